"""`on_finding` tells during training, once; a watch that resumes from a file alarms as if never interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import levelhead as lh
from levelhead.diagnosis.findings import Finding
from levelhead.errors import FindingError, LevelheadError
from levelhead.runs.record import Run
from levelhead.sinks import JSONL, Parquet
from watched import batch, one_thread, sdpa, stack

__all__ = ["one_thread"]


def growing(model: nn.Module, step: int) -> None:
    """Logits that grow by a tenth a step."""
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.mul_(1.1 if step else 8.0)


def trained(told: list[Finding], steps: range, model: Any = None, **options: Any) -> lh.watch:
    """Steps of a model whose logits grow; `told` gets what on_finding says, with the step in the evidence."""
    model = model or stack(sdpa(is_causal=True), depth=1)
    with lh.watch(model, on_finding=told.append, **options) as w:
        for step in steps:
            growing(model, step)
            model(batch(seed=step))
            w.step(loss=torch.tensor(1.0 / (1 + step)))
    return w


def test_a_finding_is_told_in_the_step_that_shows_it_and_once() -> None:
    told: list[Finding] = []
    at: list[int] = []
    model = stack(sdpa(is_causal=True), depth=1)
    with lh.watch(model, on_finding=lambda finding: (told.append(finding), at.append(step))) as w:
        for step in range(60):
            growing(model, step)
            model(batch(seed=step))
            w.step()
    assert {f.kind for f in told} == {"logit growth"} and all(f.severity != "note" for f in told)
    places = [
        (f.severity, f.module, head) for f in told for head in (f.head if isinstance(f.head, tuple) else (f.head,))
    ]
    assert told and len({(f.severity, f.head) for f in told}) == len(told) < 12
    assert len(places) <= 2 * len(set(places))
    run = w.run()
    first = lh.diagnose(Run("", run.snapshots[: at[0] + 1]))
    before = lh.diagnose(Run("", run.snapshots[: at[0]]))
    assert first.worst == "warning" and before.worst in (None, "note")


def test_raise_comes_after_the_sinks_have_the_step(tmp_path: Path) -> None:
    model = stack(sdpa(scale=1.0), depth=1)
    with lh.watch(model, on_finding="raise", sinks=[JSONL(tmp_path / "run.jsonl")]) as w:
        model(batch())
        with pytest.raises(FindingError, match="wrong scale") as raised:
            w.step()
    assert isinstance(raised.value, LevelheadError) and raised.value.finding.kind == "wrong scale"
    assert not w.attached and len(lh.sinks.read(tmp_path / "run.jsonl").snapshots) == 1
    assert not hasattr(model.blocks[0].attn, "levelhead_watch")


def test_warn_and_several_at_once() -> None:
    model, told = stack(sdpa(scale=1.0), depth=1), []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with lh.watch(model, on_finding=["warn", told.append]) as w:
            for _ in range(3):
                model(batch())
                w.step()
    assert [f.kind for f in told] == ["wrong scale"]
    assert [str(x.message) for x in warned if "levelhead" in str(x.message)] == [f"levelhead: {told[0]}"]


@pytest.mark.parametrize("bad", ["mail", 3, [3]])
def test_what_cannot_be_told_to_is_refused(bad: Any) -> None:
    with pytest.raises(LevelheadError, match="on_finding: expected a callable"):
        lh.watch(stack(sdpa()), on_finding=bad)


# ---- after a restart


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "save"])
def test_a_resumed_watch_alarms_at_the_same_step(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    make = {"jsonl": lambda: [JSONL(path)], "parquet": lambda: [Parquet(path)], "save": list}[kind]
    never: list[Finding] = []
    whole = trained(never, range(40), history=16)
    told: list[Finding] = []
    model = stack(sdpa(is_causal=True), depth=1)
    first = trained(told, range(12), model, sinks=make(), history=16)
    if kind == "save":
        first.save(path)
    assert told == [] != never
    second = trained(told, range(12, 40), model, sinks=make(), resume=path, history=16)
    assert told == never  # the evidence has the step
    assert [s.step for s in second.run().snapshots] == [s.step for s in whole.run().snapshots]
    assert second.run().logged == whole.run().logged and len(whole.run().logged["loss"]) == 40
    assert "resumed after step 11" in second.run().notes[0]


def test_what_runs_again_replaces_what_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = stack(sdpa(is_causal=True), depth=1)
    trained([], range(8), model, sinks=[JSONL(path)])
    with lh.watch(model, sinks=[JSONL(path)], resume=path) as w:
        w.start_at(5)  # the checkpoint's
        model(batch())
        w.step(loss=7.0)
    assert [s.step for s in w.run().snapshots] == [0, 1, 2, 3, 4, 5]
    again = lh.sinks.read(path)
    assert [s.step for s in again.snapshots] == [0, 1, 2, 3, 4, 5] and again.logged["loss"][-1] == (5, 7.0)


def test_without_a_file_the_history_begins_and_says_so(tmp_path: Path) -> None:
    with lh.watch(stack(sdpa()), resume=tmp_path / "none.jsonl") as w:
        w.model(batch())
    assert "was not there" in w.run().notes[0] and [s.step for s in w.run().snapshots] == [0]
    with pytest.raises(LevelheadError, match="resume: expected a path"):
        lh.watch(stack(sdpa()), resume=3)


def test_passes_after_a_resumed_history_count_on(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    model = stack(sdpa(is_causal=True), depth=1).eval()
    with lh.watch(model) as w:
        for _ in range(3):
            model(batch())
    w.save(path)
    with lh.watch(model, resume=path) as w:
        model(batch())
        model(batch())
    assert [s.step for s in w.run().snapshots] == [0, 1, 2, 3, 4]


def test_what_is_logged_is_a_number() -> None:
    with lh.watch(stack(sdpa())) as w:
        for bad in ("low", 10**400):
            with pytest.raises(LevelheadError, match="loss: expected a number"):
                w.log(loss=bad)
        w.log(loss=torch.tensor(2.0), step=9)
    assert w.run().logged == {"loss": ((9, 2.0),)}


@pytest.mark.parametrize("bad", ["a", -1, 1.5, None, True, 2**63])
def test_a_step_is_a_number_from_0_on_and_nothing_changes_otherwise(bad: Any) -> None:
    model = stack(sdpa(), depth=1).eval()
    with lh.watch(model) as w:
        model(batch())
        with pytest.raises(LevelheadError, match="step: expected an integer from 0 on"):
            w.start_at(bad)
        if bad is not None:
            with pytest.raises(LevelheadError, match="step: expected an integer from 0 on"):
                w.log(step=bad, loss=1.0)
        model(batch())
    assert [s.step for s in w.run().snapshots] == [0, 1] and w.run().logged == {}


def test_a_file_with_a_broken_line_in_the_middle_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = stack(sdpa(is_causal=True), depth=1)
    trained([], range(4), model, sinks=[JSONL(path)])
    lines = path.read_text().splitlines(keepends=True)
    damaged = max(range(1, len(lines) - 1), key=lambda n: len(lines[n]))
    lines[damaged] = lines[damaged][:40] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(LevelheadError) as read:
        lh.diagnose(path)
    with pytest.raises(LevelheadError, match=f"line {damaged + 1}") as resumed:
        lh.watch(model, sinks=[JSONL(path)], resume=path)
    assert str(resumed.value) == str(read.value)
    assert path.read_text().startswith("".join(lines))
    lh.watch(model).detach()  # nothing is attached
