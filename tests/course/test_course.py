"""The course: chapters, their numbers, the catalogues of words, and samples that a reader can run."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from levelhead.course import catalogue, chapters, story
from levelhead.course.cards import CARDS, Card
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS
from levelhead.course.numbers import shown
from levelhead.course.results import claim
from levelhead.errors import LevelheadError

IDS = [chapter.id for chapter in CHAPTERS]
LARGEST = 40_000  # bytes of one chapter's data
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)


# ---- numbers


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.6731, 2, "0.67"),
        (0.05, 1, "0.05"),
        (12288, 2, "12288"),
        (-31.62, 2, "−32"),
        (1012.3, 1, "1000"),
        (64.0, 2, "64"),
        (0, 2, "0"),
        (0.0, 2, "0"),
        (1.0, 2, "1"),
        (0.99987, 2, "0.9999"),
        (0.9999999998966898, 2, "0.9999999999"),
        (3.2e-7, 2, "3.2·10⁻⁷"),
        (6e7, 1, "6·10⁷"),
    ],
)
def test_one_function_rounds(value: float, digits: int, text: str) -> None:
    assert shown(value, digits) == text


@each_chapter
def test_numbers_are_found_anew_and_say_where_they_come_from(chapter: Chapter) -> None:
    numbers = chapter.numbers()
    assert numbers == chapter.numbers()
    for name, number in numbers.items():
        assert re.fullmatch(r"[a-zA-Z]\w*", name), name
        assert number.where and number.source in ("live", "recorded", "theory"), name


@pytest.mark.parametrize("one", [*CHAPTERS, *CARDS], ids=lambda one: one.id)
def test_where_a_number_comes_from_needs_no_language(one: Chapter | Card) -> None:
    """Formulas, names and a few technical terms, which are shown in every language as they are; no sentence."""
    for name, number in one.numbers().items():
        words = re.findall(r"[A-Za-z]{2,}", _NAMED.sub("", number.where))
        assert set(words) <= _TERMS, (name, number.where)


# Files, claims, a model, a machine.
_NAMED = re.compile(r"[\w./-]+\.jsonl?|levelhead\.[\w.]+|C\d+[a-z]?|all-MiniLM-L6-v2|\d{4}-\d\d-\d\d, .*")
_TERMS = {
    *("argmax", "erf", "float", "levelhead", "ln", "max", "softmax", "tanh", "diag"),
    *("chosen", "draws", "keys", "orders", "pairs", "queries", "seed", "walk", "walks"),
}


@pytest.mark.parametrize("id", ["hook", "real"])
def test_a_weight_in_the_text_has_the_digits_of_its_bar(id: str) -> None:
    (chapter,) = (one for one in CHAPTERS if one.id == id)
    weight = chapter.numbers()["top_divided"]
    assert weight.text == f"{weight.value:.3f}"


@each_chapter
def test_a_chapter_is_small_json(chapter: Chapter) -> None:
    found = story.chapter_json(chapter)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(json.dumps(found["data"])) <= LARGEST


def test_every_chapter_is_in_the_story() -> None:
    written = {path.stem for path in Path(chapters.__file__).parent.glob("[!_]*.py")}
    assert len(set(IDS)) == len(IDS) and set(IDS) == written


# ---- samples


@each_chapter
@pytest.mark.parametrize("library", story.LIBRARIES)
def test_samples_print_the_numbers_that_are_shown(chapter: Chapter, library: str) -> None:
    path = story.SAMPLES / f"{chapter.id}_{library}.py"
    assert "levelhead" not in path.read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path))
    lines = printed.getvalue().splitlines()
    assert lines
    for line in lines:
        name, text = line.split()
        assert_shown(chapter.numbers()[name], float(text), name)


def assert_shown(number: Any, value: float, name: str) -> None:
    """Equal to the digits that are shown, or within three standard errors of both where numbers are random."""
    if number.stderr is not None:
        assert abs(value - number.value) <= 3 * 2**0.5 * number.stderr, name
    else:
        assert value == pytest.approx(number.value, rel=1e-6) or _as_shown(value, number.text), name


def _as_shown(value: float, text: str) -> bool:
    return text in {shown(value, digits) for digits in range(1, 7)}


# ---- catalogues


def test_the_catalogues_pass_every_check() -> None:
    found = catalogue.catalogues()
    assert list(found)[:2] == ["en", "hi-Latn"]


def changed(path: str, value: Any, language: str = "hi-Latn") -> dict[str, Any]:
    """The catalogues with one value changed; None removes it."""
    found = copy.deepcopy(dict(catalogue.catalogues()))
    *above, last = path.split(".")
    part: Any = found[language]
    for name in above:
        part = part[int(name) if isinstance(part, list) else name]
    if value is None:
        del part[int(last) if isinstance(part, list) else last]
    else:
        part[int(last) if isinstance(part, list) else last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("softmax.title", None, "got nothing"),
        ("softmax.options.same", None, "got nothing"),
        ("softmax.text.1", None, "got nothing"),
        ("training.pause.0", None, "got nothing"),
        ("shell.extra", "kuch aur", "one more"),
        ("softmax.options.same", "wahi rehta hai", "placeholders"),
        ("softmax.text.1", "[[ratios]]", "formulas"),
        ("softmax.text.0", "Gap 4 hai", "no typed number, got 4"),
        ("softmax.text.0", "Gap $0.97$ hai", "no typed number, got 0"),
        ("softmax.takeaway", " ", "got nothing"),
        ("softmax.title", "*a $b`", "softmax.title: expected markup that is closed, got a lone *"),
        ("softmax.takeaway", "*ek `do*", "softmax.takeaway: expected markup that is closed, got a lone `"),
        ("shell.copy", "{ek", "shell.copy: expected markup that is closed, got a lone {"),
        ("softmax.text.0", "dekho [[softmax]]", "softmax.text.0: expected markup that is closed, got a lone [["),
        ("bench.strip.nothing", None, "got nothing"),
        ("bench.walk.text.1", "variance", "formulas"),
        ("bench.speed.run", "yahan chalao (thodi der)", "placeholders"),
        ("bench.online.one", "1 hi tile hai", "no typed number, got 1"),
        ("figures", None, "translations of the lab's texts"),
        ("figures.One row", " ", "expected words"),
        ("figures.One row", "One row", "a translation"),
        ("figures.One row", "1 row", "no typed number, got 1"),
        ("figures.{count} tokens", "kuch tokens", "placeholders"),
    ],
)
def test_a_catalogue_with_a_fault_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(LevelheadError, match=re.escape(said)) as refused:
        catalogue.check(changed(path, value), CHAPTERS)
    assert "catalogues/hi-Latn.json" in str(refused.value) and path.split(".")[0] in str(refused.value)


def test_a_value_that_is_not_translated_is_refused() -> None:
    english = catalogue.catalogues()["en"]["softmax"]["takeaway"]
    with pytest.raises(LevelheadError, match="a translation"):
        catalogue.check(changed("softmax.takeaway", english), CHAPTERS)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("softmax.title", None, "softmax.title"),
        ("softmax.words", {"row": 3}, "softmax.words.row: expected a text"),
        ("softmax.because", "It is {nothing}.", "a number of the chapter"),
        ("softmax.options.more", "another", "exactly same, larger, smaller"),
        ("training.pause", "Rest.", "training.pause: expected a list"),
        ("training.pause.1", "It is {nothing}.", "a number of the chapter"),
        ("hook", None, "the words of the chapter"),
        ("training.claims.C99", "It holds.", "ids of C7, C7a, C12"),
        ("figures", {"One row": "One row"}, "The lab writes these texts"),
    ],
)
def test_english_has_what_a_chapter_needs(path: str, value: Any, said: str) -> None:
    with pytest.raises(LevelheadError, match=re.escape(said)):
        catalogue.check(changed(path, value, "en"), CHAPTERS)


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "en.json").write_text('{"shell": {"a": "x", "a": "y"}}')
    with pytest.raises(LevelheadError, match="'a' is there twice"):
        catalogue._read(tmp_path / "en.json")


@each_chapter
def test_a_claim_that_holds_in_part_says_which_part(chapter: Chapter) -> None:
    told = catalogue.catalogues()["en"][chapter.id].get("claims", {})
    assert set(told) >= {id for id in chapter.claims if claim(id)["verdict"] == "caveat"}


@each_chapter
def test_formulas_of_the_words_exist(chapter: Chapter, root: Path) -> None:
    static = root / "src" / "levelhead" / "page" / "static"
    scene = (static / f"scene-{chapter.id}.js").read_text(encoding="utf-8")
    known = re.findall(r"^  (\w+): \(\) =>", scene + (static / "formulas.js").read_text(encoding="utf-8"), re.MULTILINE)
    words = json.dumps(catalogue.catalogues()["en"][chapter.id])
    assert set(re.findall(r"\[\[([\w-]+)\]\]", words)) <= set(known)


# ---- the lab bench

STATIC = Path("src", "levelhead", "page", "static")
PATH = re.compile(r'(?<=["`])(?:bench|shell)(?:\.\w+)+(?:\.\$)?')  # of words in the catalogue; $ begins any name


def test_the_bench_has_the_words_that_it_asks_for_and_asks_for_all(root: Path) -> None:
    files = [root / STATIC / "index.html", *(root / STATIC).glob("*.js")]
    asked = {path for file in files for path in PATH.findall(file.read_text(encoding="utf-8"))}
    english = catalogue.catalogues()["en"]
    known = {path for path, _ in catalogue._leaves({name: english[name] for name in ("bench", "shell")})}
    assert {one for one in asked if not any(_names(one, path) for path in known)} == set()
    own = {path for path in known if path.startswith("bench.")}
    assert {path for path in own if not any(_names(one, path) for one in asked)} == set()


def _names(asked: str, path: str) -> bool:
    """A path is asked for by its own name, by that of its list, or by the beginning of a name that is put together."""
    if asked.endswith("$"):
        return path.startswith(asked[:-1])
    return path == asked or re.fullmatch(re.escape(asked) + r"\.\d+", path) is not None


def test_formulas_of_the_bench_exist(root: Path) -> None:
    static = root / STATIC
    modules = "".join((static / name).read_text(encoding="utf-8") for name in ("formulas.js", "bench-formulas.js"))
    known = set(re.findall(r"^  (\w+): \(\) =>", modules, re.MULTILINE))
    words = json.dumps(catalogue.catalogues()["en"]["bench"])
    assert set(re.findall(r"\[\[([\w-]+)\]\]", words)) <= known
