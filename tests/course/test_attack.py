"""What the chapter on the assumption rests on: its rows are the core's, and a pinned softcap is not called a cure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from levelhead.attention import observe
from levelhead.course.chapters import attack
from levelhead.course.results import claim


@pytest.mark.parametrize(
    ("cure", "options"),
    [
        ("root", {"scale": "1/sqrt(d_k)"}),
        ("width", {"scale": "1/d_k"}),
        ("norm", {"scale": "cosine"}),
        ("cap", {"scale": "1/sqrt(d_k)", "softcap": float(attack.CAP)}),
    ],
)
@pytest.mark.parametrize("sigma", [1, 8])
def test_a_cell_is_what_the_core_observes(cure: str, options: dict[str, Any], sigma: int) -> None:
    q, z = attack._drawn()
    k = z.copy()
    k[:, 0] = 0.5 * q + math.sqrt(0.75) * k[:, 0]
    rows = observe(sigma * q[:, None, None], sigma * k[:, None], **options).rows
    found = attack.cell(cure, sigma, 0.5)
    assert found["entropy"] == pytest.approx(rows.entropy.mean() / math.log(attack.KEYS), abs=1e-4)
    assert found["softmax"] == pytest.approx(1 - rows.sum_p2.mean(), abs=1e-4)


@pytest.mark.parametrize("cure", ["root", "width", "norm"])
def test_the_law_holds_in_every_cell(cure: str) -> None:
    for sigma in attack.SIGMAS:
        for rho in attack.RHOS:
            found = attack.cell(cure, sigma, rho)
            assert abs(found["mean"] - found["law"]) <= 4 * found["error"], (sigma, rho)


def test_the_law_of_capped_scores_holds_in_every_cell() -> None:
    """A mean near the cap hangs on a few scores far below it, so its error is taken from a draw of its own."""
    rng = np.random.default_rng(1)
    norm, z = np.sqrt(rng.chisquare(attack.D_K, 50_000)), rng.standard_normal(50_000)
    unseen = 4 * 2 * attack.CAP / z.size  # from cap to -cap, for so few that the draw may have none
    for sigma in attack.SIGMAS:
        for rho in attack.RHOS:
            raw = norm * (rho * norm + math.sqrt(1 - rho**2) * z) / math.sqrt(attack.D_K)
            s = attack.CAP * np.tanh(sigma**2 * raw / attack.CAP)
            found = attack.cell("cap", sigma, rho)
            assert abs(s.mean() - found["law"]) <= 4 * s.std() / math.sqrt(s.size) + unseen, (sigma, rho)
            assert abs(found["mean"] - found["law"]) <= 4 * s.std() / math.sqrt(attack.ROWS) + unseen, (sigma, rho)


def test_growth_does_not_move_qk_norm() -> None:
    assert attack.cell("norm", 16, 0.5) == attack.cell("norm", 1, 0.5)


def test_scores_pinned_at_the_cap_look_level_and_are_called_pinned() -> None:
    pinned, bare = attack.cell("cap", attack.BIG, 0.5), attack.cell("root", attack.BIG, 0.5)
    assert pinned["level"] == "level" and pinned["verdict"] == "pinned"
    assert pinned["match"] < bare["match"] / 4 and pinned["left"] < pinned["softmax"] / 20
    assert attack.cell("root", 4, 0.0)["verdict"] == "other" and attack.cell("root", 4, 0.5)["verdict"] == "found"


def test_the_gradient_that_passes_is_a_derivative() -> None:
    q, z = (x.astype(np.float64)[0] for x in attack._drawn())
    raw = 64 * (z @ q) / math.sqrt(attack.D_K)

    def weight(at: int, moved: float) -> float:
        s = attack.CAP * np.tanh((raw + moved * (np.arange(len(raw)) == at)) / attack.CAP)
        return float(np.exp(s[at] - np.logaddexp.reduce(s)))

    slopes = [(weight(i, 1e-4) - weight(i, -1e-4)) / 2e-4 for i in range(len(raw))]
    p = np.array([weight(i, 0) for i in range(len(raw))])
    assert sum(slopes) == pytest.approx((p * (1 - p) * (1 - np.tanh(raw / attack.CAP) ** 2)).sum(), rel=1e-4)


def test_the_head_near_one_hot_looks_at_the_token_before() -> None:
    assert claim("C11a")["details"]["offset"] == -1
