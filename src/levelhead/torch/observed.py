"""`observed_attention`: attention with every statistic of its softmax, on any device, in training.

On a CPU the core computes both in one pass. On other devices PyTorch's best kernel computes the output (`best_kernel`),
and one more pass over q and k the statistics: the Triton kernel on CUDA and ROCm, plain torch elsewhere.
LEVELHEAD_OBSERVE=torch, or triton with TRITON_INTERPRET=1, takes that path on CPU tensors (`device.choice`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.call.arrays import _TORCH
from levelhead.call.options import Options, documented, known
from levelhead.call.prepare import team_for
from levelhead.device.choice import CORE
from levelhead.errors import bad_type, bad_value
from levelhead.observation import Observation, Unpack
from levelhead.torch import best_kernel, observed_operators
from levelhead.torch.sdpa import cast_as_torch
from levelhead.torch.tensor_observation import TensorObservation
from levelhead.torch.tensor_options import Described, described

_DTYPES = {getattr(torch, name): origin for name, origin in _TORCH.items()}


@documented()
def observed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, threads: int | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Observation[Tensor]]:
    """Attention, and every statistic of its softmax: forward with sight, for training.

    On a CPU the fused kernel computes both in one pass, with the bits and the gradients of `levelhead.attention`. On
    other devices the output is that of PyTorch's own kernel, untouched: `scaled_dot_product_attention` where it can
    express the call, else `flex_attention`, compiled on CUDA and ROCm. One more pass over q and k has the statistics
    (`levelhead::observe` in Triton, plain torch operations on MPS and XPU). It yields logsumexp and maximum as well, so
    flex is asked for its own only where the output needs one: the logsumexp, with sinks. Options that no kernel there
    serves are an error.

    The observation is detached: keeping it keeps no graph. It holds statistics only, on the tensors' device until one
    is read; `.path` says which kernels ran. It works in `torch.compile(fullgraph=True)`, which returns the observation
    (statistics are read outside of the graph), under autocast (inputs are
    cast, as for PyTorch's function) and in checkpointing, which computes the statistics again with the output.

    Args:
        q: queries (..., H, T, D), or (T, D) for one head. float32, float64, float16, bfloat16; any strides.
        k: keys (..., G, S, D); query head h uses head h // (H / G).
        v: values (..., G, S, E).
        {options}
        threads: at most so many, on a CPU.

    Returns:
        The output (..., H, T, E), differentiable by q, k, v, a scale, a float mask and sinks, and the `Observation`:
        `.rows`, `.heads`, `.logsumexp`, as from `levelhead.observe`.

    >>> q = torch.ones(2, 3, 4, requires_grad=True)
    >>> out, seen = observed_attention(q, q, q, causal=True)
    >>> out.requires_grad, seen.rows.count[0].tolist(), seen.path
    (True, [1, 2, 3], 'core')
    """
    known("observed_attention", options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise bad_type(name, "a torch tensor", type(x).__name__, "levelhead.observe takes other arrays")
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        q, k, v = (cast_as_torch(x, device) for x in (q, k, v))
        if isinstance(given.get("mask"), Tensor):
            given["mask"] = cast_as_torch(given["mask"], device)
    _check(q, k, v)
    by_core = observed_operators.path_on(device) == CORE
    if not by_core and threads is not None:
        raise bad_value("threads", f"None on {device}", threads, "The device decides")
    if not by_core and given.get("dropout") and "seed" in given:
        advice = "Use torch.manual_seed: PyTorch's kernel drops by its own generator"
        raise bad_value("seed", f"None on {device}", given["seed"], advice)
    host = device == "cpu" and not torch.compiler.is_compiling()
    call = described(q, k, v, given, host=host)
    q4, k4, v4, call = _four_axes(q, k, v, call)
    first = None if call.scoring.query_segments is None else _first_keys(call)
    team = None if threads is None else team_for(threads, _DTYPES[q.dtype])["threads"]
    out, sums, counts, path = computed(q4, k4, v4, call, first, team)
    lead = q.shape[:-1]
    sums, counts = (x.reshape(*lead, x.shape[-1]) for x in (sums, counts))
    seen = TensorObservation(sums, counts, call.scoring, k.shape[-2], first, _DTYPES[q.dtype], path)
    return out.reshape(*lead, v.shape[-1]), seen


def computed(
    q: Tensor, k: Tensor, v: Tensor, call: Described, first: Tensor | None, threads: int | None
) -> tuple[Tensor, Tensor, Tensor, str]:
    """Output, sums and counts of tensors of four axes, and who computed them. A watch wraps this function."""
    if observed_operators.path_on(q.device.type) == CORE:
        return *observed_operators.attend_observed(q, k, v, call.scoring, threads, first), CORE
    out, kernel = best_kernel.attend(q, k, v, call)
    sums, counts = observed_operators.row_states(q, k, call.scoring, first, call.start)
    return out, sums, counts, f"{kernel} + {observed_operators.path_of_states(q, k)}"


def _four_axes(q: Tensor, k: Tensor, v: Tensor, call: Described) -> tuple[Tensor, Tensor, Tensor, Described]:
    """(B, heads, tokens, width) each, and the mask as it broadcasts to that."""
    shape, mask = call.shape, call.scoring.mask
    if mask is not None and mask.dim() > 4:
        mask = mask.expand(*shape.batch, *mask.shape[-3:]).flatten(0, -4)
        call = call._replace(scoring=call.scoring._replace(mask=mask))
    q, k, v = (x.reshape(shape.B, n, *x.shape[-2:]) for x, n in ((q, shape.H), (k, shape.G), (v, shape.G)))
    return q, k, v, call


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES or x.dtype is not q.dtype:
            wanted = "one dtype of float32, float64, float16 and bfloat16, that of q"
            raise bad_type(name, wanted, x.dtype, "Convert so that q, k and v agree")
        if x.device != q.device:
            raise bad_value(name, f"a tensor on the device of q, {q.device}", x.device, "Move one to the other's")
    if torch.compiler.is_compiling():
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.layout is not torch.strided or x.is_meta:
            kind = "a meta tensor" if x.is_meta else f"{type(x).__name__} of layout {x.layout}"
            raise bad_type(name, "a plain dense tensor", kind, "Unwrap or convert it")
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            advice = "Use levelhead.torch.scaled_dot_product_attention there"
            raise bad_type(name, "a plain tensor", "one inside vmap or torch.func", advice)


def _first_keys(call: Described) -> Tensor:
    """(B, T): the first key of each query's segment; -1: its segment has none."""
    mine, theirs = call.scoring.query_segments, call.scoring.key_segments
    if theirs.shape[1] == 0:
        return torch.full_like(mine, -1)
    ids, order = theirs.sort(dim=1, stable=True)
    place = torch.searchsorted(ids.contiguous(), mine.contiguous()).clamp(max=ids.shape[1] - 1)
    return torch.where(ids.gather(1, place) == mine, order.gather(1, place), -1)
