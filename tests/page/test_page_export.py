"""The exported page: one file with everything inside, and nothing that could break out of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import page_server
import runs
from levelhead.cli import main
from levelhead.course.catalogue import catalogues
from levelhead.lab import figures
from levelhead.lab.figure import Axis, Chart, Fact, Figure, Series
from levelhead.page import assets, export
from page_server import stubbed_page  # noqa: F401

pytestmark = pytest.mark.usefixtures("stubbed")

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028"


def data_in(text: str) -> Any:
    """What the page's modules will read, as a browser finds it."""
    (found,) = re.findall(r'<script type="application/json" id="levelhead-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def modules_in(text: str) -> dict[str, str]:
    """All of them: those in the import map, and those that are read when they are needed."""
    (found,) = re.findall(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    start = "data:text/javascript;charset=utf-8,"
    later = dict(re.findall(r'<script type="text/plain" id="(levelhead/[^"]*)">(.*?)</script>', text))
    imports = json.loads(found)["imports"] | later
    assert all(address.startswith(start) for address in imports.values())
    return {name: unquote(address.removeprefix(start)) for name, address in imports.items()}


@pytest.fixture(scope="module", name="whole")
def whole_export(stubbed: Path) -> str:
    return export.exported(tell=lambda words: None)


def test_every_figure_is_there_once_per_setting_it_depends_on(whole: str) -> None:
    data = data_in(whole)
    assert data["grid"]["d_k"] == [2**n for n in range(13)]
    assert data["grid"]["scale"] == ["none", "1/sqrt(d_k)", "1/d_k", "1/sqrt(d)"]
    assert len(data["grid"]["keys"]) == 3
    assert data["about"]["export"] is True and data["about"]["run"] is False
    counts = {id: len(found) for id, found in data["figures"].items()}
    assert counts == {"logits": 156, "attack": 13, "online": 3, "training": 1, "sentence": 1, "heads": 1, "speed": 1}
    asked = {"d_k": 64, "scale": "1/sqrt(d_k)", "keys": 32, "seed": 0}
    assert data["figures"]["logits"]["64 1/sqrt(d_k) 32"]["extra"] == asked
    assert data["figures"]["attack"]["4096"]["extra"] == {"d_k": 4096, "seed": 0}
    assert data["figures"]["training"][""]["extra"] == {}


def test_nothing_is_outside(whole: str) -> None:
    own = whole.replace(assets.assets()["plotly.js"].content.decode(), "")
    assert "plotly.js v" not in own and len(whole) > 4_000_000
    assert "/assets/" not in own
    assert not re.findall(r"<(?:link|script|img)[^>]*(?:src|href)=", own)
    assert "p { color: teal }" in own
    assert len(whole.encode()) <= export.largest()
    words = modules_in(whole)
    for language in catalogues():
        own = (words[f"levelhead/{kind}-{language}.js"] for kind in ("words", "bench-words"))
        assert sum(len(text.encode()) for text in own) < export.PER_LANGUAGE, language


def test_a_policy_inside_forbids_the_network(whole: str) -> None:
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', whole)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy and "*" not in policy and "connect-src" not in policy
    assert whole.index("Content-Security-Policy") < whole.index("<script")


def test_modules_find_each_other_without_addresses(whole: str) -> None:
    modules = modules_in(whole)
    names = {"bench-data", "cards-data", "declared", "main", "source", "story-data"}
    names |= {f"{kind}-{language}" for kind in ("words", "bench-words") for language in ("en", "hi-Latn")}
    assert set(modules) == {f"levelhead/{name}.js" for name in names}
    assert 'import { data } from "levelhead/source.js";' in modules["levelhead/main.js"]
    assert '<script type="module" async>import "levelhead/main.js";</script>' in whole


def test_fields_that_say_nothing_are_left_out() -> None:
    chart = {"x": {"range": None, "log": False}, "series": [{"low": None, "y": [0, None, 0.0], "z": []}], "outside": {}}
    assert export._filled(chart) == {"x": {}, "series": [{"y": [0, None, 0.0], "z": []}]}
    assert export._filled({"value": 0, "about": ""}) == {"value": 0, "about": ""}


def test_data_stays_inside_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile(id: str, **parameters: Any) -> Figure:
        return Figure(id, HOSTILE, (), HOSTILE, extra={HOSTILE: HOSTILE})

    monkeypatch.setattr(figures, "figure", hostile)
    text = export.exported(tell=lambda words: None)
    assert data_in(text)["figures"]["training"][""]["title"] == HOSTILE
    assert HOSTILE not in text and "onerror=alert(2)>" not in text


def test_nothing_in_a_file_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def figure(id: str, **parameters: Any) -> Figure:
        series = Series("measured", "live", "line", [1], [1.23456])
        law = Series("law", "theory", "line", [1], [2])
        facts = (Fact("σ", 1.23456, "live"), Fact("σ", 1.0, "theory"))
        charts = (Chart("c", Axis("x"), Axis("y"), (series, law)),)
        old = "July, on another machine" if id == "training" else ""
        return Figure(id, "f", charts, "live = 1", facts, recorded=old)

    monkeypatch.setattr(figures, "figure", figure)
    found = data_in(export.exported(tell=lambda words: None))["figures"]
    one = found["logits"]["64 1/sqrt(d_k) 32"]
    sources = [series["source"] for series in one["charts"][0]["series"]]
    assert sources == [fact["source"] for fact in one["facts"]] == ["recorded", "theory"]
    assert one["recorded"].startswith("computed when this page was saved, by levelhead")
    assert one["python"] == "live = 1"
    assert (one["charts"][0]["series"][0]["y"], one["facts"][0]["value"]) == ([1.235], 1.23456)
    assert found["training"][""]["recorded"] == "July, on another machine"


def test_a_script_cannot_end_early(stubbed: Path) -> None:
    text = export._script(assets.Asset("x.js", "", b'a = "</script>" + "</SCRIPT >"'))
    assert text == '<script type="text/plain" id="levelhead-x">\na = "<\\/script>" + "<\\/SCRIPT >"\n</script>\n'
    with pytest.raises(RuntimeError, match="x.js"):
        export._script(assets.Asset("x.js", "", b"<!-- <script>"))
    with pytest.raises(RuntimeError, match="x.css"):
        export._style(assets.Asset("x.css", "", b"/* </style> */"))


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("index.html", "<title>", '<img src="/assets/a.png"><title>'),
        ("index.html", '<script type="module" src="/assets/main.js"></script>', ""),
        ("main.js", "./source.js", "./gone.js"),
    ],
)
def test_what_the_export_does_not_know_is_an_error(file: str, before: str, after: str) -> None:
    files = dict(assets.assets())
    text = files[file].content.decode()
    assert before in text
    files[file] = assets.Asset(file, files[file].kind, text.replace(before, after).encode())
    with pytest.raises(RuntimeError):
        export.inlined(files, "{}")


