"""`deep=True`: attention written by hand is followed through every spelling, with the same bits as without a watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes

import levelhead as lh
from levelhead.errors import LevelheadValueError
from levelhead.runs.record import from_json, to_json
from spellings import SPELLINGS
from watched import batch, by_hand, one_thread, outcome, same, sdpa, stack

__all__ = ["one_thread"]  # a fixture


STATISTICS = (
    "rows",
    "max_logit",
    "min_logit",
    "var_logit",
    "mean_entropy",
    "normalised_entropy",
    "mean_first",
    "k_rms",
)


class Mask(Tensor):
    """A subclass that torch's old constructor creates."""


def flex(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)


def lower_right(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = causal_lower_right(q.shape[-2], k.shape[-2])
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def old_constructor(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert type(Mask(2, 3)) is Mask
    return by_hand()(module, q, k, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("attend", "learns"), [(flex, False), (lower_right, True), (old_constructor, True)])
def test_what_no_dispatch_mode_supports_runs_as_it_does(attend: Callable[..., Tensor], learns: bool) -> None:
    model = stack(attend)
    plain = outcome(model, lambda: model(batch()), learns=learns)
    with lh.watch(model, deep=True):
        same(plain, outcome(model, lambda: model(batch()), learns=learns))
    assert "__new__" not in vars(Mask)


def test_a_compiled_part_stays_compiled_and_keeps_its_bits() -> None:
    model = stack(by_hand())
    ran: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            with _disable_current_modes():  # as kernels that a compiler generated
                return graph(*args)

        return run

    model.blocks[0] = torch.compile(model.blocks[0], backend=backend, fullgraph=True)
    plain = outcome(model, lambda: model(batch()))
    assert len(ran) == 1
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, lambda: model(batch())))
    assert len(ran) == 2
    assert [(line.module, line.seen) for line in w.coverage()] == [("blocks.0.attn", False), ("blocks.1.attn", True)]
    assert "compiled" in w.coverage()[0].how


def test_a_run_saved_before_the_softmax_axis_was_a_fact_is_read() -> None:
    model = stack(by_hand(), depth=1)
    with lh.watch(model, deep=True) as w:
        model(batch())
    content = to_json(w.run())
    del content["snapshots"][0]["records"][0]["facts"]["softmax_axis"]
    assert from_json(content).latest[0].facts.softmax_axis is None
    del content["snapshots"][0]["records"][0]["facts"]["d_k"]
    with pytest.raises(LevelheadValueError, match="d_k"):
        from_json(content)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_has_the_statistics_of_torchs_function(spelling: str) -> None:
    truth, model = stack(sdpa(is_causal=True), depth=1), stack(SPELLINGS[spelling], depth=1)
    with torch.no_grad(), lh.watch(truth) as known:
        truth(batch())
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model, deep=True) as w:
        same(plain, outcome(model, lambda: model(batch())))
    (line,) = w.coverage()
    assert (line.module, line.seen, line.how, line.note) == ("blocks.0.attn", True, "softmax by hand", "")
    a, b = w.last["blocks.0.attn"], known.last["blocks.0.attn"]
    assert len(a.tally) == len(b.tally)
    for name in STATISTICS:
        np.testing.assert_allclose(getattr(a.heads, name), getattr(b.heads, name), rtol=1e-4, atol=1e-5)
    assert a.facts.effective_scale == pytest.approx(b.facts.effective_scale, rel=1e-4)
    assert (a.facts.d_k, a.facts.queries, a.facts.keys) == (b.facts.d_k, b.facts.queries, b.facts.keys)
    assert a.facts.softmax_axis in ("keys", None)


def test_inference_mode_shows_the_same() -> None:
    model = stack(by_hand(), depth=1)
    with torch.inference_mode():
        plain = model(batch())
        with lh.watch(model, deep=True) as w:
            assert torch.equal(model(batch()), plain)
    with torch.no_grad(), lh.watch(model, deep=True) as known:
        model(batch())
    np.testing.assert_array_equal(w.last["blocks.0.attn"].tally, known.last["blocks.0.attn"].tally)
    assert w.last["blocks.0.attn"].facts == known.last["blocks.0.attn"].facts
