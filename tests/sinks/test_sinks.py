"""Sinks write real files and are read back; trainers of other people train with our callbacks."""

from __future__ import annotations

import csv
import functools
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError
from levelhead.runs import metrics as metrics_module
from levelhead.runs import tally
from levelhead.runs.metrics import STATISTICS, metrics
from levelhead.runs.record import Facts, Record, Run, Snapshot
from levelhead.sinks import (
    JSONL,
    MissingPackageError,
    Parquet,
    TensorBoard,
    WandB,
    hf_callback,
    lightning_callback,
    read,
    wandb_alert,
)
from levelhead.sinks import pictures as pictures_module
from levelhead.sinks.trainer import Training

FACTS = Facts("Attention", "sdpa", 64, 4, 128, 128, "float32", 0.125)


def a_tally(heads: int, seed: int = 0) -> tally.Floats:
    """What a head may leave behind: 40 rows, every column with awkward numbers."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(heads, len(tally.COLUMNS))) / 3
    for name in tally.SUMS:
        found[:, tally.INDEX[name]] = rng.random(heads) * 40
    for name in ("rows", "several", "q_count", "k_count", "gradients"):
        found[:, tally.INDEX[name]] = 40
    for name in (*tally.PLACES, "nan_rows", "empty_rows", "lone_rows"):
        found[:, tally.INDEX[name]] = rng.integers(0, 9, heads)
    found[:, tally.INDEX["max_logit"]] = 5 + rng.random(heads)
    found[:, tally.INDEX["min_logit"]] = -5 - rng.random(heads)
    return found


def a_record(module: str, heads: int = 4, seed: int = 0, **facts: Any) -> Record:
    return Record(module, replace(FACTS, **facts), a_tally(heads, seed))


def awkward(step: int = 3) -> Snapshot:
    """Everything a format may trip over."""
    odd = a_tally(3, 7)
    odd[0, :4] = -0.0, np.nan, np.inf, -np.inf
    odd[1] = tally.NOTHING
    odd[2, :3] = 1 / 3, 2.0**60 + 2.0**9, 5e-324
    facts: dict[str, Any] = {
        "scale": None,
        "effective_scale": float("nan"),
        "softcap": 50.0,
        "model_width": 512,
        "architecture": "gemma",
        "norms_present": ("q_norm", "k_norm"),
        "norms_idle": ("k_norm",),
        "causal": True,
        "sinks": True,
        "scale_reading": "normalised",
    }
    full = Record(
        "layers.0.ö/x:y",
        replace(FACTS, **facts),
        odd,
        {"1/d_k": a_tally(3, 1), "none": a_tally(3, 2)},
        {"q_proj": 0.1, "k_proj": float("inf")},
    )
    return Snapshot(step, (full, a_record("", 1), a_record("layers.1.attn", 5, 9)))


def same(a: Run, b: Run) -> None:
    """Bit for bit."""
    assert [s.step for s in a.snapshots] == [s.step for s in b.snapshots]
    for mine, theirs in zip(a.snapshots, b.snapshots, strict=True):
        for x, y in zip(mine.records, theirs.records, strict=True):
            assert x.module == y.module
            assert repr(x.facts) == repr(y.facts)  # NaN and all
            assert x.tally.shape == y.tally.shape and x.tally.dtype == y.tally.dtype
            assert x.tally.tobytes() == y.tally.tobytes()
            assert list(x.counterfactual) == list(y.counterfactual)
            for rule in x.counterfactual:
                assert x.counterfactual[rule].tobytes() == y.counterfactual[rule].tobytes()
            assert x.weights == y.weights


# ---- metrics


def test_metrics_of_modules_and_the_model_are_those_of_joined_tallies() -> None:
    snapshot = Snapshot(0, (a_record("a", 4, 1), a_record("b", 2, 2)))
    found = metrics(snapshot)
    one, two = (record.heads for record in snapshot.records)
    assert found["attention/a/max_logit"] == one.max_logit.max()
    assert found["attention/a/min_logit"] == one.min_logit.min()
    assert found["attention/all/max_logit"] == max(one.max_logit.max(), two.max_logit.max())
    # Every head has 40 rows, so means over rows are means over heads.
    for name in ("normalised_entropy", "saturated", "mean_top1", "gradient", "mean_first"):
        both = np.concatenate([getattr(one, name), getattr(two, name)])
        assert found[f"attention/a/{name}"] == pytest.approx(getattr(one, name).mean())
        assert found[f"attention/all/{name}"] == pytest.approx(both.mean())
    assert found["attention/b/logit_std"] == pytest.approx(np.sqrt(two.var_logit.mean()))
    assert found["attention/b/nan_rows"] == two.nan_rows.sum()
    levels = [found[f"attention/all/heads_{level}"] for level in metrics_module.LEVELS]
    assert sum(levels) == 6
    assert found["attention/b/head_1/max_logit"] == two.max_logit[1]


def test_joining_heads_is_merging_them() -> None:
    heads = a_tally(6)
    heads[4] = tally.NOTHING
    merged = functools.reduce(tally.merge, (row[None] for row in heads))
    np.testing.assert_allclose(tally.over_heads(heads), merged, rtol=1e-14)
    assert (tally.over_heads(heads)[:, tally.PLACE] == merged[:, tally.PLACE]).all()
    assert (tally.over_heads(tally.nothing(0)) == tally.nothing(1)).all()


def test_heads_are_left_out_on_request_and_the_prefix_is_the_callers() -> None:
    snapshot = Snapshot(0, (a_record("a"),))
    few = metrics(snapshot, heads=False, prefix="train/attn")
    assert few and not [name for name in few if "head_" in name]
    assert all(name.startswith("train/attn/") for name in few)
    assert len(metrics(snapshot)) == len(few) + 4 * (len(STATISTICS) - 1)


def test_names_are_valid_for_mlflow_and_never_alike() -> None:
    modules = ("", "all", "model", "h:0", "h?0", "h_0-2", "ö.attn")
    snapshot = Snapshot(0, tuple(a_record(module, seed=i) for i, module in enumerate(modules)))
    found = metrics(snapshot)
    assert all(re.fullmatch(r"[/\w.\- ]*", name, re.ASCII) for name in found)
    assert len(set(metrics_module.names(snapshot))) == len(modules)
    each = len(metrics(Snapshot(0, (a_record("x"),)))) - 17 - 4
    assert len(found) == len(modules) * each + 17 + 4


def test_what_nothing_was_seen_of_is_left_out() -> None:
    found = metrics(Snapshot(0, (Record("a", FACTS, tally.nothing(2)),)))
    assert set(found.values()) == {0.0}  # counts of rows and of levels
    assert {name.rpartition("/")[2] for name in found} == {
        "empty_rows",
        "nan_rows",
        "heads_flat",
        "heads_level",
        "heads_sharp",
        "heads_saturated",
    }


def test_sinks_scales_and_gradients_are_shown_where_there_are_any() -> None:
    plain = metrics(Snapshot(0, (a_record("a"),)), heads=False)
    assert not [name for name in plain if "sink" in name or "effective_scale" in name]
    record = replace(a_record("a", sinks=True, effective_scale=0.1), weights={"q_proj": 2.0})
    found = metrics(Snapshot(0, (record,)))
    assert found["attention/a/effective_scale"] == 0.1
    assert found["attention/a/q_proj/grad_norm"] == 2.0
    assert found["attention/a/head_3/mean_sink"] == record.heads.mean_sink[3]


# ---- lossless files


@pytest.fixture(params=["jsonl", "parquet"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(kind: str, path: Path, *snapshots: Snapshot, **options: Any) -> None:
    sink = {"jsonl": JSONL, "parquet": Parquet}[kind](path, **options)
    for snapshot in snapshots:
        sink(snapshot)
    sink.close()
    sink.close()


def test_files_give_the_run_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    snapshots = (awkward(3), Snapshot(4, ()), awkward(5), Snapshot(5, (a_record("a"),)))
    written(kind, tmp_path / "run", *snapshots, model="Tiny")
    found = read(tmp_path / "run")
    same(found, Run("Tiny", snapshots))
    assert found.model == "Tiny" and found.notes == ()


def test_a_saved_run_is_read_too(tmp_path: Path) -> None:
    run = Run("Tiny", (awkward(),))
    run.save(tmp_path / "run.json")
    same(read(tmp_path / "run.json"), run)
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    with pytest.raises(LevelheadValueError, match="cut off"):
        read(tmp_path / "half.json")


def test_a_saved_run_may_be_called_as_a_sink_names_its_file(tmp_path: Path) -> None:
    run = Run("Tiny", (awkward(),))
    run.save(tmp_path / "run.jsonl")
    same(read(tmp_path / "run.jsonl"), run)
    written("jsonl", tmp_path / "lines", awkward())
    same(read(tmp_path / "lines"), Run("", (awkward(),)))
    text = (tmp_path / "run.jsonl").read_text()
    for length in (0, 1, 40, len(text) // 2):
        (tmp_path / "half.jsonl").write_text(text[:length])
        with pytest.raises(LevelheadValueError, match=r"half\.jsonl"):
            read(tmp_path / "half.jsonl")


@pytest.mark.parametrize("left", [0, 3, 8, 0.5, -1], ids=str)
def test_a_part_that_was_cut_off_is_named(left: float, tmp_path: Path) -> None:
    written("parquet", tmp_path / "run", *(awkward(step) for step in range(6)), flush_every=2)
    part = tmp_path / "run" / "part-000001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: int(left * len(whole)) if 0 < left < 1 else int(left)])
    with pytest.raises(LevelheadValueError, match=r"part-000001\.parquet.*cut off.*remove this part"):
        read(tmp_path / "run")
    part.unlink()
    assert [snapshot.step for snapshot in read(tmp_path / "run").snapshots] == [0, 1, 4, 5]


def test_a_part_whose_pages_are_damaged_is_named(tmp_path: Path) -> None:
    written("parquet", tmp_path / "run", *(awkward(step) for step in range(4)), flush_every=2)
    part = tmp_path / "run" / "part-000001.parquet"
    whole = bytearray(part.read_bytes())
    whole[60:900] = bytes(840)
    part.write_bytes(whole)
    with pytest.raises(LevelheadValueError, match=r"a whole Parquet file.*part-000001\.parquet"):
        read(tmp_path / "run")


def test_a_resumed_session_replaces_the_steps_it_writes_again(kind: str, tmp_path: Path) -> None:
    def at(step: int, seed: int) -> Snapshot:
        return Snapshot(step, (a_record("a", seed=seed),))

    written(kind, tmp_path / "run", *(at(step, 1) for step in range(6)))
    written(kind, tmp_path / "run")  # a session that saw nothing changes nothing
    written(kind, tmp_path / "run", *(at(step, 2) for step in range(4, 8)), model="later")
    found = read(tmp_path / "run")
    seeds = [1, 1, 1, 1, 2, 2, 2, 2]
    same(found, Run("", tuple(at(step, seed) for step, seed in enumerate(seeds))))
    assert found.notes == ("2 snapshots from step 4 on were written again later",)
    assert found.model == "later"


def test_other_peoples_files_are_refused_and_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if kind == "jsonl":
        path.write_text('{"loss": 1}\n{"loss"')
        before = path.read_bytes()
    else:
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    with pytest.raises(LevelheadValueError, match="expected"):
        written(kind, path, awkward())
    with pytest.raises(LevelheadValueError, match="expected"):
        read(path)
    assert path.read_bytes() == before if kind == "jsonl" else os.listdir(path) == ["notes.txt"]


@pytest.mark.parametrize("make", [JSONL, Parquet, TensorBoard, Run("").save])
def test_a_place_that_cannot_be_written_is_refused_by_name(make: Any, tmp_path: Path) -> None:
    for bad in (3, None, b"x"):
        with pytest.raises(LevelheadTypeError, match=r"expected a path.*got "):
            make(bad)
    for bad in ("", "a\0b"):
        with pytest.raises(LevelheadValueError, match=r"expected a path, got "):
            make(bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(LevelheadValueError, match=r"expected a place to write, got '.*/x': Not a directory"):
        make(tmp_path / "file" / "x")
    if make is not TensorBoard:  # which makes directories
        with pytest.raises(LevelheadValueError, match=r"expected a place to write, got '.*': No such file"):
            make(tmp_path / "nothing" / "x")
    if make not in (Parquet, TensorBoard):
        with pytest.raises(LevelheadValueError, match=r"expected a place to write, got '.*': Is a directory"):
            make(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("bad", ["x", 1.5, -1])
def test_options_of_sinks_are_checked(bad: Any, tmp_path: Path) -> None:
    for make in (
        lambda: Parquet(tmp_path / "run", flush_every=bad),
        lambda: TensorBoard(tmp_path / "run", map_every=bad),
        lambda: WandB(map_every=bad),
        lambda: WandB("my-project"),
        lambda: wandb_alert("my-project"),
    ):
        with pytest.raises(LevelheadError, match="expected .*, got"):
            make()
    assert os.listdir(tmp_path) == []


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LevelheadValueError, match="path: expected a run that was recorded"):
        read(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LevelheadValueError, match="parts of a run, got none"):
        read(tmp_path / "empty")


KILLED = """
import os, sys
sys.path[:0] = [*{tests!r}, {source!r}]
from test_sinks import a_record
from levelhead.health.record import Snapshot
from levelhead.health.sinks import JSONL, Parquet
sink = JSONL({path!r}) if {kind!r} == "jsonl" else Parquet({path!r}, flush_every=2)
for step in range(5):
    sink(Snapshot(step, (a_record("a", seed=step),)))
