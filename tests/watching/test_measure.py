"""Statistics of a described call: `measure.tallied` against `lh.reference`, by the core and by plain torch."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import levelhead as lh
from levelhead import reference
from levelhead.runs import tally
from levelhead.torch import masks
from levelhead.watching import mask_functions, measure, taken_rows
from levelhead.watching.measure import Call, call_of
from levelhead.watching.rows_by_torch import NAMES

B, H, G, T, D = 2, 4, 2, 96, 8
PATHS = pytest.mark.parametrize("by_torch", [False, True], ids=["core", "torch"])
DOCUMENT = torch.tensor([[0] * 30 + [1] * 50 + [2] * 16, [0] * 64 + [1] * 32])


def inputs(T: int = T, S: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(B, H, T, D), torch.randn(B, G, T if S is None else S, D)


def measured(call: Call, by_torch: bool, sample: int | None = None) -> dict[str, Any]:
    rows = None if sample is None else taken_rows.places(B, call.q.shape[2], sample, 3, call.q.device)
    return asdict(tally.read(measure.tallied(call, by_torch=by_torch, rows=rows).double().numpy()))


def defined(call: Call, used: Tensor | None = None, first: Tensor | None = None, **options: Any) -> dict[str, Any]:
    """The same by `reference`, from float64; `used` and `first` (B, T): the rows that count, and their first keys."""
    q, k = (x.double().numpy() for x in (call.q, call.k))
    options = {"query_start": 0, "scale": call.scale.numpy()} | options
    rows = reference.observe(q, k, **options).rows
    fields = {name: np.asarray(getattr(rows, name)) for name in NAMES}
    if first is not None:
        key = np.broadcast_to(first[:, None].numpy(), fields["count"].shape)[..., None]
        with np.errstate(invalid="ignore"):
            weights = np.exp(reference.logits(q, k, **options) - rows.logsumexp[..., None])
        fields["first"] = np.where(key < 0, 0.0, np.take_along_axis(weights, np.maximum(key, 0), -1))[..., 0]
    if used is not None:
        fields["exists"] = np.broadcast_to(used[:, None].numpy(), fields["count"].shape)
    heads = tally.of_rows(fields)
    return asdict(tally.read(heads))


def same(found: dict[str, Any], truth: dict[str, Any], atol: float = 2e-6) -> None:
    for name in truth.keys() - {"q_rms", "k_rms", "dq_norm", "dk_norm", "dv_norm"}:
        np.testing.assert_allclose(found[name], truth[name], rtol=2e-5, atol=atol, err_msg=name)


def _document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (DOCUMENT[b, q] == DOCUMENT[b, k]) & (q >= k)


@PATHS
@pytest.mark.parametrize("blocks", [None, 32, (16, 48)], ids=str)
def test_a_mask_given_as_a_function(by_torch: bool, blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_functions, "AT_A_TIME", 20 * T)  # 20 rows at a time
    q, k = inputs()
    dense = (DOCUMENT[:, None, :, None] == DOCUMENT[:, None, None, :]) & torch.ones(T, T).tril().bool()
    mod: Any = _document
    if blocks is not None:
        mod = create_block_mask(_document, B, None, T, T, device="cpu", BLOCK_SIZE=blocks)
        # What is visible as a whole is not asked: a block mask is its blocks, and its function elsewhere.
        assert mod.full_kv_num_blocks.sum() > 0
    call = replace(call_of(q, k, 0.3), mask_mod=mod)
    first = torch.tensor([[0] * 30 + [30] * 50 + [80] * 16, [0] * 64 + [64] * 32])
    k[1, :, 70] *= 20  # the largest logit is in the second batch row
    same(measured(call, by_torch), defined(call, first=first, mask=dense.numpy()))
    some = measured(call, by_torch, sample=7)
    assert (some["rows"] == 7 * B).all()


@PATHS
def test_a_mask_function_by_head_beside_a_mask_and_a_window(by_torch: bool) -> None:
    q, k = inputs()
    bias = torch.randn(1, H, T, T)
    call = call_of(q, k, 0.3, mask=bias, left=20, right=3)
    call = replace(call, mask_mod=lambda b, h, q, k: (q + k + h) % 3 != 0)
    i, h = torch.arange(T), torch.arange(H)
    shown = (i[:, None] + i + h[:, None, None]) % 3 != 0
    mask = torch.where(shown, bias, -torch.inf).double().numpy()
    same(measured(call, by_torch), defined(call, mask=mask, window=(20, 3)))


@PATHS
def test_a_score_function_follows_the_scale(by_torch: bool) -> None:
    q, k = inputs()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    call = replace(
        call_of(q, k, 0.3, causal=True), score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()
    )
    same(measured(call, by_torch), defined(call, causal=True, alibi=slopes.numpy()))


@PATHS
def test_rows_that_the_model_does_not_use_count_nowhere(by_torch: bool) -> None:
    q, k = inputs()
    used = torch.ones(B, T, dtype=torch.bool)
    used[0, 40:], used[1, ::3] = False, False
    q[0, :, 50:] = 1e6
    q[1, :, 3] = torch.nan
    call = replace(call_of(q, k, 0.3, causal=True), rows=used)
    found = measured(call, by_torch)
    same(found, defined(call, used, causal=True))
    assert found["nan_rows"].sum() == 0 and (found["rows"] == used.sum().item()).all()


# ---- numbers that stand in for -inf

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LOWEST = {name: torch.finfo(dtype).min for name, dtype in TYPES.items()}
CAUSAL = torch.ones(T, T).tril().bool()


def _stand_ins() -> list[Any]:
    numbers = {"-1e4": -1e4, "-1e5": -1e5, "-1e9": -1e9, "-1e20": -1e20, "-inf": -math.inf}
    numbers |= {f"lowest {name}": number for name, number in LOWEST.items()}
    fits = {
        (dtype, name): number
        for dtype in TYPES
        for name, number in numbers.items()
        if number >= LOWEST[dtype] or number == -math.inf
    }
    return [pytest.param(TYPES[dtype], number, id=f"{name} in {dtype}") for (dtype, name), number in fits.items()]


@PATHS
@pytest.mark.parametrize(("dtype", "number"), _stand_ins())
def test_a_finite_number_that_stands_in_for_minus_infinity_hides(
    by_torch: bool, dtype: torch.dtype, number: float
) -> None:
    """As an additive mask, once and twice, with a bias beside it; in logits that were filled, or to which it was
    added."""
    q, k = (x.to(dtype) for x in inputs(32))
    shown = CAUSAL[:32, :32]
    bias = torch.randn(1, H, 32, 32).to(dtype)
    mask = torch.zeros(32, 32, dtype=dtype).masked_fill(~shown, number)
    call = call_of(q, k, 0.3, mask=mask)
    truth = defined(call, mask=shown.numpy())
    for each in (mask, mask + mask, mask.float(), torch.where(shown, mask, mask * 2)):
        same(measured(call_of(q, k, 0.3, mask=each), by_torch), truth)
    with_bias = call_of(q, k, 0.3, mask=mask + bias)
    hard = torch.where(shown, bias.double(), -torch.inf).numpy()
    same(measured(with_bias, by_torch), defined(with_bias, mask=hard))
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.3).to(dtype)
    hard = torch.where(shown, logits.double(), -torch.inf).numpy()
    for ready in (logits.masked_fill(~shown, number), logits + mask, logits + mask + mask):
        call = measure.from_scores(ready)
        same(measured(call, by_torch), defined(call, mask=hard))


@PATHS
@pytest.mark.parametrize("ready", [False, True], ids=["mask", "ready-made logits"])
@pytest.mark.parametrize("name", ["-30", "alibi", "alibi to -65536", "T5", "learned", "unscaled", "diverged"])
def test_biases_and_large_logits_hide_nothing(by_torch: bool, ready: bool, name: str) -> None:
    torch.manual_seed(1)
    n = 48
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    bias = {
        "-30": torch.where(distance > 3, -30.0, 0.0),
        "alibi": -distance * 64.0 - torch.linspace(0, 1024, 65)[1:49],
        "alibi to -65536": -(65536.0 / n) * distance,
        "T5": torch.randn(H, n, n) * 20,
        "learned": torch.randn(H, n, n) * 300,
        "unscaled": (torch.rand(H, n, n) - 0.5) * 1600,
        "diverged": torch.randn(H, n, n) * 20000,
    }[name]
    q, k = inputs(n)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.3 + bias
    call = measure.from_scores(scores) if ready else call_of(q, k, 0.3, mask=bias)
    truth = defined(call, mask=(scores if ready else bias).double().numpy())
    same(measured(call, by_torch), truth, atol=2e-6 * max(1.0, float(scores.abs().max()) / 10))  # float32 logits


@given(spread=st.floats(0.01, 900), number=st.floats(-4990, -1, allow_nan=False), seed=st.integers(0, 99))
def test_above_the_floor_nothing_hides(spread: float, number: float, seed: int) -> None:
    visible = torch.rand(64, generator=torch.Generator().manual_seed(seed)) * spread - spread / 2
    values = torch.cat([visible, torch.tensor([number])])
    assert masks.hiding(values) == -math.inf
    assert masks.hiding(values, reach=spread) == -math.inf


@given(spread=st.floats(0.01, 4000), margin=st.floats(0.01, 3), seed=st.integers(0, 99))
def test_the_gap_decides_below_the_floor(spread: float, margin: float, seed: int) -> None:
    """Hidden where the gap is as wide as everything above it, and not where it is narrower."""
    visible = torch.rand(64, generator=torch.Generator().manual_seed(seed)).double() * spread
    low, wide = float(visible.min()), max(float(visible.max() - visible.min()), masks.UNDERFLOW)
    number = min(low - wide * margin, masks.FLOOR - 1)
    enough = low - number >= wide
    values = torch.cat([visible, torch.tensor([number, number], dtype=torch.float64)])
    assert float(masks.hiding(values)) == (number if enough else -math.inf)


def test_a_mask_must_leave_room_for_the_logits() -> None:
    """-1e4 hides nothing from logits that reach 6000: such a key may have the largest weight."""
    mask = torch.tensor([0.0, -1e4])
    assert float(masks.hiding(mask, reach=4000.0)) == -1e4
    assert float(masks.hiding(mask, reach=6000.0)) == -math.inf


@PATHS
def test_a_row_that_holds_nothing_but_the_stand_in_sees_no_key(by_torch: bool) -> None:
    """Softmax makes such a row uniform: that says nothing about its head, so it counts as a row without keys."""
    q, k = inputs(32)
    shown = CAUSAL[:32, :32].clone()
    shown[5] = False
    call = call_of(q, k, 0.3, mask=torch.zeros(32, 32).masked_fill(~shown, -1e9))
    found = measured(call, by_torch)
    same(found, defined(call, mask=shown.numpy()))
    assert (found["empty_rows"] == B).all()


# ---- padding and documents


def _padded(left: bool) -> Tensor:
    real = torch.ones(B, T, dtype=torch.bool)
    real[0, slice(0, 17) if left else slice(T - 17, T)] = False
    return real


@PATHS
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["keys", "causal", "causal -1e9", "causal flag", "function"])
def test_padding_counts_nowhere_and_the_first_key_is_none_of_it(by_torch: bool, left: bool, kind: str) -> None:
    q, k = inputs()
    real = _padded(left)
    keys = real[:, None, None]
    q[0, :, ~real[0]], k[0, :, ~real[0]] = 1e3, 1e3
    full = keys.expand(B, 1, T, T) if kind == "keys" else keys & CAUSAL
    call = {
        "keys": lambda: call_of(q, k, 0.3, mask=keys),
        "causal": lambda: call_of(q, k, 0.3, mask=full),
        "causal -1e9": lambda: call_of(q, k, 0.3, mask=torch.zeros(full.shape).masked_fill(~full, -1e9)),
        "causal flag": lambda: call_of(q, k, 0.3, mask=keys, causal=True),
        "function": lambda: replace(call_of(q, k, 0.3), mask_mod=lambda b, h, q, k: real[b, k] & (q >= k)),
    }[kind]()
    first = torch.tensor([17 if left else 0, 0])[:, None].expand(B, T)
    found = measured(call, by_torch)
    same(found, defined(call, used=real, first=first, mask=full.numpy()))
    assert (found["rows"] == real.sum().item()).all() and (found["empty_rows"] == 0).all()
    assert np.allclose(found["q_rms"] ** 2, (q * real[:, None, :, None]).square().sum((0, 2, 3)) / real.sum() / D)


@PATHS
def test_packed_documents_have_a_first_key_each(by_torch: bool) -> None:
    """By segments, by a mask, with a window, with what packing leaves over."""
    q, k = inputs()
    ids = DOCUMENT.clone()
    ids[0, 90:] = -1
    first = torch.tensor([[0] * 30 + [30] * 50 + [80] * 16, [0] * 64 + [64] * 32])
    same_id = ids[:, None, :, None] == ids[:, None, None, :]
    by_segments = call_of(q, k, 0.3, query_segments=ids, key_segments=ids, causal=True)
    truth = defined(by_segments, used=ids >= 0, first=first, mask=(same_id & CAUSAL).numpy())
    same(measured(by_segments, by_torch), truth)
    i = torch.arange(T)
    window = CAUSAL & (i[:, None] - i < 20)
    for left, mask in ((None, CAUSAL), (19, window)):
        first_of_all = torch.tensor([[0] * 30 + [30] * 50 + [80] * 10 + [90] * 6, [0] * 64 + [64] * 32])
        masked = call_of(q, k, 0.3, mask=same_id & mask)
        same(measured(masked, by_torch), defined(masked, first=first_of_all, mask=(same_id & mask).numpy()))
        packed = call_of(q, k, 0.3, query_segments=DOCUMENT, key_segments=DOCUMENT, causal=True, left=left)
        truth = defined(packed, first=first, segments=DOCUMENT.numpy(), causal=True, window=(left, None))
        same(measured(packed, by_torch), truth)


@PATHS
def test_a_cache_with_padding_on_the_left(by_torch: bool) -> None:
    q, k = inputs(1, S=T)
    shown = torch.ones(B, 1, 1, T, dtype=torch.bool)
    shown[0, ..., :9] = False
    call = call_of(q, k, 0.3, mask=shown)
    same(measured(call, by_torch), defined(call, first=torch.tensor([[9], [0]]), mask=shown.numpy()))
    shown[..., :20] = False  # of all batch rows: a window, and key 0 is not seen
    assert (measured(call, by_torch)["mean_first"] == 0).all()


@PATHS
@pytest.mark.parametrize("crossed", [True, torch.tensor(True)], ids=["known", "on the device"])
def test_the_keys_of_another_sequence_may_be_as_many(by_torch: bool, crossed: bool | Tensor) -> None:
    q, k = inputs()
    real = _padded(left=True)
    call = replace(call_of(q, k, 0.3, mask=real[:, None, None]), crossed=crossed)
    first = torch.tensor([17, 0])[:, None].expand(B, T)
    same(measured(call, by_torch), defined(call, first=first, mask=real[:, None, None].numpy()))


@PATHS
def test_one_sequence_as_only_the_device_knows(by_torch: bool) -> None:
    q, k = inputs()
    real = _padded(left=True)
    call = call_of(q, k, 0.3, mask=real[:, None, None])
    found, known = measured(replace(call, crossed=torch.tensor(False)), by_torch), measured(call, by_torch)
    assert found.keys() == known.keys()
    for name, x in found.items():
        assert np.array_equal(x, known[name], equal_nan=True), name


@PATHS
def test_a_large_mask_is_measured_in_parts(by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_functions, "AT_A_TIME", 7 * T)
    monkeypatch.setattr(masks, "_AT_A_TIME", 11 * T)
    q, k = inputs()
    mask = torch.randn(B, 1, T, T).masked_fill(~CAUSAL, -1e9)
    call = call_of(q, k, 0.3, mask=mask)
    hard = mask.double().masked_fill(~CAUSAL, -math.inf).numpy()
    same(measured(call, by_torch), defined(call, mask=hard))


_PEAK = """
import resource, torch
from dataclasses import asdict, replace
from torch.nn.attention.flex_attention import create_block_mask
from levelhead.watching import measure
B, H, T = 2, 2, 4096
document = (torch.arange(T) // 300).expand(B, T)
mod = lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k)
mask = create_block_mask(mod, B, None, T, T, device="cpu")
q, k = torch.randn(B, H, T, 16), torch.randn(B, H, T, 16)
small = measure.call_of(q[:, :, :128], k[:, :, :128], 0.25)
measure.tallied(replace(small, mask_mod=mod))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
tally = measure.tallied(replace(measure.call_of(q, k, 0.25), mask_mod=mask))
print(peak() - before, tally[0, 0].item())
"""


def test_a_document_mask_is_never_built_as_a_whole() -> None:
    """Dense it takes 32 MiB, and as many again to be read; the rows' statistics take 4."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    kibibytes, rows = done.stdout.split()
    assert int(kibibytes) < 24 * 1024 and float(rows) == 2 * 4096


