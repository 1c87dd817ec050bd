"""The pure wheel: what is in it, that its core keeps the contracts of the compiled one, and that neither wheel ever
stands in for the other.

The wheel is built from this tree and unpacked; what runs in it runs in a process of its own, before the installed one.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import levelhead as lh

INSTALLED = Path(lh.__file__).parent

# Where the contracts of the core are tested, and what of that is about the compiled one: instruction sets, memory,
# speed, and sizes that would take this one minutes.
CONTRACTS = (
    "additive errors forward gradients invariance observation query_lengths query_lengths_core reference robustness "
    "statistics stats weights"
)
COMPILED = (
    "every_built_path or work_follows_the_queries or stays_one_array_in_half or more_than_16_bits or more_than_31_bits "
    "or where_threads_are_worth_it or as_exact_as_pytorch"
)

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pure")
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(place))
    build = [sys.executable, "-m", "pip", "wheel", *options, str(root)]
    done = subprocess.run(build, env=os.environ | {"LEVELHEAD_PURE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = place.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def pure(wheel: Path) -> Run:
    """Runs Python in a process that finds the unpacked wheel first; gives what it prints."""
    place = wheel.with_suffix("")
    zipfile.ZipFile(wheel).extractall(place)
    return lambda *arguments: python(place, *arguments)


def python(first: Path, *arguments: str, fails: bool = False) -> str:
    quiet = {"PYTHONPATH": str(first), "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=os.environ | quiet, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


# ---- what is in it


def test_it_fits_everywhere_and_carries_its_core(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"levelhead-{lh.__version__}-py3-none-any.whl"
    assert {"levelhead/_core.py", "levelhead/_core.pyi", "levelhead/numpy_core/forward.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".cpp", ".h", "_jax_ffi.pyi"))]
    described = zipfile.ZipFile(wheel).read(f"levelhead-{lh.__version__}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: true" in described


def test_a_compiled_wheel_does_not_carry_it() -> None:
    assert not [*INSTALLED.glob("_core.py"), *INSTALLED.glob("numpy_core")]
    assert "numpy" not in lh.info().built


def test_info_says_that_no_kernel_is_there_and_why(pure: Run) -> None:
    info = json.loads(
        pure("-c", "import json, levelhead as lh; i = lh.info(); print(json.dumps([i.isa, i.built, i.off]))")
    )
    assert info[:2] == ["numpy", ["numpy"]]
    assert any(line.startswith("compiled kernel: this is the pure wheel") for line in info[2])
    assert not any("did not find jaxlib" in line for line in info[2])


SIGNATURES = """
import inspect, json
from levelhead import _core
found = {name: [[x.name, x.kind.name, None if x.default is x.empty else repr(x.default)] for x in
                inspect.signature(function).parameters.values()]
         for name, function in vars(_core).items() if not name.startswith("_")}
print(json.dumps(found))
"""


def declared(function: ast.FunctionDef) -> list[list[str | None]]:
    """Name, kind and default of each parameter, as `inspect` has them."""
    a = function.args
    defaults = [None] * (len(a.args) - len(a.defaults)) + [ast.unparse(x) for x in a.defaults]
    found: list[list[str | None]] = [[x.arg, "POSITIONAL_OR_KEYWORD", y] for x, y in zip(a.args, defaults, strict=True)]
    for x, y in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append([x.arg, "KEYWORD_ONLY", None if y is None else ast.unparse(y)])
    return found + ([[a.kwarg.arg, "VAR_KEYWORD", None]] if a.kwarg else [])


def test_its_core_has_the_interface_of_the_compiled_one(root: Path, pure: Run) -> None:
    stub = ast.parse((root / "src" / "levelhead" / "_core.pyi").read_text())
    functions = {node.name: declared(node) for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert json.loads(pure("-c", SIGNATURES)) == functions


# ---- what it does


def test_it_keeps_the_contracts_of_the_core(root: Path, pure: Run) -> None:
    chosen = [str(root / "tests" / "front" / f"test_{name}.py") for name in CONTRACTS.split()]
    told = pure("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen, "-k", f"not ({COMPILED})")
    assert "isa         numpy" in told
    counted = re.search(r"(\d+) passed", told)
    assert counted is not None and int(counted[1]) > 2000


def test_a_missing_numpy_is_named(wheel: Path, pure: Run) -> None:  # which unpacks it
    place = str(wheel.with_suffix(""))
    told = python(Path(place), "-S", "-c", "import levelhead", fails=True).splitlines()[-1]
    assert told.endswith("levelhead: expected the package numpy, got none. Run: pip install numpy.")


def test_it_refuses_an_instruction_set_that_it_does_not_have(pure: Run) -> None:
    code = "import os; os.environ['LEVELHEAD_ISA'] = 'avx2'; import levelhead as lh; lh.info()"
    told = pure("-c", f"try:\n  exec({code!r})\nexcept ValueError as error: print(error)")
    assert told == "LEVELHEAD_ISA: expected one of numpy (what the pure wheel has), got 'avx2'\n"


WATCHED = """
import torch, levelhead as lh
from torch.nn import functional as F

