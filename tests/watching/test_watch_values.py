"""The statistics of a watch equal those computed in float64, to one part in 10⁵.

The truth is the reference on the very q, k, mask, scale, cap and sinks that the model used, which
are caught on their way by the test itself. The path for other devices is held to the same.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import levelhead as lh
from levelhead import reference, stats
from levelhead.runs import row_sample
from levelhead.runs.record import Record
from levelhead.watching import measure, rows_by_torch, taken_rows
from levelhead.watching.measure import Call, call_of
from levelhead.watching.watch import Watch
from tiny_models import HEADS, MODELS
from watched import TOKENS, batch, by_hand, hidden, one_thread, sdpa, stack

__all__ = ["one_thread"]  # a fixture

EXACT = ("rows", "lone_rows", "empty_rows", "max_query", "max_key", "saturated")


def truth(q: Tensor, k: Tensor, mask: Tensor | None = None, **options: Any) -> stats.Heads:
    """The reference on the call in float64; hidden keys may be the lowest number of the mask."""
    sizes = (*q.shape[:3], k.shape[2])
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf).double()
    given = None if mask is None else mask.detach().expand(sizes).numpy()
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach().double().numpy()
    arrays = (x.detach().double().numpy() for x in (q, k))
    wide_q, wide_k = arrays
    rows = reference.observe(wide_q, wide_k, mask=given, **options).rows
    fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(stats.Rows)}
    exists = np.ones(q.shape[:3], bool)
    if given is not None:
        # A key that no query sees is padding, and so is its query; the first key comes after it.
        logits = reference.logits(wide_q, wide_k, mask=given, **options)
        keys = (logits != -np.inf).any((1, 2))
        first = np.take_along_axis(logits, keys.argmax(-1)[:, None, None, None], -1)[..., 0]
        fields["first"] = np.where(first == -np.inf, 0.0, np.exp(first - rows.logsumexp))
        exists &= keys[:, None] if q.shape[2] == k.shape[2] else True
        fields["count"] = np.where(exists, fields["count"], 0)
        fields |= {n: np.where(exists, fields[n], x) for n, x in (("max", -np.inf), ("min", np.inf))}
    as_one = {n: x.swapaxes(0, 1).reshape(q.shape[1], -1) for n, x in fields.items()}  # the batch
    heads = stats.heads(stats.Rows(**as_one), exists.swapaxes(0, 1).reshape(q.shape[1], -1))
    return dataclasses.replace(heads, max_query=heads.max_query % q.shape[2])


def agree(record: Record, wanted: stats.Heads, *, ties: bool = False) -> None:
    """`ties`: several logits may be the largest within rounding, so its place is not compared."""
    for field in dataclasses.fields(stats.Heads):
        if ties and field.name in ("max_query", "max_key"):
            continue
        given, true = getattr(record.heads, field.name), getattr(wanted, field.name)
        if field.name in EXACT:
            np.testing.assert_array_equal(given, true, field.name)
        else:
            # 10⁻⁵ of the statistic, or of 1 where it is a small difference of larger numbers
            np.testing.assert_allclose(given, true, rtol=1e-5, atol=1e-5, err_msg=field.name)


BOOL, FLOAT = ~hidden(TOKENS), torch.zeros(TOKENS, TOKENS).masked_fill(hidden(TOKENS), -math.inf)
WILD = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5)) * 4
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for torch, for the reference
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "bool mask": ({"attn_mask": BOOL}, {"mask": BOOL}),
    "float mask": ({"attn_mask": FLOAT}, {"mask": FLOAT}),
    "bias": ({"attn_mask": WILD}, {"mask": WILD}),
    "a scale of one's own": ({"scale": 1.7, "is_causal": True}, {"scale": 1.7, "causal": True}),
    "no scale": ({"scale": 1.0}, {"scale": 1.0}),
    "grouped": ({"enable_gqa": True, "is_causal": True}, {"causal": True}),
}


@pytest.fixture(params=["core", "plain torch", "plain torch, row by row"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool | None:
    """Who computes; `plain_torch` as `watch` takes it."""
    if request.param.endswith("row by row"):
        monkeypatch.setattr(rows_by_torch, "_AT_A_TIME", 1)
    return request.param != "core" or None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_torchs_function(name: str, dtype: torch.dtype, path: bool | None) -> None:
    for_torch, for_reference = CALLS[name]
    for_torch = {n: _as(x, dtype) for n, x in for_torch.items()}
    caught: list[tuple[Tensor, Tensor]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caught.append((q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v, **for_torch)

    model = stack(attend, dtype=dtype, kv_heads=2 if name == "grouped" else None)
    with torch.no_grad(), Watch(model, plain_torch=path) as w:
        model(3 * batch(dtype=dtype))
    for record, (q, k) in zip(w.last.records, caught, strict=True):
        mask = for_reference.get("mask")
        rest = {n: x for n, x in for_reference.items() if n != "mask"}
        agree(record, truth(q, k, _as(mask, dtype), **rest))
        assert record.facts.scale == pytest.approx(rest.get("scale", 8**-0.5))
        assert record.facts.causal is bool(rest.get("causal"))
        assert record.facts.masked is (mask is not None)
        assert record.facts.dtype == str(dtype).removeprefix("torch.")


def _as(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def caught_from_transformers(name: str) -> list[dict[str, Any]]:
    """What a model's eager function is given, call by call."""
    model = MODELS[name].make("eager")
    module = importlib.import_module(type(model).__module__)
    original = module.eager_attention_forward
    caught: list[dict[str, Any]] = []

    def catch(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Any:
        sinks = rest.get("s_aux", getattr(module, "sinks", None))
        bias = rest.get("position_bias")
        both = mask if bias is None else bias if mask is None else mask + bias
        options = {"scale": rest["scaling"], "softcap": rest.get("softcap"), "sinks": sinks}
        caught.append({"q": q, "k": k, "mask": both} | options)
        return original(module, q, k, v, mask, **rest)

    module.eager_attention_forward = catch
    try:
        with torch.no_grad():
            _large(model)(**MODELS[name].inputs())
    finally:
        module.eager_attention_forward = original
    return caught


def _large(model: nn.Module) -> nn.Module:
    """Weights that make heads differ: fresh ones are flat."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma-2", "GPT-OSS", "BERT", "T5", "Whisper"])
def test_transformers_models(name: str, implementation: str) -> None:
    tiny = MODELS[name]
    if implementation not in tiny.implementations:
        with pytest.raises(ValueError, match="does not support|cannot be run"):
            tiny.make(implementation)(**tiny.inputs())
        return
    caught = caught_from_transformers(name)
    model = _large(tiny.make(implementation))
    stance = "force_eager" if implementation == "flex_attention" else "default"
    with torch.no_grad(), torch.compiler.set_stance(stance), Watch(model) as w:
        model(**tiny.inputs())
    assert len(w.last.records) == len(caught)
    order = {line.module: n for n, line in enumerate(w.coverage())}
    for record in w.last.records:
        given = dict(caught[order[record.module]])
        wanted = truth(given.pop("q"), given.pop("k"), given.pop("mask"), **given)
        agree(record, wanted, ties=True)  # tokens repeat
        assert record.facts.softcap == (50.0 if name == "Gemma-2" else None)
        assert record.facts.sinks is (name == "GPT-OSS")


# ---- the path for other devices


def _call(**changes: Any) -> Call:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 8, generator=random) * 2
    k = torch.randn(2, 2, 11, 8, generator=random)
    return call_of(q, k, changes.pop("scale", 0.3), **changes)


OPTIONS: dict[str, Any] = {
    "plain": {},
    "causal from a start": {"causal": True, "start": 2},
    "window": {"left": 3, "right": 1, "start": 2},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([-1.0, 0.0, 2.0, 9.0])},
    "scales": {"scale": torch.tensor([0.1, 0.2, 0.3, 5.0])},
    "rows that see nothing": {"causal": True, "start": -4},
    "lengths": {"key_lengths": torch.tensor([11, 3]), "query_lengths": torch.tensor([2, 9]), "sinks": torch.ones(4)},
    "segments": {"query_segments": torch.arange(18).view(2, 9) // 4, "key_segments": torch.arange(22).view(2, 11) // 5},
    "ALiBi": {"alibi": torch.tensor([0.5, 0.25, 0.0, -0.1]), "start": 2},
    "cosine": {"cosine": True, "scale": 3.0},
    "log-n": {"log_n": True, "causal": True, "start": 2},
    "a row's NaN": {"mask": torch.where(torch.arange(99).view(9, 11) == 40, math.nan, 0.0)},
    "all at once": {
        "causal": True,
        "start": 2,
        "softcap": 3.0,
        "sinks": torch.zeros(4),
        "left": 5,
        "mask": torch.linspace(-2, 2, 99).view(9, 11),
    },
}


@pytest.mark.parametrize("at_a_time", [1, 200, 1 << 24])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sample", [None, 4])
def test_plain_torch_gives_the_cores_tally(
    name: str, sample: int | None, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_by_torch, "_AT_A_TIME", at_a_time)
    call = _call(**dict(OPTIONS[name]))
    rows = None if sample is None else taken_rows.places(*call.q.shape[::2][:2], sample, 3, call.q.device)
    core, plain = (measure.tallied(call, rows=rows, by_torch=x) for x in (False, True))
    torch.testing.assert_close(plain.double(), core.double(), rtol=1e-5, atol=1e-5)


class NoWaiting(TorchDispatchMode):
    """Refuses to read a number from a tensor, which would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "item", "nonzero"), name
        assert not (name == "_to_copy" and (kwargs or {}).get("device") is not None), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"rows": 4}, {"counterfactual": True}, {"gradients": True}])
