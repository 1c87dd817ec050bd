"""Hugging Face: a `TrainerCallback` that watches the model while `Trainer` trains it.

The trainer calls no hook when training ends in an exception; use the callback in a `with`, or call its `detach`, if the
model is used afterwards. Reporters are callbacks as well and precede those that a user passes, so `install` puts this
one in front of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from levelhead.runs.needs import need
from levelhead.sinks.trainer import Training, Watcher, watch


def hf_callback(
    *,
    after_step: Callable[[Any], object] | None = None,
    prefix: str = "attention",
    heads: bool = False,
    make: Callable[..., Watcher] = watch,
    **watch_options: Any,
) -> Any:
    """A callback for `transformers.Trainer`; further options go to `watch`.

    Snapshots have the trainer's numbers of steps: every=50 looks at steps 50, 100 and so on. Evaluations in between are
    not looked at, unless training_only=False.

    The metrics of the latest snapshot join the training logs, and so reach `trainer.state.log_history`; with
    `callback.install(trainer)` instead of `callbacks=[callback]` they reach the trainer's reporters too.
    `after_step(watch)` runs right after the optimiser.

        callback = hf_callback(every=50, sinks=[JSONL("run.jsonl")])
        with callback:
            callback.install(trainer)
            trainer.train()
    """
    base = need("hf_callback", "transformers", install="pip install transformers").TrainerCallback
    kind = type("WatchCallback", (HuggingFaceHooks, base), {})
    return kind(make, after_step, prefix, heads, watch_options)


class HuggingFaceHooks(Training):
    """What the trainer calls; joined with transformers' own base class by `hf_callback`."""

    _stepped = False

    def install(self, trainer: Any) -> None:
        """Adds itself to the trainer, in front of its reporters."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.begin(model, state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        # Before gradients are cleared, where a remedy may still want them.
        if self.after_step is not None:
            self.step()
            self._stepped = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self._stepped:
            self.step()
        self._stepped = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs is None or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        new = self.fresh()
        logs.update(new)
        state.log_history[-1].update(new)  # it was copied from the logs before this call

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.detach()
