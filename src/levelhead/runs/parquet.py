"""Parquet: a tidy table, a row per step, module and head, that DuckDB, Polars and pandas read.

A directory of parts; each rank writes its own. A part appears in one go when it is whole, so a killed process leaves
every earlier part readable and loses at most the snapshots since. Columns: step, module, head; the facts of the module;
the statistics of `metrics`, and the level; then the raw tally as `tally_…`, the counterfactual tallies and the
projections' gradient norms, from which `read` gives the same run back, bit for bit.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from levelhead import cache, checks
from levelhead.errors import bad_value
from levelhead.extras import command, need
from levelhead.runs import sessions, tally
from levelhead.runs.metrics import STATISTICS, statistics
from levelhead.runs.record import Facts, Record, Run, Snapshot, logged_in, logged_out

FORMAT = "levelhead-parquet"
KEY = b"levelhead"  # of a part's metadata: the session, and how its rows fall into snapshots
PART = re.compile(r"part-(\d{6})(?:-rank(\d+))?\.parquet")  # each rank has parts of its own
ROWS = 1 << 17  # a part is written at this size at the latest, whatever flush_every is: 75 MB in memory

FACTS = tuple(field.name for field in fields(Facts))


class Parquet:
    """Writes a table per head into a directory, a part for every `flush_every` snapshots.

    `read` gives the run back. An existing directory of the same format is continued.
    """

    def __init__(self, path: str | os.PathLike[str], *, flush_every: int = 50, model: str = "") -> None:
        advice = "1 writes a part at every snapshot; more makes fewer and larger files"
        checks.integer("flush_every", flush_every, "an integer of at least 1", advice, lambda n: n >= 1)
        _arrow()
        self.path = checks.path("path", path)
        with cache.writing("path", self.path):
            known = _parts(self.path) if self.path.exists() else []
            if known:
                _header(known[-1])
            self.path.mkdir(exist_ok=True)
        self.flush_every = flush_every
        self._rank = sessions.rank()
        self._next = 1 + max((number for number, rank in map(_number, known) if rank == self._rank), default=-1)
        self._session = self._next  # a session has the number of its first part
        self._header = sessions.header(FORMAT, model)
        self._waiting: list[Snapshot] = []
        self._logged: dict[str, list[tuple[int, float]]] = {}
        self._rows = 0

    def __call__(self, snapshot: Snapshot) -> None:
        self._waiting.append(snapshot)
        self._rows += sum(len(record.tally) for record in snapshot.records)
        if len(self._waiting) >= self.flush_every or self._rows >= ROWS:
            self.flush()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of a step, such as its loss: they are in the metadata of the next part."""
        for name, x in numbers.items():
            self._logged.setdefault(name, []).append((step, x))

    def flush(self) -> None:
        """Writes a part with what has come since the last one."""
        if not self._waiting and not self._logged:
            return
        layout = [[snapshot.step, [len(record.tally) for record in snapshot.records]] for snapshot in self._waiting]
        header = {**self._header, "session": self._session, "snapshots": layout, "logged": logged_out(self._logged)}
        table = _table(self._waiting).replace_schema_metadata({KEY: json.dumps(header).encode()})
        of_rank = "" if self._rank is None else f"-rank{self._rank}"
        part = self.path / f"part-{self._next:06}{of_rank}.parquet"
        # Readers of directories pass over names with a dot in front.
        draft = part.with_name(f".{part.name}.{os.getpid()}")
        try:
            _arrow(".parquet").write_table(table, draft)
            os.replace(draft, part)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._next += 1
        self._waiting, self._rows, self._logged = [], 0, {}

    def close(self) -> None:
        """Writes the last part; a second time does nothing."""
        self.flush()


def read(path: str | os.PathLike[str]) -> Run:
    """The run in the directory, or in a single part of it."""
    parquet = _arrow(".parquet")
    parts: dict[tuple[int, int | None], sessions.Session] = {}
    for part in _parts(Path(path)):
        header, rank = _header(part), _number(part)[1]
        session = parts.setdefault((int(header["session"]), rank), sessions.Session(header, rank))
        try:
            table = parquet.read_table(part)
        except (_arrow().ArrowException, OSError) as wrong:
            raise _damaged(part, wrong) from None
        session.snapshots.extend(_snapshots(table, header["snapshots"]))
        session.log(logged_in(header.get("logged", {})))
    if not parts:
        advice = "Nothing was flushed before the process ended; record again"
        raise bad_value(str(path), "parts of a run", "none", advice)
    return sessions.join(parts.values())


def _arrow(module: str = "") -> Any:
    return need("Parquet", f"pyarrow{module}", install=command("sinks"))


# ---- parts


