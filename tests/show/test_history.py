"""A recorded run over its steps: curves with their alarms, in a page, in a notebook, and from the command line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import levelhead as lh
from levelhead.cli.main import main
from levelhead.diagnosis import logit_growth
from levelhead.runs import tally
from levelhead.runs.record import Run, Snapshot
from levelhead.show import curves_svg, html
from levelhead.sinks import JSONL, Parquet
from runs import record, run


def history(last: float, steps: int = 40) -> Run:
    """Two modules; the largest logit of the second grows from 2."""
    curve = np.geomspace(2.0, last, steps)
    snapshots = []
    for step, level in enumerate(curve):
        records = [record("layers.0.<attn>"), record("layers.1.attn")]
        for each, size in zip(records, (3.0, level), strict=True):
            each.tally[:, tally.INDEX["max_logit"]], each.tally[:, tally.INDEX["min_logit"]] = size, -1.0
        snapshots.append(Snapshot(10 * step, tuple(records)))
    coverage = run(*snapshots[0].records).coverage
    loss = tuple((10 * step, 3.0 / (1 + step)) for step in range(steps))
    return Run("Grown", tuple(snapshots), coverage, logged={"loss": loss})


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(f"<svg{part.split('</svg>')[0]}</svg>") for part in page.split("<svg")[1:]]


def test_curves_with_alarms_where_a_watch_would_have_raised_them() -> None:
    sick = history(400.0)
    alarm = logit_growth.first_alarm(sick)
    assert alarm is not None and alarm[1] == "layers.1.attn"
    page = html.html(sick, lh.diagnose(sick))
    charts = [svg for svg in drawings(page) if "over steps" in svg.get("aria-label", "")]
    assert [svg.get("aria-label", "").partition(" over")[0] for svg in charts] == [
        "largest |logit|",
        "entropy, H/ln n",
        "loss",
    ]
    lines = [[path for path in svg if path.get("fill") == "none"] for svg in charts]
    assert [len(x) for x in lines] == [2, 2, 1]
    assert all(len([p for p in svg if p.get("class") == "alarm-line"]) == 1 for svg in charts)
    assert len([p for p in charts[0] if p.get("class") == "warning-mark"]) == 1
    assert f"layers.1.attn head 0 at step {alarm[0]}" in page and "<attn>" not in page
    assert "Attention may be the cause" in page and "not judged" in page


def test_a_clean_history_has_no_mark_and_a_verdict() -> None:
    calm = history(12.0)
    page = html.html(calm, lh.diagnose(calm))
    assert "No alarm on the way" in page and 'class="warning-mark"' not in page
    assert "Attention is not the cause" in page


def test_one_step_has_no_curves() -> None:
    one = replace(history(400.0), snapshots=history(400.0).snapshots[:1])
    assert curves_svg.charts(one) == "" and "Over the steps" not in html.html(one, lh.diagnose(one))


def test_a_notebook_has_numbers_history_and_findings() -> None:
    shown = history(400.0)._repr_html_()
    for part in ("largest |logit|", "every number", "logit growth", "verdict"):
        assert part in shown
    assert Run("Empty")._repr_html_()


@pytest.mark.parametrize("kind", ["save", "jsonl", "parquet"])
def test_the_command_reads_every_format(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "run", tmp_path / "page.html"
    sick = history(400.0)
    if kind == "save":
        sick.save(path)
    else:
        sink: Any = {"jsonl": JSONL, "parquet": Parquet}[kind](path)
        for snapshot, (step, loss) in zip(sick.snapshots, sick.logged["loss"], strict=True):
            sink(snapshot)
            sink.log(step, {"loss": loss})
        sink.close()
    assert main(["diagnose", str(path), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert "verdict: attention may be the cause: logit growth in layers.1.attn" in said and "wrote" in said
    assert "loss over steps" in page.read_text() and "not judged: " in said


def test_the_command_as_json_and_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    history(12.0).save(path)
    assert main(["diagnose", str(path), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("attention is not the cause") and found["findings"] is not None
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    assert main(["diagnose", str(path), "--json", "-", "--html", "-"]) == 2
    assert main(["diagnose", str(path), "--html", str(tmp_path / "no" / "page.html")]) == 2
