"""The sweeps over Hugging Face architectures as one file, and its table.

python bench/huggingface_zoo.py ZOO
python bench/huggingface_watch.py WATCH ZOO
python bench/huggingface_use.py USE ZOO
python bench/huggingface_preflight.py PREFLIGHT ZOO
python bench/huggingface_results.py bench/results/huggingface.json ZOO WATCH USE PREFLIGHT
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from about import machine, versions

PARTS = ("watch", "use", "preflight")


def watch_word(found: dict[str, Any]) -> str:
    """What a watch said of an architecture, in all variants that ran."""
    ran = [x for x in found.values() if isinstance(x, dict) and "error" not in x]
    if any(x["findings"] for x in ran):
        return "warned"
    return "silent" if ran and all(x["same"] for x in ran) else "not run"


def use_reasons(found: dict[str, Any]) -> dict[str, str]:
    """Whatever is not the same, by implementation and case."""
    reasons = {}
    for implementation in ("eager", "sdpa"):
        x = found.get(implementation, {})
        if "refused" in x:
            reasons[implementation] = x["refused"]
        cases = x.get("cases", {}).items()
        reasons |= {f"{implementation}, {case}": word for case, word in cases if word not in ("same", "not run")}
    return reasons


def preflight_row(found: dict[str, Any]) -> dict[str, Any]:
    """What a pre-flight said of an architecture: warnings and errors as they were printed."""
    if "error" in found:
        return {"preflight": "not run", "preflight_error": found["error"].splitlines()[0][:200]}
    return {"preflight": "warned", "warnings": found["findings"]} if found["findings"] else {"preflight": "silent"}


def main() -> None:
    file, *sources = sys.argv[1:]
    zoo, watch, use, preflight = (json.loads(Path(source).read_text()) for source in sources)
    rows = {}
    for name, x in sorted(zoo.items()):
        row: dict[str, Any] = {"ran": "error" not in x, "attends": bool(x.get("attending"))}
        row |= {"class": x["recipe"]["class"]} if row["ran"] else {"error": x["error"].splitlines()[0][:200]}
        if name in watch:
            row["watch"] = watch_word(watch[name])
        if name in use:
            row["use"] = use[name]["outcome"]
            row |= {"reasons": reasons} if (reasons := use_reasons(use[name])) and row["use"] != "match" else {}
        if name in preflight:
            row |= preflight_row(preflight[name])
        rows[name] = row
    summary: dict[str, Any] = {
        "architectures": len(rows),
        "ran": sum(row["ran"] for row in rows.values()),
        "attend": sum(row["attends"] for row in rows.values()),
    }
    for part in PARTS:
        summary[part] = dict(Counter(row[part] for row in rows.values() if part in row).most_common())
    import transformers

    about = machine(1) | {"versions": versions() | {"transformers": transformers.__version__}}
    Path(file).write_text(json.dumps({"about": about, "summary": summary, "rows": rows}, indent=1) + "\n")
    for part in PARTS:
        for word, count in summary[part].items():
            print(f"{part:9} {count:4} {word}")


if __name__ == "__main__":
    main()
