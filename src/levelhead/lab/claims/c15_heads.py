"""C15: the heads of a real model look at different things, in different subspaces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from levelhead.lab import minilm
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import Array
from levelhead.lab.settings import whole
from levelhead.lab.verdict import BOUND
from levelhead.weights import weights

if TYPE_CHECKING:
    from torch import Tensor

MOST = 0.95  # of the pairs of heads in a layer
APART = 0.1 * math.log(2)  # nats, of at most ln 2
OVERLAP = 0.5  # of the directions two heads read; 1: the same ones


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    texts, tokens = whole("texts", params["texts"], 3), whole("tokens", params["tokens"], 8, 250)
    tell(0.0, f"opening {minilm.MODEL}")
    opened = minilm.opened()
    model, blank = opened.model, _untrained(opened.model, seed)
    parts = minilm.passages(opened, 3 * texts, tokens, seed)
    trained, random = [], []
    for text in range(texts):
        tell(0.3 + 0.7 * text / texts, f"reading passage {text + 1} of {texts}")
        ids = _in_two_contexts(opened.tokenizer, *parts[3 * text : 3 * text + 3])
        trained.append(_distances(model, ids, tokens))
        random.append(_distances(blank, ids, tokens))
    distance = np.stack(trained)  # (texts, layers, heads, heads)
    apart = _between(distance)  # (texts, layers)
    differing = _differing(distance)  # (layers,)
    overlap, by_chance = _overlap(model)
    verdict: Verdict = "refuted"
    if differing.mean() >= 0.5:
        everywhere = differing.min() >= MOST and apart.mean(0).min() >= APART
        verdict = "confirmed" if everywhere and max(overlap) <= OVERLAP else "caveat"
    return Outcome(
        theory={
            "distance": {"same head": 0.0, "largest": math.log(2)},
            "pairs that differ": 1.0,
            "overlap of subspaces": by_chance,
        },
        measured={
            "distance": apart.mean(0).tolist(),
            "pairs that differ": differing.tolist(),
            "overlap of subspaces": overlap,
        },
        stderr={"distance": _stderr(apart), "pairs that differ": None, "overlap of subspaces": None},
        verdict=verdict,
        details={
            "distances": distance.mean(0).tolist(),
            "same head, other context": _within(distance).mean(0).tolist(),
            "untrained": _between(np.stack(random)).mean(0).tolist(),
            "layer": list(range(distance.shape[1])),
        },
    )


def _in_two_contexts(tokenizer: Any, one: list[int], other: list[int], text: list[int]) -> Tensor:
    """The same passage at the same place behind two different ones, (2, tokens)."""
    import torch

    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    return torch.tensor([[begin, *before, *text, end] for before in (one, other)])


def _distances(model: Any, ids: Tensor, tokens: int) -> Array:
    """Mean Jensen-Shannon divergence of weight rows, (layers, heads, heads): head h in the first
    context against head g in the second. Rows run over the passage that both share."""
    shared = slice(-tokens - 1, -1)
    layers = []
    for q, k in minilm.queries_and_keys(model, ids):
        p, r = weights(q[:, :, shared], k[:, :, shared], None).astype(np.float64)
        layers.append(_divergence(p[:, None], r[None]).mean(-1))
    one_way = np.stack(layers)
    mirrored: Array = (one_way + one_way.swapaxes(-1, -2)) / 2
    return mirrored


def _divergence(p: Array, r: Array) -> Array:
    """Jensen-Shannon, in nats: 0 for equal rows, ln 2 for rows with nothing in common."""

    def entropy(x: Array) -> Array:
        return np.asarray(-(x * np.log(np.maximum(x, 1e-300))).sum(-1))

    return entropy((p + r) / 2) - (entropy(p) + entropy(r)) / 2


def _differing(distance: Array) -> Array:
    """By layer, the share of pairs further apart than either head is from itself elsewhere."""
    own = np.diagonal(distance, axis1=-2, axis2=-1)
    excess = distance - np.maximum(own[..., :, None], own[..., None, :])
    error = excess.std(0, ddof=1) / math.sqrt(len(excess))
    pairs = np.triu_indices(distance.shape[-1], 1)
    different = excess.mean(0) > BOUND * error
    share: Array = different[:, pairs[0], pairs[1]].mean(-1)
    return share


def _between(distance: Array) -> Array:
    """The mean over pairs of different heads, (texts, layers)."""
    pairs = np.triu_indices(distance.shape[-1], 1)
    mean: Array = distance[..., pairs[0], pairs[1]].mean(-1)
    return mean


def _within(distance: Array) -> Array:
    mean: Array = np.diagonal(distance, axis1=-2, axis2=-1).mean(-1)
    return mean


def _stderr(x: Array) -> list[float]:
    return list((x.std(0, ddof=1) / math.sqrt(len(x))).tolist())


def _overlap(model: Any) -> tuple[list[float], float]:
    """By layer, the mean squared cosine between what two heads read of the stream, over queries
    and keys; and d_k/d, what random subspaces have."""
    heads, by_layer = model.config.num_attention_heads, []
    width = model.config.hidden_size
    pairs = np.triu_indices(heads, 1)
    for layer in model.encoder.layer:
        both = []
        for part in (layer.attention.self.query, layer.attention.self.key):
            rows = part.weight.detach().numpy().astype(np.float64).reshape(heads, -1, width)
            basis = np.linalg.qr(rows.swapaxes(-1, -2))[0]  # (heads, d, d_k)
            cosines = np.einsum("adi,bdj->abij", basis, basis)
            both.append((cosines**2).sum((-1, -2))[pairs].mean() / rows.shape[1])
        by_layer.append(float(np.mean(both)))
    return by_layer, 1 / heads


def _untrained(model: Any, seed: int) -> Any:
    """The same architecture with the weights it would start with."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.config).eval()


CLAIM = Claim(
    id="C15",
    claim="Several heads attend to different subspaces.",
    derivation=(
        "A head reads d_k of d directions through its own W_Q and W_K. Two measures of\n"
        "difference: the Jensen-Shannon divergence of two heads' weight rows for the same\n"
        "tokens (0: equal, ln 2: nothing in common), and the overlap of the subspaces (1: the\n"
        "same, d_k/d: as random ones). How different is different? A head differs from itself\n"
        "when other text stands before a passage; two heads differ if they are further apart\n"
        "than that."
    ),
    criterion=(
        "confirmed: in every layer of the model at least 95 % of the pairs of heads are further "
        "apart than either is from itself behind another text (by more than 4 standard errors "
        "over passages), the mean divergence is at least a tenth of ln 2, and the mean overlap "
        "at most 1/2; caveat: at least half of all pairs are; else refuted"
    ),
    expected="confirmed",
    quick={"texts": 8, "tokens": 60},
    full={"texts": 64},
    experiment=experiment,
    plots=(
        Plot(
            "How far apart heads are",
            "layer",
            "Jensen-Shannon divergence, nats",
            {
                "two heads": ("measured", "distance"),
                "one head behind two texts": ("details", "same head, other context"),
                "two heads, untrained": ("details", "untrained"),
            },
        ),
        Plot("Overlap of subspaces", "layer", "mean squared cosine", {"": ("measured", "overlap of subspaces")}),
    ),
)
