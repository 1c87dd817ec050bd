"""`MultiHeadAttention` as a module: `nn.MultiheadAttention` and what models have added since.

Projections are separate `nn.Linear`s, so that whatever adapts or quantises those works here. Masks are levelhead's:
True may attend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead import multihead
from levelhead.attention import attention
from levelhead.call.options import PER_CALL, PerCallOptions, documented, known
from levelhead.call.prepare import existing_tokens
from levelhead.errors import bad_value
from levelhead.multihead import KeyValueCache, continued
from levelhead.observation import Unpack
from levelhead.torch.functorch import untraced


class MultiHeadAttention(nn.Module):
    """out_proj(attention(q_proj(x), k_proj(y), v_proj(y))).

    Args:
        embed_dim: width of queries and of the result.
        num_heads: query heads.
        kv_heads: key/value heads, a divisor of num_heads; None: as many.
        head_dim: width of a head; None: embed_dim / num_heads.
        kdim, vdim: width of keys and values as they come in; None: embed_dim.
        bias: whether the projections have one.
        dropout: share of weights dropped while training.
        causal, window, scale, softcap: as in `levelhead.attention`.
        qk_norm: queries and keys of each head are normalised (RMS), with learned weights.
        sinks: one learned logit per head in the denominator.
        rotary: the base of rotary positions, such as 10000.0; None: no rotation.
        batch_first: (batch, tokens, width) if True, (tokens, batch, width) if not.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: Any = None,
        softcap: float | None = None,
        qk_norm: bool = False,
        sinks: bool = False,
        rotary: float | None = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise bad_value("kv_heads", f"a divisor of num_heads = {num_heads}", kv_heads, "Change either")
        if head_dim is None and embed_dim % num_heads:
            advice = "Change either, or give head_dim"
            raise bad_value("embed_dim", f"a multiple of num_heads = {num_heads}", embed_dim, advice)
        width = embed_dim // num_heads if head_dim is None else head_dim
        if rotary is not None and width % 2:
            raise bad_value("head_dim", "an even number", width, "Rotation turns columns in pairs")
        tensor = {"device": device, "dtype": dtype}
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads, width
        self.dropout, self.rotary, self.batch_first = dropout, rotary, batch_first
        self.options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
        self.q_proj = nn.Linear(embed_dim, num_heads * width, bias, **tensor)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_heads * width, bias, **tensor)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_heads * width, bias, **tensor)
        self.out_proj = nn.Linear(num_heads * width, embed_dim, bias, **tensor)
        epsilon = multihead.NORM_EPSILON
        self.q_norm = nn.RMSNorm(width, epsilon, **tensor) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, epsilon, **tensor) if qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(num_heads, **tensor)) if sinks else None

    @documented(PER_CALL)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        **options: Unpack[PerCallOptions],
    ) -> Tensor:
        """The result, of the query's shape; keys and values are the query's unless given.

        With a cache, `query` holds new tokens, which are appended and see those before them.

        Args:
            {options}
        """
        known("forward", options, PER_CALL)
        key = query if key is None else key
        value = key if value is None else value
        turned = not self.batch_first and query.dim() > 2
        if turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # Selected before and after the projections: nothing of such a row reaches their weights, and it is 0.
        absent = _absent("query_lengths", options.get("query_lengths"), query)
        query = query if absent is None else query.masked_fill(absent, 0.0)
        if cache is None:  # a cache keeps keys that a later call may see
            absent_keys = _absent("key_lengths", options.get("key_lengths"), key)
            key, value = (x if absent_keys is None else x.masked_fill(absent_keys, 0.0) for x in (key, value))
        q = self.q_norm(self._heads(self.q_proj(query), self.num_heads))
        k = self.k_norm(self._heads(self.k_proj(key), self.kv_heads))
        v = self._heads(self.v_proj(value), self.kv_heads)
        q, k, v = continued(q, k, v, cache, self.rotary, torch)
        drops = self.dropout if self.training else 0.0
        own = {**self.options, "sinks": self.sinks, "dropout": drops}
        out: Tensor = attention(q, k, v, **own, **options)
        out = self.out_proj(out.transpose(-3, -2).flatten(-2))
        out = out if absent is None else out.masked_fill(absent, 0.0)
        return out.transpose(0, 1) if turned else out

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """A module with the same weights, hence the same results and gradients.

        Its masks are levelhead's: True may attend, where `nn.MultiheadAttention` has True hide.
        """
        if module.bias_k is not None or module.add_zero_attn:
            given = "bias_k, bias_v or add_zero_attn"
            raise bad_value("module", "plain keys and values", given, "Append those keys and values yourself")
        weight, bias = module.out_proj.weight, module.in_proj_bias
        result = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=bias is not None,
            dropout=module.dropout,
            batch_first=module.batch_first,
            device=weight.device,
            dtype=weight.dtype,
        )
        joined = module.in_proj_weight
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = separate if joined is None else joined.chunk(3)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        state = {f"{name}.weight": x for name, x in zip(names, (*weights, weight), strict=True)}
        if bias is not None:
            state |= {f"{name}.bias": x for name, x in zip(names, (*bias.chunk(3), module.out_proj.bias), strict=True)}
        result.load_state_dict(state)
        return result.train(module.training)

    def to_numpy(self) -> multihead.MultiHeadAttention:
        """The same for NumPy: the weights are copies, dropout is off."""
        weights = {name: x.detach().numpy().copy() for name, x in self.state_dict().items()}
        return multihead.MultiHeadAttention(weights, self.num_heads, self.kv_heads, self.rotary, dict(self.options))


def _absent(argument: str, lengths: Any, x: Tensor) -> Tensor | None:
    """Tokens of x (..., T, width) beyond the lengths, (..., T, 1); None: there are none."""
    return None if lengths is None else _beyond(argument, lengths, x)  # without lengths no graph is broken


@untraced
def _beyond(argument: str, lengths: Any, x: Tensor) -> Tensor | None:
    exists = existing_tokens(argument, lengths, tuple(x.shape[:-2]), x.shape[-2])
    return None if exists is None else torch.from_numpy(~exists).to(x.device)
