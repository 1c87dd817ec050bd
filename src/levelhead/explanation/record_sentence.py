"""One sentence, recorded for where no model is: `python -m levelhead.explanation.record_sentence FILE`.

Writes what `explain_text` says about it on minilm, the numbers of one head and where every head
looks, with what they were made with. Small enough to be kept beside the code.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from levelhead._version import __version__
from levelhead.explanation.text import TextExplanation, explain_text
from levelhead.runs.record import write_whole

__all__ = ["SENTENCE", "TOKEN", "recorded"]

SENTENCE, TOKEN, MODEL = "The dog chased the ball because it was fast.", "it", "minilm"
_DROPPED = ("q", "k", "v", "output", "queries", "keys", "logits")  # not drawn, or there twice


def recorded() -> dict[str, Any]:
    """The explanation as JSON, and how it was made."""
    explained = explain_text(SENTENCE, model=MODEL, token=TOKEN)
    found = explained.to_json()
    for name in _DROPPED:
        del found[name]
    return {"about": _about(explained), **found}


def _about(explained: TextExplanation) -> dict[str, str]:
    packages = ("torch", "transformers", "numpy")
    return {
        "model": explained.reading.about,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python -m levelhead.explanation.record_sentence FILE",
        "levelhead": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m levelhead.explanation.record_sentence FILE", file=sys.stderr)
        return 2
    content = json.dumps(recorded(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_whole(Path(arguments[0]), content + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
