"""Every instruction set of this CPU: the environment variable selects it, `info` reports it, and its results are right.

Each runs in its own interpreter, as for a user. The details of the arithmetic are tested elsewhere, by switching within
the process; here the promise is that the selected path runs.
"""

from __future__ import annotations

import platform
import sys

import pytest

import levelhead as lh
from levelhead import _core
from processes import fresh, output_of, start

AVAILABLE, BUILT = lh.info().available, lh.info().built
X86 = platform.machine() == "x86_64"

AGAINST_REFERENCE = """
import ml_dtypes
assert lh.info().isa == os.environ["LEVELHEAD_ISA"], lh.info().isa
assert any("LEVELHEAD_ISA" in reason for reason in lh.info().off)

TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = [  # H, G, T, S, D, E: below a vector, at its edges, several tiles, grouped, wide
    (1, 1, 1, 1, 1, 1), (2, 2, 3, 5, 7, 3), (2, 1, 16, 17, 16, 15), (4, 2, 97, 130, 32, 33),
    (1, 1, 1, 1030, 64, 64), (2, 1, 200, 515, 72, 80), (1, 1, 20, 40, 576, 512),
]
OPTIONS = [
    dict(),
    dict(causal=True),
    dict(window=(9, 3), softcap=4.0, alibi=True, sinks="sinks"),
    dict(mask="mask", key_lengths="half", dropout=0.25, seed=7),
]

for name, tolerance in TOLERANCE.items():
    dtype = getattr(ml_dtypes, name) if name == "bfloat16" else np.dtype(name)
    for H, G, T, S, D, E in SHAPES:
        q, k, v = numbers(H, T, D, seed=1), numbers(G, S, D, seed=2), numbers(G, S, E, seed=3)
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        values = {"sinks": numbers(H), "mask": numbers(T, S) > -0.5, "half": S // 2 + 1}
        for given in OPTIONS:
            options = {key: values[x] if type(x) is str else x for key, x in given.items()}
            wide = [x.astype(np.float64) for x in (q, k, v)]
            want = lh.reference.observe(*wide, **options)
            results = {lh.attention(q, k, v, threads=t, **options).tobytes() for t in (1, 3)}
            seen = lh.observe(q, k, v, **options)
            assert results == {seen.output.tobytes()}, (name, H, G, T, S, D, E, given)
            for got, right, bound in (
                (seen.output, want.output, tolerance),
                (seen.logsumexp, want.logsumexp, min(tolerance * 20, 1e-4)),
            ):
                np.testing.assert_allclose(
                    got.astype(np.float64), right, rtol=bound, atol=bound,
                    err_msg=f"{name} {(H, G, T, S, D, E)} {given}",
                )
print(lh.info().isa)
"""


@pytest.mark.parametrize("isa", AVAILABLE)
def test_the_variable_chooses_and_the_path_is_right(isa: str) -> None:
    assert fresh(AGAINST_REFERENCE, LEVELHEAD_ISA=isa, OPENBLAS_NUM_THREADS="1") == f"{isa}\n"


@pytest.mark.parametrize("isa", AVAILABLE)
def test_denormal_values_survive(isa: str) -> None:
    # No path flushes subnormals except products in pairs of bfloat16: with one visible key the output is its
    # value.
    fresh(
        """
for dtype, tiny in ((np.float32, 1e-42), (np.float64, 5e-324), (np.float16, 6e-8)):
    q, v = np.ones((4, 300, 16), dtype), np.full((4, 1, 33), tiny, dtype)
    for threads in (1, 2):
        assert (lh.attention(q, q[:, :1], v, threads=threads) == v[0, 0, 0]).all(), dtype
assert v[0, 0, 0] != 0
""",
        LEVELHEAD_ISA=isa,
    )


def test_what_is_built_and_what_runs_here() -> None:
    # Width 16 on AVX2 is how a CPU without AVX-512 tests that code; never chosen unasked.
    expected = {"baseline", "avx2", "avx2x16", "avx512", "avx512bf16"} if X86 else {"baseline"}
    assert set(BUILT) == expected
    assert set(AVAILABLE) <= set(BUILT)
    assert "baseline" in AVAILABLE
    assert ("avx2x16" in AVAILABLE) == ("avx2" in AVAILABLE)
    assert fresh("print(lh.info().isa)", LEVELHEAD_ISA=None).strip() == AVAILABLE[-1] != "avx2x16"
    assert fresh("print(lh.info().isa)", LEVELHEAD_ISA="").strip() == AVAILABLE[-1]


def test_info_names_what_this_cpu_lacks() -> None:
    for isa in set(BUILT) - set(AVAILABLE):
        assert any(reason.startswith(f"{isa}:") for reason in lh.info().off)


UNKNOWN = ["sse9", "AVX2", "baseline ", *sorted(set(BUILT) - set(AVAILABLE))]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_impossible_wish_is_one_clear_error(name: str) -> None:
    code = """
import numpy as np
import levelhead as lh
x = np.ones((4, 4), np.float32)
calls = [lambda: lh.attention(x, x, x), lambda: lh.observe(x, x), lambda: lh.info()]
for call in calls + calls:  # the second time too: no silent fallback
    try:
        call()
    except lh.LevelheadError as error:
        assert isinstance(error, ValueError)
        print(error)
"""
    process = start([sys.executable, "-c", code], LEVELHEAD_ISA=name)
    lines = output_of(process, 240).splitlines()
    assert len(lines) == 6, "something ran all the same"
    assert len(set(lines)) == 1
    assert lines[0].startswith("LEVELHEAD_ISA: expected")
    assert repr(name) in lines[0]
    assert all(available in lines[0] for available in AVAILABLE)


def test_switching_within_a_process() -> None:
    code = """
from levelhead import _core
before = lh.info().isa
for isa in lh.info().available:
    assert _core.set_isa(isa) == before
    before = isa
    assert lh.info().isa == isa
    got = lh.attention(small, small, small, causal=True)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
"""
    fresh(code)
    with pytest.raises(ValueError, match="baseline"):
        _core.set_isa("sse9")
