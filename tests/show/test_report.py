"""How a run is shown: every head is there, lines keep to their width, the page keeps to itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import runs
from levelhead import stats
from levelhead.diagnosis.compare import compare
from levelhead.diagnosis.findings import Finding
from levelhead.runs.record import Run, Seen, Snapshot
from levelhead.show import curves_svg, html, notebook, view
from levelhead.show import text as report

NAMES = [f"encoder.layer.{i}.attention.self" for i in range(5)]
HOSTILE = "a<script>alert(1)</script>\"'&.b\x1b[31m"


def stack(heads: int = 12, **options: Any) -> Run:
    random = np.random.default_rng(1)
    records = [
        runs.record(name, np.exp(random.normal(0.5, 1.5, heads)), seed=i, **options) for i, name in enumerate(NAMES)
    ]
    return runs.run(*records)


def finding(severity: Any = "warning", module: str = NAMES[2], head: Any = None) -> Finding:
    return Finding(
        "wrong scale",
        severity,
        module,
        head,
        {"effective_scale": 0.5},
        "It is too large.",
        "Divide by √d_k.",
        "docs/health.md#wrong-scale",
    )


def plain(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


# ---- the table --------------------------------------------------------------


def tables(text: str) -> Iterator[tuple[str, list[str]]]:
    """Full module names and the lines of their heads."""
    for name in NAMES:
        lines = text[text.index(f"\n{name}\n") :].split("\n\n")[0].splitlines()
        yield name, [line for line in lines if re.match(r" *\d+ ▕", line)]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_head_has_its_line_and_lines_keep_to_the_width(width: int) -> None:
    run = stack()
    text = report.text(run, width=width)
    assert max(map(len, text.splitlines())) <= width
    for (_, lines), record in zip(tables(text), run.latest, strict=True):
        assert [int(line.split()[0]) for line in lines] == list(range(12))
        for line, level in zip(lines, record.heads.levels, strict=True):
            entropy = float(record.heads.normalised_entropy[int(line.split()[0])])
            assert f"{stats.gauge(entropy, level)} {level}" in line


def test_a_line_has_every_number_of_its_head() -> None:
    run = stack()
    heads = run.latest[3].heads
    (line,) = [
        x
        for name, lines in tables(report.text(run, width=120))
        if name == NAMES[3]
        for x in lines
        if x.split()[0] == "7"
    ]
    for number in (
        f"{heads.normalised_entropy[7]:.3f}",
        f"{heads.mean_top1[7]:.3f}",
        f"{heads.max_logit[7]:.2f}",
        f"0,{heads.max_query[7]},{heads.max_key[7]}",
        f"{heads.var_logit[7] ** 0.5:.2f}",
        f"{100 * heads.saturated[7]:.0f}%",
        f"{heads.gradient[7]:.3f}",
        f"{heads.mean_first[7]:.3f}",
    ):
        assert number in line.split()


def test_a_sampled_maximum_is_a_lower_bound() -> None:
    exact, sampled = (report.text(runs.run(runs.record("a", sampled=sampled)), width=100) for sampled in (False, True))
    assert "≥" not in exact
    assert "every row" in exact
    assert len(re.findall(r"≥\d", sampled)) == 4
    assert "sampled rows" in sampled
    assert "maxima are lower bounds" in sampled
    for bound in (False, True):
        steps = tuple(Snapshot(step, (runs.record("a", sampled=bound),)) for step in range(2))
        assert ("a lower bound" in curves_svg.charts(Run("Made up", steps))) == bound
        after = Run("Made up", (Snapshot(1, (runs.record("a", seed=1, sampled=bound),)),))
        assert ("≥" in str(compare(Run("Made up", steps[:1]), after).changes[0])) == bound


def test_columns_that_would_say_nothing_are_left_out() -> None:
    bare = report.text(runs.run(runs.record("a")), width=200)
    full = report.text(runs.run(runs.record("a", sinks=True, gradients=True)), width=200)
    for title in ("sink", "‖dq‖", "‖dk‖", "‖dv‖", "gradient norms of the weights: q_proj 0.25"):
        assert title not in bare
        assert title in full


def test_columns_that_do_not_fit_follow_below() -> None:
    run = runs.run(runs.record("a", sinks=True, gradients=True))
    text = report.text(run, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\nhead ") == 2
    assert "‖dv‖" in text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (dict(scale=0.25, effective_scale=0.25), "scale 0.25 ≈ 1/√d_k in effect"),
        (dict(scale=0.125, effective_scale=0.125), "scale 0.125 ≈ 1/√d in effect"),
        (dict(scale=0.0625, effective_scale=0.0625), "scale 0.0625 ≈ 1/d_k in effect"),
        (dict(scale=1.0, effective_scale=0.25), "scale 1, in effect 0.25 ≈ 1/√d_k"),
        (dict(scale=4.0, effective_scale=4.0), "scale 4 ≈ √d_k in effect"),
        (
            dict(scale=0.25, effective_scale=None, scale_reading="normalised"),
            "scale 0.25 ≈ 1/√d_k (in effect: normalised)",
        ),
        (
            dict(scale=None, effective_scale=None, scale_reading="not one number"),
            "scale unknown (in effect: not one number)",
        ),
        (dict(scale=None, effective_scale=0.77), "scale 0.77 in effect"),
    ],
)
def test_scale_passed_and_scale_in_effect(facts: dict[str, Any], words: str) -> None:
    assert words in view.facts(runs.record("a", **facts))


def test_a_longer_name_than_the_terminal_is_whole_in_the_table_and_short_in_the_map() -> None:
    name = "one." + "very_long_part_of_a_name." * 8 + "end"
    lines = report.text(runs.run(runs.record(name)), width=80).splitlines()
    assert name in lines
    shortened = next(line for line in lines if "…" in line)
    assert len(shortened) <= 80
    assert shortened.startswith("one.very") and shortened.endswith("end")


# ---- the map ----------------------------------------------------------------


@pytest.mark.parametrize(("heads", "width"), [(1, 80), (12, 80), (40, 80), (64, 80), (64, 200)])
def test_the_map_has_one_glyph_per_head(heads: int, width: int) -> None:
    run = stack(heads)
    lines = list(report.heads_map(run, colour=False, width=width))
    assert max(map(len, lines)) <= width
    for i, record in enumerate(run.latest):
        row = "".join(
            line.split(maxsplit=1)[1]
            for line in lines
            if re.match(rf" +{i} ", line)
            if not re.match(r" +\d+ +\d", line)
            if set(line) & set("○◔◑●")
        )
        wanted = [view.GLYPHS[level] for level in record.heads.levels]
        assert [glyph for glyph in row if glyph in "○◔◑●"] == wanted


def test_colour_says_nothing_that_a_glyph_does_not() -> None:
    run, found = stack(counterfactual=True), [finding(), finding("error", NAMES[1], (2, 3))]
    coloured = report.text(run, found, colour=True, width=100)
    assert "\x1b[" in coloured
    assert plain(coloured) == report.text(run, found, colour=False, width=100)
    assert len(set(view.GLYPHS.values())) == len(view.GLYPHS)


def test_the_map_marks_what_was_found() -> None:
    found = [finding(), finding("error", NAMES[1], (2, 3)), finding("note", NAMES[0], 1)]
    lines = list(report.heads_map(stack(), found, colour=False, width=80))
    assert [line.count("✖") for line in lines[2:7]] == [0, 2, 0, 0, 0]
    assert [line.startswith(f"  {i}▲") for i, line in enumerate(lines[2:7])] == [False, False, True, False, False]


def test_modules_are_grouped_by_the_numbers_in_their_names() -> None:
    names = ["enc.0.attn", "dec.0.layer.1.attn", "enc.1.attn", "dec.1.layer.1.attn", "", "h2o.attn"]
    blocks = view.blocks([runs.record(name) for name in names])
    assert [(block.name, [label for label, _ in block.rows]) for block in blocks] == [
        ("enc.*.attn", ["0", "1"]),
        ("dec.*.layer.1.attn", ["0", "1"]),
        ("(the model itself)", [""]),
        ("h2o.attn", [""]),
    ]


# ---- the rest ---------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_findings_are_printed_with_where_why_and_what(width: int) -> None:
    found = [finding("note", name, 1) for name in NAMES] * 2 + [finding()]
    lines = list(report.finding_lines(found, colour=False, width=width))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert lines[0] == "▲ warning: wrong scale"
    assert f"{NAMES[2]}: effective scale 0.500" in text
    for words in ("why: It is too large.", "try: Divide by √d_k.", "… and 2 more"):
        assert words in text


def test_scales_tried_are_counted_for_every_head() -> None:
    run = stack(counterfactual=True)
    lines = list(report.scale_lines(run, colour=False, width=80))
    assert max(map(len, lines)) <= 80
    assert len(lines) == 1 + 4  # as it is, and three rules
    for line in lines[1:]:
        assert sum(int(n) for n in re.findall(r"(\d+) (?:flat|level|sharp|saturated)", line)) == 60
    assert not list(report.scale_lines(stack(), colour=False, width=80))


@pytest.mark.parametrize("counts", [(1, 0, 0, 270), (1, 1, 1, 1), (0, 0, 0, 5), (90, 3, 2, 1)])
def test_a_bar_is_as_long_as_it_should_be(counts: tuple[int, ...]) -> None:
    named = dict(zip("abcd", counts, strict=True))
    shares = view.shares(named, 24)
    assert sum(shares.values()) == 24
    assert all((n > 0) == (named[level] > 0) for level, n in shares.items())


def test_what_was_not_seen_is_said() -> None:
    coverage = (Seen("a", "A", True, "sdpa", 3), Seen("b", "B", False, "never ran", 0, "a note"))
    run = runs.run(runs.record("a"), coverage=coverage, notes=("one more thing",))
    for text in (report.text(run), html.html(run)):
        assert "1 of 2 attention modules seen: 1 through sdpa" in text
        assert "not seen: b (B): never ran" in text
        assert "one more thing" in text


def test_the_cost_is_one_line() -> None:
    cost = dict(seconds=0.5, observed_steps=5.0, milliseconds_per_observed_step=100.0, steps=10.0)
    run = runs.run(runs.record("a"), cost=cost | {"share": 0.031})
    wanted = "watching took 100.0 ms per observed step, 3.1 % of the time (5 of 10 steps observed)"
    assert wanted in report.text(run, width=100)
    assert wanted in html.html(run)
    assert wanted in notebook.run(run, ())


def test_nothing_seen_is_said_and_breaks_nothing() -> None:
    empty = Run("Nothing")
    assert report.text(empty) == "Nothing: no attention was seen"
    assert "No attention was seen" in html.html(empty)
    assert "no attention was seen" in notebook.run(empty)


def test_the_last_record_of_every_module_is_shown() -> None:
    run = Run("Steps", (Snapshot(0, (runs.record("a"), runs.record("b"))), Snapshot(7, (runs.record("a", [9.0]),))))
    text = report.text(run)
    assert "5 heads in 2 attention modules" in text
    assert "step 7, the last of 2 observed" in text


# ---- the page ---------------------------------------------------------------

_VOID = {"meta", "br", "rect", "path", "ellipse", "circle"}
_LOADING = {"script", "link", "img", "iframe", "object", "embed", "use", "image", "base", "form"}


class Page(HTMLParser):
    """Tags that close as they open, and what was written between them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize("draw", [html.html, notebook.run])
