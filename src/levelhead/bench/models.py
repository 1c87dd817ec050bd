"""A whole model and the tokens it reads, its answer in float64, and its calls with both attentions.

Models are those that `levelhead.models` opens without a network: an encoder (MiniLM) and a decoder (SmolLM2, whose
cells are the prefill: keys and values cached, logits of the last token). The truth is the same model in float64 with
PyTorch's attention; norms and rotations that the library pins to float32 stay so, for all peers. The time of a model is
not counted in FMAs: attention is the smaller part of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from levelhead import models
from levelhead.bench.calls import Array, Call, Parts, Refused, Uncounted, Variants
from levelhead.bench.cases import Case
from levelhead.errors import LevelheadError


@dataclass(frozen=True)
class Reading(Uncounted):
    """A model with something to read."""

    case: Case
    model: Any  # of transformers, float32, with PyTorch's attention
    tokens: Array  # (B, T)
    lengths: Array  # (B,) of which are no padding

    def call(self, model: Any) -> Call:
        """One forward pass of a copy of the model."""
        import torch

        arguments: dict[str, Any] = dict(input_ids=torch.from_numpy(self.tokens))
        if self.case.padding:
            kept = np.arange(self.case.T) < self.lengths[:, None]
            arguments["attention_mask"] = torch.from_numpy(kept.astype(np.int64))
        if self.case.causal:
            arguments |= dict(use_cache=True, logits_to_keep=1)
        return Call(lambda: model(**arguments), self._read)

    def _read(self, result: Any) -> Parts:
        out = result.logits if self.case.causal else result.last_hidden_state
        return {"out": out.detach().numpy()}

    def copied(self) -> Any:
        """The model's modules and configuration anew, its weights the same memory."""
        return copy.deepcopy(self.model, {id(x): x for x in self.model.parameters()})

    def truth(self) -> Parts:
        import torch

        with torch.no_grad():
            return self._read(self.call(copy.deepcopy(self.model).double()).run())

    @property
    def output_bytes(self) -> int:
        case, config = self.case, self.model.config
        width = config.vocab_size if case.causal else case.T * config.hidden_size
        return 4 * case.B * int(width)


def make(case: Case, seed: int = 0) -> Reading:
    assert case.model is not None
    model = _opened(case.model)
    random = np.random.default_rng(seed)
    tokens = random.integers(0, model.config.vocab_size, (case.B, case.T))
    shortest = case.T // 4 if case.padding else case.T
    lengths = np.linspace(case.T, shortest, case.B).round().astype(int)
    return Reading(case, model, tokens, lengths)


@lru_cache(maxsize=1)  # one at a time is enough to keep in memory
def _opened(name: str) -> Any:
    try:
        model = models.open(name).model
    except LevelheadError as error:  # its message names the package to install
        raise Refused(" ".join(str(error).split())) from error
    model.set_attn_implementation("sdpa")
    return model.float().eval()


def ours(reading: Reading, threads: int) -> Variants:
    return {"huggingface.use": partial(_ours, reading)}


def _ours(reading: Reading) -> Call:
    from levelhead.torch import huggingface

    # A copy that only this call runs, so nothing is undone between turns. Other models pay a microsecond per layer.
    model = reading.copied()
    huggingface.use(model)
    return reading.call(model)


def sdpa(reading: Reading, threads: int) -> Variants:
    return {"sdpa": partial(reading.call, reading.model)}
