"""What a watch records: records of modules, in snapshots of steps, in one `Run`.

Plain data, written to a file and read back without loss. Checks, reports, plots and sinks read these, never a model.
`watch` and `doctor` make them; nothing is measured here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from levelhead import checks, front_ends
from levelhead._version import __version__
from levelhead.cache import write_named
from levelhead.errors import bad_value
from levelhead.json_numbers import json_number, json_value, number_from_json
from levelhead.runs import tally
from levelhead.runs.tally import Floats, Heads

FORMAT = "levelhead-run"
FORMAT_VERSION = 1  # of this and of the formats of sinks
# What reading raises where a file was cut off or changed, or is another.
DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Facts:
    """The facts of a module's calls; None: not known, or not used."""

    kind: str  # the module's class
    how: str  # the path it was observed on: "sdpa", "huggingface:eager", "levelhead", "softmax by hand" …
    d_k: int
    kv_heads: int
    queries: int  # of the last call
    keys: int
    dtype: str
    scale: float | None  # passed with the call, or multiplied after the product; None: unknown
    effective_scale: float | None = None  # from the projections' outputs to the logits
    scale_reading: str = "unknown"  # "projections", "normalised", or why it is unknown
    model_width: int | None = None  # what the q projection reads
    effective_scales: tuple[float, ...] = ()  # of every head, where they differ
    head_parts: tuple[int, ...] = ()  # widths of the parts of a head that come from different projections
    configured_scale: float | None = None  # the right one by the model's configuration; None: 1/sqrt(d_k), or see below
    configured_by: str = ""  # what the configuration says about the scale
    softcap: float | None = None
    causal: bool = False
    masked: bool = False
    sinks: bool = False
    sampled: bool = False  # some query rows only: the maximum is a lower bound
    fused: bool = False  # the statistics came from the pass that computed the attention
    architecture: str | None = None  # a Hugging Face model_type
    norms_present: tuple[str, ...] = ()  # q or k norms the module has
    norms_idle: tuple[str, ...] = ()  # of those, the ones that never ran
    # Of a softmax by hand: over "keys", as its weights are used, or over "queries" or a "batch" axis, which is a bug.
    softmax_axis: str | None = None
    learned_scale: str = ""  # the parameter of the module that the scale is; "": it is none
    # The least and the largest number of rows that a measured one stands for, by the calls; (): each for itself alone.
    row_weights: tuple[float, ...] = ()
    scale_call: int = 0  # of added-up calls with different scales: whose scale this is, from 1 on within a pass

    def with_rows_of(self, other: Facts) -> Facts:
        """These facts, of the rows of both."""
        weights = [*(self.row_weights or (1.0,)), *(other.row_weights or (1.0,))]
        joined = (min(weights), max(weights)) if max(weights) > 1.0 else ()
        return replace(self, sampled=self.sampled or other.sampled, row_weights=joined)

    @property
    def product_scale(self) -> float | None:
        """What q · k is multiplied with to be the logits, masks aside; None: unknown, or a cap bends them."""
        return self.scale if self.softcap is None else None

    @property
    def mentioned(self) -> list[str]:
        """The options in use, in words."""
        cap = None if self.softcap is None else f"softcap {self.softcap:g}"
        words = (self.causal and "causal", self.masked and "masked", cap, self.sinks and "sinks")
        return [word for word in words if word]


# The options that facts mention, as callers pass them.
MENTIONED = ("causal", "mask", "softcap", "sinks")


def mentioned(scoring: Any, *, ready: bool) -> dict[str, Any]:
    """The facts that a call's `Scoring` gives; with `ready` its mask holds finished logits, and is no mask."""
    return {
        "causal": scoring.causal,
        "masked": scoring.mask is not None and not ready,
        "softcap": scoring.softcap,
        "sinks": scoring.sinks is not None,
    }


@dataclass(frozen=True)
class Record:
    """One attention module in one step."""

    module: str  # full name within the model; "" is the model itself
    facts: Facts
    tally: Floats  # (H, columns)
    counterfactual: Mapping[str, Floats] = field(default_factory=dict)  # scale rule -> tally
    weights: Mapping[str, float] = field(default_factory=dict)  # projection -> gradient norm

    @cached_property
    def heads(self) -> Heads:
        """The statistics, (H,) each."""
        return tally.read(self.tally)

    def _repr_html_(self) -> str:
        shown: str = front_ends.serving("notebook", "html").record(self)
        return shown

    def merged(self, later: Record) -> Record:
        """Both, as one longer step."""
        rules = {
            rule: tally.merge(mine, later.counterfactual[rule])
            for rule, mine in self.counterfactual.items()
            if rule in later.counterfactual
        }
        facts = later.facts.with_rows_of(self.facts)
        return replace(later, facts=facts, tally=tally.merge(self.tally, later.tally), counterfactual=rules)


