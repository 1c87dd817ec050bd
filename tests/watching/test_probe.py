"""Attention by hand is looked for without being asked, and what happened is said; nothing is clean in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.errors import LevelheadValueError
from watched import batch, by_hand, one_thread, outcome, same, sdpa, stack

__all__ = ["one_thread"]  # a fixture

WIDTH, HEADS = 32, 4


class Head(nn.Module):
    """A head by hand, with the scale of the whole width."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        T, C = x.shape[1:]
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * C**-0.5
        scores = scores.masked_fill(torch.tril(torch.ones(T, T)) == 0, float("-inf"))
        return functional.softmax(scores, dim=-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads()


def passes(model: nn.Module, n: int, **options: Any) -> lh.watch:
    with lh.watch(model, **options) as w:
        for seed in range(n):
            model(batch(seed=seed))
    return w


def test_a_head_by_hand_is_found_on_the_second_pass_and_its_bug_named_in_every_head() -> None:
    w = passes(heads(), 2)
    assert [record.module for record in w.last.records] == [f"heads.{n}" for n in range(HEADS)]
    assert len(w.run().snapshots) == 1
    assert "a softmax by hand was found on a probe of pass 2 in 4 modules: Head (heads.0" in " ".join(str(w).split())
    found = lh.diagnose(w)
    wrong = [finding for finding in found if finding.kind == "wrong scale"]
    assert [finding.module for finding in wrong] == [f"heads.{n}" for n in range(HEADS)]
    assert all(finding.severity == "warning" and "whole model's width" in finding.why for finding in wrong)
    (note,) = (finding for finding in found if finding.kind == "attention by hand")
    assert "probe of pass 2" in note.why and note.evidence == {"modules": 4.0}


def test_a_probe_keeps_every_bit() -> None:
    model = heads()
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        for _ in range(3):
            same(plain, outcome(model, lambda: model(batch())))
    assert w.last.records


def test_after_one_pass_it_is_said_what_to_do() -> None:
    w = passes(heads(), 1)
    words = "no attention function was called in 1 pass. One more observed pass looks for a softmax by hand"
    assert words in " ".join(str(w).split())
    with pytest.raises(LevelheadValueError, match="One more observed pass looks for a softmax by hand; deep=True"):
        lh.diagnose(w)
    with pytest.raises(LevelheadValueError, match="the model did not run"):
        lh.diagnose(passes(heads(), 0))


def test_deep_false_never_looks() -> None:
    w = passes(heads(), 3, deep=False)
    assert not w.last.records
    with pytest.raises(LevelheadValueError, match="a softmax by hand was not looked for"):
        lh.diagnose(w)


@pytest.mark.parametrize("deep", [None, True])
def test_a_model_without_attention_is_said_to_have_none(deep: bool | None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8), nn.Softmax(-1))
    w = passes(model, 3, deep=deep)
    assert "no attention was found" in str(w)
    with pytest.raises(LevelheadValueError, match="no attention was found"):
        lh.diagnose(w)


def test_a_module_missed_beside_others_is_found_too() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.unknown = stack(sdpa(), depth=1), stack(by_hand(), depth=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.unknown(self.known(x))

    w = passes(Both(), 2)
    assert [record.module for record in w.last.records] == ["known.blocks.0.attn", "unknown.blocks.0.attn"]
    assert "not all attention was seen; a softmax by hand was found on a probe of pass 2 in 1 module" in w.run().by_hand


def test_nothing_is_followed_where_nothing_was_missed() -> None:
    w = passes(stack(sdpa()), 3)
    assert not w.probe.follows and not w.probe.looked and not w.run().by_hand
    assert not [finding for finding in lh.diagnose(w) if finding.kind == "attention by hand"]


def test_what_happened_is_saved_with_the_run(tmp_path: Any) -> None:
    w = passes(heads(), 2)
    w.save(tmp_path / "run.json")
    assert [f.why for f in lh.diagnose(tmp_path / "run.json")] == [f.why for f in lh.diagnose(w)]


def test_scripted_parts_run_as_they_do_and_are_found() -> None:
    model = nn.Sequential(torch.jit.trace(Head(), batch()), nn.Linear(WIDTH // HEADS, 4))
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        for _ in range(2):
            same(plain, outcome(model, lambda: model(batch())))
    assert w.last.records[0].facts.how == "softmax by hand"
    with pytest.raises(lh.LevelheadError, match="got the scripted"):
        lh.watch(model[0])


class ScriptedAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ x.transpose(-2, -1)) @ x


def test_a_scripted_module_that_is_called_attention_is_named() -> None:
    w = passes(nn.Sequential(torch.jit.trace(ScriptedAttention(), batch())), 1)
    assert [(line.module, line.seen) for line in w.coverage()] == [("0", False)]
    assert "scripted" in w.coverage()[0].how


def test_a_compiled_model_stays_compiled_and_it_is_said() -> None:
    model = heads()
    compiled = torch.compile(model, backend="eager")
    with lh.watch(model) as w:
        for _ in range(3):
            compiled(batch())
    assert not w.last.records
    with pytest.raises(LevelheadValueError, match="run it once without torch.compile"):
        lh.diagnose(w)


def test_a_part_called_by_itself_is_followed_too() -> None:
    model = nn.ModuleDict({"encoder": heads()})
    with lh.watch(model) as w:
        for _ in range(2):
            model["encoder"](batch())
    assert len(w.last.records) == HEADS
