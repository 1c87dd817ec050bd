"""The zoo: a tiny, freshly initialised model with inputs for every architecture of transformers that can be shrunk.

`specimen("llama")` builds one. `python bench/huggingface_zoo.py FILE` tries all of them, in worker processes with
limits of time and memory, and writes the outcome of each to FILE; a second run goes on where the first one stopped.
"""

from __future__ import annotations

import inspect
import json
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from huggingface_exceptions import CHANGES, LEFT_OUT
from huggingface_inputs import Inputs, guesses
from huggingface_shrink import small

# Classes that generate come first: they contain the base model.
_MAPPING_NAMES = (
    "MULTIMODAL_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ SEQ_TO_SEQ_CAUSAL_LM CAUSAL_LM BASE MASKED_LM TEXT_TO_WAVEFORM "
    "OBJECT_DETECTION UNIVERSAL_SEGMENTATION PRETRAINING CTC IMAGE_CLASSIFICATION"
)
_MAPPINGS = _MAPPING_NAMES.split()
_LARGEST = 40_000_000  # parameters of a tiny model
SECONDS, BYTES, CHUNK = 20, 3 * 2**30, 40


@dataclass
class Specimen:
    """A model that has run on its inputs."""

    name: str  # of the architecture, its model_type
    model: Any
    inputs: Inputs
    recipe: dict[str, Any]  # how it was built: class, level of shrinking, guess of the inputs
    make: Callable[[str], Any]  # another one with the same parameters, by implementation

    def run(self, model: Any | None = None, **more: Any) -> Any:
        torch.manual_seed(0)  # some models draw numbers in their forward
        return (self.model if model is None else model)(**self.inputs, **more)


def architectures() -> list[str]:
    """model_type of every architecture with a model class, each class once."""
    found: dict[str, str] = {}
    for name in CONFIG_MAPPING.keys():  # noqa: SIM118  a lazy mapping, not a dict
        kinds = classes(name)
        if kinds and name not in LEFT_OUT:
            found.setdefault(kinds[0], name)
    return sorted(found.values())


def classes(name: str) -> list[str]:
    """Names of the model classes of an architecture, the one to try first at the beginning."""
    tables = {mapping: getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}) for mapping in _MAPPINGS}
    tables["BASE"] = modeling_auto.MODEL_MAPPING_NAMES
    found: list[str] = []
    for mapping, table in tables.items():
        kinds = table.get(name, ())
        if mapping == "CAUSAL_LM" and name in tables["MASKED_LM"]:  # an encoder, whose decoder is the exception
            continue
        found += [kinds] if isinstance(kinds, str) else list(kinds)
    return list(dict.fromkeys(found))


def specimen(name: str, recipe: dict[str, Any] | None = None, implementation: str | None = None) -> Specimen:
    """The architecture's tiny model: by its recipe, or by the first attempt that runs."""
    errors = []
    for kind, level in _attempts(name, recipe):
        try:
            return _built(name, kind, level, recipe, implementation)
        except Exception as error:
            errors.append(f"{kind} level {level}: {type(error).__name__}: {str(error)[:300]}")
    raise RuntimeError("\n".join(errors) or "no model class")


def _attempts(name: str, recipe: dict[str, Any] | None) -> Iterator[tuple[str, int]]:
    if recipe is not None:
        yield recipe["class"], recipe["level"]
        return
    for kind in classes(name)[:3]:
        for level in range(3):
            yield kind, level


def _built(name: str, kind: str, level: int, recipe: dict[str, Any] | None, implementation: str | None) -> Specimen:
    import transformers

    model_class = getattr(transformers, kind)

    def make(implementation: str | None) -> Any:
        config = small(CONFIG_MAPPING[name], level, **CHANGES.get(name, {}))
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=implementation)
        return model.float().eval()

    if recipe is None:
        with torch.device("meta"):
            count = sum(p.numel() for p in make(implementation).parameters())
        if count > _LARGEST:
            raise ValueError(f"{count:,} parameters")
    model = make(implementation)
    errors = []
    for number, inputs in enumerate(guesses(model)):
        if recipe is not None and number != recipe["guess"]:
            continue
        found = Specimen(name, model, inputs, {"class": kind, "level": level, "guess": number}, make)
        try:
            with torch.no_grad():
                found.run()
        except Exception as error:
            given = ", ".join(f"{key} {tuple(x.shape)}" for key, x in inputs.items())
            errors.append(f"[{given}] {type(error).__name__}: {str(error)[:200]}")
            continue
        return found
    asked = " ".join(list(inspect.signature(model.forward).parameters)[:8])
    raise ValueError(" ; ".join(errors) or f"no guess for the inputs {asked}")


# ---- all of them, under limits


class TooSlowError(Exception):
    """An architecture took longer than its time."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooSlowError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def examine(name: str) -> dict[str, Any]:
    """Whether an architecture runs, and what attends in it."""
    from levelhead.torch.huggingface.survey import attending_modules

    began = time.perf_counter()
    with limited(SECONDS):
        found = specimen(name)
    kinds = {type(x.module).__name__: _ways(x) for x in attending_modules(found.model)}
    return {
        "recipe": found.recipe,
        "inputs": {key: list(x.shape) for key, x in found.inputs.items()},
        "parameters": sum(p.numel() for p in found.model.parameters()),
        "attending": kinds,
        "seconds": round(time.perf_counter() - began, 2),
    }


def _ways(found: Any) -> str:
    return " ".join(way for way in ("interface", "sdpa", "by_hand") if getattr(found, way))


def sweep(
    script: str, file: Path, names: list[str], work: Callable[[str], dict[str, Any]], arguments: list[str]
) -> dict[str, Any]:
    """work(name) for every name, in worker processes of the script; results so far are in the file and are kept."""
    if names and file.name == "-":  # a worker: one line of JSON per architecture
        for name in names:
            print(json.dumps({name: _guarded(work, name)}), flush=True)
        return {}
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    left = [name for name in names if name not in done]
    while left:
        chunk = left[:CHUNK]
        command = [sys.executable, script, "-", *arguments, "--only", *chunk]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                done |= json.loads(line)
        missing = [name for name in chunk if name not in done]
        if missing:  # the worker died with this one
            done[missing[0]] = {"error": f"the process ended with {worker.returncode}"}
        left = [name for name in left if name not in done]
        file.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
        print(f"{len(done)} of {len(names)}", file=sys.stderr)
    return done


def sweep_zoo(script: str, examine: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """`script FILE ZOO`: examine(name, recipe) for every architecture that runs, by the zoo's file."""
    file, zoo, *rest = sys.argv[1:]
    recipes = {name: x["recipe"] for name, x in json.loads(Path(zoo).read_text()).items() if "error" not in x}
    names = rest[1:] if rest else sorted(recipes)
    prepare_worker()
    sweep(script, Path(file), names, lambda name: examine(name, recipes[name]), [zoo])


def _guarded(work: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    try:
        return work(name)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:3000]}


def prepare_worker() -> None:
    """Limits of this process."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()


def main() -> None:
    arguments = sys.argv[1:]
    names = arguments[arguments.index("--only") + 1 :] if "--only" in arguments else architectures()
    prepare_worker()
    done = sweep(__file__, Path(arguments[0]), names, examine, [])
    if done:
        ran = [x for x in done.values() if "error" not in x]
        attend = [x for x in ran if x["attending"]]
        print(f"{len(done)} architectures, {len(ran)} ran, {len(attend)} of these attend")


if __name__ == "__main__":
    main()