@dataclass(frozen=True)
class Snapshot:
    """One step: the record of every module that was observed in it."""

    step: int
    records: tuple[Record, ...]

    def __getitem__(self, module: str) -> Record:
        for record in self.records:
            if record.module == module:
                return record
        names = ", ".join(repr(record.module) for record in self.records)
        raise KeyError(f"no record of {module!r}; there are {names}")

    def each(self) -> Iterator[tuple[Record, int]]:
        """Every head: its record and its number there."""
        for record in self.records:
            for head in range(len(record.tally)):
                yield record, head

    def _repr_html_(self) -> str:
        shown: str = front_ends.serving("notebook", "html").snapshot(self)
        return shown

    def merged(self, later: Snapshot) -> Snapshot:
        """Both, under the step of this one."""
        records = {record.module: record for record in self.records}
        for record in later.records:
            earlier = records.get(record.module)
            records[record.module] = record if earlier is None else earlier.merged(record)
        return Snapshot(self.step, tuple(records.values()))


@dataclass(frozen=True)
class Seen:
    """A line of the coverage report: an attention module, and whether it was observed."""

    module: str
    kind: str
    seen: bool
    how: str  # the path, or the reason why not
    calls: int
    note: str = ""  # such as a fast path that was switched off


@dataclass(frozen=True)
class Run:
    """Everything recorded: snapshots in the order of their steps, coverage and cost."""

    model: str
    snapshots: tuple[Snapshot, ...] = ()
    coverage: tuple[Seen, ...] = ()
    notes: tuple[str, ...] = ()  # about the run as a whole
    cost: Mapping[str, float] = field(default_factory=dict)
    expected_scale: float | str | None = None  # the right one, if the user has passed it
    version: str = __version__
    logged: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # such as "loss": steps, numbers
    by_hand: str = ""  # in words: whether attention by hand was looked for, and what came of it; "": nothing was missed

    @property
    def last(self) -> Snapshot:
        """The latest step; empty if nothing was recorded."""
        return self.snapshots[-1] if self.snapshots else Snapshot(0, ())

    @cached_property
    def latest(self) -> tuple[Record, ...]:
        """The last record of every module: not each of them runs in every step."""
        by_module = {record.module: record for snapshot in self.snapshots for record in snapshot.records}
        return tuple(by_module.values())

    def _repr_html_(self) -> str:
        shown: str = front_ends.serving("notebook", "html").run(self)
        return shown

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything as JSON, whole or not at all."""
        write_named("path", checks.path("path", path), json.dumps(to_json(self), allow_nan=False) + "\n")


def load(path: str | os.PathLike[str]) -> Run:
    """Reads what `Run.save` wrote."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        given, advice = error.strerror or str(error), "Check the path"
    except (RecursionError, ValueError):  # of json, or of an encoding
        given, advice = "one that is not", "It was cut off, or is another file; record it again"
    else:
        return from_json(content)
    raise bad_value(os.fspath(path), "a JSON file", given, advice)


def check_format(header: Any, kind: str, where: str, advice: str) -> dict[str, Any]:
    """The beginning of a file, if this version of levelhead can read what follows it."""
    if not isinstance(header, dict) or header.get("format") != kind:
        raise bad_value(where, f'JSON with "format": "{kind}"', "another", advice)
    if header.get("format_version") != FORMAT_VERSION or header.get("columns") != list(tally.COLUMNS):
        given = f"version {header.get('format_version')} of levelhead {header.get('version')}"
        advice = "Read it with that version, or record to another path with this one"
        raise bad_value(where, f"format version {FORMAT_VERSION} with the same columns", given, advice)
    return header


# ---- JSON: NaN is null, infinities are text; among facts NaN is text too, as null means that a fact is not known


