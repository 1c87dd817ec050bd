"""Attention with the wrong scale, as nine public projects had it, each rebuilt small.

Every class takes `right=True` for what its project has had since the mistake was found. Width 64,
4 heads of 16: 1/√d_k = 1/4 is right, 1/√d_model = 1/8, 1/d_k = 1/16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 64, 4
D_K = WIDTH // HEADS


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class VitPytorch65(nn.Module):
    """vit-pytorch#65: `dim ** -0.5` before the heads were counted; one fused projection."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.heads = HEADS
        self.scale = (D_K if right else WIDTH) ** -0.5
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part) for part in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        return self.to_out(join(torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)))


class VitCifar11(nn.Module):
    """ViT-CIFAR#11 and #12: `feats ** 0.5` of all features, heads in the third dimension."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.head = HEADS
        self.sqrt_d = (D_K if right else WIDTH) ** 0.5
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x)) for project in (self.q, self.k, self.v))
        score = functional.softmax(torch.einsum("bhif, bhjf->bhij", q, k) / self.sqrt_d, dim=-1)
        attn = torch.einsum("bhij, bhjf->bihf", score, v)
        return self.o(attn.flatten(2))


class _Head(nn.Module):
    def __init__(self, right: bool) -> None:
        super().__init__()
        self.right = right
        self.key, self.query, self.value = (nn.Linear(WIDTH, D_K, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        _, T, C = x.shape
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * (k.shape[-1] if self.right else C) ** -0.5
        weights = weights.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
        return functional.softmax(weights, dim=-1) @ self.value(x)


class TrainLlmFromScratch3(nn.Module):
    """train-llm-from-scratch#3: `C ** -0.5` with C the embedding, in a module for every head."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(right) for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Dfdx171(nn.Module):
    """dfdx#171: 1/√K of all heads' keys together, on heads folded into the batch."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.scalar = 1.0 / math.sqrt(D_K if right else WIDTH)
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(w(x)).flatten(0, 1) for w in (self.w_q, self.w_k, self.w_v))
        weights = torch.bmm(q, k.permute(0, 2, 1)) * self.scalar
        tokens = torch.bmm(weights.softmax(-1), v)
        return self.w_o(join(tokens.unflatten(0, (-1, HEADS))))


class Dl4Proteins12(nn.Module):
    """DL4Proteins#12: divided by √embed_dim; keys are transposed first."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.num_heads, self.embed_dim = HEADS, D_K if right else WIDTH
        self.query_layer, self.key_layer, self.value_layer, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query_layer, self.key_layer, self.value_layer)
        q, k, v = (split(layer(x)) for layer in layers)
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / torch.sqrt(torch.tensor(self.embed_dim))
        return self.out(join(torch.matmul(self.softmax(scores), v)))


class SetTransformer18(nn.Module):
    """set_transformer#18: √dim_V in a block whose heads lie one after another in the batch."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.dim_V, self.num_heads, self.right = WIDTH, HEADS, right
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, X: Tensor) -> Tensor:
        Q, K, V = self.fc_q(X), self.fc_k(X), self.fc_v(X)
        size = self.dim_V // self.num_heads
        Q_, K_, V_ = (torch.cat(x.split(size, 2), 0) for x in (Q, K, V))
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(size if self.right else self.dim_V), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)  # noqa: E741  the project's letter
        return O + functional.relu(self.fc_o(O))


class PerceiverIo9(nn.Module):
    """perceiver-io#9: divided by d ** -0.5, that is multiplied by √d."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.num_heads, self.right = HEADS, right
        self.dp_scale = D_K**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        attn = torch.einsum("bic,bjc->bij", q, k)
        attn = attn * self.dp_scale if self.right else attn / self.dp_scale
        o = torch.einsum("bij,bjc->bic", attn.softmax(dim=-1), v)
        return self.o_proj(join(o.unflatten(0, (-1, HEADS))))


