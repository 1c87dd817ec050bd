"""The notebooks of examples/notebooks: they run, and print the numbers that are committed with them.

Each runs in a kernel of its own. Notebook 4 trains less here (LEVELHEAD_NOTEBOOK_QUICK); its committed outputs come
from the full run, and cells that show it are not compared.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("ipykernel", "matplotlib", "nbclient", "nbformat") if not find_spec(name)]
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in PATHS]
needs_kernel = pytest.mark.needs("running the notebooks", " and ".join(MISSING))


def plain(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in plain(path)["cells"] for output in cell.get("outputs", ())]


def test_there_is_one_for_each_part() -> None:
    assert [name[0] for name in NAMES] == list("123456")


@needs_kernel
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_it_runs_and_prints_what_is_committed(path: Path) -> None:
    import notebooks

    committed, now = notebooks.read(path), notebooks.executed(path, quick=True)
    assert any(notebooks.printed(committed))
    for before, after in zip(notebooks.printed(committed), notebooks.printed(now), strict=True):
        assert notebooks.same_text(before, after), f"committed:\n{before}\nnow:\n{after}"
    # Numbers of a table differ a little more: places of a largest logit change where two are almost equal.
    for before, after in zip(notebooks.drawn(committed), notebooks.drawn(now), strict=True):
        assert notebooks.same_text(before, after, numbers=False), f"committed:\n{before}\nnow:\n{after}"


@needs_kernel
def test_numbers_are_compared_as_printed() -> None:
    from notebooks import same_text

    assert same_text("loss 0.601, 12 heads", "loss 0.602, 12 heads")
    assert not same_text("loss 0.601", "loss 0.631") and not same_text("12 heads", "14 heads")
    assert not same_text("loss 0.601", "less 0.601") and not same_text("1 2", "1")


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_outputs_are_small_clean_and_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert not re.search(r"/tmp/|/home/|/root/|/usr/|file:|[A-Z]:\\\\|site-packages|127\.0\.0\.1|localhost", text)
    notebook = plain(path)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook["cells"], 1):
        assert cell["id"] == f"cell-{i:02}" and set(cell["metadata"]) <= {"tags"}
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    kinds = {(output["output_type"], output.get("name", "stdout")) for output in outputs(path)}
    assert kinds and kinds <= {("stream", "stdout"), ("execute_result", "stdout"), ("display_data", "stdout")}
    assert not any("<script" in json.dumps(output) for output in outputs(path))


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_it_asks_before_it_shows(path: Path) -> None:
    cells = plain(path)["cells"]
    words = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    assert len(re.findall(r"\*\*What do you expect", words)) >= 2
    linked = re.findall(r"\]\(([^)]+)\)", words)
    assert all((FOLDER / link).exists() for link in linked), linked


def test_the_full_training_shows_what_its_words_say() -> None:
    """Divided by √d_k every seed answers sequences it never saw; undivided none does, and known ones come first."""
    (path,) = (path for path in PATHS if path.stem.startswith("4"))
    printed = "".join("".join(output.get("text", "")) for output in outputs(path))
    ends = {
        name.strip(): (known, new) for name, known, new in re.findall(r"(.*)   known (.*)   never seen (.*)", printed)
    }
    known, new = ([float(x) for x in part.split()] for part in ends["undivided"])
    assert len(new) == 3 and all(a > b for a, b in zip(known, new, strict=True)) and max(new) < 0.9
    assert min(float(x) for x in ends["divided by √d_k"][1].split()) > 0.97
    norms = dict(re.findall(r" *(undivided|divided by √d_k) +0\.\d\d +(0\.\d{4}) ", printed))
    assert float(norms["undivided"]) > 2 * float(norms["divided by √d_k"])


def words_of(number: str) -> str:
    (path,) = (path for path in PATHS if path.stem.startswith(number))
    return "".join("".join(cell["source"]) for cell in plain(path)["cells"])


def test_words_say_what_the_code_does() -> None:
    """A gradient per row, shared by the two scales; the root in W; a softmax that can also add to a gradient."""
    third, fourth, fifth = map(words_of, "345")
    assert "g = rng.standard_normal((500, 32))\nfor name, scale" in third and "a g for every row" in third
    assert "16 times larger" in fourth and "can also add" in fourth
    assert "hidden)) / np.sqrt(d)" in fifth and "in the entries of W" in fifth and "no divisor" not in fifth
