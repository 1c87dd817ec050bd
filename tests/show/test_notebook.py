"""What objects put into a notebook: small, in the notebook's colours, nothing that reaches out, all text escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import levelhead as lh
import runs
from levelhead.diagnosis.findings import Finding, Findings, Verdict
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Gauge, Series
from levelhead.runs.record import Run, Seen, Snapshot
from levelhead.show import gauge_svg, notebook

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&.b"


def large(layers: int, heads: int) -> Run:
    random = np.random.default_rng(0)
    one = runs.record("", np.exp(random.normal(0.5, 1.5, heads)))
    return runs.run(*(replace(one, module=f"layers.{i}.attention") for i in range(layers)))


def found(module: str = "layers.0.attention", head: Any = 1, text: str = "why") -> Finding:
    return Finding("wrong scale", "warning", module, head, {"effective_scale": 1.0}, text, text, "docs/health.md#x")


def hostile() -> dict[str, Any]:
    """Every object that draws itself, with markup wherever a name or a text can hold it."""
    record = runs.record(HOSTILE, kind=HOSTILE, how=HOSTILE, dtype=HOSTILE, scale_reading=HOSTILE)
    findings = Findings([found(HOSTILE, None, HOSTILE)], HOSTILE, Verdict(HOSTILE, (HOSTILE,)))
    seen = (Seen(HOSTILE, HOSTILE, False, HOSTILE, 0, HOSTILE),)
    steps = tuple(Snapshot(step, (record,)) for step in range(3))
    run = Run(HOSTILE, steps, seen, (HOSTILE,), logged={HOSTILE: ((0, 1.0), (1, 2.0))})
    series = Series(HOSTILE, "live", "bars", [HOSTILE, "b"], [1.0, 2.0])
    chart = Chart(HOSTILE, Axis(HOSTILE), Axis(HOSTILE), (series,), HOSTILE)
    facts = (Fact(HOSTILE, HOSTILE, "theory", formula=HOSTILE),)
    gauges = (Gauge(HOSTILE, "level", 0.5, 0.8, "live"),)
    claims = ({"id": HOSTILE, "verdict": HOSTILE},)
    figure = Figure("i", HOSTILE, (chart,), HOSTILE, facts, gauges, HOSTILE, HOSTILE, claims)
    return dict(record=record, snapshot=steps[0], run=run, findings=findings, finding=findings[0], figure=figure)


def everything() -> dict[str, str]:
    (result,) = lh.lab.run("C6")
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 8))
    made = {name: one._repr_html_() for name, one in hostile().items()}
    made["a run with findings"] = notebook.run(large(2, 4), [found()])
    made["an observation"] = lh.observe(q, k, v)._repr_html_()
    made["an explanation"] = lh.explain(q, k, v)._repr_html_()
    made["a large run"] = large(32, 16)._repr_html_()
    return made | {"a result": result._repr_html_()}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEVELHEAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield everything()


NAMES = ("record", "snapshot", "run", "findings", "finding", "figure", "a run with findings", "an observation")
NAMES += ("an explanation", "a large run", "a result")


@pytest.mark.parametrize("name", NAMES)
def test_an_output_keeps_to_itself(name: str, outputs: dict[str, str]) -> None:
    assert set(outputs) == set(NAMES)
    page = ElementTree.fromstring(outputs[name])
    assert (page.tag, page.get("class")) == ("div", "lh note")
    tags = {part.tag.split("}")[-1] for part in page.iter()}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "image", "use", "base", "form"}
    for part in page.iter():
        assert not [key for key in part.attrib if key.startswith("on") or key in ("src", "href", "id")], part.attrib
        assert not re.search(r"url\(|javascript:", " ".join(part.attrib.values()))
    css = "".join(part.text or "" for part in page.iter("style"))
    assert not re.search(r"url\(|@import|https?:", css)
    rules = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    rules = re.sub(r"@media[^{]*\{((?:[^{}]*\{[^{}]*\})*)[^{}]*\}", r"\1", rules)
    selectors = [one.strip() for group in re.findall(r"([^{}]+)\{[^{}]*\}", rules) for one in group.split(",")]
    assert selectors and all(re.match(r"(svg)?\.lh\b", one) for one in selectors), selectors


@pytest.mark.parametrize("name", NAMES)
def test_an_output_has_the_notebook_s_colours(name: str, outputs: dict[str, str]) -> None:
    """On a dark notebook a fixed ink or face would be unreadable: what holds text is a shade of the text's colour."""
    page = ElementTree.fromstring(outputs[name])
    css = "".join(part.text or "" for part in page.iter("style"))
    (own,) = re.findall(r"\.lh\.note \{(  ?--ink.*?)\}", css)
    variables = dict(re.findall(r"--([\w-]+): ([^;]+);", own))
    for used in ("ink", "soft", "line", "card"):
        assert "currentColor" in variables[used], used
    assert "color: var(--jp-content-font-color1, var(--vscode-foreground, inherit))" in own
    assert "prefers-color-scheme" not in re.sub(
        r"@media \(prefers-color-scheme: dark\) \{\s*\.lh\.page.*?\}\s*\}", "", css
    )
    used = set(re.findall(r"var\(--([\w-]+)", css)) - {"jp-content-font-color1", "vscode-foreground", "w"}
    known = set(re.findall(r"--([\w-]+):", css))
    assert {one for one in used if not one.startswith(("jp-", "vscode-"))} <= known