class Cntkx10(nn.Module):
    """cntkx#10: no scale at all."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.num_heads, self.right = HEADS, right
        self.query, self.key, self.value, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(project(x)) for project in (self.query, self.key, self.value))
        scores = q @ k.mT
        if self.right:
            scores = scores / math.sqrt(D_K)
        return self.last(join(torch.softmax(scores, -1) @ v))


class ReallmForge447(nn.Module):
    """ReaLLM-Forge#447: the branch by hand and the branch through torch's function disagree."""

    def __init__(self, right: bool = False, *, flash: bool = True) -> None:
        super().__init__()
        self.n_head, self.flash, self.right = HEADS, flash, right
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part) for part in self.c_attn(x).split(WIDTH, dim=2))
        if self.flash:
            scale = None if self.right else 1.0
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            T = x.shape[1]
            att = att.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
            y = functional.softmax(att, dim=-1) @ v
        return self.c_proj(join(y))


BUGS: dict[str, tuple[type[nn.Module], str]] = {  # and what it looks like
    "vit-pytorch#65": (VitPytorch65, "whole model's width"),
    "ViT-CIFAR#11": (VitCifar11, "whole model's width"),
    "train-llm-from-scratch#3": (TrainLlmFromScratch3, "whole model's width"),
    "dfdx#171": (Dfdx171, "whole model's width"),
    "DL4Proteins#12": (Dl4Proteins12, "whole model's width"),
    "set_transformer#18": (SetTransformer18, "whole model's width"),
    "perceiver-io#9": (PerceiverIo9, "multiplying by √d_k"),
    "cntkx#10": (Cntkx10, "no scale at all"),
    "ReaLLM-Forge#447": (ReallmForge447, "no scale at all"),
}


# ---- the same right scale, put elsewhere


class Placed(nn.Module):
    """The right scale at a place of one's choice; projections of every kind."""

    def __init__(self, place: str, projections: str = "linear") -> None:
        super().__init__()
        self.num_heads, self.place, self.projections = HEADS, place, projections
        if projections == "functional":
            self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(3))
        elif projections == "einsum":
            self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(WIDTH, HEADS, D_K) / WIDTH**0.5) for _ in range(3))
        elif projections == "interleaved":
            self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        elif projections == "nameless":
            self.lin1, self.lin2, self.lin3 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        elif projections == "convolution":
            self.to_q, self.to_k, self.to_v = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.projections == "functional":
            q, k, v = (functional.linear(x, w) for w in (self.w_q, self.w_k, self.w_v))
        elif self.projections == "einsum":
            weights = (self.wq, self.wk, self.wv)
            q, k, v = (torch.einsum("btd,dhe->bthe", x, w).flatten(2) for w in weights)
        elif self.projections == "interleaved":
            joint = self.query_key_value(x).unflatten(-1, (HEADS, 3, D_K))
            q, k, v = (joint[..., n, :].flatten(2) for n in range(3))
        elif self.projections == "nameless":
            q, k, v = (layer(x) for layer in (self.lin1, self.lin2, self.lin3))
        elif self.projections == "convolution":
            q, k, v = (c(x.mT).mT for c in (self.to_q, self.to_k, self.to_v))
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        return split(q), split(k), split(v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._project(x)
        scale = D_K**-0.5
        if self.place == "on q":
            q = q * scale
        elif self.place == "on q in place":
            q *= scale
        elif self.place == "on k":
            k = k / math.sqrt(D_K)
        elif self.place == "half on each":
            q, k = q * D_K**-0.25, k * D_K**-0.25
        elif self.place == "torch's function":
            return join(functional.scaled_dot_product_attention(q, k, v))
        elif self.place == "before torch's function":
            return join(functional.scaled_dot_product_attention(q * scale, k, v, scale=1.0))
        logits = q @ k.mT
        if self.place == "after":
            logits = logits * scale
        elif self.place == "after, missing":
            pass
        return join(logits.softmax(-1) @ v)


PLACES = ("on q", "on q in place", "on k", "half on each", "after", "torch's function", "before torch's function")
PROJECTIONS = ("functional", "einsum", "interleaved", "nameless", "convolution")
