"""Shapes and options: what is accepted, its normal form, and every error with its message."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from levelhead.call import options as call_options
from levelhead.errors import LevelheadError, LevelheadTypeError, LevelheadValueError

SHAPE = call_options.shape_of((2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6))
SQUARE = call_options.shape_of((2, 4, 5, 8), (2, 4, 5, 8), None)


def refuses(kind, argument, given, call, *arguments, **options):
    """The call raises `kind`, and its message names the argument and what was given."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert isinstance(caught.value, LevelheadError)
    assert message.startswith(argument), message
    assert ": expected " in message and f", got {given}" in message, message
    assert message.endswith("."), message


# Shapes


def test_shape_of_grouped_heads():
    assert SHAPE.batch == (2, 3)
    assert (SHAPE.B, SHAPE.H, SHAPE.G, SHAPE.T, SHAPE.S, SHAPE.D, SHAPE.E) == (6, 4, 2, 5, 7, 8, 6)
    assert SHAPE.lead == (2, 3, 4)


def test_two_dimensions_are_one_head():
    shape = call_options.shape_of((5, 8), (7, 8), (7, 6))
    assert (shape.batch, shape.B, shape.H, shape.G, shape.T, shape.S) == ((), 1, 1, 1, 5, 7)
    assert shape.lead == ()


def test_empty_dimensions_are_shapes():
    shape = call_options.shape_of((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    assert (shape.B, shape.H, shape.T, shape.S, shape.E) == (0, 0, 0, 0, 0)
    assert call_options.shape_of((2, 0, 3, 4), (2, 2, 3, 4), None).H == 0


@pytest.mark.parametrize(
    ("q", "k", "v", "argument", "given"),
    [
        ((8,), (7, 8), None, "q", "shape (8,)"),
        ((), (), None, "q", "shape ()"),
        ((2, 5, 8), (7, 8), (7, 6), "k", "shape (7, 8)"),
        ((2, 5, 8), (2, 7, 8), (7, 6), "v", "shape (7, 6)"),
        ((3, 2, 5, 8), (1, 2, 7, 8), None, "k", "shape (1, 2, 7, 8)"),
        ((3, 2, 5, 8), (3, 2, 7, 8), (2, 2, 7, 8), "v", "shape (2, 2, 7, 8)"),
        ((4, 5, 8), (3, 7, 8), None, "k", "3 heads"),
        ((2, 5, 8), (4, 7, 8), None, "k", "4 heads"),
        ((2, 5, 8), (0, 7, 8), None, "k", "0 heads"),
        ((4, 5, 8), (2, 7, 8), (4, 7, 8), "v", "4 in shape"),
        ((2, 5, 8), (2, 7, 9), None, "k", "9 in shape"),
        ((2, 5, 8), (2, 7, 8), (2, 6, 8), "v", "6 in shape"),
        ((5, 8), (7, 8), (6, 8), "v", "6 in shape"),
        ((2**31, 2**31, 8), (2**31, 1, 8), None, "q", "shape (2147483648,"),
        ((1, 1, 8), (1, 2**62, 8), None, "k", "shape (1, 4611686018427387904, 8)"),
        ((1, 1, 8), (1, 2, 8), (1, 2, 2**62), "v", "shape (1, 2, 4611686018427387904)"),
        ((2**30, 4, 1), (1, 2**30, 1), None, "q and k", "shape (1073741824, 4, 1073741824)"),
        ((2**32, 1, 1), (1, 1, 1), (1, 1, 2**30), "q and v", "shape (4294967296, 1, 1073741824)"),
        ((2**31, 2**31, 0), (2**31, 1, 0), None, "q", "shape (2147483648,"),
    ],
)
def test_bad_shapes(q, k, v, argument, given):
    refuses(LevelheadValueError, argument, given, call_options.shape_of, q, k, v)


# Normal forms


def test_defaults():
    plain = call_options.describe(SHAPE)
    assert plain.scale.tolist() == [1 / math.sqrt(8)] * 4
    assert plain.query_start.tolist() == [2] * 6  # S - T: the last query is aligned with the last key
    assert (plain.causal, plain.left, plain.right, plain.softcap) == (False, None, None, None)
    assert (plain.dropout, plain.seed) == (0.0, 0)
    for name in ("mask", "sinks", "alibi", "key_lengths", "query_segments", "key_segments"):
        assert getattr(plain, name) is None


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (7,), (), (4, 1, 7), (3, 1, 5, 1), (2, 3, 4, 5, 7)])
@pytest.mark.parametrize("dtype", [bool, np.float32, np.float16])
def test_mask_is_a_view_of_the_callers(shape, dtype):
    mask = np.zeros(shape, dtype)
    result = call_options.describe(SHAPE, mask=mask, dtype_name="float16").mask
    assert result.shape == (2, 3, 4, 5, 7)
    assert result.dtype == dtype
    assert np.shares_memory(result, mask)


