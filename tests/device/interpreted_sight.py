"""`levelhead.torch.observed_attention` with the Triton kernel: under its interpreter, run by `test_interpreter.py`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import H, S, T, merged, tensors
from torch import Tensor
from torch.nn import functional

from levelhead import reference
from levelhead.device import choice
from levelhead.torch import observed_attention
from levelhead.torch.best_kernel import FORMED, SDPA
from support import check_rows

SETS = {("bool mask",): SDPA, ("causal", "segments", "query lengths"): FORMED, ("window", "bias", "ALiBi"): FORMED}


@pytest.mark.parametrize("names", SETS)
def test_output_of_torch_and_states_of_the_kernel(names: tuple[str, ...]) -> None:
    q, k = tensors()
    v = torch.randn_like(k)
    options: dict[str, Any] = {x: torch.from_numpy(y) if x == "mask" else y for x, y in merged(names).items()}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, seen = observed_attention(q, k, v, **options)
    assert seen.path == f"{SETS[names]} + triton"
    truth = reference.observe(*(x.detach().numpy() for x in leaves), **merged(names))
    assert truth.output is not None
    torch.testing.assert_close(out.detach().double(), torch.from_numpy(truth.output), atol=2e-6, rtol=2e-5)
    check_rows(seen.rows, truth.rows, M=10.0)
    found = torch.autograd.grad(out.sum(), leaves)
    if SETS[names] == SDPA:
        want = functional.scaled_dot_product_attention(q, k, v, options["mask"], enable_gqa=True)
        assert torch.equal(out, want)
        assert all(map(torch.equal, found, torch.autograd.grad(want.sum(), leaves)))


def test_in_a_graph() -> None:
    q, k = tensors(S=T)

    def run(q: Tensor, k: Tensor) -> Any:
        return observed_attention(q, k, k, causal=True)

    torch._dynamo.reset()
    out, seen = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k)
    want, plain = run(q, k)
    assert seen.path == plain.path == "sdpa + triton"
    assert torch.equal(out, want)
    np.testing.assert_array_equal(seen.state.sums, plain.state.sums)


def test_float64_and_a_kernel_that_fails_take_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tensors()
    assert observed_attention(q.double(), k.double(), k.double())[1].path == "sdpa + torch"
    from levelhead.device import launch

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(launch, "observe", broken)
    monkeypatch.setattr(choice, "_failures", [])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, seen = observed_attention(q, k, k)
    assert seen.path == "sdpa + torch"
    assert any("no compiler" in str(x.message) for x in said)
    assert seen.rows.count.shape == (len(q), H, T)
    assert (seen.rows.count == S).all()