def test_markup_in_names_stays_text() -> None:
    for name, one in hostile().items():
        words = "".join(ElementTree.fromstring(one._repr_html_()).itertext())
        assert "<script>alert(1)</script>" in words, name


def test_512_heads_stay_small_and_all_are_drawn() -> None:
    run = large(32, 16)
    shown = notebook.run(run, [found("layers.3.attention", 5)])
    assert len(shown) < 64_000
    page = ElementTree.fromstring(shown)
    (drawn,) = [svg for svg in page.iter("svg") if svg.get("class") == "rows"]
    bubbles = "".join(path.get("d", "") for path in drawn.iter("path") if path.get("class") == "air")
    tubes = "".join(path.get("d", "") for path in drawn.iter("path") if path.get("class") in gauge_svg._TYPICAL)
    assert bubbles.count("M") == tubes.count("M") == 512
    assert [path.get("class") for path in drawn.iter("path") if "mark" in path.get("class", "")] == ["warning-mark"]
    assert "numbers of the first 32 of 512 heads" in shown


def test_what_is_beyond_the_limits_is_counted() -> None:
    run = large(80, 70)
    shown = notebook.run(run, [found("layers.79.attention", 69), found("layers.0.attention")])
    assert "… 64 more modules, 1 of them with an alarm." in shown and "… 6 more heads in a row." in shown
    assert len(shown) < 120_000
    places = Findings([found(f"layers.{i}.attention", None) for i in range(500)])._repr_html_()
    assert "… and 492 more" in places and len(places) < 10_000
    assert "… 38 more heads." in run.latest[0]._repr_html_()


def test_marks_of_a_drawn_level_are_where_it_begins_and_ends() -> None:
    """A bubble stands between the two marks exactly where its head is level."""
    entropies = np.linspace(0, 1, 101)
    marks = re.search(r'class="k" d="M([\d.]+) 0V\d+M([\d.]+) 0V', gauge_svg.picture("level"))
    assert marks
    begin, end = map(float, marks.groups())
    for entropy in entropies:
        level = lh.stats.level(float(entropy), 0.0)
        at = re.search(r'cx="([\d.]+)"', gauge_svg.picture(level, float(entropy)))
        assert at and (begin < float(at[1]) < end) == (level == "level"), (entropy, level)


def test_plain_text_is_what_it_was() -> None:
    """A terminal shows no HTML, and a record's repr stays that of a dataclass."""
    record = runs.record("a")
    assert repr(record).startswith("Record(module='a'") and repr(Snapshot(0, (record,))).startswith("Snapshot(step=0")
    assert str(found()).startswith("warning: wrong scale: layers.0.attention head 1")


def test_a_result_stands_beside_its_theory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path))
    (result,) = lh.lab.run("C5", params={"d_k": [4, 64], "batches": 4})
    page = ElementTree.fromstring(result._repr_html_())
    rows = [[("".join(cell.itertext())) for cell in row] for row in page.iter("tr")]
    assert rows[0] == ["", "measured", "theory"] and [row[0] for row in rows[1:]] == ["entropy", "top1"]
    assert all(len(row[1].split(", ")) == len(row[2].split(", ")) == 2 for row in rows[1:])
    words = "".join(page.itertext())
    assert f"C5: {result.verdict}" in words and result.criterion in words and "batches 4, " in words
    assert len(list(page.iter("{http://www.w3.org/2000/svg}svg"))) == 2


def test_axes_of_words_have_words_and_axes_of_numbers_round_numbers() -> None:
    def labels(series: Series, **axis: Any) -> list[str]:
        shown = Figure("i", "t", (Chart("c", Axis("x", **axis), Axis("y"), (series,)),), "")._repr_html_()
        svg = next(ElementTree.fromstring(shown).iter("{http://www.w3.org/2000/svg}svg"))
        return [text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text")]

    assert {"one", "two"} <= set(labels(Series("s", "live", "bars", ["one", "two"], [1.0, 3.0])))
    assert {"10", "100", "1000"} <= set(labels(Series("s", "live", "line", [4, 1024], [0.1, 0.97]), log=True))
    assert {"0.25", "0.5", "0.75"} <= set(labels(Series("s", "live", "line", [4, 1024], [0.1, 0.97])))
    assert "0.5" in labels(Series("s", "live", "line", [0, 1], [0.5, 0.5]))