os.kill(os.getpid(), 9)
"""


def test_what_was_written_before_a_kill_is_there(kind: str, tmp_path: Path) -> None:
    import levelhead

    source = str(Path(levelhead.__file__).parent.parent)
    path = str(tmp_path / "run")
    here = Path(__file__).parent
    tests = [str(here), str(here.parent / "helpers")]
    text = KILLED.format(tests=tests, source=source, path=path, kind=kind)
    killed = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    steps = range(5 if kind == "jsonl" else 4)  # the last part was not full
    same(read(path), Run("", tuple(Snapshot(s, (a_record("a", seed=s),)) for s in steps)))


def test_half_a_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written("jsonl", path, awkward(0), awkward(1), awkward(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    found = read(path)
    same(found, Run("", (awkward(0), awkward(1))))
    assert found.notes == ("line 4 was cut off while it was written, and is left out",)
    written("jsonl", path, awkward(2))  # resumed: no half line stays in between
    again = read(path)
    same(again, Run("", (awkward(0), awkward(1), awkward(2))))
    assert again.notes == ()


def test_a_line_is_on_the_disk_when_the_sink_returns(tmp_path: Path) -> None:
    sink = JSONL(tmp_path / "run.jsonl")
    for step in range(3):
        sink(awkward(step))
        assert [s.step for s in read(tmp_path / "run.jsonl").snapshots] == list(range(step + 1))
    sink.close()


@pytest.mark.parametrize("line", ["{}", "[1]", "nonsense", '{"step": 1, "records": [{}]}'])
def test_a_changed_line_is_an_error_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written("jsonl", path, awkward())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(LevelheadValueError, match="line 3"):
        read(path)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written("jsonl", path, awkward())
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "format_version": 99}) + "\n" + rest)
    for attempt in (read, JSONL):
        with pytest.raises(LevelheadValueError, match="version 99"):
            attempt(path)


def test_the_table_is_tidy(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    snapshots = [awkward(step) for step in range(5)]
    written("parquet", tmp_path / "run", *snapshots, flush_every=2)
    assert sorted(os.listdir(tmp_path / "run")) == [f"part-00000{n}.parquet" for n in range(3)]
    table = pq.read_table(tmp_path / "run")  # without levelhead
    assert table.num_rows == 5 * 9
    keys = list(zip(*(table[name].to_pylist() for name in ("step", "module", "head")), strict=True))
    assert keys == [(s.step, r.module, h) for s in snapshots for r, h in s.each()]
    assert len(set(keys)) == len(keys)
    assert {field.name for field in fields(Facts)} <= set(table.column_names)
    assert {f"tally_{name}" for name in tally.COLUMNS} <= set(table.column_names)
    record = snapshots[0]["layers.1.attn"]
    assert table["max_logit"].to_pylist()[4:9] == record.heads.max_logit.tolist()
    assert table["saturated"].to_pylist()[4:9] == record.heads.saturated.tolist()
    assert table["level"].to_pylist()[4:9] == record.heads.levels
    assert table["softcap"].null_count == 5 * 6


def test_a_failed_write_leaves_nothing_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    def fails(table: Any, path: Path) -> None:
        path.write_bytes(b"PAR1 half")
        raise OSError("disk full")

    sink = Parquet(tmp_path / "run", flush_every=2)
    sink(awkward(0))
    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", fails)
        with pytest.raises(OSError, match="disk full"):
            sink(awkward(1))
    assert os.listdir(tmp_path / "run") == []
    sink.close()
    same(read(tmp_path / "run"), Run("", (awkward(0), awkward(1))))


def test_many_rows_are_not_kept_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levelhead.runs.parquet.ROWS", 8)
    sink = Parquet(tmp_path / "run")
    for step in range(3):
        sink(Snapshot(step, (a_record("a", 4),)))
    assert len(read(tmp_path / "run").snapshots) == 2
    with pytest.raises(LevelheadValueError, match="flush_every: expected an integer of at least 1, got 0"):
        Parquet(tmp_path / "run", flush_every=0)


# ---- dashboards


def events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(path), size_guidance={"images": 0, "scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_tensorboard_gets_scalars_histograms_and_a_map(tmp_path: Path) -> None:
    snapshots = [Snapshot(s, (a_record("a", 4, s), a_record("b", 6, 10 + s))) for s in range(4)]
    sink = TensorBoard(tmp_path, map_every=3)
    for snapshot in snapshots:
        sink(snapshot)
    sink.close()
    found = events(tmp_path)
    tags = found.Tags()
    wanted = metrics(snapshots[0], heads=False)
    assert set(tags["scalars"]) == set(wanted)
    for name in wanted:
        values = [(event.step, event.value) for event in found.Scalars(name)]
        right = [(s.step, np.float32(metrics(s)[name])) for s in snapshots]
        assert values == right, name
    names = {f"attention/{m}/{s}/heads" for m in "ab" for s in pictures_module.HISTOGRAMS}
    assert set(tags["histograms"]) == names
    histogram = found.Histograms("attention/b/max_logit/heads")[2]
    logits = snapshots[2]["b"].heads.max_logit
    value = histogram.histogram_value
    assert (histogram.step, value.num, value.min, value.max) == (2, 6, logits.min(), logits.max())
    assert sum(value.bucket) == 6 and value.sum == pytest.approx(logits.sum())
    images = found.Images("attention/all/normalised_entropy/map")
    size = pictures_module.CELL
    pictures = [(image.step, image.height, image.width) for image in images]
    assert pictures == [(0, 2 * size, 6 * size), (3, 2 * size, 6 * size)]


def test_tensorboard_takes_a_writer_and_leaves_it_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoard(writer, prefix="attn", heads=True, map_every=0)
        sink(Snapshot(0, (a_record("a"), Record("unseen", FACTS, tally.nothing(2)))))
        sink.close()
        writer.add_scalar("loss", 1.0, 1)
    tags = events(tmp_path).Tags()
    assert {"loss", "attn/a/head_3/max_logit", "attn/all/gradient"} <= set(tags["scalars"])
    assert tags["images"] == []
    with pytest.raises(LevelheadTypeError, match="a path or a SummaryWriter, got int"):
        TensorBoard(3)
    with pytest.raises(LevelheadValueError, match="map_every"):
        TensorBoard(tmp_path, map_every=-1)


def test_the_map_shows_levels_in_their_colours() -> None:
    entropies = np.array([[0.0, 0.5, 0.9], [1.0, np.nan, 0.05]])
    picture = pictures_module.coloured(entropies, cell=2)
    assert picture.shape == (4, 6, 3) and picture.dtype == np.uint8
    saturated, sharp, level = picture[0, 0], picture[0, 2], picture[0, 4]
    flat, unseen = picture[2, 0], picture[2, 2]
    assert saturated[0] > 2 * saturated[1:].max() and level.argmax() == 1 and flat.argmax() == 2
    assert sharp[0] > sharp[1] > sharp[2] and tuple(unseen) == pictures_module.UNSEEN
    ragged = Snapshot(0, (a_record("a", 2), a_record("b", 3)))
    assert np.isnan(pictures_module.entropy_map(ragged)).tolist()[0] == [False, False, True]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of wandb.init for a run that stays in a directory of its own."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return {"project": "p", "mode": "offline", "dir": str(tmp_path)}


def history(offline: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows in the file of an offline run that is finished."""
    (path,) = Path(offline["dir"]).glob("wandb/offline-run-*/run-*.wandb")
    # W&B's own process writes the end of the file after the run is finished here.
    deadline = time.monotonic() + 60
    while not (records := _records(path.read_bytes())) or not records[-1].HasField("exit"):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.05)
    found = []
    for record in records:
        row: dict[str, Any] = {}
        for item in record.history.item:
            name, *inner = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if inner:
                row.setdefault(name, {})[inner[0]] = value
            else:
                row[name] = value
        found += [row] if row else []
    return found


