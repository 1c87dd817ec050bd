"""Makes runs that the page shows, in `src/levelhead/lab/recorded/`: `python bench/recorded.py [speed heads claims]`.

Not installed. Speed is taken from the committed results, heads are examined anew (MiniLM, reading the doctor's sample).
Claims are measured at their full sizes; those about training are judged on `training.json`, and those that measure time
are taken from the committed results, which had the machine to themselves. Each file, and each claim, says in "about"
where it comes from.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import levelhead as lh
from levelhead.info import cpu_name
from levelhead.lab.claim import Task
from levelhead.lab.claims import c07_vanishing, c07a_honest_half, c12_training, c16_generalise
from levelhead.lab.figures.speed import reduced
from levelhead.lab.result import outcome_json, result_of
from levelhead.runs import record
from levelhead.watching.doctor import doctor
from training_record import unpacked

RESULTS = Path(__file__).parent / "results"
RECORDED = Path(__file__).parent.parent / "src" / "levelhead" / "lab" / "recorded"
CLAIMS = "lab-full.jsonl"
JUDGED = {"C7": c07_vanishing, "C7a": c07a_honest_half, "C12": c12_training, "C16": c16_generalise}
SEED = 0
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


def claims() -> dict[str, Any]:
    """The result of every claim, its curves included."""
    committed = {one["id"]: one for one in map(json.loads, (RESULTS / CLAIMS).read_text().splitlines())}
    training = json.loads((RECORDED / "training.json").read_text())
    runs = {run.plan: run for run in unpacked(training)}
    here = {
        "command": "python bench/recorded.py claims",
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "isa": lh.info().isa,
        "levelhead": lh.__version__,
    }
    trained = {"from": "lab/recorded/training.json"} | {name: training["about"][name] for name in ("date", "cpu")}
    results = []
    for claim in lh.lab.claims():
        print(claim.id, file=sys.stderr)
        if claim.alone:
            result, about = {**committed[claim.id], "details": {}}, {"from": f"bench/results/{CLAIMS}"}
        elif claim.id in JUDGED:
            module = JUDGED[claim.id]
            params = {**claim.quick, **claim.full}
            outcome = module.judge([runs[plan] for plan in module.wanted(params, SEED)])
            result, about = vars(result_of(Task(claim, params, SEED), outcome_json(outcome))), trained
        else:
            (measured,) = lh.lab.run(claim.id, seed=SEED, full=True)
            result, about = vars(measured), here
        results.append(_six_digits({"about": about, **result}))
    return {"about": here, "results": results}


def _six_digits(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _six_digits(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [_six_digits(part) for part in x]
    return float(f"{x:.6g}") if isinstance(x, float) else x


if __name__ == "__main__":
    known = {"speed": speed, "heads": heads, "claims": claims}
    for name in sys.argv[1:] or known:
        text = json.dumps(known[name](), ensure_ascii=False, separators=(",", ":"))
        (RECORDED / f"{name}.json").write_text(text + "\n")
