"""The package: what importing it does to a process, what the built files contain, and that facts written in several
places agree.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
import processes
from levelhead import _core

PACKAGE = Path(lh.__file__).parent
EXTENSION = Path(_core.__file__)


def fresh(code: str) -> str:
    """What a new interpreter prints for the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- importing --------------------------------------------------------------


def packages_loaded_by(statement: str) -> set[str]:
    """Top-level packages beyond those that NumPy brings anyway."""
    listing = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    loaded, anyway = (set(fresh(f"{line}; {listing}").split()) for line in (statement, "import numpy"))
    return loaded - anyway - sys.stdlib_module_names


def test_import_loads_numpy_and_nothing_heavier() -> None:
    assert packages_loaded_by("import levelhead") == {"levelhead"}


def test_import_leaves_out_what_is_slow_and_rarely_needed() -> None:
    slow = {"asyncio", "importlib.metadata", "inspect", "lzma", "shutil", "tempfile"}
    listing = f"import sys; print(*sys.modules.keys() & {slow})"
    by_numpy = set(fresh(f"import numpy; {listing}").split())
    assert set(fresh(f"import levelhead; {listing}").split()) == by_numpy


def test_calling_loads_nothing_more() -> None:
    call = "q = np.ones((2, 2), 'f'); lh.attention(q, q, q); str(lh.observe(q, q)); lh.info()"
    assert packages_loaded_by(f"import numpy as np, levelhead as lh; {call}") == {"levelhead"}


def test_without_jax_its_tests_are_left_out_by_name(root: Path) -> None:
    script = """
        import sys, pytest
        from levelhead import extras
        found = extras.find_spec
        extras.find_spec = lambda name: None if name in ("jax", "flax") else found(name)
        sys.exit(pytest.main(["-p", "no:cacheprovider", "--rootdir", sys.argv[1], sys.argv[1] + "/tests/jax"]) != 5)
    """
    assert "left out: levelhead.jax, for want of jax and flax" in processes.fresh(
        textwrap.dedent(script), root, CI=None
    )


def test_import_and_call_leave_denormals_alone() -> None:
    # A library linked with -ffast-math flushes denormals in every process that loads it.
    fresh(
        """
import sys
import numpy as np

def check():
    assert 5e-324 * float(len(sys.argv)) != 0.0  # not a constant: computed at run time
    assert (np.full(64, 1e-45, np.float32) * np.float32(1)).all()

check()
import levelhead as lh
check()
v = np.full((8, 1, 64), 1e-42, np.float32)
q = np.ones((8, 300, 16), np.float32)
for threads in (1, 2):  # with one visible key the output is its value, in every worker
    out = lh.attention(q, q[:, :1], v, threads=threads)
    assert (out == np.float32(1e-42)).all(), threads
    check()
"""
    )


# ---- the built files --------------------------------------------------------

DT_NEEDED, DT_STRTAB, DT_FLAGS, DF_STATIC_TLS, PT_LOAD, PT_DYNAMIC = 1, 5, 30, 0x10, 1, 2