def _records(data: bytes) -> list[Any]:
    """The whole records in a log of 32 KB blocks, as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2

    found, message, at = [], b"", 7  # after the file's header
    while at + 7 <= len(data):
        if (left := 0x8000 - at % 0x8000) < 7:  # no room for a record: padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            break
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return found


def test_wandb_gets_aggregates_and_histograms(offline: dict[str, Any]) -> None:
    snapshots = [Snapshot(s, (a_record("a", 4, s), a_record("b", 6, 10 + s))) for s in (2, 4)]
    sink = WandB(map_every=2, table_every=2, **offline)
    for snapshot in snapshots:
        sink(snapshot)
    sink.close()
    sink.close()
    rows = history(offline)
    assert [row["attention/step"] for row in rows] == [2, 4]
    for row, snapshot in zip(rows, snapshots, strict=True):
        wanted = metrics(snapshot, heads=False)
        assert {name: row[name] for name in wanted} == wanted
        histogram = row["attention/b/max_logit/heads"]
        assert histogram["_type"] == "histogram" and sum(histogram["values"]) == 6
    extra = {"attention/all/normalised_entropy/map", "attention/all/table"}
    assert set(rows[0]) - set(rows[1]) == extra


def test_of_several_ranks_each_has_its_own_curves_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levelhead.runs.sessions.rank", lambda: 1)
    sink = TensorBoard(tmp_path, map_every=0)
    sink(Snapshot(2, (a_record("a", 4),)))
    sink.close()
    assert not list(tmp_path.glob("events*")) and events(tmp_path / "rank1").Scalars("attention/all/max_logit")
    silent = WandB()  # rank 0 has the run
    silent(Snapshot(2, (a_record("a", 4),)))
    silent.close()
    assert silent.run is None


def test_wandb_leaves_a_run_that_is_somebodys_to_them(offline: dict[str, Any]) -> None:
    import wandb

    with wandb.init(**offline) as run:
        with pytest.raises(LevelheadValueError, match="no options of wandb.init"):
            WandB(run, project="other")
        for sink in (WandB(run), WandB()):  # given, or found active
            assert sink.run is run
            run.log({"loss": 1.0})
            sink(Snapshot(0, (a_record("a"),)))
            sink.close()
        run.log({"loss": 2.0})
    rows = history(offline)
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, 1.0, 2.0]
    assert sum("attention/all/max_logit" in row for row in rows) == 2
    with pytest.raises(LevelheadValueError, match="map_every"):
        WandB(map_every=-1)


class FakeRun:
    """Takes what a run takes, and keeps the names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def define_metric(self, name: str, **options: Any) -> None:
        pass

    def log(self, found: dict[str, Any]) -> None:
        self.names |= set(found)


