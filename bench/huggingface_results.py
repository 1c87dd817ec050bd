"""The sweeps over Hugging Face architectures as one file, and its table.

python bench/huggingface_zoo.py ZOO
python bench/huggingface_watch.py WATCH ZOO
python bench/huggingface_use.py USE ZOO
python bench/huggingface_results.py bench/results/huggingface.json ZOO WATCH USE
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from about import machine, versions


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


def main() -> None:
    file, *sources = sys.argv[1:]
    zoo, watch, use = (json.loads(Path(source).read_text()) for source in sources)
    rows = {}
    for name, x in sorted(zoo.items()):
        row: dict[str, Any] = {"ran": "error" not in x, "attends": bool(x.get("attending"))}
        row |= {"class": x["recipe"]["class"]} if row["ran"] else {"error": x["error"].splitlines()[0][:200]}
        if name in watch:
            row["watch"] = watch_word(watch[name])
        if name in use:
            row["use"] = use[name]["outcome"]
            row |= {"reasons": reasons} if (reasons := use_reasons(use[name])) and row["use"] != "match" else {}
        rows[name] = row
    summary = {
        "architectures": len(rows),
        "ran": sum(row["ran"] for row in rows.values()),
        "attend": sum(row["attends"] for row in rows.values()),
        "watch": dict(Counter(row["watch"] for row in rows.values() if "watch" in row).most_common()),
        "use": dict(Counter(row["use"] for row in rows.values() if "use" in row).most_common()),
    }
    import transformers

    about = machine(1) | {"versions": versions() | {"transformers": transformers.__version__}}
    Path(file).write_text(json.dumps({"about": about, "summary": summary, "rows": rows}, indent=1) + "\n")
    for part in ("watch", "use"):
        for word, count in summary[part].items():
            print(f"{part:6} {count:4} {word}")


if __name__ == "__main__":
    main()
