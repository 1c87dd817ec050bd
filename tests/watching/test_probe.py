"""Attention by hand is looked for without being asked, and what happened is said; nothing is clean in silence."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.errors import LevelheadValueError
from levelhead.watching.by_hand import Deep
from watched import BATCH, TOKENS, batch, by_hand, one_thread, outcome, same, sdpa, stack

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


def test_a_head_by_hand_is_found_on_the_first_pass_and_its_bug_named_in_every_head() -> None:
    w = passes(heads(), 2)
    assert [record.module for record in w.last.records] == [f"heads.{n}" for n in range(HEADS)]
    assert len(w.run().snapshots) == 2
    assert "a softmax by hand was found in pass 1 in 4 modules: Head (heads.0" in " ".join(str(w).split())
    found = lh.diagnose(w)
    wrong = [finding for finding in found if finding.kind == "wrong scale"]
    assert [finding.module for finding in wrong] == [f"heads.{n}" for n in range(HEADS)]
    assert all(finding.severity == "warning" and "whole model's width" in finding.why for finding in wrong)
    (note,) = (finding for finding in found if finding.kind == "attention by hand")
    assert "found in pass 1" in note.why and note.evidence == {"modules": 4.0}


def test_a_probe_keeps_every_bit() -> None:
    model = heads()
    plain = outcome(model, lambda: model(batch()))
    with lh.watch(model) as w:
        for _ in range(3):
            same(plain, outcome(model, lambda: model(batch())))
    assert w.last.records


def test_a_model_that_did_not_run_is_said_to_have_not() -> None:
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
    assert "some attention calls no known function; a softmax by hand was found in pass 1 in 1" in w.run().by_hand


class Mixed(nn.Module):
    """Attends by a function, or by hand where `by_hand` says so: no name of it has to do with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.out, self.ran = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def by_hand(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        q, k, v = self.to_qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        y = (q @ k.mT).softmax(-1) @ v if self.by_hand() else functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Evaluation(Mixed):
    def by_hand(self) -> bool:
        return not self.training


class WithoutGradients(Mixed):
    def by_hand(self) -> bool:
        return not torch.is_grad_enabled()


class Flag(Mixed):
    flash = True

    def by_hand(self) -> bool:
        return not self.flash


class Later(Mixed):
    def by_hand(self) -> bool:
        return self.ran > 5


class Both(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        extra = (x @ x.mT).softmax(-1) @ x if self.ran > 5 else 0.0
        return super().forward(x) + extra


class Frozen(nn.Module):
    """A part that runs from the sixth pass on, inside a model that was followed before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.ran = Mixed(), Evaluation().eval(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        return self.second(x) if self.ran > 5 else self.first(x)


@pytest.mark.parametrize(
    ("kind", "found"), [(Evaluation, 6), (WithoutGradients, 6), (Flag, 6), (Frozen, 6), (Later, 7), (Both, 8)]
)
def test_a_module_that_attends_by_hand_later_is_found(kind: type[nn.Module], found: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), Mixed())
    with lh.watch(model) as w:
        for _ in range(5):
            model(batch())
        assert not w.run().by_hand and all(line.how == "sdpa" for line in w.coverage() if line.seen)
        if kind is not Frozen:
            model.train(kind is not Evaluation)
        if kind is Flag:
            model[0].flash = False
        with torch.set_grad_enabled(kind is not WithoutGradients):
            for _ in range(6, found + 1):
                model(batch())
    assert f"a softmax by hand was found in pass {found} in 1 module: " in w.run().by_hand
    (line,) = (line for line in w.coverage() if "by hand" in line.how)
    (record,) = (record for record in w.last.records if "by hand" in record.facts.how)
    assert line.seen and record.heads.rows[0] == BATCH * TOKENS


def test_few_passes_are_followed_where_all_attention_calls_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    passed, begun = Counter[str](), Deep.__enter__
    monkeypatch.setattr(Deep, "__enter__", lambda self: (followed.append(passed["n"]), begun(self))[1])
    model = stack(sdpa())
    with lh.watch(model) as w:
        for _ in range(20):
            passed["n"] += 1
            model(batch())
    assert followed == [1, 2, 4, 8, 16]
    assert not w.run().by_hand
    assert not [finding for finding in lh.diagnose(w) if finding.kind == "attention by hand"]
    followed.clear()
    passed.clear()
    with lh.watch(model, every=4) as w:  # an unobserved pass is never followed
        for _ in range(16):
            passed["n"] += 1
            model(batch())
    assert followed == [1, 5, 13]


def test_each_of_two_watches_counts_its_own_calls() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.teacher = heads(), [heads()]

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) - self.teacher[0](x)

    model = Student()
    with lh.watch(model, deep=True) as student, lh.watch(model.teacher[0], deep=True) as teacher:
        model(batch())
    for w in (student, teacher):
        assert len(w.last.records) == HEADS
        assert all((record.heads.rows == BATCH * TOKENS).all() for record in w.last.records)


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
    around, scripted = w.coverage()  # the first has the sigmoid that is found below Python
    assert (scripted.module, scripted.seen) == ("0", False) and "scripted" in scripted.how
    assert not around.seen and "sigmoid" in around.how


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


def test_no_call_is_missed_while_another_thread_is_still_looking() -> None:
    threads = 4
    together = threading.Barrier(threads)

    class Waiting(Mixed):
        def by_hand(self) -> bool:
            together.wait(60)  # all passes have begun, and none has ended
            return True

    model = Waiting()
    with lh.watch(model) as w:
        running = [threading.Thread(target=model, args=(batch(),)) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    assert [line.calls for line in w.coverage()] == [threads]