def test_wandb_names_stay_below_ten_thousand_for_a_large_model() -> None:
    modules = [f"model.layers.{i}.self_attn" for i in range(80)]
    records = tuple(a_record(m, 64, sinks=True, effective_scale=0.1) for m in modules)
    records = tuple(replace(r, weights=dict.fromkeys("qkvo", 1.0)) for r in records)
    run = FakeRun()
    sink = WandB(run, map_every=1, table_every=1)
    sink(Snapshot(0, records))
    assert 80 * 20 < len(run.names) < 10_000
    assert not [name for name in run.names if "head_" in name]
    assert len(run.names) == 80 * (18 + 4 + 1 + 4 + 5) + 18 + 4 + 3  # and the step, map, table


# ---- trainers


class StandIn:
    """Counts like a watch: a snapshot per step."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.options, self.said, self.steps = model, options, ["made"], 0
        self.last = Snapshot(0, ())

    def attach(self) -> None:
        self.said.append("attach")

    def start_at(self, step: int) -> None:
        self.steps = step

    def step(self) -> None:
        self.last = Snapshot(self.steps, (a_record("a", seed=self.steps),) if self.steps else ())
        self.steps += 1

    def detach(self) -> None:
        self.said.append("detach")


def test_a_training_begins_steps_and_ends() -> None:
    training = Training(StandIn, None, "attention", False, {"every": 3})
    training.step()  # before it began: nothing
    training.detach()
    assert training.watch is None and training.fresh() == {}
    with training as same_one:
        assert same_one is training
        training.begin("model", 0)
        watch = training.watch
        assert (watch.model, watch.options, watch.steps) == ("model", {"every": 3}, 1)
        assert training.fresh() == {}
        training.step()
        assert training.fresh() == metrics(watch.last, heads=False) != {}
        assert training.fresh() == {}  # reported already
        training.begin("again", 7)  # without an end: an exception came between
        assert watch.said == ["made", "attach", "detach"]
        assert training.watch.steps == 8
    training.detach()
    training.step()
    assert training.watch.said == ["made", "attach", "detach"] and training.watch.steps == 8


BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"every": 0},
    {"on_finding": "x"},
    {"sinks": 3},
    {"training_only": "yes"},
    {"plain_torch": 1},
    {"resume": b"x"},
    {"evry": 2},
    {"heads": "x"},
)


@pytest.mark.parametrize("bad", BAD_OPTIONS, ids=lambda bad: next(iter(bad)))
def test_callbacks_refuse_options_when_they_are_made(bad: dict[str, Any]) -> None:
    for make in (hf_callback, lightning_callback):
        with pytest.raises(LevelheadError, match=f"{next(iter(bad))}: expected .*, got"):
            make(**bad)
    assert hf_callback(every=2, on_finding="stop", sinks=iter([print]))._options["sinks"] == [print]


def test_callbacks_know_every_option_of_a_watch() -> None:
    import levelhead as lh
    from levelhead.watching import options

    taken = set(inspect.signature(lh.watch).parameters) - {"model"}
    with pytest.raises(LevelheadValueError) as refused:
        options.checked({"no": 1})
    assert taken == set(re.findall(r"\w+", str(refused.value).split("options ")[1].split(", got")[0]))


def test_what_runs_after_a_step_gets_the_watch_and_must_be_callable() -> None:
    given: list[Any] = []
    training = Training(StandIn, given.append, "attention", False, {})
    training.begin("model", 0)
    assert given == []
    training.step()
    assert given == [training.watch] and given[0].last.step == 1
    for callback in (hf_callback, lightning_callback):
        with pytest.raises(LevelheadTypeError, match="after_step: expected a callable, got int"):
            callback(after_step=3)


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def hf_trainer(model: Any, path: Path, data: Any = None, callbacks: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50, (24, 12)).tolist()
    given = data or [{"input_ids": row, "labels": row} for row in rows]
    arguments = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        **options,
    }
    made = TrainingArguments(str(path), **arguments)
    return Trainer(model, made, train_dataset=given, eval_dataset=given, callbacks=callbacks)


MODULES = {f"model.layers.{i}.self_attn" for i in range(2)}


def hooks(model: Any) -> int:
    """What watching may leave behind on a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hugging_face_trains_with_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    plain, model = tiny_llama(), tiny_llama()
    hf_trainer(plain, tmp_path).train()
    seen: list[tuple[int, float]] = []
    callback = hf_callback(
        sinks=[JSONL(tmp_path / "run.jsonl")],
        after_step=lambda w: seen.append((w.last.step, float(w.last.records[0].tally[0, 0]))),
    )
    evaluated = dict(eval_strategy="steps", eval_steps=1)
    trainer = hf_trainer(model, tmp_path, report_to="tensorboard", **evaluated)
    callback.install(trainer)
    callback.install(trainer)  # once is enough, twice does no harm
    trainer.train()

    # The model has learned what it would have learned, and carries nothing.
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hooks(model) == 0 and not callback.watch.attached
    # A snapshot per step of the optimiser, both micro-batches in it, evaluations not.
    run = read(tmp_path / "run.jsonl")
    assert [snapshot.step for snapshot in run.snapshots] == [1, 2, 3]
    for snapshot in run.snapshots:
        assert {record.module for record in snapshot.records} == MODULES
        assert all((record.heads.rows == 2 * 2 * 12).all() for record in snapshot.records)
    assert seen == [(step, 48.0) for step in (1, 2, 3)]
    # The trainer's own log has the metrics, evaluations' logs have not, and reporters got them.
    history = trainer.state.log_history
    training = [row for row in history if "loss" in row]
    for row, snapshot in zip(training, run.snapshots, strict=True):
        wanted = metrics(snapshot, heads=False)
        assert {name: row[name] for name in wanted} == wanted
    assert [row for row in history if "eval_loss" in row and "attention/all/max_logit" in row] == []
    scalars = events(tmp_path / "board")
    board = scalars.Scalars("train/attention/all/max_logit")
    assert [event.step for event in board] == [1, 2, 3]