class Attention(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.qkv, self.scale = torch.nn.Linear(64, 192), scale

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=True).transpose(1, 2).flatten(2)

torch.manual_seed(0)
model = torch.nn.Sequential(Attention(None), Attention(1.0), Attention(0.01))
watch = lh.watch(model, every=1)
for step in range(3):
    model(torch.randn(2, 40, 64) * 3).square().mean().backward()
    watch.step()
found = lh.diagnose(watch)
print(found, found.verdict, sep="\\n")
"""


def test_findings_and_verdict_are_those_of_the_compiled_core(pure: Run) -> None:
    found = pure("-c", WATCHED)
    assert "wrong scale\n  1: effective scale 1" in found and "flat heads" in found
    assert found == python(INSTALLED.parent, "-c", WATCHED)


ALONE = """
import atexit, threading, numpy as np, levelhead as lh

q = np.random.default_rng(0).standard_normal((2, 4, 500, 8), np.float32)

def run():
    return lh.attention(q, q, q, threads=2).tobytes()

known = run()  # by threads
atexit.register(lambda: print("at exit", run() == known))
name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
start = getattr(threading, name)
for there in 0, 1:
    wanted = []

    def limited(*given, **named):
        wanted.append(None)
        if len(wanted) > there:
            raise RuntimeError("can't start new thread")
        return start(*given, **named)

    setattr(threading, name, limited)
    print(there, run() == known, len(wanted) > there)
setattr(threading, name, start)
"""


def test_it_computes_where_no_thread_can_be_started(pure: Run) -> None:
    """A limit of the system, a platform without threads, an interpreter that ends: then the call's own computes."""
    assert pure("-c", ALONE).splitlines() == ["0 True True", "1 True True", "at exit True"]


@pytest.mark.parametrize(("limit", "threads"), [("1", 1), ("0", 7), ("+1", 7), ("8", 7), ("9" * 5000, 7)])
def test_the_variable_limits_its_threads(limit: str, threads: int, pure: Run) -> None:
    code = "import os; os.sched_getaffinity = lambda _: range(7); os.environ['LEVELHEAD_NUM_THREADS'] = {!r}"
    assert pure("-c", code.format(limit) + "; import levelhead as lh; print(lh.info().threads)") == f"{threads}\n"


def test_it_knows_itself_without_its_sources(pure: Run) -> None:
    """As in a program that was frozen: modules are .pyc files."""
    code = "from levelhead import _core; from levelhead.info import is_pure; _core.__file__ += 'c'; print(is_pure())"
    assert pure("-c", code) == "True\n"


# ---- a compiled wheel without its library


@pytest.mark.parametrize("library", [None, b"no library"], ids=["missing", "damaged"])
def test_a_library_that_cannot_be_loaded_is_an_error_that_says_so(library: bytes | None, tmp_path: Path) -> None:
    shutil.copytree(INSTALLED, tmp_path / "levelhead", ignore=shutil.ignore_patterns("_core.*.so", "__pycache__"))
    if library is not None:
        (compiled,) = INSTALLED.glob("_core.*.so")
        (tmp_path / "levelhead" / compiled.name).write_bytes(library)
    told = python(tmp_path, "-c", "import levelhead", fails=True).splitlines()[-1]
    assert told.startswith(
        "levelhead.errors.LevelheadImportError: levelhead: expected the compiled library of its wheel, got"
    )
    assert f"{sys.executable} -m pip install --force-reinstall" in told and "LEVELHEAD_PURE=1 pip install" in told
    code = "try:\n  import levelhead\nexcept ImportError as error:\n  assert error.__cause__ is not None"
    python(tmp_path, "-c", code)
