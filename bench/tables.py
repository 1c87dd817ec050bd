"""Puts the tables of bench/results/*.json into docs/kernel.md, where it says so.

    python bench/tables.py

A table stands between `<!-- FILE: TABLE -->` and `<!-- end -->`, FILE being the result's name
without ".json". A test holds the document to it: no number there is older than its file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "kernel.md"
PLACE = re.compile(r"<!-- ([\w.-]+): ([\w. ]+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


def table(file: str, name: str) -> str:
    result = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text())
    return "\n".join(result["tables"][name]) + "\n"


def filled(text: str) -> str:
    """The text with every table as its file has it."""
    return PLACE.sub(
        lambda found: f"<!-- {found[1]}: {found[2]} -->\n{table(found[1], found[2])}<!-- end -->\n",
        text,
    )


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
