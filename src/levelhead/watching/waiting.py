"""Passes that may still be parts of a step, and what shows that they are not.

Without `step()` every pass of the model is a step, but the first call of `step()` makes one step of the passes before
it, such as micro-batches. Until then sinks and findings wait in training. Once an optimiser has made a step and another
pass begins without such a call, the passes before it are steps for good.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from levelhead.runs.record import Snapshot
from levelhead.watching.undisturbed import undisturbed

_PASSES_OF_A_STEP = 64  # more micro-batches than are accumulated before a first step


class Waiting:
    """The snapshots that sinks and findings have not had."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._snapshots: list[Snapshot] = []
        self._versions: dict[int, int] = {}  # of the parameters when the latest pass began
        self._stepped = False  # whether an optimiser of theirs was called since then
        self._updated = False  # whether one made a step between the latest two passes
        self._hook: Any = None
        self.final = 0  # the first step after those that no `step()` joins any more

    def attach(self) -> None:
        """Learns of the steps of PyTorch's optimisers from here on."""
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def detach(self) -> None:
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepped:
            self._stepped = any(id(x) in self._versions for group in optimizer.param_groups for x in group["params"])

    def begin_pass(self, step: int) -> None:
        """The pass of this step begins. Version counters show compiled optimisers and updates by hand, but not fused
        optimisers; no number is read."""
        if not self._model.training:
            return
        before, self._versions = self._versions, _versions(self._model)
        changed = any(self._versions.get(key, version) > version for key, version in before.items())
        self._updated, self._stepped = changed or self._stepped, False
        if self._updated:
            self.final = step

    def add(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        if len(self._snapshots) > _PASSES_OF_A_STEP:
            self.final = max(self.final, snapshot.step + 1)

    @property
    def over(self) -> bool:
        """Whether these are steps for good, or too many to be parts of one."""
        return self._updated or len(self._snapshots) > _PASSES_OF_A_STEP

    def take(self) -> list[Snapshot]:
        """All of them, which wait no longer."""
        taken, self._snapshots = self._snapshots, []
        return taken


def _versions(model: nn.Module) -> dict[int, int]:
    """How often each trainable parameter was changed in place."""
    with undisturbed():
        return {id(x): x._version for x in model.parameters() if x.requires_grad and not x.is_inference()}
