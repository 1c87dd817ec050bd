"""Where findings point: every link has its heading, on a site, in a folder and in the installed copy."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import levelhead
from levelhead import documentation
from levelhead.cli.main import main
from levelhead.diagnosis import findings
from levelhead.documentation import Section, anchor, where
from levelhead.errors import LevelheadValueError
from levelhead.preflight_checks import result
from needs import NO_JAX

WRONG_SCALE = findings.link("wrong scale")


@pytest.fixture(autouse=True)
def _no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(documentation.VARIABLE, raising=False)


def headings() -> list[Section]:
    return [one for page, text in documentation.pages().items() for one in documentation.sections(page, text)]


# ---- addresses


def test_without_a_site_a_link_is_a_command_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert where(WRONG_SCALE) == "levelhead docs wrong-scale"
    assert main(where(WRONG_SCALE).split()[1:]) == 0
    said = capsys.readouterr().out
    assert said.startswith("### Wrong scale\n") and "1/√d_k" in said and "## Unusual scale" not in said


@pytest.mark.parametrize("given", ["https://a.org/x", "https://a.org/x/", " http://localhost:8000 "])
def test_one_setting_moves_every_link(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(documentation.VARIABLE, given)
    base = given.strip().rstrip("/")
    assert where(WRONG_SCALE) == f"{base}/docs/health.html#wrong-scale"
    assert where("docs/watch.md") == f"{base}/docs/watch.html"
    assert where("https://b.org") == "https://b.org" and where("") == ""
    group = findings.Group("note", "k", "why", "what", WRONG_SCALE, ("a",))
    assert f"  read: {base}/docs/health.html#wrong-scale" in list(group.lines())


def test_a_folder_is_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "my site"
    (place / "docs").mkdir(parents=True)
    (place / "docs" / "index.html").touch()
    monkeypatch.setenv(documentation.VARIABLE, str(place))
    assert where(WRONG_SCALE) == f"{place.as_uri()}/docs/health.html#wrong-scale"


@pytest.mark.parametrize(
    "given", ["nowhere", "javascript:alert(1)", "https://", "https://a.org/?x=1", "https://a.org/#x", "https://a b"]
)
def test_a_wrong_site_is_named_and_no_report_fails(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(documentation.VARIABLE, given)
    with pytest.raises(LevelheadValueError, match="LEVELHEAD_SITE: expected a web address, or a folder"):
        documentation.site()
    assert where(WRONG_SCALE).startswith("levelhead docs wrong-scale (LEVELHEAD_SITE: expected")


# ---- every finding has its heading


def preflight_kinds() -> dict[str, str]:
    """Patterns of the first arguments of `finding`, and where each is; names stand for what their modules give them."""
    found: dict[str, str] = {}
    for path in sorted(Path(result.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        given = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("finding", "_finding") and node.args):
                continue
            kind = node.args[0]
            if isinstance(kind, ast.Constant):
                found[re.escape(kind.value)] = path.name
            elif isinstance(kind, ast.JoinedStr):
                parts = (re.escape(x.value) if isinstance(x, ast.Constant) else r"\w+" for x in kind.values)
                found["".join(parts)] = path.name
            elif isinstance(kind, ast.Name) and kind.id in given:
                found[re.escape(given[kind.id])] = path.name
    return found


def test_every_kind_of_a_preflight_is_a_heading_of_its_own() -> None:
    titles = [one.title for one in headings() if one.page == "preflight"]
    kinds = preflight_kinds()
    assert len(kinds) > 25
    assert [(kind, file) for kind, file in kinds.items() if not any(re.fullmatch(kind, x) for x in titles)] == []
    # And the other direction: what the page explains exists.
    text = "".join(path.read_text() for path in Path(result.__file__).parent.glob("*.py"))
    explained = titles[titles.index("Findings") + 1 :]
    made_of_parts = [x for x in explained if f'"{x}"' not in text]
    assert [x for x in made_of_parts if not any(re.fullmatch(kind, x) for kind in kinds)] == []


def test_the_headings_of_findings_are_unique() -> None:
    """`levelhead docs NAME` finds each without its page's name."""
    explained = [one for one in headings() if one.page in ("health", "preflight")]
    counts = {one.anchor: sum(x.anchor == one.anchor for x in headings()) for one in explained}
    several = {name for name, count in counts.items() if count > 1}
    assert several <= {"the-statistics", "the-gauge", "findings"}  # headings that explain no finding


def test_headings_of_a_preflight_share_the_text_below_them() -> None:
    assert result.finding("ALiBi's sign", "error", "m", "why", "what").link == "docs/preflight.md#alibis-sign"
    told = documentation.section(["sees", "the", "next", "token"])
    assert "The form of a mask in the calls" in told and "### causal from the first key" not in told


# ---- the installed copy


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Wrong scale", "wrong-scale"),
        ("How early?", "how-early"),
        ("Per head: `observe(...).heads`", "per-head-observeheads"),
    ],
)
def test_names_of_headings_are_those_of_github(title: str, name: str) -> None:
    assert anchor(title) == name


def test_code_is_no_heading() -> None:
    text = "# A\n```\n# no\n```\n## B\n~~~\n## no\n~~~\nb\n# C\nc"
    assert [(one.title, one.text[-1]) for one in documentation.sections("p", text)] == [
        ("A", "b"),
        ("B", "b"),
        ("C", "c"),
    ]


def test_every_page_is_there_and_the_start_is_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert documentation.pages() == {path.stem: path.read_text() for path in (root / "docs").glob("*.md")}
    installed = Path(levelhead.__file__).parent / "docs"
    if root / "src" not in installed.parents:
        assert documentation.folder() == installed
        assert {path.suffix for path in installed.rglob("*") if path.is_file()} == {".md"}
    assert main(["docs"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# levelhead\n") and "## Start here" in said
    assert said.rstrip().splitlines()[-1].startswith("pages: ") and "health, kernel" in said


def test_a_page_and_a_heading_of_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "remedies"]) == 0
    assert capsys.readouterr().out == (documentation.folder() / "remedies.md").read_text()
    assert main(["docs", "health", "the-gauge"]) == 0
    assert capsys.readouterr().out.startswith("## The gauge")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wrong-scal"], "Is it wrong-scale"),
        (["the-gauge"], "Say which: levelhead docs health the-gauge, levelhead docs statistics the-gauge"),
        (["health", "nothing like this at all"], "expected a page or a heading"),
        (["../../etc/passwd"], "expected a page or a heading"),
    ],
)
def test_what_does_not_exist(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", *words]) == 2
    assert message in capsys.readouterr().err


# ---- coming from other libraries


@pytest.mark.parametrize("name", ["from-pytorch", "from-jax", "from-flash-attention"])
def test_snippets_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the library is installed; elsewhere they are parsed."""
    snippets = re.findall(r"```python\n(.*?)```", documentation.pages()[name], re.S)
    assert snippets
    names: dict[str, object] = {}
    for snippet in snippets:
        code = compile(snippet, name, "exec")
        if name != "from-jax" or not NO_JAX:
            exec(code, names)