def test_bfloat16_mask_travels_as_bits():
    mask = np.full((5, 7), -1.5, ml_dtypes.bfloat16)
    for given in (mask, mask.view(np.uint16)):
        result = call_options.describe(SHAPE, mask=given, dtype_name="bfloat16").mask
        assert result.dtype == np.uint16
        assert np.shares_memory(result, mask)


def test_window_sides():
    both = call_options.describe(SHAPE, window=(3, np.int32(0)))
    assert (both.left, both.right) == (3, 0)
    open_sides = call_options.describe(SHAPE, window=[None, 2**70])
    assert (open_sides.left, open_sides.right) == (None, None)


def test_integers_per_batch_row():
    options = call_options.describe(SHAPE, key_lengths=[[1], [7]], query_start=-3)
    assert options.key_lengths.tolist() == [1, 1, 1, 7, 7, 7]
    assert options.query_start.tolist() == [-3] * 6
    single = call_options.shape_of((2, 5, 8), (2, 7, 8), None)
    for lengths in (4, [4], np.array([4], np.uint64)):
        assert call_options.describe(single, key_lengths=lengths).key_lengths.tolist() == [4]


def test_segments():
    one = call_options.describe(SQUARE, segments=[0, 0, 1, 1, 1])
    assert one.query_segments.shape == one.key_segments.shape == (2, 5)
    pair = call_options.describe(SHAPE, segments=(np.arange(5), np.zeros((2, 1, 7), np.int8)))
    assert pair.query_segments.tolist() == [[0, 1, 2, 3, 4]] * 6
    assert pair.key_segments.shape == (6, 7)


def test_segment_ids_from_cumulative_lengths():
    assert call_options.segment_ids([0, 2, 2, 5]).tolist() == [0, 0, 2, 2, 2]
    assert call_options.segment_ids(np.array([0, 1], np.int32), total=3).tolist() == [0, -1, -1]
    assert call_options.segment_ids([0]).tolist() == []


