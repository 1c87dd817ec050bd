"""Which languages the course speaks: a catalogue each, English first."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("catalogues")
PATTERN = "en"


def languages() -> tuple[str, ...]:
    """Their names, without reading their words."""
    return (PATTERN, *sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != PATTERN))
