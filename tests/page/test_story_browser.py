"""The story in a real browser: every chapter that exists, in every language.

A chapter needs no test of its own for what all chapters do: its name appears here by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from browsing import CHROMIUM, DESKTOP, FLAGS, PHONE, Tab, in_a_browser, started_browser, tabs  # noqa: F401
from levelhead import reference, stats
from levelhead.course.catalogue import catalogues
from levelhead.course.chapter import Chapter
from levelhead.course.chapters import CHAPTERS

pytestmark = in_a_browser

LAST = CHAPTERS[-1].id
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.id for chapter in CHAPTERS])
HINGLISH = "hi-Latn"
OPEN_ENDS = re.compile(r"NaN|undefined|\[object|\{\w+\}|\[\[|null")


@pytest.fixture
def opened(address: str, browser: Any) -> Iterator[Callable[..., Tab]]:
    """Opens the story at this address; at the end nothing may have gone wrong."""
    with tabs(browser) as open_tab:

        def open_story(state: str = "", chapter: str | None = None, **options: Any) -> Tab:
            tab = open_tab(f"{address}{state}", **options)
            arrives(tab, chapter or "hook")
            return tab

        yield open_story


@pytest.fixture(scope="module", name="loaded")
def loaded_once(address: str, browser: Any) -> Iterator[dict[str, Tab]]:
    """Two tabs that all chapters share: the page is loaded once."""
    with tabs(browser) as open_tab:
        yield {"desktop": open_tab(address), "phone": open_tab(address, viewport=PHONE, reduced_motion="reduce")}


@contextmanager
def lent(tab: Tab) -> Iterator[Tab]:
    """A shared tab for one test, in English and with nothing stored. What goes wrong is this test's."""
    tab.ask("import('/assets/storage.js').then(({ keep }) => keep('language', 'en'))")  # the page's memory has it, too
    tab.ask("localStorage.clear()")
    tab.errors.clear()
    yield tab
    assert tab.errors == []


@pytest.fixture
def story(loaded: dict[str, Tab]) -> Iterator[Tab]:
    with lent(loaded["desktop"]) as tab:
        yield tab


@pytest.fixture
def phone(loaded: dict[str, Tab]) -> Iterator[Tab]:
    with lent(loaded["phone"]) as tab:
        yield tab


def arrives(tab: Tab, chapter: str) -> None:
    tab.page.locator(f"[data-chapter={chapter}]").wait_for()


def goes(tab: Tab, hash: str, chapter: str) -> None:
    tab.page.evaluate("hash => { location.hash = hash }", hash)
    arrives(tab, chapter)


def plain(text: str) -> str:
    """The words of a value, without markup and numbers, for a search in the page."""
    return max(re.split(r"[{}*`$_√]|\{\w+\}", text), key=len).strip()


@each_chapter
def test_a_chapter_asks_before_it_shows_and_the_address_holds_it(story: Tab, chapter: Chapter) -> None:
    words, tab = catalogues()["en"][chapter.id], story
    goes(tab, f"#/{chapter.id}", chapter.id)
    tab.page.locator(".option").first.wait_for()
    assert tab.count(".option") == len(chapter.options)
    assert tab.count(".because, .takeaway, .chapter-text > *, .player") == 0
    assert plain(words["because"]) not in tab.text("body")
    first = chapter.options[0]
    tab.page.locator(f".option[value={first}]").click()
    tab.page.locator(".because").wait_for()
    assert plain(words["because"]) in tab.text(".because")
    assert plain(words["options"][first]) in tab.text(".said")
    assert plain(words["options"][chapter.answer]) in tab.text(".is")
    assert tab.count(".takeaway") == 1 and tab.count(".scene > *") > 0 and tab.count(".option") == 0
    assert f"answers={chapter.id}:{first}" in tab.page.url
    assert tab.ask("document.activeElement.className") == "is"  # where a screen reader goes on
    scene = tab.text(".scene")
    tab.page.reload()
    arrives(tab, chapter.id)
    assert tab.text(".scene") == scene and plain(words["options"][first]) in tab.text(".said")
    tab.page.locator(".ask-again").click()
    tab.page.locator(".option").first.wait_for()
    assert "answers" not in tab.page.url