def dynamic_section(path: Path) -> tuple[list[str], int]:
    """(needed libraries, DT_FLAGS) of a 64-bit little-endian ELF file."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    start, size, count = struct.unpack_from("<Q14xHH", data, 32)
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)]
    offset, length = next((h[2], h[5]) for h in headers if h[0] == PT_DYNAMIC)
    entries = list(struct.iter_unpack("<QQ", data[offset : offset + length]))
    address = next(value for tag, value in entries if tag == DT_STRTAB)
    strings = next(address - h[3] + h[2] for h in headers if h[0] == PT_LOAD and 0 <= address - h[3] < h[5])
    names = [strings + value for tag, value in entries if tag == DT_NEEDED]
    needed = [data[name : data.index(b"\0", name)].decode() for name in names]
    return needed, next((value for tag, value in entries if tag == DT_FLAGS), 0)


def symbols(path: Path, *options: str) -> dict[str, str]:
    """name -> kind letter, as nm prints them."""
    done = subprocess.run(["nm", "-P", *options, str(path)], capture_output=True, text=True, check=True)
    return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}


if sys.platform == "linux":  # ELF and auditwheel exist on Linux only
    from judge import SYSTEM_LIBRARIES

    def test_extension_needs_system_libraries_only() -> None:
        needed, _ = dynamic_section(EXTENSION)
        # In particular no OpenMP runtime: a second one in a process crashes or is very slow.
        assert [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)] == []

    def test_extension_asks_for_no_static_tls() -> None:
        # It is scarce: a library loaded late fails with "cannot allocate memory in static TLS".
        _, flags = dynamic_section(EXTENSION)
        assert not flags & DF_STATIC_TLS

    def test_extension_exports_its_entry_and_nothing_of_the_core() -> None:
        exported = symbols(EXTENSION, "--dynamic", "--defined-only")
        assert "PyInit__core" in exported
        assert [name for name in exported if "levelhead" in name] == []


def isa_objects(root: Path) -> list[Path]:
    found = sorted(root.glob("build/cp3*/core/CMakeFiles/levelhead_core.dir/isa_*.o"))
    assert found, "no objects under build/: build with `make test` or `pip install .`"
    return found


def test_isa_objects_share_no_code(root: Path) -> None:
    # The linker keeps one copy of a weak symbol: were it the AVX-512 one, older CPUs would crash.
    for path in isa_objects(root):
        isa = re.fullmatch(r"isa_(\w+)\.cpp\.o", path.name).group(1)
        kinds = symbols(path, "--defined-only")
        # Uppercase is global; u is unique-global; V, v, W, w are weak.
        visible = {name for name, kind in kinds.items() if kind.isupper() or kind in "uvw"}
        assert {name.removeprefix("_") for name in visible} == {f"levelhead_kernel_{isa}"}, path


def test_every_isa_was_built(root: Path) -> None:
    built = {path.name.split(".")[0].removeprefix("isa_") for path in isa_objects(root)}
    assert built == set(lh.info().built)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in vars(_core) if not name.startswith("_")}


def arguments(function: ast.stmt) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def test_the_stub_names_the_arguments_that_exist() -> None:
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            declared = arguments(node)
            (overload,) = getattr(_core, node.name).__nb_signature__
            signature: Any = ast.parse(re.sub(r"\\\d+", "0", overload[0]) + ": ...").body[0]
            bound = arguments(signature)
            if signature.args.kwarg is None:
                assert declared == bound, node.name
            else:  # it collects its keywords and refuses unknown ones
                assert declared[: len(bound)] == bound and len(declared) > len(bound), node.name


def test_the_core_refuses_keywords_that_the_stub_does_not_name() -> None:
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    forward, backward = (x for x in stub.body if isinstance(x, ast.FunctionDef) and x.name in ("forward", "backward"))
    q, scale = np.ones((1, 1, 2, 4), np.float32), np.ones(1)
    lse, out = np.zeros((1, 1, 2), np.float32), np.empty_like(q)
    calls = {"forward": (forward, (q, q, q)), "backward": (backward, (q, q, q, q, out, lse))}
    for name, (node, given) in calls.items():
        core = getattr(_core, name)
        named = {x.arg: None for x in node.args.kwonlyargs if x.arg not in ("threads", "torchs_team")}
        core(*given, scale=scale, **{**named, "out": out} if name == "forward" else named)
        with pytest.raises(TypeError, match="does not know"):
            core(*given, scale=scale, unknown=None)


# ---- the same everywhere ----------------------------------------------------


def test_version_is_the_same_everywhere(root: Path) -> None:
    changelog = re.search(r"^## (\d\S*)", (root / "CHANGELOG.md").read_text(), re.M)
    citation = re.search(r"^version: (\S+)", (root / "CITATION.cff").read_text(), re.M)
    assert changelog.group(1) == citation.group(1) == lh.__version__ == lh.info().version
    # The distribution reads it from _version.py; a second copy in pyproject.toml could disagree.
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()
    for distribution in importlib.metadata.distributions(name="levelhead"):
        assert distribution.version == lh.__version__


def test_constraints_pin_everything_exactly(root: Path) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.match(r"[\w-]+==[\w.]+(;|$)", pin)] == []
    assert "torch==2.13.0" in pins


@pytest.mark.parametrize("name", ["README.md"])
def test_snippets_run(root: Path, name: str) -> None:
    names: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", (root / name).read_text(), re.S)
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), names)
