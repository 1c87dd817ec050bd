"""Who runs a whole model: transformers with levelhead's attention, and with PyTorch's own."""

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

    model = reading.copied()  # which nobody else runs: never given back
    huggingface.use(model)
    return Call(reading.call(model), reading.read)