@pytest.mark.parametrize("quiet", [True, False])
def test_hugging_face_in_its_natural_form(quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer(callbacks=[...]), as docs/watch.md has it: reporters get the metrics, printed logs only if wanted."""
    from transformers import PrinterCallback

    printed: list[dict[str, Any]] = []
    monkeypatch.setattr(PrinterCallback, "on_log", lambda self, *a, logs=None, **kw: printed.append(dict(logs)))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = hf_callback(sinks=[JSONL(tmp_path / "run.jsonl")], **({} if quiet else {"quiet": False}))
    trainer = hf_trainer(tiny_llama(), tmp_path, report_to="tensorboard", callbacks=[callback])
    trainer.train()
    board = events(tmp_path / "board").Scalars("train/attention/all/max_logit")
    assert [event.step for event in board] == [1, 2, 3]
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert all("attention/all/max_logit" in row for row in history) and len(history) == 3
    assert {"attention/all/max_logit" in row for row in printed if "loss" in row} == {not quiet}
    run = read(tmp_path / "run.jsonl")
    assert [snapshot.step for snapshot in run.snapshots] == [1, 2, 3] and hooks(trainer.model) == 0
    assert run.logged["loss"] == tuple((row["step"], row["loss"]) for row in history)


def test_the_class_is_a_callback_too(tmp_path: Path) -> None:
    trainer = hf_trainer(tiny_llama(), tmp_path, callbacks=[hf_callback])
    trainer.train()
    history = [row for row in trainer.state.log_history if "loss" in row]
    assert all("attention/all/max_logit" in row for row in history) and len(history) == 3


def test_a_finding_asks_for_a_checkpoint(tmp_path: Path) -> None:
    model, told = tiny_llama(), []
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0  # forgotten
    trainer = hf_trainer(
        model, tmp_path, save_strategy="steps", save_steps=99, callbacks=[hf_callback(on_finding=["save", told.append])]
    )
    trainer.train()
    assert {finding.kind for finding in told} == {"wrong scale"}
    assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-2").exists()
    trainer = hf_trainer(model, tmp_path, callbacks=[hf_callback(on_finding="stop")])
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_finding_is_an_alert_of_a_wandb_run() -> None:
    from levelhead.diagnosis.findings import Finding
    from levelhead.sinks import wandb_alert

    class Alerted:
        def alert(self, **given: Any) -> None:
            self.given = given

    run = Alerted()
    wandb_alert(run)(Finding("logit growth", "error", "layers.3", 1, {"max_logit": 9e3}, "why.", "advice.", ""))
    assert run.given["level"] == "ERROR" and "layers.3 head 1" in run.given["text"]
    assert run.given["title"] == "attention: logit growth"
    with pytest.raises(LevelheadValueError, match="wandb_alert: expected a run that is active"):
        wandb_alert()(Finding("k", "error", "m", None, {}, "w", "a", ""))


def test_a_resumed_training_goes_on_counting(tmp_path: Path) -> None:
    path, out = tmp_path / "run", tmp_path / "out"
    for steps, resume in ((3, None), (4, str(out / "checkpoint-2"))):
        saved = dict(save_strategy="steps", save_steps=2)
        trainer = hf_trainer(tiny_llama(), out, max_steps=steps, **saved)
        trainer.add_callback(hf_callback(sinks=[Parquet(path)]))
        trainer.train(resume_from_checkpoint=resume)
    run = read(path)
    assert [snapshot.step for snapshot in run.snapshots] == [1, 2, 3, 4]
    assert run.notes == ("1 snapshots from step 3 on were written again later",)


def test_an_exception_in_a_training_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(list):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            raise OSError("the data is gone")

    model = tiny_llama()
    callback = hf_callback()
    trainer = hf_trainer(model, tmp_path, Broken([1] * 24))
    trainer.add_callback(callback)
    with pytest.raises(OSError, match="data is gone"), callback:
        trainer.train()
    assert callback.watch is not None and hooks(model) == 0

    def fails(snapshot: Snapshot) -> None:
        raise RuntimeError("the sink is full")

    trainer = hf_trainer(model, tmp_path)
    trainer.add_callback(callback := hf_callback(sinks=[fails]))
    with pytest.raises(RuntimeError, match="sink is full"), callback:  # a sink's error is seen
        trainer.train()
    assert hooks(model) == 0


def a_module(fails: bool = False) -> Any:
    import pytorch_lightning as pl
    import torch

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def training_step(self, batch: Any, index: int) -> Any:
            if fails and index == 1:
                raise OSError("the data is gone")
            (x,) = batch
            loss = self.attention(x, x, x, need_weights=False)[0].square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.training_step(batch, 0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Tiny()


def fit(module: Any, path: Path, callbacks: list[Any], **options: Any) -> Any:
    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.loggers import CSVLogger

    rows = torch.randn(24, 10, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    trainer = pl.Trainer(
        max_steps=3,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        val_check_interval=2,
        accelerator="cpu",
        logger=CSVLogger(str(path)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(module, data, data)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning: few workers, a short epoch
def test_lightning_trains_with_a_watch(tmp_path: Path) -> None:
    import torch

    plain, module = a_module(), a_module()
    fit(plain, tmp_path / "plain", [])
    steps: list[int] = []
    path = tmp_path / "run.jsonl"
    callback = lightning_callback(sinks=[JSONL(path)], after_step=lambda w: steps.append(w.last.step))
    trainer = fit(module, tmp_path / "watched", [callback])
    for a, b in zip(plain.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hooks(module) == 0 and not callback.watch.attached
    run = read(path)
    assert steps == [snapshot.step for snapshot in run.snapshots] == [1, 2, 3]
    for snapshot in run.snapshots:
        assert [record.module for record in snapshot.records] == ["attention"]
        assert (snapshot.records[0].heads.rows == 2 * 2 * 10).all()  # validation is not in it
    last = metrics(run.last, heads=False)
    assert {k: trainer.callback_metrics[k].item() for k in last} == pytest.approx(last, rel=1e-6)
    (table,) = tmp_path.glob("watched/**/metrics.csv")
    with table.open() as file:
        rows = [row["attention/all/max_logit"] for row in csv.DictReader(file)]
    assert len([row for row in rows if row]) == 3


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exception_in_lightning_leaves_nothing_behind(tmp_path: Path) -> None:
    module, callback = a_module(fails=True), lightning_callback()
    with pytest.raises(OSError, match="data is gone"):
        fit(module, tmp_path, [callback], num_sanity_val_steps=0)
    assert callback.watch is not None and not callback.watch.attached and hooks(module) == 0


# ---- packages


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("pyarrow", lambda: Parquet("never")),
        ("tensorboard", lambda: TensorBoard("never")),
        ("wandb", lambda: WandB()),
        ("transformers", lambda: hf_callback()),
        ("lightning pytorch_lightning", lambda: lightning_callback()),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    package: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(sys.modules):
        if name.split(".")[0] in package.split() or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    for name in package.split():
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MissingPackageError, match=r"Run: pip install (\"levelhead\[(sinks|sinks,torch|models)\]\"|lightning)\."
    ):
        make()
    assert issubclass(MissingPackageError, LevelheadError | ImportError)
    assert os.listdir(tmp_path) == []


def test_importing_the_sinks_imports_none_of_their_packages() -> None:
    import levelhead

    source = str(Path(levelhead.__file__).parent.parent)
    text = (
        f"import sys; sys.path.insert(0, {source!r}); import levelhead.sinks\n"
        "heavy = {'torch', 'pyarrow', 'wandb', 'tensorboard', 'transformers', 'lightning'}\n"
        "print(heavy & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
