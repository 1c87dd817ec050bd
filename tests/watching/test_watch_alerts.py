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
from levelhead.runs.record import Run, Snapshot
from levelhead.sinks import JSONL, Parquet
from watched import BATCH, TOKENS, batch, one_thread, sdpa, stack

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


class Failing:
    """A sink, or a function of a finding, that raises once: at a snapshot, a number or a finding."""

    def __init__(self, at: str) -> None:
        self.at, self.failed = at, False

    def _fail(self, at: str) -> None:
        if at == self.at and not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")

    def __call__(self, given: Any) -> None:
        self._fail("snapshot" if isinstance(given, Snapshot) else "finding")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._fail("number")


@pytest.mark.parametrize("at", ["snapshot", "number", "finding", "raise"])
def test_a_step_has_ended_whoever_raises_at_its_end(at: str) -> None:
    """And is numbered, delivered and judged once, in a loop that catches the error and goes on."""
    model, failing, taken, told = stack(sdpa(scale=1.0), depth=2), Failing(at), list[Snapshot](), list[Finding]()
    points: list[tuple[int, float]] = []
    taken_by = taken.append

    class Other:
        def __call__(self, snapshot: Snapshot) -> None:
            taken_by(snapshot)

        def log(self, step: int, numbers: dict[str, float]) -> None:
            points.append((step, numbers["loss"]))

    on_finding: list[Any] = ["raise" if at == "raise" else failing, told.append]
    caught = []
    with lh.watch(model, sinks=[failing, Other()], on_finding=on_finding) as w:
        for step in range(4):
            model(batch())
            try:
                w.step(loss=float(step))
            except (OSError, FindingError):
                caught.append(step)
    steps = [0, 1, 2, 3]
    assert caught == [0] and [s.step for s in w.run().snapshots] == [s.step for s in taken] == steps
    assert {int(record.heads.rows[0]) for s in taken for record in s.records} == {BATCH * TOKENS}
    assert w.run().logged["loss"] == tuple(points) == tuple((n, float(n)) for n in steps)
    assert len(told) == len({finding.module for finding in told}) == 2


def test_passes_are_steps_whoever_raises_at_their_end() -> None:
    """The next pass ends a step, and does not run then."""
    model, failing, taken = stack(sdpa(), depth=1).eval(), Failing("snapshot"), list[Snapshot]()
    with lh.watch(model, sinks=[failing, taken.append]):
        model(batch())
        with pytest.raises(OSError, match="No space"):
            model(batch())
        for _ in range(2):
            model(batch())
    assert [s.step for s in taken] == [0, 1, 2]


def test_of_two_errors_one_is_raised_and_the_other_is_a_warning() -> None:
    model, failing, taken = stack(sdpa(scale=1.0), depth=1), Failing("snapshot"), list[Snapshot]()
    with lh.watch(model, sinks=[failing, taken.append], on_finding="raise") as w:
        model(batch())
        words = "beside .*No space left.* there was FindingError: "
        with pytest.warns(UserWarning, match=words), pytest.raises(OSError, match="No space"):
            w.step()
    assert [s.step for s in taken] == [0]


@pytest.mark.parametrize("at", ["raise", "finding"])
def test_what_begins_elsewhere_does_so_though_the_end_before_it_raises(at: str) -> None:
    model, failing = stack(sdpa(scale=1.0), depth=1), Failing(at)
    with lh.watch(model, on_finding="raise" if at == "raise" else failing) as w:
        model(batch())
        with pytest.raises((OSError, FindingError)):
            w.start_at(7)
        model(batch())
        w.step()
    assert [s.step for s in w.run().snapshots] == [0, 7]


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
