"""`watch(model)`: statistics of every head of any PyTorch model, without changing it.

Hooks report which module runs, wrappers around the attention functions describe its calls. Here calls become tallies,
tallies become snapshots of steps, and snapshots go to the sinks. Outputs and gradients keep their bits; detaching
leaves nothing behind. `diagnose` evaluates what was recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

from levelhead.errors import bad_type, bad_value
from levelhead.extras import command, missing

if _error := missing("levelhead.watch", "torch", install=command("watch")):
    raise _error

import torch
from torch import nn

from levelhead.runs.record import Run, Seen, Snapshot
from levelhead.torch.operators import Pass
from levelhead.watching import alerts, amend, coverage, following, module_stack, options, ranks, sampled, watchable
from levelhead.watching.alerts import Alerts
from levelhead.watching.attempts import Attempts
from levelhead.watching.books import Book, Books
from levelhead.watching.delivery import Delivery
from levelhead.watching.history import History, step_number
from levelhead.watching.hooks import hooked
from levelhead.watching.intercept import INTERCEPTION
from levelhead.watching.measure import Call
from levelhead.watching.module_stack import (
    ATTRIBUTE,
    WATCHED_MODULES,
    Frame,
    GradientInputs,
    Observed,
    Product,
    WatchedModule,
)
from levelhead.watching.probe import Probe
from levelhead.watching.shape_inference import in_backward, infers_shapes
from levelhead.watching.step_tallies import Ledger
from levelhead.watching.taken_rows import Rows
from levelhead.watching.undisturbed import undisturbed
from levelhead.watching.waiting import Waiting
from levelhead.watching.wrapped import Reach

KEPT_SNAPSHOTS = 256  # beyond, every second one is dropped: trends stay, memory does not grow


class Watch:
    """Watches a model until `detach()`, or the end of the `with`; until then the model stays in memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        sinks: Iterable[Callable[[Snapshot], Any]] = (),
        rows: Rows = "auto",
        deep: bool | None = None,
        gradients: bool = False,
        counterfactual: bool = False,
        expected_scale: float | str | None = None,
        history: int = KEPT_SNAPSHOTS,
        plain_torch: bool | None = None,
        training_only: bool = False,
        describe: Mapping[Any, Callable[..., Any]] | None = None,
        on_finding: Any = None,
        gather: bool | str = False,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
            given = f"the scripted {model.original_name}" if isinstance(model, nn.Module) else type(model).__name__
            raise bad_type("model", "a torch.nn.Module", given, "Give the model itself, before torch.jit")
        chosen: dict[str, Any] = {"every": every, "sinks": sinks, "rows": rows, "deep": deep, "gradients": gradients}
        chosen |= {"counterfactual": counterfactual, "expected_scale": expected_scale, "history": history}
        chosen |= {"plain_torch": plain_torch, "training_only": training_only, "describe": describe}
        chosen |= {"on_finding": on_finding, "gather": gather, "resume": resume}
        known = options.checked(chosen)
        self.model = watchable.unwrapped(model)
        self.every: int = known["every"]
        self.rows: Rows = known["rows"]
        self.deep: bool | None = known["deep"]
        self.gradients: bool = known["gradients"]
        self.counterfactual: bool = known["counterfactual"]
        self.probe = Probe(self.deep)
        self.expected_scale: float | str | None = known["expected_scale"]
        self.plain_torch: bool | None = known["plain_torch"]
        self.training_only: bool = known["training_only"]
        self.describers: Mapping[Any, Callable[..., Any]] = known["describe"]
        self._reach: Reach | None = None
        limit = max(known["history"], 2)
        self._gathering = ranks.Gathering(known["gather"], self.every)
        self._delivery = Delivery(known["sinks"], self._gathering)
        tell = alerts.of_rank(known["on_finding"], self._gathering.first)
        self._history = History(limit, Alerts(tell, self.expected_scale, limit))
        self.listeners: list[Callable[..., None]] = []  # (watched, call, tally, q, k) of every call
        self._waiting = Waiting(self.model)
        self._carried: Snapshot | None = None  # passes before the first `step()`, as one step
        self._books = Books()
        self.watched_modules: list[WatchedModule] = []
        self.child_names: dict[int, str] = {}
        self._hooks: list[Any] = []
        self._step, self._forwards, self._by_hand = 0, 0, False
        self._spent = self._elapsed = 0.0
        self._since: float | None = None
        self._observed = 0
        self.passes = 0  # of the whole model that began, recomputed ones aside
        self.compiled = False  # whether a graph of the model has run
        self.lock = threading.RLock()  # several threads may run the model
        if known["resume"] is not None:
            self._history.resume(known["resume"])
            self._step = self._history.first
        self.attach()

    # ---- attaching and detaching

    def attach(self) -> Watch:
        """Begins, or begins again after `detach`."""
        if self.attached:
            return self
        if any(getattr(module, ATTRIBUTE, None) for module in self.model.modules()):
            advice = "Detach that watch first; one can have several sinks"
            raise bad_value("model", "a model that is not watched", "one that is", advice)
        if not self.watched_modules:
            with undisturbed():  # a default device is a mode, too
                self.watched_modules = [
                    WatchedModule(watchable.clean(n), m, self) for n, m in watchable.frame_modules(self.model)
                ]
            self.probe.modules = self.watched_modules
        self.child_names = {id(module): name.rsplit(".", 1)[-1] for name, module in self.model.named_modules()}
        WATCHED_MODULES.update({watched.number: watched for watched in self.watched_modules})
        self._hooks = list(hooked(self.model, self.watched_modules))
        INTERCEPTION.hold()
        self._reach = Reach(self.model, self.describers, INTERCEPTION.wrapped)
        sampled.observing[id(self)] = self.wanted
        self._waiting.attach()
        self._since = time.perf_counter()
        return self

    def detach(self) -> None:
        """Ends, and leaves the model as it was; what was recorded stays readable."""
        if not self.attached:
            return
        assert self._since is not None
        self._elapsed += time.perf_counter() - self._since
        self._since = None
        if self._reach is not None:
            self._reach.undo()
        INTERCEPTION.release()
        sampled.observing.pop(id(self), None)
        self._waiting.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for book in self._books.all:
            book.let_go()
        module_stack.leave_all(self)
        following.end(self)
        for watched in self.watched_modules:
            WATCHED_MODULES.pop(watched.number, None)
            vars(watched.module).pop(ATTRIBUTE, None)
        try:
            with Attempts() as attempt:
                attempt(self._flush)
                attempt(self._deliver)
        finally:
            self._delivery.close()

    @property
    def attached(self) -> bool:
        return self._since is not None

    def __enter__(self) -> Watch:
        return self.attach()

    def __exit__(self, *error: object) -> None:
        self.detach()

    # ---- steps

    def step(self, **numbers: Any) -> None:
        """Ends a step; from the first call on, forward passes do not count as steps. `loss=` and other numbers of the
        step are recorded as by `log`."""
        if not self._by_hand:
            self._by_hand, self._step = True, max(self._history.first, self._waiting.final)
            # The forward passes since the optimiser's last step were parts of this first step.
            passes = self._history.take_passes(self._step)
            self._carried = reduce(Snapshot.merged, passes) if passes else None
            self._observed = self._observed - len(passes) if self._waiting.final else 0
            self._waiting.take()
        values = self._history.log(self._step, numbers)
        try:
            with Attempts() as attempt:
                if values:
                    attempt(self._delivery.log, self._step, values)
                attempt(self._flush, self.observing or not self._gathering.met)
        finally:  # a step that was measured has ended, whoever raises
            self._step += 1

    def start_at(self, step: int) -> None:
        """Ends what ran before, and gives the next step this number; from here on `step()` ends steps. Resumed steps
        from this number on are forgotten: they are about to run again."""
        number = step_number(step)
        try:
            self.step()
        finally:
            self._step = number
            self._history.start_at(number)

    def log(self, *, step: int | None = None, **numbers: Any) -> None:
        """Records numbers of this step, or of another, such as loss=, for the curves of a report."""
        at = self._step if step is None else step_number(step)
        values = self._history.log(at, numbers)
        self._delivery.log(at, values)

    def begin_forward(self) -> None:
        """A forward pass of the whole model begins: the root's hook calls this."""
        INTERCEPTION.refresh()
        if in_backward() or infers_shapes():
            return
        self.passes += 1
        if self._by_hand:
            return
        with self.lock:
            upcoming = self._step + (self._forwards > 0)
            self._waiting.begin_pass(upcoming)
            self._end(self._books.over())
            if self._waiting.over:  # also where the latest pass was not measured
                self._deliver()
            self._step = upcoming
            self._forwards += 1
            self._books.begin(self._step, self._step % self.every == 0)

    @property
    def _now(self) -> int:
        """The number of the step that this thread is in."""
        return self._step if self._by_hand else self._books.step(self._step)

    @property
    def turn(self) -> int:
        """The number of this step among those that are measured."""
        return self._now // self.every

    @property
    def observing(self) -> bool:
        """Whether this step is measured."""
        return self._now % self.every == 0

    def wanted(self) -> bool:
        """Whether a call that runs now is measured: a recomputed one was already."""
        idle = self.training_only and not self.model.training  # an evaluation between two steps
        return self.observing and not idle and not in_backward() and not module_stack.runs_empty()

    def around(self, watched: WatchedModule) -> Iterator[WatchedModule]:
        """The modules that contain a module."""
        for one in self.watched_modules:
            if one is not watched and (not one.name or watched.name.startswith(f"{one.name}.")):
                yield one

    def _flush(self, gather: bool = False) -> None:
        with self.lock:
            if not self._by_hand:
                self._end(self._books.rest(self._step))
                return
            snapshot = self._pending()
            with Attempts() as attempt:
                try:
                    if gather:  # in `step()` alone, which every rank calls
                        failure = self._delivery.take_failure()
                        snapshot = self._gathering(snapshot, self._step, self.model, self._history.resumed, failure)
                        if self._gathering.failure is not None:
                            attempt(self._gathering.failure.throw)
                finally:
                    self._carried = None
                    for book in self._books.rest(self._step):
                        book.clear()
                attempt(self._keep, snapshot)

    def _end(self, books: Iterable[Book]) -> None:
        """Each of these books is a step."""
        with Attempts() as attempt:
            for book in books:
                with undisturbed():
                    records = book.records()
                book.clear()
                attempt(self._keep, Snapshot(book.step, records) if records else None)

    def _keep(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        self._observed += 1
        self._history.keep(snapshot)
        self._waiting.add(snapshot)
        waits = not self._by_hand and self.model.training and self.attached
        if not waits or self._waiting.over:
            self._deliver()

    def _deliver(self) -> None:
        held = self._waiting.take()
        with Attempts() as attempt:
            for snapshot in held:
                attempt(self._delivery, snapshot)
            for snapshot in held:  # after all sinks: a program may end with the finding
                attempt(self._history.alerts, snapshot)

    def _open(self) -> list[Snapshot]:
        """What has been recorded so far of the steps that have not ended."""
        with self.lock, undisturbed():
            each = [(book.step, book.records()) for book in self._books.open(self._step)]
        found = [Snapshot(self._step if self._by_hand else step, records) for step, records in each if records]
        found = found if self._carried is None else [self._carried, *found]
        return [reduce(Snapshot.merged, found)] if found and self._by_hand else found

    def _pending(self) -> Snapshot | None:
        """The latest of these."""
        return next(reversed(self._open()), None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes in this block are observed in any mode, and are no part of a step: `last` has them until it ends."""
        names = ("_books", "_step", "_by_hand", "_carried", "training_only")
        before = {name: getattr(self, name) for name in names}
        self._books, self._step, self._by_hand, self._carried, self.training_only = Books(), 0, True, None, False
        try:
            yield
        finally:
            for name, x in before.items():
                setattr(self, name, x)

    # ---- called by hooks and wrappers while the model runs: see `module_stack.Recorder`

    def _ledger(self, frame: Frame) -> Ledger:
        with self.lock:
            return self._books.own().ledger(frame.watched, self)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Measuring: counts as cost, and records nothing for autograd."""
        started = time.perf_counter()
        with torch.no_grad():
            yield
        self._spent += time.perf_counter() - started

    def record_call(self, frame: Frame, path: str, call: Call) -> None:
        with self._timed():
            self._ledger(frame).add(frame, path, call)

    def measure_call(self, frame: Frame, path: str, call: Call, product: Product) -> Callable[..., None]:
        with self._timed():
            return self._ledger(frame).measured(frame, path, call, product)

    def record_pass(self, frame: Frame, path: str, computed: Pass) -> None:
        with self._timed():
            self._ledger(frame).add_pass(frame, path, computed)

    def record_observed(self, frame: Frame, observed: Observed) -> None:
        with self._timed():
            self._ledger(frame).add_observed(frame, observed)

    def follow_gradients(self, frame: Frame, inputs: GradientInputs) -> None:
        if self.gradients and self.observing and torch.is_grad_enabled() and not module_stack.runs_empty():
            with undisturbed():
                self._ledger(frame).follow_gradients(frame, inputs)

    # ---- results

    @property
    def last(self) -> Snapshot:
        """The latest step that was measured, unfinished or not."""
        return self._pending() or (self._history.snapshots[-1] if self._history.snapshots else Snapshot(0, ()))

    def coverage(self) -> tuple[Seen, ...]:
        """Which modules attend, and whether and how each was observed."""
        return coverage.report(self.model, self.watched_modules, compiled=self.compiled, probe=self.probe)

    @property
    def cost(self) -> dict[str, float]:
        """The cost of watching: seconds, steps, and the share of the time it was attached."""
        elapsed = self._elapsed + (0.0 if self._since is None else time.perf_counter() - self._since)
        observed = self._observed + len(self._open())
        return {
            "seconds": self._spent,
            "observed_steps": float(observed),
            "milliseconds_per_observed_step": 1e3 * self._spent / max(observed, 1),
            "steps": float(self._step + 1),
            "share": self._spent / elapsed if elapsed else 0.0,
        }

    def run(self) -> Run:
        """Everything recorded so far, as plain data."""
        name = type(self.model).__name__
        snapshots = (*self._history.snapshots, *self._open())
        notes = (*self._history.notes, *amend.unsaved(self.model))
        logged = {key: tuple(curve) for key, curve in self._history.logged.items()}
        seen = any(watched.calls for watched in self.watched_modules)
        ran = any(watched.runs for watched in self.watched_modules)
        by_hand_words = self.probe.in_words(seen=seen, ran=ran, compiled=self.compiled)
        known: dict[str, Any] = {"expected_scale": self.expected_scale, "logged": logged, "by_hand": by_hand_words}
        return Run(name, snapshots, self.coverage(), notes, self.cost, **known)

    def metrics(self, *, heads: bool = True) -> dict[str, float]:
        """The latest step as a flat dictionary, for any logger."""
        from levelhead.runs.metrics import metrics

        return metrics(self.last, heads=heads)

    def save(self, path: Any) -> None:
        """Writes everything recorded so far to a file that `diagnose` and the page read."""
        self.run().save(path)

    def gather(self, group: Any = None, *, heads: str = "same", parts: str | None = None) -> Snapshot:
        """The latest step of all ranks together; every rank calls it, and gets the same result.

        Args:
            group: of torch.distributed; None is all ranks.
            heads: "same" where every rank has all heads (data and context parallelism): their rows add up. "split"
                where each has some (tensor parallelism): they are put side by side, in rank order. For both at once
                `watching.ranks.gathered` takes a snapshot.
            parts: "pipeline" where each rank has layers of its own: their names get the rank in front. "replicas" where
                each has the whole model. None: found out, and refused where equal names have different parameters.
        """
        known: dict[str, Any] = {"fingerprint": ranks.fingerprint(self.model), "structure": ranks.structure(self.model)}
        return ranks.gathered(self.last, group, heads=heads, parts=parts, **known)

    def __str__(self) -> str:
        from levelhead.show.text import text

        return text(self.run())

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<Watch of {type(self.model).__name__}: {len(self.last.records)} modules seen, {state}>"

    def _repr_html_(self) -> str:
        from levelhead.show import notebook

        return notebook.run(self.run())


watch = Watch
