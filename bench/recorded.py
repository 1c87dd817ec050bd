"""Makes the runs that the page shows from the committed results: `python bench/recorded.py`.

Not installed. It measures nothing: it takes from `bench/results/` what figures need and writes it to
`src/levelhead/lab/recorded/`, naming the files it read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from levelhead.lab.figures.speed import reduced

RESULTS = Path(__file__).parent / "results"
RECORDED = Path(__file__).parent.parent / "src" / "levelhead" / "lab" / "recorded"
SPEED, ADDITIVE = "bench-zen4-avx512bf16.json", "training-zen4-avx512bf16.json"


def speed() -> dict[str, Any]:
    """Time and error of every cell; and of one head, additive attention beside dot products."""
    whole, more = (json.loads((RESULTS / name).read_text()) for name in (SPEED, ADDITIVE))
    found = reduced(whole)
    found["about"] = {"from": f"bench/results/{SPEED}, {ADDITIVE}"} | found["about"]
    additive = [cell for cell in reduced(more)["cells"] if cell["family"] == "additive"]
    alike = [cell for cell in found["cells"] if cell["family"] in ("dense", "short")]
    lengths = {cell["tokens"] for cell in additive}
    found["dot_product"] = _one_head([cell for cell in alike if cell["tokens"] in lengths])
    forward = [cell for cell in additive if "gradients" not in cell["name"]]
    found["additive"] = _one_head(forward)
    return found


def _one_head(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens → seconds of one head in levelhead."""
    return {str(cell["tokens"]): cell["seconds"]["levelhead"] / cell["heads"] for cell in cells}


if __name__ == "__main__":
    text = json.dumps(speed(), ensure_ascii=False, separators=(",", ":"))
    (RECORDED / "speed.json").write_text(text + "\n")
