"""All entries, and those of them whose library is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from levelhead.watching.functions import flash_attn, torch_functions, transformer_engine, xformers
from levelhead.watching.functions.known import Known

KNOWN: tuple[Known, ...] = (*torch_functions.KNOWN, *flash_attn.KNOWN, *xformers.KNOWN, *transformer_engine.KNOWN)


def loaded() -> Iterator[tuple[Callable[..., Any], Known]]:
    """The functions and classes of the table that exist in this process, each once."""
    found: set[int] = set()
    for known in KNOWN:
        for place in known.places:
            module, name = place.split(":")
            function = getattr(sys.modules.get(module), "__dict__", {}).get(name)
            if callable(function) and id(function) not in found:
                found.add(id(function))
                yield function, known
