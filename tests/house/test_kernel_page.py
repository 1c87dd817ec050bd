"""The pages of docs/ agree with the committed measurements, and their tools still fit the core.

That the ladder's steps are right is checked where it is built: core/test/CMakeLists.txt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import script

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
LADDERS = sorted(RESULTS.glob("ladder-*.json"))
ACCOUNTS = sorted(RESULTS.glob("account-*.json"))


@pytest.mark.parametrize(
    "page",
    ["README.md", *(f"docs/{name}.md" for name in ("gpu", "kernel", "health", "lab", "remedies", "scaling", "watch"))],
)
def test_every_table_is_its_file(root: Path, page: str) -> None:
    tables = script(root, "tables")
    assert root / page in tables.DOCUMENTS
    text = (root / page).read_text()
    assert tables.filled(text) == text, "python bench/tables.py"
    assert text.count("<!-- end -->") == len(tables.PLACE.findall(text)) > 0


def test_tables_are_drawn_from_any_benchmark(root: Path) -> None:
    """Cells with a measurement, cells without a limit, cells that could not be measured."""
    tables = script(root, "tables")
    error = dict(rms=1.0, max=1.0)
    said = dict(word="met", ratio_by_best=2.0, ratio_by_median=1.5, fastest_by_best="PyTorch", accuracy=None)
    results = [
        dict(name="levelhead", best=0.001, error=error, memory=2**20),
        dict(name="PyTorch", best=0.002, error=error, memory="needs /proc"),
    ]
    cell = dict(name="additive-512", family="additive", observed=False, bar=dict(ratio=1.1))
    absent = cell | dict(name="model-x", verdict=dict(word="missing", why="why"), results=[])
    result = dict(cells=[cell | dict(verdict=said, results=results), absent])
    assert tables.families(result)[2] == (
        "| additive | 1 | 2.00 to 2.00× | 2.00× | - | 2.00 to 2.00× | 2.00× | 1 | 0 | 0 |"
    )
    assert tables.cells(result)[2:] == [
        "| additive-512 | 1.00 ms | 2.00 ms PyTorch | 2.00× | 1.50× | ≥ 1.1× | met | - |"
    ]
    assert tables.memory(result)[2:] == ["| additive-512 | 1.0 | needs /proc |"]


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_every_tile_size_can_be_tried(root: Path, isa: str) -> None:
    tiles = script(root, "tiles")
    variants = tiles.variants(isa)
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        for file, old, new in variant.changes:
            text = (root / "core" / file).read_text()
            changed = tiles.changed(variant, file, text)
            assert new in changed
            assert changed != text or old == new


def test_a_constant_that_is_gone_is_an_error(root: Path) -> None:
    tiles = script(root, "tiles")
    stale = tiles.Variant("key block", "7", (("plan.h", "no_such_constant = 1", "x"),))
    with pytest.raises(SystemExit, match="no_such_constant"):
        tiles.changed(stale, "plan.h", (root / "core" / "plan.h").read_text())


@pytest.mark.parametrize("path", LADDERS, ids=[path.stem for path in LADDERS])
def test_a_ladder_is_whole(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "cpu", "compiler", "isa", "threads", "tokens"} <= result.keys()
    for race in result["races"]:
        names = [step["step"] for step in race["steps"]]
        assert names == [*"012345678", "7a", "7b", "7c"]
        for step in race["steps"]:
            assert step["best"] == pytest.approx(min(step["samples"]), rel=1e-3)
            assert step["error"] is None if step["step"][1:] else step["error"] < 5e-6


@pytest.mark.parametrize("path", ACCOUNTS, ids=[path.stem for path in ACCOUNTS])
def test_an_account_leaves_nothing_out(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text())
    assert {"date", "cpu", "compiler", "isa", "threads", "tokens", "rounds"} <= result.keys()
    for account in result["accounts"]:
        for parts, whole in (("parts", "whole"), ("statistics", "added")):
            assert sum(part["cycles"] for part in account[parts]) == pytest.approx(account[whole], rel=1e-4)
        vectors = 2 * result["tokens"] ** 2 * account["d"] / {"avx512": 16, "avx2": 8}[result["isa"]]
        fmas = sum(part["cycles"] for part in account["parts"] if part["name"].endswith(": FMAs"))
        assert fmas == pytest.approx(vectors / account["fmas_per_cycle"], rel=1e-2)
