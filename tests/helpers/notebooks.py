"""The notebooks of examples/notebooks: run, cleaned, and compared. `python tests/helpers/notebooks.py` writes their
outputs again, from full runs; names select some.

A cleaned notebook has no time, no path and no count in it: running it twice changes nothing but what its own cells time
(those are tagged `varies`; those whose output a quick run does not have are tagged `full`).
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
QUICK = "LEVELHEAD_NOTEBOOK_QUICK"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_MARKUP = re.compile(r"<style>.*?</style>|<[^>]*>", re.DOTALL)
_COST = re.compile(r'<p class="soft">watching took [^<]*</p>')


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def executed(path: Path, *, quick: bool) -> Any:
    """The notebook with the outputs of a run in a process of its own; an error in a cell is raised."""
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell["outputs"] = []
    with tempfile.TemporaryDirectory() as place:  # for IPython's history and its settings, which are nobody's here
        environment = os.environ | {QUICK: "1" if quick else "0", "IPYTHONDIR": place}
        environment.pop("LEVELHEAD_SITE", None)  # findings would link there
        options = {
            "timeout": 600,
            "kernel_name": "python3",
            "coalesce_streams": True,
            "resources": {"metadata": {"path": str(path.parent)}},
        }
        without_ports = Config(KernelManager={"transport": "ipc", "connection_file": f"{place}/kernel.json"})
        NotebookClient(notebook, config=without_ports, **options).execute(env=environment)
    return cleaned(notebook)


def cleaned(notebook: Any) -> Any:
    """Without what differs from run to run."""
    run = 0
    for i, cell in enumerate(notebook.cells, 1):
        cell["id"] = f"cell-{i:02}"
        tags = cell.metadata.get("tags")
        cell["metadata"] = {"tags": tags} if tags else {}
        if cell.cell_type != "code":
            continue
        run += 1
        cell["execution_count"] = run
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output["execution_count"] = run
            if "data" in output:
                output["metadata"] = {}
                if "image/png" in output.data:
                    output.data.pop("text/plain", None)
                if "text/html" in output.data:
                    output.data["text/html"] = _COST.sub("", output.data["text/html"])
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def printed(notebook: Any) -> Iterator[str]:
    """What each code cell printed; of one that is tagged, nothing."""
    for cell in _compared(notebook):
        yield "".join(output.text for output in cell.outputs if output.output_type == "stream")


def drawn(notebook: Any) -> Iterator[str]:
    """The words of what each code cell drew as HTML, without markup."""
    for cell in _compared(notebook):
        shown = (output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", ()))
        yield " ".join(_MARKUP.sub(" ", text) for text in shown)


def _compared(notebook: Any) -> Iterator[Any]:
    yield from (cell for cell in notebook.cells if cell.cell_type == "code" and not cell.metadata.get("tags"))


def same_text(a: str, b: str, *, numbers: bool = True) -> bool:
    """The same words and, with `numbers`, the same numbers: other processors round sums in another way."""
    if _NUMBER.sub("#", a).split() != _NUMBER.sub("#", b).split():
        return False
    pairs = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return not numbers or all(math.isclose(float(x), float(y), rel_tol=0.02, abs_tol=_last(x)) for x, y in pairs)


def _last(number: str) -> float:
    """A bit more than one in the last digit."""
    mantissa, _, exponent = number.partition("e")
    return 1.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


if __name__ == "__main__":
    for path in paths():
        if not sys.argv[1:] or any(word in path.name for word in sys.argv[1:]):
            print(path.name, flush=True)
            nbformat.write(executed(path, quick=False), path)
