"""Makes runs that the page shows, in `src/levelhead/lab/recorded/`: `python bench/recorded.py`.

Not installed. Speed is taken from the committed results, heads are examined anew (MiniLM, reading the doctor's sample).
Each file says in "about" where it comes from.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import levelhead as lh
from levelhead.lab.figures.speed import reduced
from levelhead.runs import record
from levelhead.watching.doctor import doctor

RESULTS = Path(__file__).parent / "results"
RECORDED = Path(__file__).parent.parent / "src" / "levelhead" / "lab" / "recorded"
SPEED, ADDITIVE = "bench-zen4-avx512bf16.json", "training-zen4-avx512bf16.json"


def speed() -> dict[str, Any]:
    """Time and error of every cell; and of one head, additive attention beside dot products."""
    whole, more = (json.loads((RESULTS / name).read_text()) for name in (SPEED, ADDITIVE))
    content = reduced(whole)
    content["about"] = {"from": f"bench/results/{SPEED}, {ADDITIVE}"} | content["about"]
    additive = [cell for cell in reduced(more)["cells"] if cell["family"] == "additive"]
    alike = [cell for cell in content["cells"] if cell["family"] in ("dense", "short")]
    lengths = {cell["tokens"] for cell in additive}
    content["dot_product"] = _one_head([cell for cell in alike if cell["tokens"] in lengths])
    forward = [cell for cell in additive if "gradients" not in cell["name"]]
    content["additive"] = _one_head(forward)
    return content


def _one_head(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens → seconds of one head in levelhead."""
    return {str(cell["tokens"]): cell["seconds"]["levelhead"] / cell["heads"] for cell in cells}


def heads() -> dict[str, Any]:
    """MiniLM's heads as a run file: six digits, without what other scales would have done."""
    run = record.to_json(doctor("minilm").run)
    for snapshot in run["snapshots"]:
        for one in snapshot["records"]:
            one["tally"] = [[_six_digits(x) for x in head] for head in one["tally"]]
            one["counterfactual"] = {}
    about = {
        "command": "levelhead doctor minilm",
        "date": date.today().isoformat(),
        "levelhead": lh.__version__,
        "isa": lh.info().isa,
    }
    return {"about": about} | run | {"cost": {}, "notes": run["notes"][:1]}  # without times


def _six_digits(x: Any) -> Any:
    return float(f"{x:.6g}") if isinstance(x, float) else x


if __name__ == "__main__":
    for make in (speed, heads):
        text = json.dumps(make(), ensure_ascii=False, separators=(",", ":"))
        (RECORDED / f"{make.__name__}.json").write_text(text + "\n")