def test_a_page_asks_nobody_for_anything(draw: Any) -> None:
    run = stack(counterfactual=True)
    text = draw(run, [finding()])
    parsed = Page(text)
    assert not _LOADING & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not {"src", "srcset", "action", "data", "xlink:href"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?:|url\(|@import|//", text)


def test_a_page_shows_every_head_twice_and_leads_from_one_to_the_other() -> None:
    run = stack()
    parsed = Page(html.html(run))
    rows = [x["id"] for x in parsed.of("tr") if "id" in x]
    assert len(rows) == len(set(rows)) == 60
    assert [f"#{row}" for row in rows] == [x["href"] for x in parsed.of("a") if x.get("class") == "cell"]
    bubbles = parsed.of("ellipse")
    assert len(bubbles) == 2 * 60 + len(stats.CELLS) + 1  # a tile per level, and the emblem


def test_a_page_marks_what_was_found_where_it_was() -> None:
    found = [finding(), finding("error", NAMES[1], (2, 3)), finding("note", NAMES[0], 1)]
    parsed = Page(html.html(stack(), found))
    marks = [x["class"] for x in parsed.of("path") if (x["class"] or "").endswith("-mark")]
    assert marks == ["error-mark", "error-mark", "warning-mark"]


def test_bubbles_stand_where_the_level_says() -> None:
    parsed = Page(notebook.run(runs.run(runs.record("a", (0.05, 1.0, 60.0))), ()))
    flat, level, saturated = (float(x["cx"] or "nan") for x in [*parsed.of("ellipse")][:3])
    assert flat < 24 - 8 < level < 24 + 8 < saturated


def test_a_page_escapes_what_is_hostile() -> None:
    record = runs.record(HOSTILE, kind="<b>Kind", how='"><i>how')
    found = [finding("error", HOSTILE, 1), finding("note", HOSTILE)]
    seen = (Seen(HOSTILE, "<u>", False, "<em>why", 0, "<s>note"),)
    run = runs.run(record, model=HOSTILE, coverage=seen, notes=("<q>",))
    for draw in (html.html, notebook.run):
        parsed = Page(draw(run, found))
        assert not {"script", "i", "u", "em", "s", "q"} & {tag for tag, _ in parsed.tags}
        assert any("a<script>alert(1)" in words for words in parsed.words)


def test_only_a_web_address_can_be_clicked() -> None:
    def links(link: str) -> list[dict[str, str | None]]:
        one = Finding("k", "note", "a", None, {"x": 1.0}, "why", "what", link)
        parsed = Page(html.html(runs.run(runs.record("a")), [one]))
        return [x for x in parsed.of("a") if x.get("class") != "cell"]

    assert links("javascript:alert(1)") == []
    assert links("docs/health.md#k") == []
    (link,) = links("https://arxiv.org/abs/1706.03762")
    assert link["rel"] == "noopener noreferrer"


def test_a_page_knows_the_dark_and_the_small() -> None:
    text = html.html(stack())
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "max-width: 30rem" in text


def test_a_page_of_a_large_model_stays_small_enough_to_open() -> None:
    random = np.random.default_rng(0)
    records = [runs.record(f"layers.{i}.attn", random.uniform(0.1, 9, 64)) for i in range(8)]
    assert len(html.html(runs.run(*records))) / 512 < 1500  # bytes per head


# ---- two runs ---------------------------------------------------------------


def test_what_changed_most_comes_first() -> None:
    before = runs.run(runs.record("a"), runs.record("b"), model="before")
    after = runs.run(runs.record("a"), runs.record("b", (0.1, 1.0, 4.0, 0.1)), model="after")
    found = compare(before, after)
    assert len(found.changes) == 8
    assert (found.changes[0].module, found.changes[0].head) == ("b", 3)
    assert found.changes[0].level == ("saturated", "flat")
    assert [change.size for change in found.changes[1:]] == [0] * 7
    text = "\n".join(found.lines())
    assert "1 of 8 heads changed level: 1 saturated → flat" in text
    assert "b, head 3: saturated → flat" in text
    assert "saturated → flat" in html.html(after, [], found)


def test_the_same_twice_is_no_change() -> None:
    run = runs.run(runs.record("a"))
    assert list(compare(run, run).lines())[-1].strip() == "no head differs at all"


@pytest.mark.parametrize(("other", "words"), [(("a",), "there is no b"), (("a", "b", "c"), "there is also c")])
def test_other_modules_cannot_be_compared(other: tuple[str, ...], words: str) -> None:
    ours = runs.run(*(runs.record(name) for name in "ab"))
    with pytest.raises(ValueError, match=words):
        compare(runs.run(*(runs.record(name) for name in other)), ours)


def test_other_heads_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="a has 3 heads of width 16, not 4 of 16"):
        compare(runs.run(runs.record("a", (1, 2, 3))), runs.run(runs.record("a")))
