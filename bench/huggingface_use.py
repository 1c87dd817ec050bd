"""Does `levelhead.torch.huggingface.use(model)` give what the model gives by itself, for every architecture of the zoo?

Compared under eager attention and under sdpa: a forward pass without padding, with padding on either side, generated
tokens, and the gradients of all parameters. Queries and keys are enlarged, so that attention weights differ.

    python bench/huggingface_use.py FILE ZOO
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from huggingface_watch import tensors
from huggingface_zoo import SECONDS, Specimen, limited, prepare_worker, specimen, sweep
from levelhead.errors import LevelheadError
from levelhead.torch.huggingface import use

Run = Callable[[], list[Tensor]]
TOLERANCE = 2e-4  # of the largest number of a tensor; float32, two layers
_QUERIES_AND_KEYS = re.compile(
    r"(^|[._])(q|k|query|key|qkv|in_proj|c_attn|wqkv|query_key_value|attn)([._]|_proj)", re.I
)
OUTCOMES = ("match", "one implementation", "partial", "refuse at use", "refuse at call", "own NaN", "differ", "not run")


def examine(name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """What became of an architecture, by implementation and by case, and in one word."""
    found: dict[str, Any] = {}
    for implementation in ("eager", "sdpa"):
        with limited(4 * SECONDS):
            try:
                built = specimen(name, recipe, implementation)
            except Exception as error:
                found[implementation] = {"unsupported": f"{type(error).__name__}: {error}"[:200]}
                continue
            found[implementation] = compared(built)
    return found | {"outcome": outcome(found)}


def outcome(found: dict[str, Any]) -> str:
    """The word for what an architecture's implementations gave."""
    words = [_word(x) for x in found.values() if "unsupported" not in x]
    if not words:
        return "not run"
    if "differ" in words:
        return "differ"
    if all(word == "match" for word in words):
        return "match"
    if "match" in words:
        return "one implementation"
    return min(words, key=OUTCOMES.index)


def _word(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "partial" if found.get("partial") else "refuse at use"
    cases = found["cases"].values()
    if "own NaN" in cases:
        return "own NaN"
    if any(not case.startswith(("same", "not run")) and not case.startswith("refused") for case in cases):
        return "differ"
    if any(case.startswith("refused") for case in cases):
        return "refuse at call"
    return "match" if "same" in cases else "not run"


def compared(built: Specimen) -> dict[str, Any]:
    """Every case, with the model's own attention and with levelhead's."""
    with torch.no_grad():
        for key, x in built.model.named_parameters():
            if x.dim() > 1 and _QUERIES_AND_KEYS.search(key):
                x.mul_(4.0)
    try:
        use(built.model).undo()
    except LevelheadError as error:
        return {"refused": str(error)[:400], "partial": _serves_a_part(built.model)}
    cases: dict[str, str] = {}
    calls = 0
    for name, run in _cases(built).items():
        try:
            own = run()
        except Exception as error:  # the model cannot: nothing to compare
            cases[name] = "not run"
            if name == "plain":
                cases[name] = f"not run: {type(error).__name__}: {error}"[:200]
            continue
        try:
            with use(built.model) as used:
                served = run()
            calls += used.calls
        except LevelheadError as error:
            cases[name] = f"refused: {error}"[:300]
            continue
        except Exception as error:
            cases[name] = f"broke: {type(error).__name__}: {error}"[:300]
            continue
        cases[name] = difference(own, served)
        if cases[name].startswith("differ: ") and cases[name].endswith("of the largest"):
            cases[name] = _or_rounding(built, run, own, served, cases[name])
    return {"cases": cases, "calls": calls}


def _or_rounding(
    built: Specimen, run: Callable[[], list[Tensor]], own: list[Tensor], served: list[Tensor], word: str
) -> str:
    """ "same" where the model itself moves further if its parameters change in their last bit."""
    kept = [p.detach().clone() for p in built.model.parameters()]
    with torch.no_grad():
        for p in built.model.parameters():
            p.mul_(1 + 2**-23)
    moved = run()
    with torch.no_grad():
        for p, x in zip(built.model.parameters(), kept, strict=True):
            p.copy_(x)
    if _distance(own, served) <= _distance(own, moved):
        return "same"
    return "same" if _same_in_float64(built, run) else word


def _same_in_float64(built: Specimen, run: Run) -> bool:
    inputs = built.inputs
    built.inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    built.model.double()
    try:
        own = run()
        with use(built.model):
            return _distance(own, run()) <= 1e-9
    except RuntimeError:  # the model makes float32 tensors of its own
        return False
    finally:
        built.inputs = inputs
        built.model.float()


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x.is_floating_point() and x.numel()]
    return max(float((x - y).abs().max()) / max(1.0, float(x.abs().max())) for x, y in pairs)


