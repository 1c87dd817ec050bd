"""A release: what judges the wheels finds what is wrong with one, and the places that name the wheels (the builder,
cibuildwheel's settings, the workflow, the package's own range of versions) agree.

The wheels themselves are judged by the same code when `make wheels` builds them: release/judge.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Read and not imported: it imports its compiler, which the tests do not install.
BUILDER = Path(__file__).parents[2] / "release/wheels.py"


def of_builder(name: str) -> Any:
    found = re.search(rf"^{name} = (.*?)(?:  #.*)?$", BUILDER.read_text(), re.M)
    assert found, name
    return eval(found[1])


def workflow(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / ".github/workflows/wheels.yml").read_text())


def steps(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


# ---- judging a wheel --------------------------------------------------------

if sys.platform == "linux":  # the judge reads ELF
    from judge import extensions, faults, glibc, library_faults

    BUILT = sorted((Path(sys.prefix) / "wheels").glob("*.whl"))

    @pytest.fixture(scope="module")
    def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
        """An extension with everything wrong that a compiler can make wrong."""
        folder = tmp_path_factory.mktemp("library")
        (folder / "bad.cpp").write_text(
            "#include <cstdlib>\nint levelhead_leak() { return rand(); }\n"
            'extern "C" const char* PyInit_other() { return __FILE__; }\n'
        )
        compiler = os.environ.get("CXX", "c++").split()
        options = ["-shared", "-fPIC", "-g", "-Wl,-rpath,/opt/lib", "-o", folder / "bad.so", folder / "bad.cpp"]
        subprocess.run([*compiler, *options], check=True)
        return (folder / "bad.so").read_bytes()

    def test_the_judge_finds_what_is_wrong_with_a_library(library: bytes) -> None:
        machine, other = ("x86_64", "aarch64") if os.uname().machine == "x86_64" else ("aarch64", "x86_64")
        said = "\n".join(library_faults("_core.abi3.so", library, machine, (0, 1)))
        for words in ("not stripped", "bad.cpp", "a search path", "asks for glibc", "must export PyInit__core"):
            assert words in said
        assert f"not for {other}" in library_faults("_core.abi3.so", library, other, (0, 1))[0]

    def wheel_of(folder: Path, name: str, members: dict[str, bytes]) -> Path:
        with zipfile.ZipFile(folder / name, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return folder / name

    def test_the_judge_finds_what_is_wrong_with_a_wheel(library: bytes, tmp_path: Path) -> None:
        members = {"levelhead/_core.abi3.so": library, "levelhead/_core.cpp": b"", "levelhead/__pycache__/a.pyc": b""}
        wrong = faults(wheel_of(tmp_path, "levelhead-1-cp312-abi3-manylinux_2_17_x86_64.whl", members), jax=True)
        assert [x for x in wrong if x.endswith("has levelhead/_core.cpp")] and [x for x in wrong if "__pycache__" in x]
        assert [x for x in wrong if "must have ['_core', '_jax_ffi']" in x]
        for name in ("levelhead-1-cp312-abi3-linux_x86_64.whl", "levelhead-1-py3-none-any.whl"):
            assert "no manylinux tag" in faults(wheel_of(tmp_path, name, {}), jax=False)[0]

    @pytest.mark.needs("the wheel that make built", "" if BUILT else f"{sys.prefix}/wheels")
    def test_the_wheel_of_this_tree_has_no_fault_but_its_new_glibc(root: Path, tmp_path: Path) -> None:
        (wheel,) = BUILT
        libraries = extensions(wheel)
        newest = max(glibc(x) for x in libraries.values())
        machine = os.uname().machine
        tag = f"manylinux_{newest[0]}_{newest[1]}_{machine}"
        named = Path(shutil.copy(wheel, tmp_path / wheel.name.replace(f"linux_{machine}", tag)))
        assert faults(named, jax="_jax_ffi" in {x.split(".")[0] for x in libraries}) == []
        assert str(root).encode() not in b"".join(libraries.values())


# ---- what is built, and where it says so ------------------------------------


def test_every_python_that_the_package_promises_has_a_wheel(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    abis = of_builder("ABIS")
    assert f">={abis['cp310']}" == project["project"]["requires-python"]
    assert f"{project['tool']['scikit-build']['wheel']['py-api']}-abi3" in abis
    # cibuildwheel builds free-threaded interpreters from 3.14 on.
    on_macos = {x.removesuffix("-macosx_*") for x in project["tool"]["cibuildwheel"]["build"]}
    assert on_macos == {abi.removesuffix("-abi3") for abi in abis} - {"cp313t"}
    assert of_builder("NO_JAX") == ("cp310",)  # where the group `build` has no jax
    assert any(x == "jax>=0.10; python_version >= '3.11'" for x in project["dependency-groups"]["build"])


def test_every_python_that_a_wheel_is_tried_on_is_a_classifier(root: Path) -> None:
    named = tomllib.loads((root / "pyproject.toml").read_text())["project"]["classifiers"]
    tried = workflow(root)["jobs"]["try"]["strategy"]["matrix"]["python"]
    classified = {x.rpartition(" :: ")[2] for x in named if re.search(r"Python :: 3\.\d+$", x)}
    assert classified == {x.removesuffix("t") for x in tried}


def test_what_tries_a_wheel_exists(root: Path) -> None:
    import try_wheel

    assert [x for x in try_wheel.TESTS if not (root / "tests" / x).is_file()] == []
    assert set(map(frozenset, try_wheel.BUILT.values())) >= {frozenset(__import__("levelhead").info().built)}
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert tuple(project["tool"]["cibuildwheel"]["test-requires"]) == try_wheel.NEEDS


def test_the_workflow_builds_and_tries_what_make_builds(root: Path) -> None:
    jobs, abis = workflow(root)["jobs"], of_builder("ABIS")
    assert "make wheels-twice" in steps(jobs["linux"])
    (setup,) = (x for x in jobs["linux"]["steps"] if "setup-python" in x.get("uses", ""))
    assert sorted(setup["with"]["python-version"].split()) == sorted(abis.values())
    tried = set(jobs["try"]["strategy"]["matrix"]["python"])
    assert tried >= set(abis.values()) and "3.13" in tried  # an interpreter newer than the stable ABI's
    assert {x.partition("-")[2].endswith("arm") for x in jobs["try"]["strategy"]["matrix"]["os"]} == {True, False}
    assert "release/try_wheel.py" in steps(jobs["try"])


def test_only_a_tag_publishes_and_no_password_is_kept(root: Path) -> None:
    text, jobs = (root / ".github/workflows/wheels.yml").read_text(), workflow(root)["jobs"]
    assert "secrets." not in text and "password:" not in text
    publishers = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert publishers == ["publish"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert workflow(root)["permissions"] == {"contents": "read"}

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    assert before("publish") == set(jobs) - {"publish"}
