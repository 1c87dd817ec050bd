"""What SECURITY.md promises about the sources: no pickle, no network, no code from files; and that its tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "levelhead"

SERIALISES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
TALKS = {"ftplib", "http", "httpx", "imaplib", "poplib", "requests", "smtplib", "socket", "ssl", "telnetlib", "urllib3"}
# Where a module that can talk is imported, and what for.
LOOPBACK = {"page/connections.py": "listens on 127.0.0.1", "cluster/session.py": "the name of this host"}


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@cache
def facts() -> tuple[dict[str, set[str]], list[tuple[str, str, ast.Call]]]:
    """In one walk: by file, a dotted name for everything that is imported; and all calls as (file, last name, call)."""
    names: dict[str, set[str]] = {file: set() for file in trees()}
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names[file] |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                names[file] |= {f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                found.append((file, node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node))
    return names, found


def importing(packages: set[str]) -> set[str]:
    """The files that import one of these."""
    return {file for file, names in facts()[0].items() if {name.split(".")[0] for name in names} & packages}


def calls(wanted: str) -> list[tuple[str, ast.Call]]:
    """Calls of functions and methods of that name: (file, call)."""
    return [(file, node) for file, name, node in facts()[1] if name == wanted]


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {word.arg: ast.unparse(word.value) for word in call.keywords}


def test_nothing_is_pickled() -> None:
    assert len(trees()) > 400
    assert importing(SERIALISES) == set()


def test_few_modules_could_reach_a_network() -> None:
    assert importing(TALKS) == {*LOOPBACK}
    of_urllib = {x for names in facts()[0].values() for x in names if x.startswith("urllib.")}
    assert of_urllib and all(x.startswith("urllib.parse.") for x in of_urllib)
    addresses = re.findall(r'^ADDRESS = "(.*)"', (PACKAGE / "page" / "connections.py").read_text(), re.M)
    assert addresses == ["127.0.0.1"]


def test_no_code_comes_from_a_file() -> None:
    alone = [(name, file, call) for name in ("exec", "eval") for file, call in calls(name)]
    assert [file for _, file, call in alone if isinstance(call.func, ast.Name)] == []  # model.eval() is another
    texts = {file: (PACKAGE / file).read_text() for file in trees()}
    assert [file for file, text in texts.items() if "trust_remote_code" in text or "allow_pickle" in text] == []


def test_weights_are_read_as_weights() -> None:
    """The one place that reads a file of torch.save, and every place that has transformers open a model."""
    loading = [(file, keywords(call)) for file, call in calls("load") if ast.unparse(call.func) == "torch.load"]
    assert [(file, given["weights_only"]) for file, given in loading] == [
        ("preflight_checks/earlier_weights.py", "True")
    ]
    opening = calls("from_pretrained")
    assert len(opening) >= 4
    for file, call in opening:
        assert file in ("models.py", "gguf_cache.py") and None in keywords(call), file  # **local, **source
        assert "local_files_only" in (PACKAGE / file).read_text()


@pytest.mark.parametrize("named", re.findall(r"`(\w+/test_\w+\.py)`", (ROOT / "SECURITY.md").read_text()))
def test_the_tests_that_are_named_exist(named: str) -> None:
    assert (ROOT / "tests" / named).is_file()
