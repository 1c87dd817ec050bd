"""Running a model again and again, with every module's inputs and outputs at hand, and leaving it as it was.

`held_still` holds the model: evaluation mode, no gradients; every pass has the same random numbers and buffers.
A `Tape` is what the modules of one pass took and gave; `moved` compares a later pass with it, place by place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from levelhead.errors import LevelheadError, bad_value
from levelhead.preflight_checks.attributes import Kept
from levelhead.preflight_checks.inputs import Batch

# What counts as moved, as a share of the tensor's largest number: sums in another order may differ by so much.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-6, torch.float16: 8e-3, torch.bfloat16: 3e-2}

Places: TypeAlias = Callable[[Tensor], Tensor | None]  # the numbers that must not move; None: cannot be told


def tensors(x: Any, depth: int = 4) -> list[Tensor]:
    """All tensors with real numbers in an argument or a result, in order."""
    if isinstance(x, Tensor):
        plain = x.is_floating_point() and x.layout is torch.strided and not x.is_nested
        return [x.detach()] if plain else []
    if depth == 0:
        return []
    if isinstance(x, Mapping):
        x = list(x.values())
    return [t for part in x for t in tensors(part, depth - 1)] if isinstance(x, tuple | list) else []


@dataclass(frozen=True)
class Entry:
    """One call of a module."""

    module: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Tape:
    """The calls of one pass, in the order in which they ended."""

    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)  # by module and number of its call

    def add(self, module: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        number = sum(key[0] == module for key in self.entries) if (module, 0) in self.entries else 0
        copies = ([x.clone() for x in xs] for xs in (inputs, outputs))  # later code may overwrite them
        self.entries[module, number] = Entry(module, *copies)

    @property
    def outputs(self) -> list[Tensor]:
        """Of the whole model."""
        return self.entries["", 0].outputs


def distance(before: Tensor, after: Tensor, largest: float) -> float:
    """The largest change as a share of `largest`; 0: within rounding."""
    a, b = before.double(), after.double()
    same_nan = torch.equal(a.isnan(), b.isnan())
    a, b = (x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in (a, b))
    relative = float((a - b).abs().max()) / max(largest, 1e-30)
    if not same_nan:
        return max(relative, 1.0)
    return relative if relative > tolerance(before.dtype) else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; NaN equals NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def tolerance(dtype: torch.dtype) -> float:
    """What counts as moved, as a share of the largest number."""
    return _TOLERANCE.get(dtype, 3e-6)


@dataclass(frozen=True)
class Moved:
    """What moved that must not."""

    size: float  # the largest change, as a share; 0: nothing
    module: str | None  # the first whose inputs stood still there
    compared: int  # modules whose output could be read


def moved(before: Tape, after: Tape, places: Places) -> Moved:
    """Compares the places of two passes that must not move. The model's own output decides where it can be read, else
    the last module whose output can: inside, a shape may look like tokens and be none."""
    first: str | None = None
    sizes: dict[str, float] = {}  # of modules that can be read, in the order in which they ended
    for key, old in before.entries.items():
        new = after.entries.get(key)
        size, known = (0.0, 0) if new is None else _size(old.outputs, new.outputs, places)
        if new is None or not known:
            continue
        sizes[key[0]] = size
        if size and first is None and _size(old.inputs, new.inputs, places)[0] == 0.0:
            first = key[0]
    last = sizes.get("", next(reversed(sizes.values()), 0.0))
    return Moved(last, first if last else None, len(sizes))


def _size(old: list[Tensor], new: list[Tensor], places: Places) -> tuple[float, int]:
    largest, known = 0.0, 0
    for a, b in zip(old, new, strict=False):
        x, y = (places(a), places(b)) if a.shape == b.shape else (None, None)
        if x is not None and y is not None and x.numel():
            known += 1
            if torch.equal(x, y):
                continue
            whole = a.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
            largest = max(largest, distance(x, y, float(whole)))
    return largest, known


# ---- the model, held still


@contextmanager
def held_still(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no compiled code, no fused path of torch's modules; all put back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002  theirs
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            torch.backends.mha.set_fastpath_enabled(fast)
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])  # noqa: NPY002
            if cuda:
                torch.cuda.set_rng_state_all(cuda)


def run(batch: Batch, *, seed: int = 0, call: Callable[[], Any] | None = None) -> Any:
    """One pass, or what `call` does; buffers and what modules keep in attributes are put back afterwards."""
    kept = Kept(batch.model)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  the generator that a model may use
    try:
        return batch.run() if call is None else call()
    except LevelheadError:
        raise
    except Exception as error:
        given = f"one on which {type(batch.model).__name__} failed: {type(error).__name__}: {str(error)[:200]}"
        advice = "Give what the model is called with: a mapping, a tuple or one tensor"
        raise bad_value("batch", "one that the model takes", given, advice) from error
    finally:
        kept.put_back()


def taped(batch: Batch, *, seed: int = 0) -> Tape:
    """One pass with what every module took and gave."""
    tape = Tape()
    with _recording(batch.model, lambda: tape):
        run(batch, seed=seed)
    return tape


Part: TypeAlias = Callable[[Any], Batch]  # what a pass is called with, given the result of the one before


def in_parts(parts: Sequence[Part], begins: Callable[[], Any]) -> Callable[[], Any]:
    """Passes one after the other, what modules keep is left to the next; `begins` is called before each."""

    def call() -> Any:
        result = None
        for part in parts:
            begins()
            result = part(result).run()
        return result

    return call


def taped_parts(batch: Batch, parts: Sequence[Part]) -> list[Tape]:
    """A tape of each."""
    tapes: list[Tape] = []
    with _recording(batch.model, lambda: tapes[-1]):
        run(batch, call=in_parts(parts, lambda: tapes.append(Tape())))
    return tapes


@contextmanager
def _recording(model: nn.Module, tape: Callable[[], Tape]) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tape().add(name, tensors([args, kwargs]), tensors(output))

        return after

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
