"""The architecture: which module may import which, how long a file may be, which strings no file may contain."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import levelhead as lh
from levelhead import old_paths

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "levelhead"

# From the lowest up. A module may import from the layers below its own, and leaves from each other;
# a package (bench) is one layer, and its modules may import each other.
LEAVES = (
    "_version cache documentation errors extras checks front_ends json_numbers state stats terminal words reference "
    "call.__init__ call.dropout call.halves call.options call.scaling call.segments call.shapes "
    "device.__init__ device.choice device.tiles"
)
LAYERS = [
    set(layer.split())
    for layer in (
        LEAVES,
        "numpy_core",
        "_core _jax_ffi",
        "call.arrays call.prepare info",
        "chosen_weights observation",
        "attention",
        "additive gradients multihead weights",
        "onnx torch",
        "device",
        "distributed",
        "gguf_cache",
        "models",
        "runs",
        "diagnosis",
        "show",
        "watching",
        "jax",
        "remedies",
        "sinks",
        "explanation",
        "preflight_checks",
        "testing",
        "bench",
        "cluster",
        "lab",
        "course",
        "old_paths",
        "__init__",
        "page",
        "cli",
        "__main__",
    )
]

MODELS = {
    "device",
    "distributed",
    "preflight_checks",
    "remedies",
    "watching",
}  # folders that work on models and tensors: they import torch
LEARNING = {"lab.training", "lab.transformer", "cluster.measure"}  # imported only for training or measuring
# The modules that serve the page need a web server; its assets and its export do without one.
SERVING = {f"page.{name}": {"starlette"} for name in ("bodies", "connections", "guard", "responses", "routes")}
SERVING |= {"page.server": {"uvicorn"}}
SERVING |= {f"device.{name}": {"triton"} for name in ("hiding_kernel", "kernel", "launch", "tally_kernel")}  # on launch
SAMPLES = ("course", "samples")  # text that the page shows, and readers run; nothing imports it
LINES = 450
# What people write.
WRITTEN = {".py", ".pyi", ".h", ".cpp", ".cmake", ".txt", ".toml", ".yml", ".md", ".cff", ".js", ".css", ".html"}
NAMED = {"Makefile", "run", ".gitignore"}


@cache
def modules() -> dict[str, Path]:
    """Modules by name; those of a package inside as "package.module"."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    paths = {path: inside for path, inside in paths.items() if inside.parts[:2] != SAMPLES}
    found = {".".join(inside.parts): path for path, inside in paths.items()}
    return found | {name: PACKAGE / f"{name}.pyi" for name in ("_core", "_jax_ffi")}


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Dotted names a file imports, those given as strings too; with lazy=False only those that importing it loads."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if lazy else _executed(tree.body):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute in this project"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif lazy and isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removeprefix("levelhead.")  # for import_module, or in a table of such names
            if name != node.value and {name, f"{name}.__init__"} & modules().keys():
                yield node.value


def computed_imports(path: Path) -> Iterator[str]:
    """Calls that import a module whose name is computed, which no reader of the text can follow."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Constant):
            continue
        if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield ast.unparse(node.args[0])


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
    """The layer of a module: its own entry, else that of its folder."""
    for known in (name, name.split(".")[0]):
        for height, names in enumerate(LAYERS):
            if known in names:
                return height
    raise AssertionError(f"{name}.py has no layer: give it one in {Path(__file__).name}")


def texts() -> Iterator[Path]:
    """Every file of the project that people write."""
    folders = ("core", "src", "tests", "docs", "examples", "bench", "release", ".ci", ".github")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in (*inside, *ROOT.iterdir()):
        if path.is_file() and (path.suffix in WRITTEN or path.name in NAMED):
            yield path


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    for other in own_imports(name) - {name}:
        below = layer(other) < layer(name)
        inside = "." in name and name.split(".")[0] == other.split(".")[0]
        leaves = layer(name) == layer(other) == 0
        assert below or inside or leaves, f"{name} must not import {other}"


# Modules that import by a computed name, and why that points downwards.
COMPUTED = {
    "__init__": "names of `_ON_DEMAND` and `_FUNCTIONS`, held to the layers below",
    "old_paths": "the table of old paths; a name of the layers below, see the test of its table",
    "torch.__init__": "its own submodule",
    "extras": "packages of others",
    "lab.registry": "the table of claims, inside the lab",
    "lab.pool": "a claim that the registry named",
    "course.chapters.__init__": "its own chapters, in their order",
}


@pytest.mark.parametrize("name", sorted(modules()))
def test_computed_imports_are_known(name: str) -> None:
    assert not list(computed_imports(modules()[name])) or name in COMPUTED


def test_names_imported_on_demand_lie_below() -> None:
    targets = [f"{name}.__init__" if f"{name}.__init__" in modules() else name for name in lh._ON_DEMAND]
    targets = [name for name in targets if name != "health"]  # a namespace of old paths
    targets += [name if name in modules() else f"{name}.__init__" for name in lh._FUNCTIONS.values()]
    assert [name for name in targets if layer(name) >= layer("__init__")] == []
    new = [path.removeprefix("levelhead.") for path in old_paths.NEW_PATHS.values()]
    new = [name if name in modules() else f"{name}.__init__" for name in new]
    assert [name for name in new if layer(name) >= layer("old_paths")] == []


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
    # A front end needs the package it is named after, code for models needs torch, the page's server a web
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
    binding = {"_core.cpp", "_fast_call.cpp", "_run.cpp", "_arrays.h", "_binding.h", "_dlpack.h"}
    binding |= {"_jax_ffi.cpp", "_problem.h", "_shared.h"}
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
        # Split strings, so that this file does not match.
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
