"""TensorBoard: a scalar per module and statistic, histograms over heads, a map of all heads.

Per-head scalars only on request: thousands of charts would be of no use.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from levelhead import cache, checks
from levelhead.errors import bad_type
from levelhead.extras import command, need
from levelhead.runs import sessions
from levelhead.runs.metrics import metrics
from levelhead.runs.record import Snapshot
from levelhead.sinks.pictures import coloured, entropy_map, histograms


class TensorBoard:
    """Writes to a log directory, or through a `SummaryWriter` that stays its owner's. Of several ranks, each but the
    first writes to a directory of its own inside.

    `map_every` counts snapshots; 0 draws no map. With `heads` every head gets its scalars too.
    """

    def __init__(
        self, to: str | os.PathLike[str] | Any, *, prefix: str = "attention", heads: bool = False, map_every: int = 50
    ) -> None:
        advice = "It counts snapshots; 0 draws none"
        checks.integer("map_every", map_every, "an integer of at least 0", advice, lambda n: n >= 0)
        self._own = isinstance(to, str | os.PathLike)
        if self._own:
            module = need("TensorBoard", "torch.utils.tensorboard", install=command("sinks", "torch"))
            folder, rank = checks.path("to", to), sessions.rank()
            folder = folder / f"rank{rank}" if rank else folder  # one curve of two ranks would be none
            with cache.writing("to", folder):
                self.writer = module.SummaryWriter(str(folder))
        elif hasattr(to, "add_histogram_raw"):
            self.writer = to
        else:
            advice = "Pass the directory that tensorboard --logdir reads"
            raise bad_type("to", "a path or a SummaryWriter", type(to).__name__, advice)
        self.prefix, self.heads, self.map_every = prefix, heads, map_every
        self._snapshots = 0

    def __call__(self, snapshot: Snapshot) -> None:
        step = snapshot.step
        for name, value in metrics(snapshot, heads=self.heads, prefix=self.prefix).items():
            self.writer.add_scalar(name, value, step)
        for name, values, counts, edges in histograms(snapshot):
            self.writer.add_histogram_raw(
                f"{self.prefix}/{name}/heads",
                min=float(values.min()),
                max=float(values.max()),
                num=len(values),
                sum=float(values.sum()),
                sum_squares=float(np.square(values).sum()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )
        if self.map_every and self._snapshots % self.map_every == 0 and snapshot.records:
            tag = f"{self.prefix}/all/normalised_entropy/map"
            self.writer.add_image(tag, coloured(entropy_map(snapshot)), step, dataformats="HWC")
        self._snapshots += 1

    def close(self) -> None:
        """Closes a writer that it made; any other is only flushed."""
        if self._own:
            self.writer.close()
        else:
            self.writer.flush()