@each_chapter
def test_a_chapter_has_all_its_words_in_every_language(story: Tab, chapter: Chapter) -> None:
    tab = story
    goes(tab, f"#/{chapter.id}?lang={HINGLISH}", chapter.id)
    tab.page.locator(".skip-question").click()
    tab.page.locator(".because").wait_for()
    assert tab.count(".said") == 0 and f"{chapter.id}:skip" in tab.page.url
    for language in (HINGLISH, "en"):
        words = catalogues()[language][chapter.id]
        tab.page.locator(".top-bar select").select_option(language)
        tab.until(lambda language=language: tab.ask("document.documentElement.lang") == language, language)
        assert plain(words["title"]) in tab.text("h1") and plain(words["takeaway"]) in tab.text(".takeaway")
        tab.ask(UNFOLDED)
        said = tab.ask(SAID)
        assert not OPEN_ENDS.search(said), OPEN_ENDS.search(said)
        labels = tab.ask("[...document.querySelectorAll('#story [aria-label]')].map(x => x.ariaLabel).join(' ')")
        assert not OPEN_ENDS.search(labels), labels
        assert tab.ask(
            "[...document.querySelectorAll('#story svg[role=img], #story [role=img]')].every(x => x.ariaLabel)"
        )
        assert len(tab.text(".code").splitlines()) >= 5
        assert tab.count(".claim-list li") == len(chapter.claims)
    assert "lang=en" in tab.page.url


@each_chapter
def test_a_pause_stands_where_the_words_have_one(story: Tab, chapter: Chapter) -> None:
    """After everything else of its chapter, in every language, and nowhere before the answer."""
    tab = story
    goes(tab, f"#/{chapter.id}", chapter.id)
    tab.page.locator(".option").first.wait_for()
    assert tab.count(".pause") == 0
    tab.page.locator(".skip-question").click()
    tab.page.locator(".because").wait_for()
    for language in catalogues():
        tab.page.locator(".top-bar select").select_option(language)
        tab.until(lambda language=language: tab.ask("document.documentElement.lang") == language, language)
        words = catalogues()[language][chapter.id].get("pause", [])
        assert tab.count(".chapter-text > .folds + .pause:last-child > p") == tab.count(".pause > p") == len(words)
        assert all(plain(text) in tab.text(".pause") for text in words)
    assert tab.count(".pause") == (chapter.id == "training")


@each_chapter
def test_arrow_keys_go_through_steps_then_chapters(story: Tab, chapter: Chapter) -> None:
    tab = story
    goes(tab, f"#/{chapter.id}?answers={chapter.id}:skip", chapter.id)
    tab.page.locator(".because").wait_for()
    for step in range(1, min(chapter.steps, 3)):
        before = tab.text(".step-words")
        tab.page.keyboard.press("ArrowRight")
        tab.until(lambda step=step: tab.page.url.endswith(f"&step={step}"), f"step {step}")
        assert tab.text(".step-words") != before
    for _ in range(1, min(chapter.steps, 3)):
        tab.page.keyboard.press("ArrowLeft")
    tab.until(lambda: "step" not in tab.page.url, "the first step")
    last = max(chapter.steps - 1, 0)
    if last:
        goes(tab, f"#/{chapter.id}?answers={chapter.id}:skip&step={last}", chapter.id)
        at_the_end = [str(chapter.steps)] * 2  # "step 9 of 9"
        tab.until(lambda: re.findall(r"\d+", tab.text(".player-at")) == at_the_end, "the last step")
    tab.page.keyboard.press("ArrowRight")
    at = CHAPTERS.index(chapter)
    if chapter.id != LAST:
        arrives(tab, CHAPTERS[at + 1].id)
        assert f"#/{CHAPTERS[at + 1].id}?answers={chapter.id}:skip" in tab.page.url  # answers are kept, the step is not
        tab.page.keyboard.press("ArrowLeft")
    arrives(tab, chapter.id)


