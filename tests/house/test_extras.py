"""The extras: what the wheel offers, what errors name and what the README lists are the same; a part whose package is
missing says which command installs it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from levelhead import extras, models

ROOT = Path(__file__).resolve().parents[2]

# Hides packages as if they were not installed: those that are named, or all others. Then runs what it reads.
LONELY = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder

names, hidden, cases = json.loads(sys.argv[1])
seen = {*names, "levelhead", *sys.stdlib_module_names}

class Few(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        root = name.partition(".")[0]
        there = root not in names if hidden else root in seen
        return super().find_spec(name, path, target) if there else None

sys.meta_path[:] = [Few if finder is PathFinder else finder for finder in sys.meta_path]
import levelhead as lh
from levelhead.cli.main import main

def command(*words):
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        code = main([*words])
    return [code, said.getvalue(), wrong.getvalue()]

answers = []
for case in cases:
    try:
        answers.append([None, eval(case)])
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        answers.append([kinds, str(error)])
print(json.dumps(answers, default=repr))
"""

Answer = tuple[list[str] | None, Any]


def alone(cases: list[str], folder: Path, *names: str, hidden: bool = False) -> dict[str, Answer]:
    """What each expression gives where only these packages are installed, or all but these: (names of the error's
    types, text)."""
    words = [sys.executable, "-c", LONELY, json.dumps([names, hidden, cases])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(tuple, json.loads(done.stdout)), strict=True))


def offered() -> set[str]:
    """The extras in the metadata of the wheel that is installed."""
    return set(importlib.metadata.metadata("levelhead").get_all("Provides-Extra"))


def requirements(extra: str) -> set[str]:
    """Names of what an extra asks for; an extra of levelhead itself is taken apart."""
    found = set()
    for line in importlib.metadata.requires("levelhead"):
        wanted, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        name, inside = re.match(r"([\w-]+)(?:\[([\w, -]+)\])?", wanted).groups()
        if name == "levelhead":
            found |= {x for other in inside.split(",") for x in requirements(other.strip())}
        else:
            found.add(name.lower().replace("-", "_"))
    return found


