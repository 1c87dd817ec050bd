"""Hugging Face: a `TrainerCallback` that watches the model while `Trainer` trains it.

Reporters are callbacks as well and precede those that a user passes. So this one puts a helper in front of all when
training begins: the helper adds the metrics to the logs before the reporters read them, and the callback takes them out
again before the trainer prints. The trainer calls no hook when training ends in an exception; use the callback in a
`with`, or call its `detach`, if the model is used afterwards.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from levelhead import checks
from levelhead.extras import command, need
from levelhead.sinks.trainer import Training, Watcher, watch

_ASKED = {"save": "should_save", "stop": "should_training_stop"}  # what a finding may ask of the trainer


class hf_callback:  # noqa: N801 - used like a function; `Trainer` also takes the class
    """A callback for `transformers.Trainer`; further options go to `watch`.

    Snapshots have the trainer's numbers of steps: every=50 looks at steps 50, 100 and so on. Evaluations in between are
    not looked at, unless training_only=False.

    The metrics of the latest snapshot join the training logs, and so reach every reporter and
    `trainer.state.log_history`; with quiet=False also what the trainer prints. The loss is recorded beside the
    statistics. `qk_clip=100.0` clips heads above that bound right after the optimiser (`remedies.QKClip`), and
    `after_step(watch)` runs. `on_finding`, "warn" unless another is given, may also be "save", which asks the trainer
    for a checkpoint, or "stop", on all ranks if one has the finding; the number of findings so far joins the logs.

        Trainer(..., callbacks=[hf_callback(every=50, sinks=[JSONL("run.jsonl")])])
    """

    def __new__(
        cls,
        *,
        after_step: Callable[[Any], object] | None = None,
        prefix: str = "attention",
        heads: bool = False,
        quiet: bool = True,
        make: Callable[..., Watcher] = watch,
        qk_clip: float | None = None,
        **watch_options: Any,
    ) -> Any:
        checks.flag("quiet", quiet)
        base = need("hf_callback", "transformers", install=command("models")).TrainerCallback
        kind = type("WatchCallback", (HuggingFaceHooks, base), {})
        callback = kind(make, after_step, prefix, heads, watch_options, qk_clip)
        callback.quiet, callback.front = quiet, type("WatchMetrics", (MetricsInFront, base), {})(callback)
        return callback


class MetricsInFront:
    """Stands before the reporters, and adds the metrics to the logs that they read."""

    def __init__(self, callback: HuggingFaceHooks) -> None:
        super().__init__()
        self.callback = callback

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.callback.add_metrics(state, logs)


class HuggingFaceHooks(Training):
    """What the trainer calls; joined with transformers' own base class by `hf_callback`."""

    quiet = True
    front: Any = None
    _stepped = False
    _logged_step = -1
    _added: tuple[str, ...] = ()  # names of metrics in the logs that are on their way

    def install(self, trainer: Any) -> None:
        """Adds itself to the trainer, as `callbacks=[...]` does, and its helper in front of the reporters."""
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            callbacks.append(self)
        self._put_in_front(callbacks)

    def _put_in_front(self, callbacks: list[Any]) -> None:
        if self.front not in callbacks:
            callbacks.insert(0, self.front)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        # The trainer passes neither itself nor its list of callbacks; the caller has the list.
        callbacks = getattr(sys._getframe(1).f_locals.get("self"), "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            begun = self.front in callbacks and self._attached
            self._put_in_front(callbacks)
            if begun:  # called again: the list grew by one in front of this place
                return
        elif self.front is not None:
            warnings.warn("hf_callback: metrics reach log_history only; call callback.install(trainer)", stacklevel=2)
        self.begin(model, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # Before gradients are cleared, where a remedy may still want them.
        if self.after_step is not None or self.qk_clip is not None:
            self.step()
            self._stepped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._stepped:
            self.step()
        self._stepped = False
        for word in self.asked():
            setattr(control, _ASKED[word], True)

    def add_metrics(self, state: Any, logs: Any) -> None:
        """Adds what is new to the logs of a training step, and to the trainer's history."""
        if logs is None or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        if self._logged_step != state.global_step:
            self._logged_step = state.global_step
            self.keep(state.global_step, loss=logs["loss"])
        new = self.fresh()
        if not new:
            return
        logs.update(new)
        state.log_history[-1].update(new)  # it was copied from the logs before this call
        self._added = tuple(new)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        self.add_metrics(state, logs)  # where the helper is not in place, these reach the history alone
        if self.quiet and logs is not None:
            for name in self._added:
                logs.pop(name, None)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.detach()