@each_chapter
def test_every_screen_has_room(phone: Tab, chapter: Chapter) -> None:
    """Phone and desktop, light and dark, at 200 % zoom, without motion: nothing is wider than the window, before the
    answer, after it, and at every step."""
    tab, narrow = phone, {"width": 320, "height": 480}
    zoomed = {"width": DESKTOP["width"] // 2, "height": DESKTOP["height"] // 2}
    for language in (HINGLISH, "en"):
        tab.page.set_viewport_size(narrow)
        goes(tab, f"#/{chapter.id}?lang={language}", chapter.id)
        tab.page.locator(f"html[lang={language}] .option").first.wait_for()
        assert not tab.ask(WIDE), (language, "before the answer", tab.ask(WIDE))
        goes(tab, f"#/{chapter.id}?lang={language}&answers={chapter.id}:skip", chapter.id)
        tab.page.locator(f"html[lang={language}] .because").wait_for()
        tab.ask(UNFOLDED)
        for size in (PHONE, zoomed, DESKTOP, narrow):
            tab.page.set_viewport_size(size)
            assert not tab.ask(WIDE), (language, size, tab.ask(WIDE))
        for step in range(1, chapter.steps):
            tab.page.keyboard.press("ArrowRight")
            assert not tab.ask(WIDE), (language, step, tab.ask(WIDE))
        last = f"step={chapter.steps - 1}"
        tab.until(lambda last=last: chapter.steps < 2 or last in tab.page.url, last)
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        paper = tab.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) > 384) == (scheme == "light")
    moving = (
        "[...document.querySelectorAll('#story *')].filter(x => getComputedStyle(x).transitionDuration !== '0s').length"
    )
    assert tab.ask(moving) == 0
    assert tab.page.locator(".player-play").is_hidden()


