"""The walls: which module may import which, how long a file may be, what no file may say."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "levelhead"

# From the ground up. A module may import from the layers below its own, and leaves from each other;
# a package (bench) is one layer, and its modules may import each other.
LEAVES = (
    "_version errors checks state stats words reference "
    "call.__init__ call.dropout call.scaling call.scoring call.segments call.shapes"
)
LAYERS = [
    set(layer.split())
    for layer in (
        LEAVES,
        "_core",
        "call.arrays info",
        "observation",
        "attention",
        "additive gradients multihead weights",
        "onnx torch",
        "distributed",
        "gguf_cache",
        "models",
        "runs",
        "diagnosis",
        "show",
        "watching",
        "remedies",
        "sinks",
        "explanation",
        "testing",
        "bench",
        "cluster",
        "lab",
        "old_paths",
        "__init__",
        "page",
        "cli",
        "__main__",
    )
]

MODELS = {"distributed", "remedies", "watching"}  # rooms that meet models and tensors: torch is loaded with them
LEARNING = {"lab.training", "lab.transformer", "cluster.measure"}  # loaded when something is trained or measured
# The modules that serve the page need a web server; its assets and its export do without one.
_SERVING = {"starlette", "uvicorn", "h11"}
SERVING = {"page.server": _SERVING, "page.protocol": _SERVING}
LINES = 450
WRITTEN = {".py", ".pyi", ".h", ".cpp", ".txt", ".toml", ".md", ".cff", ".js", ".css", ".html"}  # what people write
NAMED = {"Makefile", "run", ".gitignore"}


@cache
def modules() -> dict[str, Path]:
    """Modules by name; those of a package inside as "package.module"."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    found = {".".join(inside.parts): path for path, inside in paths.items()}
    return found | {"_core": PACKAGE / "_core.pyi"}


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names a file imports; with lazy=False only those that importing the file loads."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazy else _executed(tree.body):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute in this project"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.dump(node):
            yield from _executed(node.body)


@cache
def own_imports(name: str) -> set[str]:
    """Modules of the package that a module of the package imports."""
    found = set()
    for dotted in imports(modules()[name]):
        parts = dotted.split(".")
        if parts[0] == "levelhead":
            prefixes = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            longest = [name for prefix in prefixes for name in (prefix, f"{prefix}.__init__")]
            found.add(next((part for part in longest if part in modules()), "__init__"))
    return found


def layer(name: str) -> int:
    """The height of a module: its own entry, else that of its room."""
    for known in (name, name.split(".")[0]):
        for height, names in enumerate(LAYERS):
            if known in names:
                return height
    raise AssertionError(f"{name}.py has no layer: give it one in {Path(__file__).name}")


def texts() -> Iterator[Path]:
    """Every file of the project that people write."""
    folders = ("core", "src", "tests", "docs", "examples", "bench", ".ci")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in (*inside, *ROOT.iterdir()):
        if path.is_file() and (path.suffix in WRITTEN or path.name in NAMED):
            yield path


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    for other in own_imports(name):
        below = layer(other) < layer(name)
        inside = "." in name and name.split(".")[0] == other.split(".")[0]
        leaves = layer(name) == layer(other) == 0
        assert below or inside or leaves, f"{name} must not import {other}"


def test_no_two_modules_need_each_other() -> None:
    left = {name: own_imports(name) - {name} for name in modules()}
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"an import cycle among {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("name", sorted(modules()))
def test_numpy_is_the_only_package_that_importing_needs(name: str) -> None:
    roots = {dotted.split(".")[0] for dotted in imports(modules()[name], lazy=False)}
    # A front end needs the package it is named after, what meets models needs torch, what serves the page a web
    # server; test_package.py shows what importing levelhead itself loads.
    room = name.split(".")[0]
    meets = room in MODELS or name in LEARNING
    needed = {"numpy", room} | ({"torch"} if meets else set())
    needed |= SERVING.get(name, set())
    assert roots - sys.stdlib_module_names - {"levelhead"} <= needed


@pytest.mark.parametrize("name", LEAVES.split())
def test_leaves_never_reach_for_anything_but_numpy(name: str) -> None:
    roots = {dotted.split(".")[0] for dotted in imports(modules()[name])}
    assert roots - sys.stdlib_module_names - {"levelhead"} <= {"numpy"}


def test_the_core_knows_no_python_and_no_framework() -> None:
    foreign = re.compile(r"#\s*include\s*[<\"](Python\.h|nanobind|pybind11|torch|ATen|numpy|omp\.h)")
    files = [path for path in (ROOT / "core").rglob("*") if path.suffix in (".h", ".cpp")]
    assert files
    assert [path.name for path in files if foreign.search(path.read_text())] == []


def test_few_files_bind() -> None:
    files = [*ROOT.glob("src/**/*.cpp"), *ROOT.glob("src/**/*.h")]
    binding = {"_core.cpp", "_door.cpp", "_run.cpp", "_arrays.h", "_binding.h", "_dlpack.h"}
    assert {path.name for path in files} == binding


def test_no_file_is_too_long() -> None:
    tests = (ROOT / "tests", ROOT / "core" / "test")
    long = {
        str(path.relative_to(ROOT)): lines
        for path in texts()
        if not any(folder in path.parents for folder in tests)
        if (lines := len(path.read_text().splitlines())) > LINES
    }
    assert long == {}


@pytest.mark.parametrize(
    "pattern",
    [
        # Written apart, so that this file does not find itself.
        pytest.param(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", id="unfinished"),
        pytest.param(r"(?<![\w.])/(home|root|Users|work|tmp)" + r"/\w", id="paths of a machine"),
        pytest.param(r"py" + r"pi\.org|pythonhosted" + r"\.org", id="hosts of a registry"),
    ],
)
def test_no_file_says(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []
