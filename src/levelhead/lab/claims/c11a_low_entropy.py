"""C11a: low entropy is not sickness: a healthy model has a head that is near one-hot on purpose."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from levelhead import stats
from levelhead.attention import observe
from levelhead.lab import minilm
from levelhead.lab.claim import Claim, Outcome, Params, Plot, Tell, Verdict
from levelhead.lab.measure import curve
from levelhead.lab.settings import whole
from levelhead.watching.doctor import Examination, doctor

if TYPE_CHECKING:
    from levelhead.models import Opened

MOST_ROWS = 0.5  # of a head at a top-1 weight of 0.99: what the gauge calls saturated
ONE_PLACE = 0.9  # of those rows look at one and the same place


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    texts, tokens = whole("texts", params["texts"], 3), whole("tokens", params["tokens"], 8, 500)
    tell(0.0, f"opening {minilm.MODEL}")
    model = minilm.opened()
    passages = minilm.passages(model, texts, tokens, seed)
    examined = []
    for number, ids in enumerate(passages, 1):
        tell(0.3 + 0.7 * number / (texts + 1), f"reading passage {number} of {texts}")
        examined.append(doctor(model, model.tokenizer.decode(ids), tokens=tokens, threads=1))
    shares = np.stack([_saturated(one) for one in examined])  # (texts, layers, heads)
    # Chosen by the first passage, measured on the others: the largest of 72 flatters itself.
    layer, head = np.unravel_index(shares[0].argmax(), shares[0].shape)
    chosen = shares[1:, layer, head]
    place, there = _place(model, passages[1:], int(layer), int(head))
    share, fixed = curve([0], [chosen]), curve([0], [there])
    complaints = [str(f) for one in examined for f in one.findings if f.severity != "note"]
    verdict: Verdict = "refuted"
    if share.y[0] >= MOST_ROWS and not complaints:
        verdict = "confirmed" if fixed.y[0] >= ONE_PLACE else "caveat"
    return Outcome(
        theory={"rows near one-hot": 0.0, "of those at one place": 1 / tokens, "complaints": 0},
        measured={"rows near one-hot": share.y[0], "of those at one place": fixed.y[0], "complaints": len(complaints)},
        stderr={"rows near one-hot": share.stderr[0], "of those at one place": fixed.stderr[0], "complaints": None},
        verdict=verdict,
        details={
            "layer": int(layer),
            "head": int(head),
            "offset": place,
            "complaints": complaints,
            "saturated rows by layer and head": shares.mean(0).tolist(),
            "H/ln n by layer and head": np.mean([_entropy(one) for one in examined], 0).tolist(),
        },
    )


def _saturated(one: Examination) -> list[list[float]]:
    return [record.heads.saturated.tolist() for record in one.run.latest]


def _entropy(one: Examination) -> list[list[float]]:
    return [record.heads.normalised_entropy.tolist() for record in one.run.latest]


def _place(model: Opened, passages: list[list[int]], layer: int, head: int) -> tuple[int, list[float]]:
    """The offset from query to key at which near one-hot rows look, and how many, by passage."""
    import torch

    begin, end = model.tokenizer.cls_token_id, model.tokenizer.sep_token_id
    offsets = []
    for ids in passages:
        layers = minilm.queries_and_keys(model.model, torch.tensor([[begin, *ids, end]]))
        q, k = (x[0, head] for x in layers[layer])
        rows = observe(q, k).rows
        offset_of_row = rows.argmax - np.arange(len(q))
        offsets.append(offset_of_row[rows.top1 >= stats.SATURATED_ROW])
    (offset, _), *_ = Counter(np.concatenate(offsets).tolist()).most_common(1) or [(0, 0)]
    return int(offset), [float((x == offset).mean()) if x.size else 0.0 for x in offsets]


CLAIM = Claim(
    id="C11a",
    claim="Low entropy is not sickness: healthy trained models have heads near one-hot on purpose.",
    derivation=(
        "By scale alone no row of independent q and k divided by √d_k is near one-hot (C11: the\n"
        "largest of 256 weights is 0.04). A trained head can be: it learned q and k that agree.\n"
        "To copy what stands one token earlier, say, a weight of 1 there is the right answer,\n"
        "and the gradient is small because there is nothing left to learn. So an accident and a\n"
        "purpose look alike in entropy; they differ in where the rows look and in what the\n"
        "logits do."
    ),
    criterion=(
        "confirmed: a head of the trained model, picked on one passage, has on the others at "
        "least half of its rows at a top-1 weight of 0.99 or more, at least 90 % of these look "
        "at one and the same place relative to the query, and diagnose has no warning and no "
        "error; caveat: they look here and there; else refuted"
    ),
    expected="confirmed",
    quick={"texts": 6, "tokens": 126},
    full={"texts": 29},
    experiment=experiment,
    plots=(Plot("H/ln n of every head", "head", "layer", {"": ("details", "H/ln n by layer and head")}, heat=True),),
)