SAID = "document.querySelector('#story').innerText.replaceAll(document.querySelector('.code').innerText, '')"
UNFOLDED = "document.querySelectorAll('.fold').forEach((x) => { x.open = true })"
# What is wider than the window, two frames later: charts follow it.
WIDE = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(
  document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll('#story *')].filter((x) => x.getBoundingClientRect().right > innerWidth + 1)
    .map((x) => x.className?.baseVal ?? x.className).slice(0, 5)))))"""

HOSTILE = {
    "#/nothing": "“nothing”",
    "#/__proto__?lang=__proto__": "__proto__",
    "#/hook?lang=<img src=x onerror=alert(1)>": "<img",
    "#/hook?answers=hook:__proto__": "hook:__proto__",
    "#/hook?answers=constructor:skip,:,::": "constructor",
    "#/hook?answers=hook:divided,hook:both": "hook:both",
    "#/hook?step=-1&step=999": "-1",
    "#/hook?constructor=1": "constructor",
    "#/%E0%A4%A?lang=%": "%E0",
    "#/" + "x" * 5000: "xxx",
}


def test_a_hostile_address_opens_the_first_chapter_with_a_sentence(opened: Callable[..., Tab]) -> None:
    tab = opened()
    for address, said in HOSTILE.items():
        goes(tab, address, "hook")
        tab.until(lambda said=said: said in tab.text(".notes:visible"), f"a note about {said}")
        assert tab.count(".notes *") == 0 and tab.count("#story img") == 0  # text, and nothing that was parsed
        assert tab.count(".option") == 4 and len(tab.text(".notes:visible")) < 400
    goes(tab, "#", "hook")
    tab.until(lambda: tab.count("#story .notes") == 0, "the note to go")


def test_a_note_says_what_is_shown(story: Tab) -> None:
    tab = story
    goes(tab, "#/softmax?foo=bar", "softmax")
    tab.until(lambda: "The link sets “foo”" in tab.text(".notes:visible"), "the note")
    assert "first chapter" not in tab.text(".notes:visible")
    tab.until(lambda: "Chapter 3" in tab.text(".course"), "the chapter in English")
    tab.page.locator(".top-bar select").select_option(HINGLISH)  # remembered from here
    tab.until(lambda: tab.ask("document.documentElement.lang") == HINGLISH, "the language")
    goes(tab, "#/hook?lang=xx", "hook")
    tab.until(lambda: "This is English" in tab.text(".notes:visible"), "the note on the language")
    assert tab.ask("document.documentElement.lang") == "en"


def test_the_story_works_where_nothing_can_be_stored(address: str, browser: Any) -> None:
    with tabs(browser) as open_tab:
        tab = open_tab("about:blank")
        broken = (
            "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError') } })"
        )
        tab.page.add_init_script(broken)
        tab.page.goto(address)
        arrives(tab, "hook")
        tab.requests.clear()
        tab.page.locator(".top-bar select").select_option(HINGLISH)
        tab.until(lambda: "aapko" in tab.text(".kicker").lower(), "the language")
        goes(tab, "#/softmax", "softmax")
        assert tab.ask("document.documentElement.lang") == HINGLISH  # kept in memory
        tab.requests.clear()


def test_a_language_is_remembered(opened: Callable[..., Tab]) -> None:
    tab = opened()
    tab.page.locator(".top-bar select").select_option(HINGLISH)
    tab.until(lambda: f"lang={HINGLISH}" in tab.page.url, "the address")
    tab.page.evaluate("location.hash = '#/softmax'")
    arrives(tab, "softmax")
    assert tab.ask("document.documentElement.lang") == HINGLISH


def test_the_first_chapter_is_small_and_needs_no_drawing_library(opened: Callable[..., Tab]) -> None:
    tab = opened()
    tab.page.wait_for_load_state("networkidle")
    names = [one.url.rsplit("/", 1)[1] for one in tab.requests]
    assert "chapter-hook.js" in names and "plotly.js" not in names and "bench.js" not in names
    assert f"words-{HINGLISH}.js" not in names
    loaded = {name for name in names if name.startswith("chapter-")}
    assert loaded <= {f"chapter-{chapter.id}.js" for chapter in CHAPTERS[:2]}  # this one, and the next
    assert sum(len(one.response().body()) for one in tab.requests if one.response().status == 200) < 400_000


def test_what_does_not_load_is_named_and_everything_agrees_with_what_is_shown(address: str, browser: Any) -> None:
    """A chapter, then a language: the page stays where it is, says what is missing, and loads it when it is there."""
    with tabs(browser) as open_tab:
        tab = open_tab(f"{address}#/hook?answers=hook:skip")
        arrives(tab, "hook")
        tab.page.wait_for_load_state("networkidle")
        title, held = tab.ask("document.title"), []
        tab.page.route("**/chapter-attack.js", lambda route: held.append(route))
        tab.ask("scrollTo({ top: 900, behavior: 'instant' })")
        tab.ask("location.hash = '#/attack?answers=hook:skip'")
        tab.until(lambda: len(held) > 0 and tab.count("#story[aria-busy=true]") == 1, "the chapter to be asked for")
        held[0].abort()
        tab.page.locator(".trouble[role=alert]").wait_for()
        assert catalogues()["en"]["attack"]["title"] in tab.text(".trouble")
        assert tab.ask(IN_SIGHT) and tab.count("#story[aria-busy]") == 0 and tab.count("[data-chapter=hook]") == 1
        assert tab.page.url.endswith("#/hook?answers=hook:skip") and tab.ask("document.title") == title
        tab.page.unroute("**/chapter-attack.js")
        tab.page.route(f"**/words-{HINGLISH}.js", lambda route: route.abort())
        tab.page.locator(".top-bar select").select_option(HINGLISH)
        tab.until(lambda: "Hinglish" in tab.text(".trouble"), "the language to be named")
        assert tab.page.locator(".top-bar select").input_value() == "en" == tab.ask("document.documentElement.lang")
        assert "lang" not in tab.page.url and tab.ask("localStorage.getItem('levelhead-language')") == "en"
        tab.page.reload()
        arrives(tab, "hook")
        goes(tab, "#/attack", "attack")
        assert tab.count(".trouble") == 0
        assert len(tab.errors) == 4, tab.errors  # two files, each said by the browser and by the page
        tab.errors.clear()


BAR_INSIDE = "[...document.querySelectorAll('.bar-end *')].every(x => x.getBoundingClientRect().right <= innerWidth)"
IN_SIGHT = """(({ top, bottom }) => top >= 0 && bottom <= innerHeight)(
  document.querySelector('.trouble').getBoundingClientRect())"""


def test_forced_colours_leave_bars_and_choices(story: Tab) -> None:
    tab = story
    tab.page.emulate_media(forced_colors="active")
    back = "getComputedStyle(document.querySelector('{}')).backgroundColor"
    for chapter in ("hook", "online"):
        goes(tab, f"#/{chapter}?answers={chapter}:skip", chapter)
        tab.page.locator(".because").wait_for()
        assert tab.ask(back.format(".bar-fill")) != tab.ask(back.format(".bar-track")), chapter
    goes(tab, "#/attack?answers=attack:skip", "attack")
    tab.page.locator(".because").wait_for()
    chosen, other = (back.format(f".segments input{state} + span") for state in (":checked", ":not(:checked)"))
    assert tab.ask(chosen) != tab.ask(other)
    goes(tab, "#/real?answers=real:skip", "real")
    tab.page.locator(".because").wait_for()
    edge = "getComputedStyle(document.querySelector('.real-cell[aria-checked={}]')).borderTopColor"
    assert tab.ask(edge.format("true")) != tab.ask(edge.format("false"))
    tab.page.emulate_media(forced_colors="none")


def test_what_is_pressed_or_pulled_is_24_pixels_high(story: Tab) -> None:
    tab = story
    for chapter in ("by_hand", "attack", None):
        if chapter:
            goes(tab, f"#/{chapter}?answers={chapter}:skip", chapter)
            tab.page.locator(f"[data-chapter={chapter}] .because").wait_for()
            tab.ask(UNFOLDED)
            tab.page.locator(".fold .to-cards").wait_for()
        else:
            tab.goes_to("#scale=1/d_k^p")
            tab.page.locator("#strip").wait_for()
        for size in (PHONE, DESKTOP):
            tab.page.set_viewport_size(size)
            assert tab.ask(LOW) == [], (chapter, size)


LOW = """[...document.querySelectorAll('a:not(.skip), input[type=range], summary, button, select')]
  .filter((x) => x.checkVisibility() && x.offsetHeight > 0 && x.getBoundingClientRect().height < 23.9)
  .map((x) => x.className + ' ' + x.id + ': ' + x.textContent)"""


def test_large_letters_have_room(address: str, browser: Any) -> None:
    """A reader whose browser's letters are twice as large, on a phone."""
    large = browser.browser_type.launch(executable_path=CHROMIUM, args=[*FLAGS, "--blink-settings=defaultFontSize=32"])
    with tabs(large) as open_tab:
        tab = open_tab(f"{address}#/hook", viewport=PHONE)
        for language in (HINGLISH, "en"):
            for chapter in ("hook", "attack", "cards"):
                hash = f"#/{chapter}?lang={language}" + (f"&answers={chapter}:skip" if chapter != "cards" else "")
                goes(tab, hash, chapter)
                tab.until(lambda language=language: tab.ask("document.documentElement.lang") == language, language)
                assert tab.ask("parseFloat(getComputedStyle(document.documentElement).fontSize)") == 32
                inside = tab.ask(BAR_INSIDE)
                assert inside and not tab.ask(WIDE), (hash, tab.ask(WIDE))
    large.close()


