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


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.5, 0.9])
def test_the_variance_of_a_term_is_the_derived_one(rho: float) -> None:
    """(1 + ρ²)σ⁴ for normal entries, and another number of the fourth moment for others."""
    rng = np.random.default_rng(2)
    sigma, many = 1.5, 1_000_000
    root3 = math.sqrt(3)
    for fourth, draw in (
        (3.0, lambda: rng.standard_normal(many)),
        (1.8, lambda: rng.uniform(-root3, root3, many)),  # E[q⁴] of a uniform entry of variance 1
    ):
        q, z = sigma * draw(), sigma * draw()
        term = q * (rho * q + math.sqrt(1 - rho**2) * z)
        derived = (1 + rho**2 * (fourth - 2)) * sigma**4
        assert term.mean() == pytest.approx(rho * sigma**2, abs=5 * math.sqrt(derived / many))
        squares = (term - rho * sigma**2) ** 2
        assert abs(squares.mean() - derived) <= 5 * squares.std() / math.sqrt(many), (rho, fourth)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_spread_of_a_match_is_the_derived_one(rho: float) -> None:
    spread, error = attack.match_spread(rho)
    assert abs(spread - math.sqrt(1 + rho**2)) <= 4 * error


def test_growth_does_not_move_qk_norm() -> None:
    assert attack.cell("norm", 16, 0.5) == attack.cell("norm", 1, 0.5)


def test_scores_pinned_at_the_cap_look_level_and_are_called_pinned() -> None:
    pinned, bare = attack.cell("cap", attack.BIG, 0.5), attack.cell("root", attack.BIG, 0.5)
    assert pinned["level"] == "level" and pinned["verdict"] == "pinned"
    assert pinned["match"] < bare["match"] / 4 and pinned["left"] < pinned["softmax"] / 20


def test_what_is_said_of_a_row_fits_its_level_and_its_match() -> None:
    """A row that is right "however sharp it is" is sharp; without correlation there is no match to be missed."""
    at = {(rho, sigma): attack.cell("root", sigma, rho) for rho in attack.RHOS for sigma in attack.SIGMAS}
    for (rho, _), found in at.items():
        sure = found["level"] in ("sharp", "saturated")
        assert (found["verdict"] == "chance") == (sure and not rho and found["match"] < 0.5)
        assert found["verdict"] != "found" or (sure and found["match"] >= 0.5)
        assert found["verdict"] != "leads" or (found["level"] == "level" and found["match"] >= 0.5)
        assert found["verdict"] != "other" or (rho and sure)
    seen = [
        at[0.0, 4]["verdict"],
        at[0.2, 4]["verdict"],
        at[0.5, 4]["verdict"],
        at[attack.RHO, attack.SIGMA]["verdict"],
    ]
    assert seen == ["chance", "other", "found", "leads"]


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