def _parts(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    inside = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    strange = sorted(entry.name for entry in inside if not PART.fullmatch(entry.name))
    if strange:
        advice = "Give a directory of its own; it is made if it is not there"
        raise bad_value(str(path), "a directory of part-….parquet alone", strange[0], advice)
    return sorted(inside, key=lambda part: (_number(part)[0], part.name))


def _number(part: Path) -> tuple[int, int | None]:
    """The number of a part, and the rank that wrote it; None: the only process."""
    match = PART.fullmatch(part.name)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else (0, None)


def _header(part: Path) -> dict[str, Any]:
    try:
        metadata = _arrow(".parquet").read_schema(part).metadata or {}
    except (_arrow().ArrowException, OSError) as wrong:
        raise _damaged(part, wrong) from None
    return sessions.check(json.loads(metadata.get(KEY, b"null")), FORMAT, part)


def _damaged(part: Path, wrong: Exception) -> Exception:
    if isinstance(wrong, OSError) and wrong.errno is not None:  # the system's: no permission, no file
        return wrong
    words = str(wrong).strip().rstrip(".")
    advice = "It may have been cut off while it was written: remove this part to read the others"
    return bad_value("path", "a whole Parquet file", f"{str(part)!r}: {words}", advice)


# ---- rows


def _table(snapshots: list[Snapshot]) -> Any:
    pa = _arrow()
    pairs = [(snapshot, record) for snapshot in snapshots for record in snapshot.records]
    heads = np.array([len(record.tally) for _, record in pairs], np.int64)

    def each(of: Callable[[Record], Any], kind: Any) -> Any:
        """A value of the record, repeated for each of its heads."""
        values = pa.array([of(record) for _, record in pairs], kind)
        return values.take(pa.array(np.repeat(np.arange(len(pairs)), heads)))

    text = pa.dictionary(pa.int32(), pa.string())
    steps = np.array([snapshot.step for snapshot, _ in pairs], np.int64)
    columns: dict[str, Any] = {
        "step": pa.array(np.repeat(steps, heads)),
        "module": each(lambda record: record.module, text),
        "head": pa.array(np.concatenate([np.arange(0), *map(np.arange, heads)]), pa.int32()),
    }
    kinds = {
        "str": text,
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "tuple[str, ...]": pa.list_(pa.string()),
        "tuple[int, ...]": pa.list_(pa.int64()),
        "tuple[float, ...]": pa.list_(pa.float64()),
    }
    for field in fields(Facts):
        of_facts = operator.attrgetter(f"facts.{field.name}")
        columns[field.name] = each(of_facts, kinds[str(field.type).removesuffix(" | None")])
    measured = [statistics(record.heads) for _, record in pairs]
    for name in STATISTICS:
        columns[name] = pa.array(np.concatenate([np.empty(0), *(by_name[name] for by_name in measured)]))
    levels = [level for _, record in pairs for level in record.heads.levels]
    columns["level"] = pa.array(levels, pa.string()).dictionary_encode()
    raw = np.concatenate([tally.nothing(0), *(record.tally for _, record in pairs)])
    for name, column in zip(tally.COLUMNS, raw.T, strict=True):
        columns[f"tally_{name}"] = pa.array(np.ascontiguousarray(column))
    rules = [rule for _, record in pairs for rule in _rules(record)]
    columns["counterfactual"] = pa.array(rules, pa.map_(pa.string(), pa.list_(pa.float64())))
    columns["weights"] = each(lambda record: list(record.weights.items()), pa.map_(pa.string(), pa.float64()))
    return pa.table(columns)


def _snapshots(table: Any, layout: list[list[Any]]) -> Iterator[Snapshot]:
    raw = np.stack([table[f"tally_{name}"].to_numpy() for name in tally.COLUMNS], axis=1)
    start = 0
    for step, heads in layout:
        records = []
        for count in heads:
            records.append(_record(table.slice(start, count), raw[start : start + count].copy()))
            start += count
        yield Snapshot(int(step), tuple(records))


def _record(rows: Any, raw: tally.Floats) -> Record:
    known = [name for name in FACTS if name in rows.column_names]  # an older version wrote fewer
    once = rows.slice(0, 1).select(["module", *known, "weights"]).to_pylist()[0]
    facts: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in once.items() if name in FACTS}
    by_head = [dict(rules) for rules in rows["counterfactual"].to_pylist()]
    rules = {rule: np.array([head[rule] for head in by_head]) for rule in by_head[0]}
    return Record(once["module"], Facts(**facts), raw, rules, dict(once["weights"]))


def _rules(record: Record) -> Iterator[list[tuple[str, list[float]]]]:
    """Per head, what other scale rules would have made of it."""
    for head in range(len(record.tally)):
        yield [(rule, heads[head].tolist()) for rule, heads in record.counterfactual.items()]