def test_links_lead_to_the_bench_and_back(opened: Callable[..., Tab]) -> None:
    tab = opened("#/hook?answers=hook:skip")
    tab.page.locator(".fold-claims summary").click()
    tab.page.locator(".claim-list a").first.click()
    tab.until(lambda: tab.count("#claim-C5[open]") == 1, "the claim")
    assert tab.page.locator("#bench").is_visible() and not tab.page.locator("#story").is_visible()
    tab.page.locator("#d_k").press("End")
    tab.until(lambda: "d_k=4096" in tab.page.url, "the bench's address")
    tab.page.go_back()
    arrives(tab, "hook")
    assert not tab.page.locator("#bench").is_visible() and tab.count("#story .notes") == 0
    tab.page.locator(".to-bench").click()
    tab.until(lambda: "d_k=4096" in tab.page.url and tab.text("#d_k-now") == "4096", "the bench as it was left")
    tab.page.locator(".brand a").last.click()
    tab.page.locator("#story").wait_for()
    assert tab.page.url.endswith("#/hook?answers=hook:skip")  # and the story as it was left


def test_contents_numbers_and_swipes(opened: Callable[..., Tab]) -> None:
    tab = opened("#/hook?answers=hook:skip", has_touch=True, viewport=PHONE)
    tab.page.locator(".because .number[title]").first.click()
    assert "Live" in tab.text(".where:visible")
    tab.page.locator(".contents summary").click()
    assert tab.count(".contents li") == len(CHAPTERS) and tab.count(".contents a[aria-current=page]") == 1
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator(".contents nav").is_visible()
    tab.ask(SWIPE)
    arrives(tab, CHAPTERS[1].id)
    tab.page.go_back()
    arrives(tab, "hook")


