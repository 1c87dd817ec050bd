"""Lightning: a `Callback` that watches the module while `Trainer.fit` trains it.

Works with the package `lightning` and with `pytorch_lightning`, whichever the program uses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from levelhead.extras import need
from levelhead.sinks.trainer import Training, Watcher, watch

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_callback(
    *,
    after_step: Callable[[Any], object] | None = None,
    prefix: str = "attention",
    heads: bool = False,
    make: Callable[..., Watcher] = watch,
    qk_clip: float | None = None,
    **watch_options: Any,
) -> Any:
    """A callback for Lightning's `Trainer`; further options go to `watch`.

    Snapshots have the trainer's numbers of steps: every=50 looks at steps 50, 100 and so on. Evaluations in between are
    not looked at, unless training_only=False.

    The metrics of each new snapshot go through the module's `log_dict`, so loggers get them, and callbacks may monitor
    them. The loss of observed steps is recorded beside the statistics. After each step of the optimiser `qk_clip=100.0`
    clips heads above that bound (`remedies.QKClip`), and `after_step(watch)` runs. `on_finding`, "warn" unless another
    is given, may also be "stop", which ends the training, on all ranks if one has the finding.

        trainer = Trainer(callbacks=[lightning_callback(every=50)])
    """
    # The two packages have a base class each; the one the program has imported is the right one.
    wanted = sorted(PACKAGES, key=lambda package: package not in sys.modules)
    package = need("lightning_callback", *wanted, install="pip install lightning")
    kind = type("WatchCallback", (LightningHooks, package.Callback), {})
    return kind(make, after_step, prefix, heads, watch_options, qk_clip)


class LightningHooks(Training):
    """What the trainer calls; joined with Lightning's base class by `lightning_callback`."""

    words = ("stop",)
    _done = 0  # steps of the optimiser that were counted

    # Not in `setup`: a checkpoint is read, and the module tried on validation data, after it.
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module, trainer.global_step)
        self._done = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._done:  # gradients still accumulate
            return
        self._done = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and getattr(self.watch, "observing", False):  # reading it waits for the device
            self.keep(self._done, loss=loss)
        self.step()
        if self.asked():
            trainer.should_stop = True
        if new := self.fresh():
            pl_module.log_dict(new, on_step=True, on_epoch=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.detach()
