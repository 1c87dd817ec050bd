"""The chapter on the online softmax: what the core keeps after each tile, against the definition."""

from __future__ import annotations

import numpy as np
import pytest

from levelhead import reference
from levelhead.course.chapters.online import ORDERS, SCORES, TILE, VALUES, merged


@pytest.mark.parametrize("order", ORDERS)
def test_after_every_tile_the_state_is_that_of_the_keys_so_far(order: tuple[int, ...]) -> None:
    for arrived, kept in enumerate(merged(order), 1):
        keys = [key for tile in order[:arrived] for key in range(tile * TILE, (tile + 1) * TILE)]
        s, v = (np.array([row[key] for key in keys], np.float64) for row in (SCORES, VALUES))
        truth = reference.observe(np.ones((1, 1)), s[:, None], v[:, None], scale=1.0)
        e = np.exp(s - s.max())
        assert truth.output is not None
        wanted = {"m": s.max(), "l": e.sum(), "a": e @ v, "b": e @ s}
        wanted |= {"output": truth.output.item(), "entropy": truth.rows.entropy.item()}
        assert kept == pytest.approx(wanted, rel=1e-6)


def test_orders_begin_in_order_and_every_press_changes_them() -> None:
    assert ORDERS[0] == tuple(range(len(SCORES) // TILE))
    assert all(sorted(order) == list(ORDERS[0]) for order in ORDERS)
    assert all(a != b for a, b in zip(ORDERS, ORDERS[1:] + ORDERS[:1], strict=True))
