"""`query_lengths` through the binding: a keyword of `_core.forward` and `_core.backward`, with the
shape and type of `key_lengths`. Its results are tested in core/test/test_query_lengths.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from levelhead import _core

B, H, T, S, D = 2, 2, 7, 9, 8
LENGTHS = np.array([4, 0])


def _random(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, logsumexp = np.empty_like(q), np.empty((B, H, T), np.float32)
    given = {"scale": np.full(H, 0.3), "sinks": np.zeros(H)} | options
    _core.forward(q, k, v, out=out, logsumexp=logsumexp, **given)
    return out, logsumexp


def test_rows_beyond_the_length_do_not_exist() -> None:
    q, k, v = _random(B, H, T, D), _random(B, H, S, D), _random(B, H, S, D)
    exists = np.arange(T) < LENGTHS[:, None, None]
    plain = _forward(q, k, v)
    q[~np.broadcast_to(exists, q.shape[:3])] = np.nan
    out, logsumexp = _forward(q, k, v, query_lengths=LENGTHS)
    np.testing.assert_array_equal(out, np.where(exists[..., None], plain[0], 0))
    np.testing.assert_array_equal(logsumexp, np.where(exists, plain[1], -np.inf))

    dq, dk, dv = np.full_like(q, 7), np.full_like(k, 7), np.full_like(v, 7)
    dsinks, dout = np.full(H, 7.0), np.where(exists[..., None], _random(B, H, T, D), np.nan)
    into = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}
    options = {"sinks": np.zeros(H), "scale": np.full(H, 0.3), "query_lengths": LENGTHS}
    _core.backward(dout, q, k, v, out, logsumexp, **into, **options)
    for gradient in (dq, dk, dv, dsinks):
        assert np.isfinite(gradient).all()
    assert not dq[0, :, 4:].any() and not dq[1].any() and not dk[1].any() and not dv[1].any()
    assert dq[0, :, :4].any() and dk[0].any() and dv[0].any() and dsinks.any()


@pytest.mark.parametrize("wrong", [np.array([1]), np.array([1.0, 2.0])], ids=["shape", "dtype"])
def test_memory_of_another_shape_or_type_is_refused(wrong: Any) -> None:
    x = _random(B, H, T, D)
    with pytest.raises(ValueError, match="query_lengths"):
        _forward(x, x, x, query_lengths=wrong)