def test_sinks_of_packed_documents_are_noted() -> None:
    """A head that rests on each document's first token, 0.6 of the weight: key 0 of the row has next to none."""
    torch.manual_seed(0)
    lengths = [24, 40, 32]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    starts = torch.tensor([0, 24, 64])
    bias = torch.zeros(96, 96)
    bias[:, starts] = math.log(30.0)
    mask = torch.where((ids[0][:, None] == ids[0]) & CAUSAL, bias, -math.inf)

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.view(1, 96, 2, 8).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q * 0.01, q, q, attn_mask=mask)

    with lh.watch(Attention()) as w:
        w.model(torch.randn(1, 96, 16))
    assert (w.last.records[0].heads.mean_first > 0.55).all()
    assert [finding.kind for finding in lh.diagnose(w)].count("sink heads") >= 1
    with lh.watch(Attention()) as w:  # equal weights over documents of six tokens are no sinks
        mask = torch.where((torch.arange(96)[:, None] // 6 == torch.arange(96) // 6) & CAUSAL, 0.0, -math.inf)
        w.model(torch.randn(1, 96, 16))
    assert w.last.records[0].heads.mean_first[0] > 0.3
    assert "sink heads" not in [finding.kind for finding in lh.diagnose(w)]


def test_a_call_of_levelhead_is_counted_alike() -> None:
    """Padding and documents of `lh.attention` under a watch, and finite stand-ins through the drop-in."""
    real, used = _padded(left=True), int(_padded(left=True).sum())
    q, k = inputs()
    mask = real[:, None, None] & CAUSAL
    finite = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    first = torch.tensor([17, 0])[:, None].expand(B, T)
    truth = defined(call_of(q, k, D**-0.5), used=real, first=first, mask=mask.numpy())

    class Attention(torch.nn.Module):
        def forward(self, kind: str) -> Any:
            if kind == "attention":
                return lh.attention(q, k, k, mask=mask, threads=1)
            if kind == "finite":
                return lh.attention(q, k, k, mask=finite)
            return lh.torch.scaled_dot_product_attention(q, k, k, attn_mask=finite, enable_gqa=True)

    for kind in ("attention", "finite", "drop-in"):
        with lh.watch(Attention()) as w:
            w.model(kind)
        found = asdict(w.last.records[0].heads)
        assert (found["rows"] == used).all(), kind
        same(found, truth)


def test_cross_attention_over_as_many_keys_keeps_its_queries() -> None:
    layer = torch.nn.TransformerDecoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    padding = torch.zeros(1, 8, dtype=torch.bool)
    padding[:, 6:] = True
    x, memory = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
    with lh.watch(layer) as w:
        layer(x, memory, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)
    rows = {record.module: int(record.heads.rows[0]) for record in w.last.records}
    assert rows == {"self_attn": 6, "multihead_attn": 8}