def test_alibi_slopes():
    np.testing.assert_array_equal(call_options.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    # the paper's rule for other head counts: those of 4, then every other one of 8
    np.testing.assert_allclose(call_options.alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    assert call_options.alibi_slopes(1).tolist() == [2.0**-8]
    assert call_options.alibi_slopes(0).shape == (0,)
    assert call_options.describe(SHAPE, alibi=True).alibi.tolist() == call_options.alibi_slopes(4).tolist()
    assert call_options.describe(SHAPE, alibi=False).alibi is None


def test_sinks_may_be_minus_infinity():
    sinks = call_options.describe(SHAPE, sinks=[0, -math.inf, 1.5, -2]).sinks
    assert sinks.tolist() == [0, -math.inf, 1.5, -2]
    assert sinks.dtype == np.float64


def test_seed():
    assert call_options.describe(SHAPE, dropout=0.5, seed=2**64 - 1).seed == 2**64 - 1
    drawn = {call_options.describe(SHAPE, dropout=0.5).seed for _ in range(4)}
    assert len(drawn) == 4 and all(0 <= seed < 2**64 for seed in drawn)


def test_float64_reaches_further():
    wide = call_options.describe(SHAPE, scale=1e300, sinks=[1e300] * 4, softcap=1e-300, dtype_name="float64")
    assert wide.scale[0] == wide.sinks[0] == 1e300


# Errors

VALUE, TYPE = LevelheadValueError, LevelheadTypeError


@pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        (VALUE, {"scale": math.nan}, "nan"),
        (VALUE, {"scale": math.inf}, "inf"),
        (VALUE, {"scale": 1e300}, "1e+300"),
        (VALUE, {"scale": [1.0, 2.0]}, "shape (2,)"),
        (TYPE, {"causal": 1}, "1 of type int"),
        (TYPE, {"causal": None}, "None"),
        (TYPE, {"window": 3}, "3 of type int"),
        (VALUE, {"window": (1, 2, 3)}, "(1, 2, 3)"),
        (VALUE, {"window": (-1, 0)}, "-1"),
        (VALUE, {"window": (0, -5)}, "-5"),
        (TYPE, {"window": (1.0, 0)}, "1.0 of type float"),
        (TYPE, {"window": (True, 0)}, "True of type bool"),
        (TYPE, {"mask": np.ones((5, 7), np.int64)}, "dtype int64"),
        (TYPE, {"mask": np.ones((5, 7), np.uint16)}, "dtype uint16"),
        (TYPE, {"mask": np.ones((5, 7))}, "dtype float64"),
        (TYPE, {"mask": np.ones((5, 7), np.float16)}, "dtype float16"),
        (TYPE, {"mask": np.ones((5, 7), ml_dtypes.bfloat16)}, "dtype bfloat16"),
        (TYPE, {"mask": np.ones((5, 7), np.complex64)}, "dtype complex64"),
        (TYPE, {"mask": np.ones((5, 7), ">f4")}, "dtype >f4"),
        (TYPE, {"mask": "causal"}, "'causal' of type str"),
        (TYPE, {"mask": [[True], [True, False]]}, "[[True], [True, False]] of type list"),
        (VALUE, {"mask": np.ones((7, 5), bool)}, "shape (7, 5)"),
        (VALUE, {"mask": np.ones((2, 5, 7), bool)}, "shape (2, 5, 7)"),
        (VALUE, {"mask": np.ones((1, 2, 3, 4, 5, 7), bool)}, "shape (1, 2, 3, 4, 5, 7)"),
        (VALUE, {"mask": np.ones((0, 7), bool)}, "shape (0, 7)"),
        (VALUE, {"softcap": 0.0}, "0.0"),
        (VALUE, {"softcap": -30}, "-30.0"),
        (VALUE, {"softcap": math.inf}, "inf"),
        (VALUE, {"softcap": 1e-300}, "1e-300"),
        (TYPE, {"softcap": "30"}, "'30' of type str"),
        (TYPE, {"softcap": [30.0]}, "[30.0] of type list"),
        (VALUE, {"sinks": [0.0] * 3}, "shape (3,)"),
        (VALUE, {"sinks": 0.0}, "shape ()"),
        (VALUE, {"sinks": [0, 0, 0, math.nan]}, "nan"),
        (VALUE, {"sinks": [0, 0, 0, math.inf]}, "inf"),
        (VALUE, {"sinks": [0, 0, 0, 1e39]}, "1e+39"),
        (TYPE, {"sinks": [True] * 4}, "[True, True, True, True] of type list"),
        (VALUE, {"alibi": [0.5, 0.5]}, "shape (2,)"),
        (VALUE, {"alibi": [0.5, 0.5, math.nan, 0.5]}, "nan"),
        (TYPE, {"alibi": "yes"}, "'yes' of type str"),
        (VALUE, {"key_lengths": 8}, "8"),
        (VALUE, {"query_lengths": 60}, "60"),
        (TYPE, {"query_lengths": 1.5}, "1.5"),
        (VALUE, {"key_lengths": [-1, 0, 0]}, "-1"),
        (VALUE, {"key_lengths": [1, 2]}, "shape (2,)"),
        (TYPE, {"key_lengths": 3.0}, "3.0 of type float"),
        (TYPE, {"key_lengths": np.ones(3, bool)}, "an array of shape (3,) and dtype bool"),
        (TYPE, {"query_start": 0.5}, "0.5 of type float"),
        (VALUE, {"query_start": [0, 1]}, "shape (2,)"),
        (VALUE, {"query_start": 2**62}, "4611686018427387904"),
        (TYPE, {"query_start": 2**70}, "1180591620717411303424"),
        (VALUE, {"query_start": np.uint64(2**63)}, "a value of 9223372036854775808"),
        (VALUE, {"segments": np.zeros(7, int)}, "one array"),
        (VALUE, {"segments": (np.zeros(5, int),)}, "a tuple of 1"),
        (VALUE, {"segments": (np.zeros(7, int), np.zeros(7, int))}, "shape (7,)"),
        (TYPE, {"segments": (np.zeros(5), np.zeros(7, int))}, "an array of shape (5,)"),
        (TYPE, {"segments": (0, 1)}, "0 of type int"),
        (VALUE, {"dropout": 1.0}, "1.0"),
        (VALUE, {"dropout": -0.1}, "-0.1"),
        (VALUE, {"dropout": math.nan}, "nan"),
        (TYPE, {"dropout": True}, "True of type bool"),
        (VALUE, {"seed": -1}, "-1"),
        (VALUE, {"seed": 2**64}, "18446744073709551616"),
        (TYPE, {"seed": 1.5}, "1.5 of type float"),
    ],
)
def test_bad_options(kind, options, given):
    (argument,) = options
    refuses(kind, argument, given, call_options.describe, SHAPE, **options)


def test_integer_masks_are_told_to_become_bool():
    with pytest.raises(LevelheadTypeError, match="Use bool"):
        call_options.describe(SHAPE, mask=np.ones((5, 7), np.int32))


@pytest.mark.parametrize(
    "cu_seqlens", [[], [1, 2], [0, 3, 2], [0.0, 1.0], [[0, 1]], [[0], [1, 2]], 3, None, np.zeros((2, 2), int)]
)
def test_bad_cumulative_lengths(cu_seqlens):
    with pytest.raises(LevelheadError, match=r"^cu_seqlens: expected "):
        call_options.segment_ids(cu_seqlens)


def test_total_must_hold_the_sequences():
    refuses(LevelheadValueError, "total", "2", call_options.segment_ids, [0, 3], total=2)
    refuses(LevelheadTypeError, "total", "4.0", call_options.segment_ids, [0, 3], total=4.0)
