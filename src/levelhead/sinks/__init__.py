"""Where a watch sends its snapshots: files, dashboards, and the callbacks of trainers.

A sink is anything that can be called with a `Snapshot`; what has a `close` is closed when the watch is detached.
Packages are imported when the sink that needs them is made, not before.
"""

from __future__ import annotations

from levelhead.extras import MissingPackageError
from levelhead.runs.files import read
from levelhead.runs.jsonl import JSONL
from levelhead.runs.parquet import Parquet
from levelhead.sinks.huggingface import hf_callback
from levelhead.sinks.lightning import lightning_callback
from levelhead.sinks.tensorboard import TensorBoard
from levelhead.sinks.wandb import WandB, wandb_alert

__all__ = [
    "JSONL",
    "MissingPackageError",
    "Parquet",
    "TensorBoard",
    "WandB",
    "hf_callback",
    "lightning_callback",
    "read",
    "wandb_alert",
]