@cache
def named() -> set[str]:
    """The extras in every command that the sources build or write."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "command(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("command", "extras.command"):
                found |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return found


# ---- what there is ----------------------------------------------------------


def test_the_wheel_offers_what_people_type() -> None:
    assert {"all", "bench", "jax", "models", "onnx", "page", "sinks", "torch", "triton", "watch"} == offered()


def test_errors_and_pages_name_extras_that_exist() -> None:
    assert {"torch", "watch", "models", "page", "jax", "onnx", "sinks", "bench"} <= named() <= offered()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.json")):
        for names in re.findall(r"levelhead\[([\w, ]+)\]", path.read_text()):
            assert set(names.replace(" ", "").split(",")) <= offered(), path


def test_commands_are_written_in_one_place() -> None:
    written = [path for path in (ROOT / "src").rglob("*.py") if 'pip install "levelhead[' in path.read_text()]
    assert [path.name for path in written] == ["extras.py"]


def test_the_readme_lists_every_extra() -> None:
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `\[(\w+)\]` \|", readme, re.M)) == offered()


def test_all_is_everything_but_triton() -> None:
    """PyTorch for GPUs brings triton; a second one in its place would break it."""
    others = set().union(*(requirements(extra) for extra in offered() - {"all", "triton"}))
    assert requirements("all") == others


def test_no_extra_brings_weights() -> None:
    weights = {known.package.replace("-", "_") for known in models.available().values()}
    assert weights and not weights & set().union(*map(requirements, offered()))


def test_the_package_itself_needs_numpy_alone() -> None:
    plain = [line for line in importlib.metadata.requires("levelhead") if "extra ==" not in line]
    assert [re.match(r"\w+", line)[0] for line in plain] == ["numpy"]


# ---- what is missing is named -----------------------------------------------

RUN = "run/part-000000.parquet"

# With NumPy alone: an expression, and the extras that its error names.
NEEDS = {
    "lh.watch": ["watch"],
    "lh.preflight": ["watch"],
    "lh.remedies": ["watch"],
    "lh.testing.assert_level(None, None)": ["watch"],
    "lh.torch": ["torch"],
    "__import__('levelhead.torch.huggingface')": ["torch"],
    "lh.distributed": ["torch"],
    "lh.jax": ["jax"],
    "lh.onnx": ["onnx"],
    "lh.models.open('model')": ["models"],
    "lh.models.open('model.gguf')": ["models"],
    "lh.sinks.Parquet('never')": ["sinks"],
    f"lh.sinks.read({RUN!r})": ["sinks"],
    "lh.sinks.TensorBoard('never')": ["sinks", "torch"],
    "lh.sinks.WandB()": ["sinks"],
    "lh.sinks.wandb_alert()": ["sinks"],
    "lh.sinks.hf_callback()": ["models"],
}
COMMANDS = {
    "page --no-open": ["page"],
    "page --export page.html": ["page"],
    "doctor minilm": ["models"],
    "doctor model --preflight": ["models"],
    "explain one --model smollm2": ["models"],
    f"diagnose {RUN}": ["sinks"],
    "cluster-bench": ["torch"],
}
RUNS = ("info", "tour", "cards --list", "docs wrong-scale", "explain one", "lab list", "bench --list", "--version")


def line(words: str) -> str:
    return f"command(*{words.split()!r})"


@pytest.fixture(scope="module")
def with_numpy_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"architectures": ["Any"]}')
    header = b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    (folder / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "run").mkdir()
    (folder / RUN).write_bytes(b"PAR1")
    named = [f"lh.explain_text('one', model={name!r})" for name in models.available()]
    cases = [*NEEDS, *named, *map(line, [*COMMANDS, *RUNS]), "lh.sinks.lightning_callback()"]
    before = sorted(folder.rglob("*"))
    answers = alone(cases, folder, "numpy")
    assert sorted(folder.rglob("*")) == before
    return answers


@pytest.mark.parametrize("expression", NEEDS)
def test_a_missing_package_is_named_with_the_exact_command(
    expression: str, with_numpy_alone: dict[str, Answer]
) -> None:
    kinds, message = with_numpy_alone[expression]
    assert kinds[0] == "MissingPackageError" and {"LevelheadError", "ImportError"} <= {*kinds}, message
    assert f"Run: {extras.command(*NEEDS[expression])}" in message


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_without_its_package_names_the_exact_command(words: str, with_numpy_alone: dict[str, Answer]) -> None:
    _, (code, said, wrong) = with_numpy_alone[line(words)]
    assert code in (1, 2) and not said
    assert f"Run: {extras.command(*COMMANDS[words])}" in " ".join(wrong.split())


@pytest.mark.parametrize("words", RUNS)
def test_a_command_that_needs_numpy_alone_runs(words: str, with_numpy_alone: dict[str, Answer]) -> None:
    kinds, answer = with_numpy_alone[line(words)]
    if words == "--version":
        assert (kinds[0], answer) == ("SystemExit", "0")
    else:
        assert answer[0] == 0 and len(answer[1]) > 100, answer


def test_what_is_not_installed_is_off_with_its_command(with_numpy_alone: dict[str, Answer]) -> None:
    _, (_, said, _) = with_numpy_alone[line("info")]
    for name in ("torch", "onnx", "jax", "triton"):
        assert re.search(rf"off +{name} \(.*\): not installed; " + re.escape(extras.command(name)), said)
    assert "not installed; pip install ml_dtypes" in said


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_a_model_without_weights_and_packages_names_both_commands(
    name: str, with_numpy_alone: dict[str, Answer]
) -> None:
    _, message = with_numpy_alone[f"lh.explain_text('one', model={name!r})"]
    weights = models.available()[name].command
    assert f"Run: {extras.command('models')}, then {weights}." in message


def test_lightning_is_named_by_its_own_command(with_numpy_alone: dict[str, Answer]) -> None:
    kinds, message = with_numpy_alone["lh.sinks.lightning_callback()"]
    assert kinds[0] == "MissingPackageError" and "Run: pip install lightning." in message


def test_with_torch_alone_what_else_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "earlier.safetensors").write_bytes(b"")
    layer = "__import__('torch').nn.MultiheadAttention(4, 2)"
    batch = "[__import__('torch').ones(1, 3, 4)] * 3"
    cases = {
        f"lh.torch.huggingface.use({layer})": ["models"],
        f"lh.preflight({layer}, {batch}, against='earlier.safetensors')": ["watch"],
        "lh.models.open('smollm2')": ["models"],
        "lh.sinks.TensorBoard('never')": ["sinks", "torch"],
    }
    others = requirements("models") | requirements("sinks")
    gone = alone([*cases], tmp_path, *(others - {"torch"}), hidden=True)
    for expression, (kinds, message) in gone.items():
        assert kinds and kinds[0] == "MissingPackageError", (expression, message)
        assert f"Run: {extras.command(*cases[expression])}" in message, expression