SWIPE = """() => {
  const target = document.querySelector('h1');
  const touch = (clientX) => new Touch({ identifier: 1, target, clientX, clientY: 100 });
  const fire = (type, all, changed) => target.dispatchEvent(
    new TouchEvent(type, { bubbles: true, touches: all, changedTouches: changed }));
  fire('touchstart', [touch(300)], [touch(300)]);
  fire('touchend', [], [touch(120)]);
}"""


def test_code_is_copied(opened: Callable[..., Tab]) -> None:
    tab = opened("#/softmax?answers=softmax:skip", "softmax", permissions=["clipboard-read", "clipboard-write"])
    tab.page.locator(".fold-code summary").click()
    tab.page.get_by_role("button", name="PyTorch").click()
    tab.page.locator(".copy-code").click()
    tab.until(lambda: "copied" in tab.text(".tabs"), "the copy")
    assert tab.ask("navigator.clipboard.readText()").startswith("import torch")


def test_a_softmax_of_the_readers_own_is_the_references(opened: Callable[..., Tab]) -> None:
    tab = opened("#/softmax?answers=softmax:skip", "softmax")
    tab.page.get_by_role("slider", name="logit 1", exact=True).press("ArrowRight")
    tab.page.get_by_role("slider", name="add to all", exact=True).press("End")
    logits = [float(x.replace("−", "-")) for x in tab.text(".sandbox .bar-name").split()]
    assert logits == [107.5, 103, 101]
    rows = tab.page.evaluate("async (s) => (await import('/assets/measure.js')).softmax(s)", logits)
    wanted = reference_softmax(logits)
    assert rows == pytest.approx(wanted, rel=1e-12)
    assert [float(x) for x in tab.text(".sandbox .bar-value").split()] == pytest.approx(wanted, abs=5e-4)
    for _ in range(4):
        if tab.page.get_by_role("button", name="one logit more").is_enabled():
            tab.page.get_by_role("button", name="one logit more").click()
    assert tab.count(".sandbox .story-bar") == 5 and tab.count(".sandbox .number.here") >= 3


GAUGE = "async (p) => (await import('/assets/measure.js')).gaugeOf(p)"


ROWS = ([0, 0, 0], [1, 0, 0.3], [3, 0, -1], [5, 0, 0, 0], [25, 2, -3], [0.4, 0, 0.1, 0, 0])


def test_a_gauge_of_the_browser_is_the_cores(opened: Callable[..., Tab]) -> None:
    tab = opened()
    levels = set()
    for logits in ROWS:
        weights = reference_softmax(logits)
        found = tab.page.evaluate(GAUGE, weights)
        entropy = -sum(p * math.log(p) for p in weights if p) / math.log(len(weights))
        level = stats.level(entropy, float(max(weights) >= stats.SATURATED_ROW))
        place = stats.bubble(entropy, level)
        assert place is not None and found["level"] == level
        assert found["bubble"] == pytest.approx(place / 8, abs=1e-9)
        levels.add(level)
    assert levels == set(stats.CELLS)


def reference_softmax(logits: list[float]) -> list[float]:
    keys = np.array(logits, dtype=np.float64)[:, None]
    return list(reference.attention(np.ones((1, 1)), keys, np.eye(len(logits)), scale=1.0)[0])


# ---- a reader who goes back, is quick, speaks two languages, or prints


def test_going_back_keeps_the_later_answers(opened: Callable[..., Tab]) -> None:
    tab = opened()
    tab.page.locator(".option").first.click()
    tab.page.locator(".end.next").click()
    arrives(tab, "by_hand")
    tab.page.locator(".option").first.click()
    tab.page.locator(".top-bar select").select_option(HINGLISH)
    tab.until(lambda: f"lang={HINGLISH}" in tab.page.url, "the language")
    given = tab.page.url.split("?")[1]
    assert "by_hand:" in given
    tab.page.go_back()
    arrives(tab, "hook")
    tab.until(lambda: tab.page.url.endswith(f"#/hook?{given}"), "the answers in the older address")
    tab.page.locator(".end.next").click()
    arrives(tab, "by_hand")
    assert tab.count(".quiz.answered") == 1
    goes(tab, "#/hook", "hook")  # an address that was typed says all that there is
    tab.until(lambda: tab.count(".quiz.answered") == 0, "the question")


