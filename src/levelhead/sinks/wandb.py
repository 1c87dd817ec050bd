"""Weights & Biases: a scalar per module and statistic, histograms over heads; on request a map and a table of heads.

W&B recommends fewer than 10,000 distinct names in a project, and a model has thousands of heads: so never a scalar per
head. Names share one axis of their own, the watch's steps; the run's step belongs to the training script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from levelhead import checks
from levelhead.errors import bad_type, bad_value
from levelhead.extras import command, need
from levelhead.runs import sessions
from levelhead.runs.metrics import STATISTICS, metrics, names, statistics
from levelhead.runs.record import Snapshot
from levelhead.sinks.pictures import coloured, entropy_map, histograms


class WandB:
    """Logs to a run: the one given, the one that is active, or a new one made with `init`.

    Only a run that was made here is finished here. A rank but the first that has no run sends nothing, unless options
    of `init` ask for one. `map_every` and `table_every` count snapshots; 0, the default, sends none.
    """

    def __init__(
        self, run: Any = None, *, prefix: str = "attention", map_every: int = 0, table_every: int = 0, **init: Any
    ) -> None:
        for name, value in (("map_every", map_every), ("table_every", table_every)):
            advice = "It counts snapshots; 0 sends none"
            checks.integer(name, value, "an integer of at least 0", advice, lambda n: n >= 0)
        _check_run(run, "define_metric")
        self._wandb = need("WandB", "wandb", install=command("sinks"))
        active = run if run is not None else self._wandb.run
        if active is not None and init:
            wanted = "no options of wandb.init for a run that is there"
            raise bad_value("init", wanted, ", ".join(init), "Leave them out, or finish that run first")
        # Usually the first rank has the run. Another one gets a run if it asks for one.
        self._silent = active is None and not init and bool(sessions.rank())
        self._own = active is None and not self._silent
        self.run = self._wandb.init(**init) if self._own else active
        self.prefix, self.map_every, self.table_every = prefix, map_every, table_every
        self._step = f"{prefix}/step"
        self._snapshots = 0
        if self._silent:
            return
        self.run.define_metric(self._step, hidden=True)
        self.run.define_metric(f"{prefix}/*", step_metric=self._step)

    def __call__(self, snapshot: Snapshot) -> None:
        if self._silent:
            return
        values: dict[str, Any] = dict(metrics(snapshot, heads=False, prefix=self.prefix))
        for name, _, counts, edges in histograms(snapshot):
            values[f"{self.prefix}/{name}/heads"] = self._wandb.Histogram(np_histogram=(counts, edges))
        if self._due(self.map_every) and snapshot.records:
            need("WandB(map_every=…)", "PIL", install=command("sinks"))
            picture = self._wandb.Image(coloured(entropy_map(snapshot)))
            values[f"{self.prefix}/all/normalised_entropy/map"] = picture
        if self._due(self.table_every):
            values[f"{self.prefix}/all/table"] = self._table(snapshot)
        self.run.log({**values, self._step: snapshot.step})
        self._snapshots += 1

    def _due(self, every: int) -> bool:
        return every > 0 and self._snapshots % every == 0

    def _table(self, snapshot: Snapshot) -> Any:
        rows = []
        for record, name in zip(snapshot.records, names(snapshot), strict=True):
            lines = zip(record.heads.levels, *(x.tolist() for x in statistics(record.heads).values()), strict=True)
            rows += [[name, head, *values] for head, values in enumerate(lines)]
        return self._wandb.Table(columns=["module", "head", "level", *STATISTICS], data=rows)

    def close(self) -> None:
        """Finishes the run if it was made here."""
        if self._own:
            self.run.finish()
            self._own = False


def wandb_alert(run: Any = None) -> Callable[[Any], None]:
    """For `on_finding`: sends each finding as an alert of a W&B run, the one given or the one that is active then.

    lh.watch(model, on_finding=lh.sinks.wandb_alert())
    """
    _check_run(run, "alert")
    wandb = need("wandb_alert", "wandb", install=command("sinks"))

    def alert(finding: Any) -> None:
        active = run if run is not None else wandb.run
        if active is None and sessions.rank():  # the first rank has the run, and logs
            return
        if active is None:
            advice = "Call wandb.init first, or pass a run"
            raise bad_value("wandb_alert", "a run that is active", "none", advice)
        level = "ERROR" if finding.severity == "error" else "WARN"
        text = f"{finding.where}: {finding.numbers}. {finding.why} Try: {finding.advice}"
        active.alert(title=f"attention: {finding.kind}", text=text, level=level)

    return alert


def _check_run(run: Any, method: str) -> None:
    if run is not None and not hasattr(run, method):
        advice = "Pass what wandb.init returns; the name of a project is project=..."
        raise bad_type("run", "a run of wandb, or None", checks.short_repr(run), advice)