@pytest.mark.parametrize("hand", [False, True])
def test_measuring_never_waits_for_the_device(options: dict[str, Any], hand: bool) -> None:
    model = stack(by_hand(place="divided") if hand else sdpa(is_causal=True))
    with Watch(model, plain_torch=True, deep=hand, **options) as w:
        with NoWaiting():
            model(batch()).sum().backward()
        assert len(w.last.records) == 2  # reading waits, as it must


def test_under_autocast_the_rounded_queries_are_looked_at_and_statistics_are_not_rounded() -> None:
    caught: list[tuple[Tensor, Tensor]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caught.append((q.bfloat16(), k.bfloat16()))
        return nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())

    model = stack(attend, depth=1)
    for plain_torch in (None, True):
        caught.clear()
        with torch.no_grad(), Watch(model, plain_torch=plain_torch) as w, torch.autocast("cpu"):
            model(9 * batch())
        agree(w.last.records[0], truth(*caught[0]), ties=True)


# ---- the place of the largest logit, and samples of rows


def test_the_largest_logit_has_its_batch_row_query_and_key() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        for head, (b, i, j) in enumerate(PLACES):
            q[b, head, i, 0] = 40.0 + head
            k[b, head, j, 0] = 10.0
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=0.1)

    with Watch(stack(attend, depth=1)) as w:
        w.model(batch())
        w.model(torch.zeros_like(batch()))
    heads = w.run().snapshots[0].records[0].heads
    found = zip(heads.max_batch, heads.max_query, heads.max_key, strict=True)
    assert [tuple(int(x) for x in place) for place in found] == PLACES
    np.testing.assert_allclose(heads.max_logit, [40.0, 41.0, 42.0, 43.0], rtol=1e-6)