@pytest.mark.parametrize(
    "statement",
    [
        'import { a } from "./b.js";',
        "import {\n a,\n c } from './b.js'",
        'import "./b.js";',
        'export { a } from "./b.js";',
        'const b = await import("./b.js");',
        'export*from"./b.js"',
    ],
)
def test_every_way_to_import_is_known(statement: str) -> None:
    b = assets.Asset("b.js", "", b"")
    text = export._renamed({"b.js": b}, assets.Asset("a.js", "", statement.encode()))
    later = 'levelheadModule("levelhead/b.js").then((address) => import(address))'
    assert text == statement.replace('import("./b.js")', later).replace("./b.js", "levelhead/b.js")


def test_the_first_chapter_comes_first() -> None:
    """It runs while the rest of the file arrives: other chapters, the drawing library, the figures, the lab bench."""
    modules = ("main", "story", "dom", "words-en", "chapter-hook", "scene-hook", "chapter-softmax", "bench")
    files = {f"{name}.js": assets.Asset(f"{name}.js", "", b"export {};") for name in modules}
    files["main.js"] = assets.Asset("main.js", "", b'import "./dom.js"; import("./story.js"); import("./bench.js")')
    index = '<head><script type="module" src="/assets/main.js"></script></head><body><h1>x</h1></body>'
    files |= {
        "plotly.js": assets.Asset("plotly.js", "", b"P"),
        "index.html": assets.Asset("index.html", "", index.encode()),
    }
    text = export.inlined(files, "{}")
    begun = text.index('<script type="module" async>')
    place = {name: text.index(f'id="levelhead/{name}.js"') for name in modules if name not in ("main", "dom")}
    place |= {name: text.index(f'id="levelhead-{name}"') for name in ("plotly", "data")}
    before = {name for name, at in place.items() if at < begun}
    assert before == {"story", "words-en", "chapter-hook", "scene-hook"} and text.index("<h1>") < text.index(
        "importmap"
    )
    order = ["chapter-softmax", "plotly", "data", "bench"]
    assert sorted(order, key=place.__getitem__) == order


# ---- the command


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: str) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")
    assert main(["page", "--export", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"wrote {path}\n"
    assert "logits: 156 settings" in said.err
    assert path.read_text() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_takes_the_place_of_the_sample(tmp_path: Path) -> None:
    run = runs.run(runs.record("layer.0"), model="Mine <b>")
    run.save(tmp_path / "run.json")
    path = tmp_path / "page.html"
    assert main(["page", "--run", str(tmp_path / "run.json"), "--export", str(path)]) == 0
    heads = data_in(path.read_text())["figures"]["heads"][""]
    assert heads["extra"] == {"model": "Mine <b>", "steps": 1}


def test_an_unwritable_place_is_refused_before_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_server.calls.clear()
    for place in (tmp_path, tmp_path / "none" / "page.html"):
        assert main(["page", "--export", str(place)]) == 2
    bad = tmp_path / "run.json"
    bad.write_text("{")
    assert main(["page", "--run", str(bad), "--export", str(tmp_path / "page.html")]) == 2
    assert page_server.calls == []
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("expected") == 3


def test_what_is_too_large_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = export.largest()
    monkeypatch.setattr(export, "catalogues", lambda: ("en", "hi-Latn", "one more"))
    assert export.largest() == room + export.PER_LANGUAGE  # a new language does not take it from the figures
    monkeypatch.setattr(export, "LARGEST", 1_000_000)
    path = tmp_path / "page.html"
    assert main(["page", "--export", str(path)]) == 2
    assert "logits 0." in capsys.readouterr().err
    assert not path.exists()
