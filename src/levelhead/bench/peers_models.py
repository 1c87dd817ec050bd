"""Whole models: transformers with levelhead's attention, and with PyTorch's own."""

from __future__ import annotations

from functools import partial

from levelhead.bench.calls import Call, Variants
from levelhead.bench.models import Reading


def ours(reading: Reading, threads: int) -> Variants:
    return {"huggingface.use": partial(_ours, reading)}


def sdpa(reading: Reading, threads: int) -> Variants:
    return {"sdpa": lambda: Call(reading.call(reading.model), reading.read)}


def _ours(reading: Reading) -> Call:
    from levelhead.torch import huggingface

    # A copy that only this call runs, so nothing is undone between turns. Other models pay a microsecond per layer.
    model = reading.copied()
    huggingface.use(model)
    return Call(reading.call(model), reading.read)