PLACES = [(0, 3, 7), (1, 9, 0), (0, 0, 9), (1, 5, 5)]


def test_a_sample_of_rows_is_marked_and_its_maximum_a_lower_bound() -> None:
    model, x = stack(sdpa(is_causal=True)), batch(tokens=50)
    with Watch(model) as whole, torch.no_grad():
        model(x)
    with Watch(model, rows=8) as sampled, torch.no_grad():
        model(x)
    for record in sampled.last.records:
        all_rows = whole.last[record.module]
        assert record.facts.sampled and not all_rows.facts.sampled
        assert (record.heads.rows == 2 * 50).all() and row_sample.measured(record) == 2 * 8
        assert (record.heads.max_logit <= all_rows.heads.max_logit).all()
        assert (record.heads.max_logit < all_rows.heads.max_logit).any()
        rows = taken_rows.places(2, 50, 8, 0, x.device).tolist()
        found = zip(record.heads.max_batch, record.heads.max_query, strict=True)
        assert all(int(query) in rows[int(sequence)] for sequence, query in found)
    with Watch(model, rows=50) as enough, torch.no_grad():
        model(x)
    assert not any(record.facts.sampled for record in enough.last.records)


def test_a_scale_that_is_learned_per_head_is_read_as_it_is() -> None:
    scales = torch.tensor([0.1, 0.5, 1.0, 2.0])

    class Own(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return lh.attention(q, k, k, scale=scales, causal=True)

    q, k = (torch.randn(2, 4, 6, 8) for _ in range(2))
    with Watch(Own(), counterfactual=True) as w:
        w.model(q, k)
    (record,) = w.last.records
    agree(record, truth(q, k, scale=scales.numpy(), causal=True))
    assert record.facts.scale is None and record.facts.fused
    wanted = truth(q, k, scale=scales.numpy() * math.sqrt(8), causal=True)
    found = lh.health.tally.read(record.counterfactual["none"])
    np.testing.assert_allclose(found.max_logit, wanted.max_logit, rtol=1e-5)
