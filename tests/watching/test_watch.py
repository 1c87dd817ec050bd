"""Steps, threads, copies, mistakes and going: what a watch does around its measurements."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import levelhead as lh
from levelhead.runs.record import Snapshot
from levelhead.watching.module_stack import WATCHED_MODULES
from tiny_models import MODELS
from watched import (
    BATCH,
    HEADS,
    TOKENS,
    Stack,
    batch,
    by_hand,
    hidden,
    one_thread,
    outcome,
    same,
    sdpa,
    sdpa_of_three_dimensions,
    stack,
)

__all__ = ["one_thread"]  # a fixture

CAUSAL = sdpa(is_causal=True)
ROWS = BATCH * TOKENS


def rows(snapshot: Snapshot) -> set[int]:
    return {int(n) for record in snapshot.records for n in record.heads.rows}


# ---- steps


def test_every_forward_pass_is_a_step_unless_step_says_so() -> None:
    model = stack(CAUSAL)
    with lh.watch(model) as w:
        for _ in range(4):
            model(batch())
    assert [(s.step, rows(s)) for s in w.run().snapshots] == [(n, {ROWS}) for n in range(4)]


def test_a_call_without_heads_runs() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(self.project(x), x, x)

    with lh.watch(model := Attention()):
        assert model(torch.randn(2, 0, 5, 8)).shape == (2, 0, 5, 8)


def test_every_third_step_is_looked_at() -> None:
    model = stack(CAUSAL)
    seen: list[Snapshot] = []
    with lh.watch(model, every=3, sinks=[seen.append]) as w:
        for _ in range(8):
            model(batch())
            w.step()
    assert [s.step for s in w.run().snapshots] == [0, 3, 6] == [s.step for s in seen]
    assert w.cost["observed_steps"] == 3


def test_micro_batches_are_one_step() -> None:
    model = stack(CAUSAL)
    parts = [batch(seed=n) for n in range(3)]
    with lh.watch(model) as whole:
        model(torch.cat(parts))
    with lh.watch(model, every=2) as w:
        for _ in range(3):
            for part in parts:
                model(part).sum().backward()
            w.step()
    assert [s.step for s in w.run().snapshots] == [0, 2]
    assert rows(w.last) == {3 * ROWS}
    for record in w.last.records:
        wanted = whole.last[record.module]
        np.testing.assert_allclose(record.heads.max_logit, wanted.heads.max_logit, rtol=1e-6)
        np.testing.assert_allclose(record.heads.mean_entropy, wanted.heads.mean_entropy, 1e-6)


def test_the_first_step_takes_in_all_that_came_before_it() -> None:
    model = stack(CAUSAL)
    with lh.watch(model) as w:
        for _ in range(2):
            for _ in range(3):
                model(batch())
            w.step()
    assert [(s.step, rows(s)) for s in w.run().snapshots] == [(0, {3 * ROWS}), (1, {3 * ROWS})]


def test_sinks_hear_of_a_step_once() -> None:
    model = stack(CAUSAL)
    seen: list[Snapshot] = []
    with lh.watch(model, sinks=[seen.append]) as w:
        for _ in range(2):
            for _ in range(3):
                model(batch())
            w.step()
    assert [(s.step, rows(s)) for s in seen] == [(0, {3 * ROWS}), (1, {3 * ROWS})]
    assert w.cost["observed_steps"] == 2


@pytest.mark.parametrize("training", [True, False])
def test_sinks_hear_of_every_pass_where_nobody_says_step(training: bool) -> None:
    model = stack(CAUSAL).train(training)
    seen: list[Snapshot] = []
    with lh.watch(model, sinks=[seen.append]):
        for _ in range(4):
            model(batch())
        assert len(seen) == (0 if training else 3)  # in training, a step may still be called
    assert [s.step for s in seen] == [0, 1, 2, 3]


def descend(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for x in parameters:
            if x.grad is not None:
                x -= 1e-3 * x.grad


@pytest.mark.parametrize("how", ["SGD", "AdamW", "fused", "compiled", "by hand"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_in_a_training_without_step_sinks_wait_for_the_next_pass(how: str, micro: int, every: int) -> None:
    """The first one after the optimiser's step; a pass that a checkpoint runs again is none."""
    model, seen = Checkpointed(sdpa(scale=1.0), 1), list[Snapshot]()
    parameters = list(model.parameters())
    kind = torch.optim.SGD if how == "SGD" else torch.optim.AdamW
    optimizer = kind(parameters, 1e-3, fused=how == "fused")
    update: Callable[[], Any] = functools.partial(descend, parameters) if how == "by hand" else optimizer.step
    update = torch.compile(update, backend="eager") if how == "compiled" else update
    told: list[Any] = []
    with lh.watch(model, every=every, sinks=[seen.append], on_finding=told.append) as w:
        for step in range(4):
            for part in range(micro):
                model(batch().requires_grad_()).sum().backward()
                passes = range(0, step * micro, every)  # those before the optimiser's latest step
                assert [s.step for s in seen] == list(passes), part
                assert bool(told) == bool(seen)
            update()
            optimizer.zero_grad()
    assert [s.step for s in seen] == [s.step for s in w.run().snapshots] == list(range(0, 4 * micro, every))
    assert all(rows(s) == {ROWS} for s in seen)