def to_json(run: Run) -> dict[str, Any]:
    """The run as what `json` can write."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": run.version,
        "model": run.model,
        "columns": list(tally.COLUMNS),
        "notes": list(run.notes),
        "cost": dict(run.cost),
        "expected_scale": run.expected_scale,
        **({"logged": logged_out(run.logged)} if run.logged else {}),
        "coverage": [asdict(seen) for seen in run.coverage],
        **({"by_hand": run.by_hand} if run.by_hand else {}),
        "snapshots": [snapshot_out(snapshot) for snapshot in run.snapshots],
    }


def snapshot_out(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as what `json` can write."""
    return {"step": snapshot.step, "records": [_record_out(r) for r in snapshot.records]}


def snapshot_in(content: Mapping[str, Any]) -> Snapshot:
    """The snapshot that `snapshot_out` wrote; KeyError, TypeError or ValueError if it did not."""
    return Snapshot(int(content["step"]), tuple(_record_in(r) for r in content["records"]))


def from_json(content: Any) -> Run:
    """The run that `to_json` wrote; anything else is refused."""
    check_format(content, FORMAT, "run", "Give a file that watch(...).save or levelhead doctor --json wrote")
    try:
        snapshots = tuple(snapshot_in(snapshot) for snapshot in content["snapshots"])
        coverage = tuple(Seen(**seen) for seen in content["coverage"])
        notes, cost = tuple(content["notes"]), dict(content["cost"])
        model, version = str(content["model"]), str(content["version"])
        logged = logged_in(content.get("logged", {}))
        by_hand = str(content.get("by_hand", ""))
        return Run(model, snapshots, coverage, notes, cost, content["expected_scale"], version, logged, by_hand)
    except DAMAGED as error:
        advice = "The file was cut off or changed; record it again"
        raise bad_value("run", "a whole run", repr(error), advice) from error


def logged_out(logged: Mapping[str, Iterable[tuple[int, float]]]) -> dict[str, Any]:
    """Curves that were logged, as what `json` can write."""
    return {name: [[step, _number(x)] for step, x in curve] for name, curve in logged.items()}


def logged_in(content: Mapping[str, Any]) -> dict[str, tuple[tuple[int, float], ...]]:
    """The curves that `logged_out` wrote."""
    return {str(name): tuple((int(step), number_from_json(x)) for step, x in curve) for name, curve in content.items()}


def _record_out(record: Record) -> dict[str, Any]:
    return {
        "module": record.module,
        "facts": json_value(_facts_out(record.facts), not_finite="text"),
        "tally": _out(record.tally),
        "counterfactual": {rule: _out(x) for rule, x in record.counterfactual.items()},
        "weights": {name: _number(x) for name, x in record.weights.items()},
    }


def _facts_out(facts: Facts) -> dict[str, Any]:
    """All but newer facts that say nothing: an older version reads the file then."""
    newer = {f.name: f.default for f in fields(Facts) if f.name in _NEWER}
    return {name: x for name, x in asdict(facts).items() if name not in newer or x != newer[name]}


_NEWER = ("scale_call", "learned_scale", "row_weights")


def _record_in(content: Mapping[str, Any]) -> Record:
    facts = dict(content["facts"])
    known = {f.name for f in fields(Facts)}
    required = {f.name for f in fields(Facts) if f.default is MISSING}  # an older version wrote fewer of the others
    if strange := (facts.keys() - known) | (required - facts.keys()):
        raise ValueError(f"facts {sorted(strange)}")
    for name in {"norms_present", "norms_idle", "effective_scales", "head_parts", "row_weights"} & set(facts):
        facts[name] = tuple(facts[name])
    for name in {"scale", "effective_scale", "softcap", "configured_scale"} & set(facts):
        facts[name] = None if facts[name] is None else float(facts[name])
    rules = {rule: _in(x) for rule, x in content["counterfactual"].items()}
    weights = {name: number_from_json(x) for name, x in content["weights"].items()}
    return Record(str(content["module"]), Facts(**facts), _in(content["tally"]), rules, weights)


def _out(rows: Floats) -> list[list[Any]]:
    return [[_number(float(x)) for x in row] for row in rows]


def _in(rows: list[list[Any]]) -> Floats:
    table = np.array([[number_from_json(x) for x in row] for row in rows], np.float64)
    if table.ndim != 2 or table.shape[1] != len(tally.COLUMNS):
        raise ValueError(f"a tally of shape {table.shape}")
    return table


_number = partial(json_number, not_finite="infinities as text", short=True)
