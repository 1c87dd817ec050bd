"""The Makefile: its help names every command, and `make check` runs tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

INTERNAL = {"help", "checks", "cpp-plain"}  # `help` itself, and parts of other commands


def variable(makefile: str, name: str) -> str:
    """What stands behind a variable's name, with its continued lines."""
    found = re.search(rf"^{name} *:?\??= *((?:.*\\\n)*.*)", makefile, re.M)
    assert found is not None, name
    return found[1].replace("\\\n", " ")


def checked(root: Path) -> list[str]:
    listed = re.fullmatch(r"\$\(addprefix tests/, (.*)\)", variable((root / "Makefile").read_text(), "CHECKED"))
    assert listed is not None
    return listed[1].split()


def test_make_check_runs_tests_that_exist(root: Path) -> None:
    places = checked(root)
    assert len(places) > 20 and len(set(places)) == len(places)
    for place in places:
        path = root / "tests" / place
        assert list(path.glob("test_*.py")) if path.is_dir() else path.is_file(), place
    # The rules of the house are what a contributor breaks first, and cost seconds.
    assert {f"house/test_{x}.py" for x in ("architecture", "documentation", "make", "types", "walks")} <= {*places}


def test_make_check_needs_no_sanitizer_and_no_wheel(root: Path) -> None:
    recipe = (root / "Makefile").read_text().split("\ncheck:\n")[1].split("\n\n")[0]
    assert " lint cpp-plain $(VENV)/.installed" in recipe and "$(CHECKED)" in recipe
    assert "checks" not in recipe and "wheel" not in recipe


def test_help_names_every_command(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    commands = set(re.findall(r"^\.PHONY: (.*)", makefile, re.M)[0].split()) - INTERNAL
    told = set(re.findall(r"^\t@echo 'make (\S+) ", makefile, re.M))
    assert told == commands
    words = (root / "CONTRIBUTING.md").read_text()
    assert {command for command in told if f"make {command}" not in words} <= {"run", "clean", "ladder"}