def test_a_step_that_is_called_late_joins_no_pass_that_sinks_have_had() -> None:
    model, seen = stack(CAUSAL), list[Snapshot]()
    optimizer, other = (torch.optim.SGD(part.parameters(), 1e-3) for part in (model, nn.Linear(2, 2)))
    with lh.watch(model, sinks=[seen.append]) as w:
        for number in range(6):
            model(batch()).sum().backward()
            if number == 2:
                optimizer.step()
            other.step()
        assert [s.step for s in seen] == [0, 1, 2]
        w.step()
        model(batch())
        w.step()
    wanted = [(0, {ROWS}), (1, {ROWS}), (2, {ROWS}), (3, {3 * ROWS}), (4, {ROWS})]
    assert [(s.step, rows(s)) for s in seen] == [(s.step, rows(s)) for s in w.run().snapshots] == wanted
    assert w.cost["observed_steps"] == 5


class Checkpointed(Stack):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_checkpointing_is_not_counted_twice(reentrant: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(CAUSAL, 2)
    model.reentrant = reentrant
    x = batch().requires_grad_()
    plain = outcome(model, lambda: model(x))
    with lh.watch(model, gradients=gradients) as w:
        same(plain, outcome(model, lambda: model(x)))
        same(plain, outcome(model, lambda: model(x)))
    assert [(s.step, rows(s)) for s in w.run().snapshots] == [(0, {ROWS}), (1, {ROWS})]
    usual = stack(CAUSAL)
    with lh.watch(usual, gradients=True) as whole:
        outcome(usual, lambda: usual(x))
    if gradients:
        for record in w.last.records:
            wanted = whole.last[record.module].heads.dq_norm
            np.testing.assert_allclose(record.heads.dq_norm, wanted, rtol=1e-5)


def test_history_is_thinned_and_keeps_the_first_and_the_last() -> None:
    model = stack(CAUSAL, depth=1)
    with lh.watch(model, history=6) as w:
        for _ in range(40):
            with torch.no_grad():
                model(batch())
            w.step()
    steps = [s.step for s in w.run().snapshots]
    assert len(steps) <= 6 and steps[0] == 0 and steps[-1] == 39 and steps == sorted(steps)


# ---- gradients


def test_norms_of_gradients_are_those_computed_by_hand() -> None:
    kept: list[tuple[Tensor, ...]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for x in (q, k, v):
            x.retain_grad()
        kept.append((q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = stack(attend, kv_heads=2)
    plain = outcome(model, lambda: model(batch()))
    kept.clear()
    with lh.watch(model, gradients=True) as w:
        same(plain, outcome(model, lambda: model(batch())))
    for n, record in enumerate(w.last.records):
        attn = model.blocks[n].attn
        for name, x in zip(("dq", "dk", "dv"), kept[n], strict=True):
            assert x.grad is not None
            norms = x.grad.double().square().sum((0, 2, 3)).sqrt()
            wanted = norms.repeat_interleave(HEADS // len(norms)).numpy()
            np.testing.assert_allclose(getattr(record.heads, f"{name}_norm"), wanted, rtol=1e-5)
        assert record.weights == pytest.approx(
            {name: float(getattr(attn, f"{name}_proj").weight.grad.norm()) for name in "qkv"}
        )
    with lh.watch(model) as w:
        outcome(model, lambda: model(batch()))
    assert all(np.isnan(record.heads.dq_norm).all() for record in w.last.records)


def test_a_rank_without_tokens_has_gradients_of_nothing() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nothing = sdpa_of_three_dimensions(module, q[..., :0, :], k, v)
        return torch.cat([nothing, v], 2)

    model = stack(attend, depth=1)
    with lh.watch(model, gradients=True) as w:
        model(batch()).sum().backward()
    (record,) = w.last.records
    np.testing.assert_array_equal(record.heads.dq_norm, 0.0)


# ---- errors on the way


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_after_an_error_later_calls_are_attributed_right(error: BaseException, deep: bool) -> None:
    model = stack(by_hand() if deep else CAUSAL)
    raised: list[BaseException] = []

    def fail(*_: Any) -> None:
        if raised:
            raise raised.pop()

    model.blocks[0].attn.out_proj.register_forward_hook(fail)
    other = stack(by_hand() if deep else CAUSAL, depth=1)
    with lh.watch(model, deep=deep) as w:
        raised.append(error)
        with pytest.raises(type(error)):
            model(batch())
        model(batch())
        assert [(s.step, len(s.records)) for s in w.run().snapshots] == [(0, 1), (1, 2)]
        assert rows(w.last) == {ROWS}
    other(batch())
    assert rows(w.last) == {ROWS}
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_error_inside_the_attention_function_leaves_nothing() -> None:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = 3 if module.fails else k.shape[-1]
        return functional.scaled_dot_product_attention(q, k[..., :width], v)

    model = stack(attend)
    for block in model.blocks:
        block.attn.fails = False
    with lh.watch(model) as w:
        model.blocks[1].attn.fails = True
        with pytest.raises(RuntimeError):
            model(batch())
        model.blocks[1].attn.fails = False
        model(batch())
    assert len(w.last.records) == 2 and rows(w.last) == {ROWS}


# ---- going


def state() -> dict[str, Any]:
    """Everything outside of a model that a watch touches, by identity."""
    kind = transformers.AttentionInterface
    return {
        "sdpa": functional.scaled_dot_product_attention,
        "its name here": bound,
        "softmax": functional.softmax,
        "optimizers": tuple(_global_optimizer_post_hooks),
        "multihead": functional.multi_head_attention_forward,
        "attention": lh.attention,
        "attend": lh.torch.sdpa.attend,
        "get_interface": kind.__dict__.get("get_interface"),
        "getitem": kind.__dict__.get("__getitem__"),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "watched modules": dict(WATCHED_MODULES),
    }


bound = functional.scaled_dot_product_attention


def model_state(model: nn.Module) -> list[Any]:
    return [
        (
            set(vars(module)),
            *(
                dict(value)
                for name, value in sorted(vars(module).items())
                if name.endswith("_hooks") or "hooks_" in name
            ),
        )
        for module in model.modules()
    ]


def test_detaching_leaves_nothing_behind() -> None:
    model = stack(by_hand())
    before, inside = state(), model_state(model)
    watch = lh.watch(model, deep=True, gradients=True)
    assert state() != before and model_state(model) != inside
    outcome(model, lambda: model(batch()))
    with pytest.raises(RuntimeError, match="normalized_shape"), watch:
        model(batch()[..., :3])
    assert state() == before and model_state(model) == inside
    assert all(p._post_accumulate_grad_hooks in (None, {}) for p in model.parameters())
    w = lh.watch(model)
    w.detach()
    w.detach()
    assert state() == before and model_state(model) == inside


def _undo(thing: Any) -> None:
    thing.detach() if hasattr(thing, "detach") else thing.undo()


@pytest.mark.parametrize("going", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("coming", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_patch_use_and_watch_come_and_go_in_any_order(coming: tuple[int, ...], going: tuple[int, ...]) -> None:
    model, before = _llama(), state()
    tokens = MODELS["Llama"].inputs()
    plain = model(**tokens).logits
    makers: list[Callable[[], Any]] = [
        lh.torch.patch,
        functools.partial(lh.torch.huggingface.use, model),
        functools.partial(lh.watch, model),
    ]
    made = {n: makers[n]() for n in coming}
    torch.testing.assert_close(model(**tokens).logits, plain, rtol=1e-4, atol=1e-5)
    watch = made[2]
    assert {record.facts.how for record in watch.last.records} == {"huggingface:eager, levelhead"}
    assert made[1].calls == 2
    for n in going:
        _undo(made[n])
        model(**tokens)
    assert state() == before
    torch.testing.assert_close(model(**tokens).logits, plain, rtol=0, atol=0)


@functools.cache
def _llama() -> nn.Module:
    return MODELS["Llama"].make("eager")


# ---- copies, several models, several threads


@pytest.mark.parametrize("deep", [False, True])
def test_copies_of_a_watched_model_are_not_watched(deep: bool) -> None:
    model = stack(CAUSAL)
    for block in model.blocks:
        block.attn.attend = attend_for_pickle
    with lh.watch(model, deep=deep, gradients=True) as w:
        wanted = model(batch())
        calls = w.coverage()[0].calls
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(batch()), wanted)
            with lh.watch(twin) as other:
                twin(batch())
            assert len(other.last.records) == 2
        assert w.coverage()[0].calls == calls


def attend_for_pickle(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_two_models_are_watched_at_once() -> None:
    a, b = stack(CAUSAL), stack(by_hand())
    with lh.watch(a) as of_a:
        with lh.watch(b, deep=True) as of_b:
            a(batch())
            b(batch())
            b(batch())
        a(batch())
    assert [len(w.run().snapshots) for w in (of_a, of_b)] == [2, 2]
    assert {r.facts.how for r in of_a.last.records} == {"sdpa"}
    assert {r.facts.how for r in of_b.last.records} == {"softmax by hand"}


def test_a_watch_can_begin_again() -> None:
    model = stack(CAUSAL)
    w = lh.watch(model)
    model(batch())
    w.detach()
    model(batch())
    assert len(w.run().snapshots) == 1
    w.attach()
    model(batch())
    w.detach()
    assert [(s.step, rows(s)) for s in w.run().snapshots] == [(0, {ROWS}), (1, {ROWS})]


@pytest.mark.parametrize("deep", [False, True])
def test_threads_lose_no_call(deep: bool) -> None:
    model = stack(by_hand() if deep else CAUSAL)
    with torch.no_grad():
        wanted = [model(batch(seed=n)) for n in range(4)]
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(model(batch(seed=n)), wanted[n]):
                    wrong.append(n)

    with lh.watch(model, deep=deep, history=100) as w:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    for name in ("blocks.0.attn", "blocks.1.attn"):
        seen = [s[name] for s in w.run().snapshots if name in {r.module for r in s.records}]
        assert sum(int(record.heads.rows[0]) for record in seen) == 40 * ROWS


# ---- wrappers


def test_names_are_the_models_own_inside_wrappers() -> None:
    model = stack(CAUSAL)
    names = ["blocks.0.attn", "blocks.1.attn"]
    parallel = nn.DataParallel(model)
    with lh.watch(parallel) as w:
        parallel.module(batch())
    assert [r.module for r in w.last.records] == names

    class Wrapper(nn.Module):
        """A user's own: its forward counts, and so does its name."""

        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, self.module(x))

    wrapper = Wrapper()
    with lh.watch(wrapper) as w:
        wrapper(batch())
    assert {r.module for r in w.last.records} == {"", *(f"module.{name}" for name in names)}


# ---- what is kept


def test_no_tensor_of_a_call_is_kept() -> None:
    kept: list[weakref.ref[Any]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = ~hidden(TOKENS)[None, None].expand(BATCH, HEADS, -1, -1)
        mask = mask.contiguous()
        kept.extend(weakref.ref(x) for x in (q, k, v, mask))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = stack(attend)
    with torch.no_grad(), lh.watch(model) as w:
        model(batch())
        gc.collect()
        assert len(kept) == 8 and not any(ref() is not None for ref in kept)
        assert rows(w.last) == {ROWS}


# ---- what cannot be observed is reported


def test_a_model_that_ran_without_being_seen_is_reported() -> None:
    model = stack(by_hand())
    with lh.watch(model) as w:
        pass
    assert all(line.how.startswith("did not run while watched") for line in w.coverage())
    with lh.watch(model, deep=False) as w:
        model(batch())
    assert [line.module for line in w.coverage()] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(not line.seen and "deep=True" in line.how for line in w.coverage())


@pytest.mark.parametrize("kind", ["meta", "nested", "vmap"])
def test_tensors_without_numbers_run_as_they_do_and_are_reported(kind: str) -> None:
    model = stack(CAUSAL)
    if kind == "meta":
        model.to("meta")
    with lh.watch(model) as w, torch.no_grad():
        if kind == "meta":
            assert model(batch().to("meta")).shape == batch().shape
        elif kind == "vmap":
            found = torch.vmap(model)(batch()[None])
            torch.testing.assert_close(found, model(batch())[None])
            assert rows(w.last) == {ROWS}
        else:
            attn = Nested()
            with lh.watch(attn) as w:
                attn(torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 5, 8)]))
    lines = w.coverage()
    assert lines
    said = "measured below it" if kind == "vmap" else "numbers cannot be read"
    assert all(said in line.how + line.note for line in lines)


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


# ---- bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(model=42), "model: expected a torch.nn.Module, got int"),
        (dict(model="gpt2"), "model: expected a torch.nn.Module, got str"),
        (dict(every=0), "every: expected an integer of at least 1, got 0"),
        (dict(every=-3), "every: expected an integer of at least 1, got -3"),
        (dict(every=1.5), "every: expected an integer of at least 1, got 1.5"),
        (dict(every=True), "every: expected an integer of at least 1, got True"),
        (dict(every=None), "every: expected an integer of at least 1, got None"),
        (dict(rows=0), 'rows: expected an integer of at least 1, "auto", or None for all, got 0'),
        (dict(rows="all"), "rows: expected an integer of at least 1, \"auto\", or None for all, got 'all'"),
        (dict(history=0), "history: expected an integer of at least 1, got 0"),
        (dict(sinks=42), "sinks: expected callables that take a snapshot, got 42"),
        (dict(sinks=[print, "wandb"]), "sinks: expected callables that take a snapshot, got 'wandb'"),
        (dict(sinks=print), "sinks: expected callables that take a snapshot"),
        (dict(deep="yes"), "deep: expected True or False"),
        (dict(gradients=1), "gradients: expected True or False"),
        (dict(expected_scale="1/sqrt"), "expected_scale: expected a number above 0 or one of"),
        (dict(expected_scale=-1.0), "expected_scale: expected a number above 0 or one of"),
    ],
)
def test_mistakes_are_told_before_anything_is_touched(given: dict[str, Any], words: str) -> None:
    model = stack(CAUSAL)
    before, inside = state(), model_state(model)
    options = dict(given)
    with pytest.raises(lh.LevelheadError) as caught:
        lh.watch(options.pop("model", model), **options)
    assert words in str(caught.value)
    assert state() == before and model_state(model) == inside


def test_a_second_watch_on_a_model_or_a_part_of_it_is_refused() -> None:
    model = stack(CAUSAL)
    with lh.watch(model) as w:
        for again in (model, model.blocks[0], nn.Sequential(model)):
            with pytest.raises(ValueError, match="model: expected a model that is not watched"):
                lh.watch(again)
        model(batch())
    assert len(w.last.records) == 2
    with lh.watch(model.blocks[0]) as w:
        model(batch())
    assert [r.module for r in w.last.records] == ["attn"]
