"""GGUF files, de-quantised once: a cache of safetensors directories, one for each file's content.

The key is a hash of the content, so that a changed file is converted again and a moved one is not. A directory appears
by a rename, whole or not at all; one that has been damaged since is converted again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from levelhead import cache
from levelhead.errors import LevelheadError, bad_value
from levelhead.extras import command, require
from levelhead.terminal import message

_FORMAT = 1  # to be raised when what is written here changes
_MAGIC = b"GGUF"
PACKAGES = ("accelerate", "gguf")  # read such files, besides those that open any model

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done

wrong = partial(bad_value, "model")  # the error about a model that cannot be opened


def safetensors_of(file: Path, *, check: Callable[[Path], None], progress: Progress | None = None) -> Path:
    """The directory with the file's weights as safetensors, made if need be.

    `check` raises a LevelheadError if a directory is not as it should be.
    """
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise wrong(f"a GGUF file at {file}", "something else", "Copy the file again")
        stream.seek(0)
        key = hashlib.blake2b(digest_size=16)
        while chunk := stream.read(1 << 22):
            key.update(chunk)
    target = cache.directory("gguf") / f"{file.stem}-{key.hexdigest()}-{_FORMAT}"
    if target.exists():
        try:
            check(target)
            return target
        except LevelheadError:
            shutil.rmtree(target)
    _make(file, target, progress or _lines(file))
    check(target)
    return target


def _make(file: Path, target: Path, progress: Progress) -> None:
    making = cache.unfinished(target.parent)
    try:
        _convert(file, making, progress)
        try:
            making.rename(target)
        except OSError:
            if not target.exists():
                raise
            # Another process was faster; its content is the same.
    except LevelheadError:
        raise
    except Exception as error:  # whatever a damaged file makes its readers stumble over
        given = f"{type(error).__name__}: {error}"
        raise wrong(f"a whole GGUF file at {file}", given, "Copy the file again") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _convert(file: Path, into: Path, progress: Progress) -> None:
    """The file as transformers reads it, written as transformers' own format."""
    require(f"{file.name}, a GGUF file", *PACKAGES, install=command("models"))
    import torch
    import transformers
    from safetensors.torch import save_model

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    progress(0, 1, "reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
    with _tensors_counted(progress):
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    progress(1, 1, "writing")
    config = model.config
    if hasattr(config, "quantization_config"):  # no longer true of what is written
        del config.quantization_config
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(into)
    tokenizer.save_pretrained(into)
    if model.can_generate():
        model.generation_config.save_pretrained(into)
    save_model(model, str(into / "model.safetensors"), metadata={"format": "pt"})


@contextmanager
def _tensors_counted(progress: Progress) -> Iterator[None]:
    """transformers counts the tensors with a bar of its own; here it counts for `progress`."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def counted(tensors: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        every = list(tensors)
        for done, tensor in enumerate(every):
            progress(done, len(every), "de-quantising")
            yield tensor

    bar, names = getattr(reader, "tqdm", None), vars(reader)
    names["tqdm"] = counted
    try:
        yield
    finally:
        if bar is None:
            del names["tqdm"]
        else:
            names["tqdm"] = bar


def _lines(file: Path) -> Progress:
    """Progress for people: a line at each step, and at every quarter of the tensors."""
    printed: set[tuple[str, int]] = set()

    def progress(done: int, total: int, step_name: str) -> None:
        quarter = (step_name, 4 * done // total)
        if quarter not in printed:
            printed.add(quarter)
            share = f" {100 * done // total} %" if total > 1 else ""
            message(f"{file.name}, once: {step_name}{share} …")

    return progress