def _serves_a_part(model: Any) -> bool:
    try:
        use(model, partial=True).undo()
    except LevelheadError:
        return False
    return True


# "own NaN": the model's attention is not a number where a query sees no key, and levelhead's is 0.
def difference(own: list[Tensor], served: list[Tensor]) -> str:
    """ "same", or how far apart two lists of tensors are."""
    if [x.shape for x in own] != [x.shape for x in served]:
        return f"differ: {len(own)} and {len(served)} tensors, or other shapes"
    worst = 0.0
    for a, b in zip(own, served, strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "differ: tokens"
        elif a.numel():
            a, b = a.double(), b.double()
            if a.isnan().any() and not b.isnan().any():
                return "own NaN"
            if not torch.equal(a.isfinite(), b.isfinite()):
                return "differ: not finite"
            a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
            worst = max(worst, float((a - b).abs().max()) / max(1.0, float(a.abs().max())))
    return "same" if worst <= TOLERANCE else f"differ: {worst:.2g} of the largest"


# ---- the cases


def _cases(built: Specimen) -> dict[str, Callable[[], list[Tensor]]]:
    found: dict[str, Callable[[], list[Tensor]]] = {"plain": lambda: _forward(built, None)}
    masked = "attention_mask" in inspect.signature(built.model.forward).parameters
    if masked and "input_ids" in built.inputs:
        length = built.inputs["input_ids"].shape[1]
        right, left = (torch.ones(built.inputs["input_ids"].shape, dtype=torch.long) for _ in range(2))
        right[1, length - 4 :], left[1, :4] = 0, 0
        found["padded right"] = lambda: _forward(built, right)
        found["padded left"] = lambda: _forward(built, left)
    if built.model.can_generate():
        found["generate"] = lambda: _generated(built)
    found["gradients"] = lambda: _gradients(built)
    return found


@torch.no_grad()
def _forward(built: Specimen, mask: Tensor | None) -> list[Tensor]:
    out = tensors(built.run(**({} if mask is None else {"attention_mask": mask})))
    if mask is None:
        return out
    # Rows of padding tokens are not compared: what a query that is not used sees differs by implementation.
    kept = [x[mask.bool()] if x.shape[:2] == mask.shape else x for x in out]
    return [x for x in kept if x.dim() < 4 or x.shape[-1] != mask.shape[1]]


@torch.no_grad()
def _generated(built: Specimen) -> list[Tensor]:
    torch.manual_seed(0)
    inputs = {key: x for key, x in built.inputs.items() if not key.startswith("decoder_")}
    out = built.model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return tensors(out)


def _gradients(built: Specimen) -> list[Tensor]:
    built.model.zero_grad()
    out = [x for x in tensors(built.run()) if x.is_floating_point() and x.requires_grad]
    weighed = [(x.nan_to_num(0, 0, 0) * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in out if x.numel()]
    torch.stack([x.float() for x in weighed]).sum().backward()
    return [p.grad.clone() for p in built.model.parameters() if p.grad is not None]


def main() -> None:
    file, zoo, *rest = sys.argv[1:]
    known = json.loads(Path(zoo).read_text())
    recipes = {name: x["recipe"] for name, x in known.items() if "error" not in x and x["attending"]}
    names = rest[1:] if rest else sorted(recipes)
    prepare_worker()
    done = sweep(__file__, Path(file), names, lambda name: examine(name, recipes[name]), [zoo])
    for word, count in Counter(x.get("outcome", "error") for x in done.values()).most_common():
        print(f"{count:4} {word}")


if __name__ == "__main__":
    main()
