"""Which rows a watch measures by default, how near they are to all rows, and what is said about it."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import levelhead as lh
from levelhead.remedies.clip import QKClip
from levelhead.runs import row_sample, tally
from levelhead.runs.record import Record, Snapshot
from levelhead.sinks.trainer import Training
from levelhead.watching import measure, taken_rows
from levelhead.watching.described import call_of
from levelhead.watching.ranks import Given, joined
from levelhead.watching.watch import Watch

CPU = torch.device("cpu")
TOKENS = 2048
SHARES = ("mean_top1", "saturated", "normalised_entropy", "mean_first", "gradient")


class Attention(nn.Module):
    def __init__(self, size: float = 6.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)
        nn.init.normal_(self.qkv.weight, std=size / 32**0.5, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return sdpa(q, k, v, is_causal=True)


def tokens(B: int = 1, T: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randn(B, T, 32, generator=torch.Generator().manual_seed(seed)) / 2


def seen(x: Tensor, steps: int = 1, model: nn.Module | None = None, **options: Any) -> tuple[Snapshot, ...]:
    model = model or Attention()
    with Watch(model, deep=False, **options) as watch, torch.no_grad():
        for _ in range(steps):
            model(x)
    return watch.run().snapshots


def only(x: Tensor, **options: Any) -> Record:
    (snapshot,) = seen(x, **options)
    return snapshot.records[0]


# ---- the rows


SIZES = [(1, 2048, 625), (3, 50, 8), (2, 9, 8), (5, 7, 1), (1, 700, 3), (16, 100, 40), (1, 1562, 625)]


@pytest.mark.parametrize(("B", "T", "n"), SIZES)
def test_one_row_of_each_stratum_and_each_row_with_the_same_chance(B: int, T: int, n: int) -> None:
    turns = 400
    taken = torch.stack([taken_rows.places(B, T, n, turn, CPU) for turn in range(turns)])
    assert taken.shape == (turns, B, n)
    i = torch.arange(n)
    assert bool(((taken >= i * T // n) & (taken <= ((i + 1) * T - 1) // n)).all())
    times = torch.bincount(taken.flatten(), minlength=T).double()
    expected = turns * B * n / T
    assert float((times - expected).abs().max()) < 5 * expected**0.5
    square = float((times - expected).square().mean()) / expected
    assert square < 1 + 5 * (2 / T) ** 0.5  # no more than that of independent rows


@pytest.mark.parametrize(("B", "T"), [(16, 100), (1, 1562), (1, 1563), (2, 4096), (8, 200), (4, 2048), (1, 8192)])
def test_periodic_data_are_not_favoured(B: int, T: int) -> None:
    n, steps = -(-625 // B), 200
    taken = torch.stack([taken_rows.places(B, T, n, turn, CPU) for turn in range(steps)])
    for period in (2, 3, 5, 13, 64):
        for width in {1, period // 2, period - 1}:
            marked = (torch.arange(T) % period < width).double()
            off = marked[taken].mean((1, 2)) - marked.mean()
            assert abs(float(off.mean())) < 4 * row_sample.ERROR / steps**0.5, (period, width)
            assert float(off.square().mean()) ** 0.5 < 1.15 * row_sample.ERROR, (period, width)


def test_steps_calls_sequences_and_strata_have_rows_of_their_own() -> None:
    drawn = [
        taken_rows.places(4, 2000, 10, turn, CPU, call) - torch.arange(10) * 200
        for turn in range(4)
        for call in range(4)
    ]
    offsets = torch.stack(drawn).flatten()
    assert len(set(offsets.tolist())) > 180  # of 200
    assert abs(float(offsets.double().mean()) - 99.5) < 3 * 200 / 12**0.5 / 640**0.5
    assert torch.equal(taken_rows.places(4, 2000, 10, 1, CPU, 2), taken_rows.places(4, 2000, 10, 1, CPU, 2))


DEFAULT = [(1, 625, None), (1, 1249, None), (1, 1250, 625), (4, 2048, 157), (700, 8, None), (700, 512, 1)]


@pytest.mark.parametrize(("B", "T", "rows"), DEFAULT)
def test_how_many_by_default(B: int, T: int, rows: int | None) -> None:
    q = torch.empty(B, 1, T, 1)
    taken = taken_rows.taken(call_of(q, q, 1.0), SimpleNamespace(rows="auto", every=1, turn=0), 0)
    assert rows == (None if taken is None else taken.shape[1])
    assert taken_rows.taken(call_of(q, q, 1.0), SimpleNamespace(rows="auto", every=2, turn=0), 0) is None
    assert taken_rows.taken(call_of(q, q, 1.0), SimpleNamespace(rows=None, every=1, turn=0), 0) is None


# ---- the statistics


def test_shares_are_within_the_bound_and_maxima_below() -> None:
    x = tokens()
    whole, steps = only(x, rows=None), seen(x, steps=4)
    assert not whole.facts.sampled
    for snapshot in steps:
        (record,) = snapshot.records
        assert record.facts.sampled and (record.heads.rows == TOKENS).all() and row_sample.measured(record) == 625
        for name in SHARES:  # three standard errors, and strata are closer
            near = getattr(record.heads, name) - getattr(whole.heads, name)
            assert np.abs(near).max() < 3 * row_sample.ERROR, name
        assert (record.heads.max_logit <= whole.heads.max_logit).all()
        assert (record.heads.min_logit >= whole.heads.min_logit).all()
        np.testing.assert_array_equal(record.heads.q_rms, whole.heads.q_rms)
    assert len({tuple(s.records[0].heads.max_logit) for s in steps}) > 1  # each step has other rows
    every = steps[0].merged(steps[1]).merged(steps[2]).merged(steps[3]).records[0].heads  # nearly all rows
    assert abs(every.saturated - whole.heads.saturated).max() < row_sample.ERROR / 2


def test_equal_sequences_do_not_weaken_the_bound() -> None:
    x = tokens(T=640).expand(50, -1, -1).clone()
    x[:, 1::2] = 0.0  # every second row is flat, in all sequences
    record, whole = only(x, model=Attention(30.0)), only(x, model=Attention(30.0), rows=None)
    assert (record.heads.rows == 50 * 640).all() and row_sample.measured(record) == 50 * 13
    assert (whole.heads.saturated > 0.2).all() and (whole.heads.saturated < 0.8).all()
    for name in SHARES:
        assert np.abs(getattr(record.heads, name) - getattr(whole.heads, name)).max() < 3 * row_sample.ERROR, name


def test_small_calls_and_rare_steps_are_exact() -> None:
    for x, every in ((tokens(B=2, T=300), 1), (tokens(), 50)):
        record = only(x, every=every)
        assert not record.facts.sampled and (record.heads.rows == x.shape[0] * x.shape[1]).all()
        np.testing.assert_array_equal(record.tally, only(x, rows=None).tally)


def test_padding_weakens_the_bound_and_that_is_said() -> None:
    class Padded(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return sdpa(q, k, v, attn_mask=(torch.arange(TOKENS) < TOKENS // 4)[None, None, None])

    record = only(tokens(), model=Padded())
    assert abs(row_sample.measured(record) - 625 / 4) <= 1
    assert (abs(record.heads.rows - TOKENS / 4) <= 4).all()
    assert "sampled rows of 512, shares within ±0.04 (" in row_sample.limits([record])


def test_a_sampled_call_marks_its_step_whatever_follows() -> None:
    model = Attention()
    with Watch(model, deep=False) as watch, torch.no_grad():
        for T in (TOKENS, 8):
            model(tokens(T=T))
        watch.step()
    assert watch.last.records[0].facts.sampled
    assert (watch.last.records[0].heads.rows == TOKENS + 8).all()


class Marked(nn.Module):
    """Attends to itself where a token is 1, and evenly where it is 0."""

    def forward(self, x: Tensor) -> Tensor:
        k = nn.functional.normalize(torch.randn(*x.shape, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
        q = k * x[..., None] * 1e4
        return sdpa(q[:, None], k[:, None], k[:, None])


UNEQUAL = [((1, 2048), (1, 512)), ((1, 1300), (2, 600)), ((2, 1024), (1, 2048))]


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_calls_weigh_by_the_rows_that_they_have(one: tuple[int, int], other: tuple[int, int]) -> None:
    model = Marked()
    with Watch(model, deep=False) as watch, torch.no_grad():
        model(torch.ones(one))
        model(torch.zeros(other))
        watch.step()
    passes = [seen(x, model=Marked())[0] for x in (torch.ones(one), torch.zeros(other))]
    rows = one[0] * one[1], other[0] * other[1]
    for record in (watch.last.records[0], passes[0].merged(passes[1]).records[0]):
        assert record.heads.saturated[0] == pytest.approx(rows[0] / sum(rows), abs=1e-5)
        assert record.heads.rows[0] == row_sample.of_how_many(record) == sum(rows)
        assert row_sample.measured(record) <= 2 * 626 and "at least" in row_sample.rows(record)
        assert row_sample.error(record) >= row_sample.ERROR * 0.7
    ranks = joined([Given(each, "same", "replicas", None) for each in passes]).records[0]
    assert ranks.heads.saturated[0] == pytest.approx(rows[0] / sum(rows), abs=1e-5)


def test_the_stated_error_holds_for_calls_that_are_sampled_unequally() -> None:
    marked = torch.rand(1, 2048, generator=torch.Generator().manual_seed(0)).round()
    few = torch.rand(4, 1024, generator=torch.Generator().manual_seed(1)).round()
    model, off = Marked(), []
    exact = float((marked.sum() + few.sum()) / (marked.numel() + few.numel()))
    with Watch(model, deep=False, rows=100) as watch, torch.no_grad():
        for _ in range(24):
            model(marked)
            model(few)
            watch.step()
    for snapshot in watch.run().snapshots:
        off.append(snapshot.records[0].heads.saturated[0] - exact)
    stated = row_sample.error(watch.last.records[0])
    assert np.sqrt(np.mean(np.square(off))) < 1.2 * stated < 0.05


def test_a_query_that_is_not_sampled_and_not_finite_is_found() -> None:
    row = next(i for i in range(TOKENS) if i not in taken_rows.places(1, TOKENS, 625, 0, CPU)[0].tolist())

    class Spoiled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            q = q.clone()
            q[:, :, row] = torch.nan
            return sdpa(q, k, v, is_causal=True)

    model = Spoiled()
    with Watch(model, deep=False) as watch, torch.no_grad():
        model(tokens())
    (finding,) = lh.diagnose(watch).of("not finite")
    assert finding.severity == "error" and "rows at least 2" in finding.numbers


class OneRow(Attention):
    """Has one row with a logit of 30,000, until it is mended."""

    mended = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if not self.mended:
            q = q.clone()
            q[:, :, 777] = k[:, :, 5] / k[:, :, 5].square().sum(-1, keepdim=True) * 120_000
        return sdpa(q, k, v, is_causal=True)


def test_a_large_logit_stays_a_finding_until_samples_would_have_had_its_row(tmp_path: Path) -> None:
    model, x, file, had = OneRow(1.0), tokens(), tmp_path / "run.json", []
    with Watch(model, deep=False) as watch, torch.no_grad():
        for step in range(20):
            model.mended = step >= 8
            model(x)
            watch.step()
            watch.save(file)
            had.append(float(watch.last.records[0].heads.max_logit.max()) > 1e4)
            for findings in (lh.diagnose(watch), lh.diagnose(file)):
                # A step has 625 of 2,048 rows: 8 without the row have a chance of 0.054, 9 one of 0.038.
                expected = any(had[-9:])
                assert bool(findings.of("logit growth", "error")) == expected
                assert ("attention is not the cause" in findings.verdict.sentence) == (not any(had))
    assert 1 <= sum(had) < 8 and "later samples had none" in findings.verdict.sentence
    with Watch(model, deep=False, rows=None) as watch, torch.no_grad():  # all rows: what is gone is known to be gone
        for model.mended in (False, True):
            model(x)
            watch.step()
    assert lh.diagnose(watch).verdict.sentence.startswith("attention is not the cause")


# ---- steps


def test_a_resumed_watch_takes_the_rows_it_would_have_taken(tmp_path: Path) -> None:
    x, file = tokens(T=1300), tmp_path / "run.jsonl"
    never = seen(x, steps=4)
    seen(x, steps=2, sinks=[lh.sinks.JSONL(file)])
    again = seen(x, steps=2, resume=file)
    assert [s.step for s in again] == [s.step for s in never]
    for one, other in zip(never, again, strict=True):
        np.testing.assert_array_equal(one.records[0].tally, other.records[0].tally)


def test_parts_of_an_accumulated_batch_have_other_rows_and_the_same_before_the_first_step() -> None:
    x, model = tokens(T=1300), Attention()
    with Watch(model, deep=False) as watch, torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                model(x)
            watch.step()
    first, second = (s.records[0] for s in watch.run().snapshots)
    q, k, _ = model.qkv(x).detach().unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    call = call_of(q, k, 0.25, causal=True)
    for record, taken in ((first, [(0, 0), (1, 0), (2, 0)]), (second, [(1, 0), (1, 1), (1, 2)])):
        rows = [taken_rows.places(1, 1300, 625, turn, CPU, number) for turn, number in taken]
        assert len({tuple(each.flatten().tolist()) for each in rows}) == 3
        together = reduce(tally.merge, [measure.tallied(call, rows=each).double().numpy() for each in rows])
        np.testing.assert_allclose(record.heads.mean_max, tally.read(together).mean_max, rtol=1e-5)


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize(("T", "n"), [(9, 8), (5, 4), (50, 31)])
def test_a_row_that_is_taken_twice_counts_twice(T: int, n: int, by_torch: bool) -> None:
    q, k = torch.randn(2, 3, 2, T, 8, generator=torch.Generator().manual_seed(0))
    call, twice = call_of(q, k, 0.5, causal=True), 0
    for turn in range(12):
        rows = taken_rows.places(3, T, n, turn, CPU)
        twice += int((rows.diff() == 0).sum())
        each = [measure.tallied(call, rows=rows[:, [i]], by_torch=by_torch).double().numpy() for i in range(n)]
        found = measure.tallied(call, rows=rows, by_torch=by_torch).double().numpy()
        wanted = reduce(tally.merge, each)
        np.testing.assert_allclose(
            found[:, : tally.INDEX["q_squares"]], wanted[:, : tally.INDEX["q_squares"]], rtol=1e-4
        )
    assert twice > 0


def test_compiled_graphs_are_not_compiled_again_and_nothing_of_the_model_changes() -> None:
    from torch._dynamo.utils import counters

    model, x = Attention(), tokens(T=1300)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), Watch(model, deep=False) as watch:
        state = torch.get_rng_state()
        outputs = [compiled(x)]
        before = counters["stats"]["unique_graphs"]
        outputs += [compiled(x) for _ in range(3)]
        assert counters["stats"]["unique_graphs"] == before
        assert torch.equal(torch.get_rng_state(), state)
    eager = seen(x, steps=4)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    for one, other in zip(watch.run().snapshots, eager, strict=True):
        np.testing.assert_allclose(one.records[0].tally, other.records[0].tally, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


# ---- words


def test_reports_findings_and_files_say_what_is_sampled(tmp_path: Path) -> None:
    model, file = Attention(size=80.0).half().float(), tmp_path / "run.json"
    said: list[Any] = []
    with Watch(model, deep=False, on_finding=said.append) as watch, torch.no_grad():
        model(tokens(B=4))
    text = str(watch)
    limits = "628 sampled rows of 8,192, shares within ±0.02 (one standard error, at most), maxima are lower bounds"
    assert limits in " ".join(text.split())
    assert "≥" in text and watch.metrics()["attention/all/sampled_rows"] == 628
    assert limits in watch._repr_html_()
    watch.save(file)
    assert json.loads(file.read_text())["snapshots"][0]["records"][0]["facts"]["sampled"]
    for findings in (lh.diagnose(watch), lh.diagnose(file)):
        assert "largest |logit| at least " in findings.verdict.sentence
        assert any(limits in line for line in findings.verdict.not_judged)
        growth = findings.of("logit growth")[0]
        assert growth.evidence["sampled_rows"] == 628 and "largest |logit| at least " in str(growth)
    assert any("largest |logit| at least " in str(one) for one in said)
    exact = lh.diagnose(watched_whole(model))
    assert "at least" not in str(exact) and "sampled" not in str(exact)


def watched_whole(model: nn.Module) -> Watch:
    with Watch(model, deep=False, rows=None) as watch, torch.no_grad():
        model(tokens(B=4))
    return watch


def test_a_clip_has_all_rows() -> None:
    x = tokens(T=1300)
    exact = float(only(x, rows=None).heads.max_logit.max())
    for given in (lambda model: model, lambda model: Watch(model, deep=False)):
        model = Attention()
        watched = given(model)
        with QKClip(watched, tau=1.0, batch=x) as clip:
            model(x)
            assert clip.watch.rows is None
            assert clip.step().largest == pytest.approx(exact)
        if isinstance(watched, Watch):
            watched.detach()
    model = Attention()
    with Training(qk_clip=1.0, options={"rows": "auto"}) as training:  # as hf_callback
        training.begin(model, 0)
        assert training.watch.rows is None
    with pytest.raises(lh.LevelheadError, match="rows: expected None with qk_clip, got 8"):
        Training(qk_clip=1.0, options={"rows": 8})
