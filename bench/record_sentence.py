"""Records one sentence for machines without a model: `python bench/record_sentence.py FILE`.

Writes what `explain_text` computes on minilm: the numbers of one head; of every head its level and the weights of one
token, with and without the division; and the versions that made them. The file is small enough to be kept beside the
code. Not installed.
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
from levelhead.cache import write_whole
from levelhead.explanation.head_steps import rounded
from levelhead.explanation.text import TextExplanation, explain_text

SENTENCE, TOKEN, MODEL = "The dog chased the ball because it was fast.", "it", "minilm"
_COMMAND = "python bench/record_sentence.py FILE"
_DROPPED = ("q", "k", "v", "output", "queries", "keys", "logits")  # not drawn, or there twice


def recorded() -> dict[str, Any]:
    """The explanation as JSON, and how it was made."""
    explained = explain_text(SENTENCE, model=MODEL, token=TOKEN)
    about = {
        "model": explained.reading.about,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": _COMMAND,
        "levelhead": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "numpy")},
    }
    kept = {name: value for name, value in explained.to_json().items() if name not in _DROPPED}
    return {"about": about} | kept | _every_head(explained)


def _every_head(explained: TextExplanation) -> dict[str, Any]:
    """By layer and head: the token's row of weights, scaled and unscaled, and the level of the unscaled head."""
    scaled = explained.reading.calls
    unscaled = [call.unscaled() for call in scaled]
    rows, bare = ([rounded(call.weights()[:, explained.token]) for call in calls] for calls in (scaled, unscaled))
    levels = [[gauge.to_json() for gauge in call.gauges()] for call in unscaled]
    return {"rows": rows, "unscaled_rows": bare, "unscaled_gauges": levels}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"usage: {_COMMAND}", file=sys.stderr)
        return 2
    content = json.dumps(recorded(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_whole(Path(arguments[0]), content + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