@pytest.mark.parametrize("pressed", [".option", ".player-play"])
def test_what_is_pressed_while_the_next_chapter_loads_is_not_its_own(opened: Callable[..., Tab], pressed: str) -> None:
    before = "walk?answers=walk:skip" if pressed == ".player-play" else "walk"
    tab = opened(f"#/{before}", "walk")
    held: list[Any] = []
    tab.page.route("**/*attack*", lambda route: held.append(route))
    if pressed == ".player-play":
        tab.page.locator(pressed).click()
    tab.page.evaluate("location.hash = '#/attack?answers=attack:skip'")
    tab.until(lambda: len(held) > 0, "the chapter to be asked for")
    if pressed == ".option":
        tab.page.locator(pressed).first.click()
    tab.page.wait_for_timeout(1600)  # longer than the player's pause
    for one in held:
        one.continue_()
    tab.page.unroute("**/*attack*")
    arrives(tab, "attack")
    assert tab.page.url.endswith("#/attack?answers=attack:skip") and tab.count(".trouble:visible") == 0


def test_another_language_opens_where_the_reader_was(opened: Callable[..., Tab]) -> None:
    tab = opened("#/softmax?answers=softmax:skip", "softmax")
    tab.page.locator(".fold-derivation summary").click()
    tab.slide("logit 1", "End")
    highest = tab.page.locator(".sliders input").first.input_value()
    top = "document.querySelector('.fold-derivation').getBoundingClientRect().top"
    tab.ask("document.querySelector('.fold-derivation').scrollIntoView({ block: 'start', behavior: 'instant' })")
    before = tab.ask(top)
    tab.page.locator(".top-bar select").focus()
    assert tab.ask(top) == before  # the bar is in sight already
    tab.page.locator(".top-bar select").select_option(HINGLISH)
    tab.until(lambda: tab.ask("document.documentElement.lang") == HINGLISH, "the language")
    assert tab.count(".fold-derivation[open]") == 1 and tab.count(".fold[open]") == 1
    assert tab.page.locator(".sliders input").first.input_value() == highest
    assert tab.ask("document.activeElement.className") == "languages"
    assert abs(tab.ask(top) - before) <= 2


def test_paper_has_the_derivation_and_no_controls(opened: Callable[..., Tab]) -> None:
    tab = opened("#/walk?answers=walk:skip", "walk")
    tab.page.emulate_media(media="print")
    tab.ask("dispatchEvent(new Event('beforeprint'))")
    for shown in (".fold-derivation math", ".fold-code .code", ".claim-list"):
        assert tab.page.locator(shown).first.is_visible()
    for hidden in (".top-bar", ".player", ".ends nav", ".fold-cards"):
        assert not tab.page.locator(hidden).is_visible()
    assert tab.ask("getComputedStyle(document.querySelector('.scene *')).printColorAdjust") == "exact", "bars have ink"
    tab.ask("dispatchEvent(new Event('afterprint'))")
    assert tab.count(".fold[open]") == 0
    goes(tab, "#/walk", "walk")  # before an answer there is a question alone, on paper, too
    tab.page.locator(".option").first.wait_for()
    tab.ask("dispatchEvent(new Event('beforeprint'))")
    assert tab.page.locator(".quiz").is_visible() and tab.count(".fold, .takeaway") == 0


def test_a_swipe_is_not_also_the_browsers(opened: Callable[..., Tab]) -> None:
    tab = opened("#/by_hand?answers=by_hand:skip", "by_hand", has_touch=True, is_mobile=True, viewport=PHONE)
    assert tab.ask("getComputedStyle(document.documentElement).overscrollBehaviorX") == "none"
    finger = tab.page.context.new_cdp_session(tab.page)
    for places in ((330, 200, 60), (60, 200, 330)):
        for x in places:
            kind = "touchStart" if x == places[0] else "touchMove"
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": 150}]})
        finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        tab.page.wait_for_timeout(400)
    assert tab.page.url.endswith("#/by_hand?answers=by_hand:skip")  # one step forward, one back
