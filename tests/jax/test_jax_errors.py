"""Bad input to `levelhead.jax`: one clear error each, before any work."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import levelhead as lh
from processes import fresh, output_of, start
from support import qkv

lj = lh.jax
q, k, v = qkv((2, 4), 6, 9, 8, groups=2)


def traced(name: str) -> Callable[[], Any]:
    """An option that must be known when the function is traced, as an argument of it."""
    return lambda: jax.jit(lambda x: lj.attention(q, k, v, **{name: x}))(2.0)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a traced soft cap": (traced("softcap"), "softcap: expected a Python value, no array"),
    "a traced flag": (traced("causal"), "causal: expected a Python value, no array"),
    "traced lengths of a float type": (traced("key_lengths"), "key_lengths: expected integers"),
    "another layout": (lambda: lj.attention(q, k, v, layout="BHTD"), 'layout: expected "BNTH" or "BTNH"'),
    "tokens before heads": (
        lambda: lj.attention(*(x.swapaxes(1, 2) for x in (q, k, v))),
        'layout: expected .* in the layout BNTH.*pass layout="BTNH"',
    ),
    "heads before tokens": (lambda: lj.attention(q, k, v, layout="BTNH"), 'layout: .*pass layout="BNTH"'),
    "mixed dtypes": (lambda: lj.attention(q, k.astype(np.float16), v), "k: expected the dtype of q, float32"),
    "integers": (lambda: lj.attention(q.astype(int), k, v), "q: expected a JAX or NumPy array of float32"),
    "no queries": (lambda: lj.attention(None, k, v), "q: expected a JAX or NumPy array"),
    "no values": (lambda: lj.attention(q, k, None), "v: expected values, got None.*observe"),
    "a masked array": (lambda: lj.attention(np.ma.array(q), k, v), "q: expected a JAX or NumPy array.*MaskedArray"),
    "a list": (lambda: lj.attention([[1.0]], k, v), "q: expected a JAX or NumPy array"),
    "float64 without x64": (
        lambda: lj.attention(*(x.astype(np.float64) for x in (q, k, v))),
        "q: expected float32 or narrower without jax_enable_x64",
    ),
    "another width of keys": (lambda: lj.attention(q, k[..., :4], v), "k: expected key width 8"),
    "a mask of another shape": (
        lambda: lj.attention(q, k, v, mask=jnp.ones((6, 8), bool)),
        r"mask: expected a shape that broadcasts to \(2, 4, 6, 9\)",
    ),
    "an integer mask": (lambda: lj.attention(q, k, v, mask=jnp.ones((6, 9), int)), "mask: expected a bool mask"),
    "sinks of another number": (lambda: lj.attention(q, k, v, sinks=jnp.zeros(3)), "sinks: expected a shape"),
    "dropout without a seed": (lambda: lj.attention(q, k, v, dropout=0.1), "seed: expected a seed with dropout"),
    "no such option": (lambda: lj.attention(q, k, v, is_causal=True), "unexpected keyword argument 'is_causal'"),
    "a position beyond 32 bits": (
        lambda: lj.attention(q, k, v, query_start=np.array([2**40, 0]), causal=True),
        r"query_start: expected integers below 2\*\*31",
    ),
    "a gradient by slopes": (
        lambda: jax.grad(lambda x: lj.attention(q, k, v, alibi=x).sum())(np.ones(4, np.float32)),
        "alibi: expected slopes that need no gradient.* There is no gradient by it",
    ),
    "a symbolic size": (
        lambda: export.export(jax.jit(lj.attention))(
            *3 * [jax.ShapeDtypeStruct(export.symbolic_shape("4, t, 8"), "f4")]
        ),
        "q: expected sizes that are numbers",
    ),
    "the drop-in of five dimensions": (
        lambda: lj.dot_product_attention(*3 * [np.ones((1, 1, 2, 2, 4), np.float32)]),
        "query: expected 3 or 4 dimensions",
    ),
    "what was sown by nobody": (lambda: lj.sown({}), "state: expected a state of Flax NNX"),
    "forward mode": (lambda: jax.jvp(lj.attention, (q, k, v), (q, k, v)), "forward-mode"),
    "a watch of no model": (lambda: lj.watch(3), "model: expected a module or a function"),  # type: ignore[arg-type]
    "statistics that are traced": (
        lambda: jax.jit(lambda q: lj.observe(q, k).observation)(q),
        "observation: expected arrays whose numbers are known",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name: str) -> None:
    call, message = BAD[name]
    expected = TypeError if name in ("no such option", "forward mode") else lh.LevelheadError
    with pytest.raises(expected, match=message):
        call()


def test_a_python_that_is_too_old_for_jax_is_named() -> None:
    script = """
        import sys
        sys.version_info = (3, 10, 13, "final", 0)
        import levelhead as lh
        from levelhead import extras
        from levelhead.errors import LevelheadImportError
        extras.find_spec = lambda name: None
        print(lh.info())
        try:
            lh.jax
        except LevelheadImportError as error:
            print(error)
    """
    said = output_of(start([sys.executable, "-c", textwrap.dedent(script)]), 240)
    assert "arrays through DLPack): not installed; it needs Python 3.11 or later\n" in said
    assert "expected Python 3.11 or later" in said and "levelhead[jax]" not in said


def test_without_jax_everything_else_works() -> None:
    script = """
        import sys
        import numpy as np
        from levelhead import extras
        found = extras.find_spec
        extras.find_spec = lambda name, *rest: None if name == "jax" else found(name, *rest)
        import levelhead as lh
        assert "jax" not in sys.modules
        try:
            import levelhead.jax
        except ImportError as error:  # as users guard what may be missing
            assert isinstance(error, lh.LevelheadError)
            print(error)
        print(lh.attention(*3 * [np.ones((2, 3, 4))]).shape)
    """
    said = fresh(textwrap.dedent(script))
    assert "levelhead.jax: expected the package jax, got no jax. Run: pip install" in said
    assert said.rstrip().endswith("(2, 3, 4)")


def test_an_error_of_the_core_is_an_error_of_jax() -> None:
    # Two extensions, each perhaps with a C++ library of its own: an exception that crosses would end the process.
    script = """
        import numpy as np
        import levelhead as lh
        try:
            lh.jax.attention(*3 * [np.ones((2, 3, 4), np.float32)]).block_until_ready()
        except Exception as error:
            print(error)
    """
    said = output_of(start([sys.executable, "-c", textwrap.dedent(script)], LEVELHEAD_ISA="abacus"), 240)
    assert "levelhead: LEVELHEAD_ISA: expected one of baseline" in said and "'abacus'" in said


def test_importing_it_loads_no_other_framework() -> None:
    script = """
        import sys
        import levelhead.jax
        print(sorted({"torch", "flax", "equinox", "keras"} & sys.modules.keys()))
    """
    assert fresh(textwrap.dedent(script)).rstrip().endswith("[]")


def test_info_names_a_build_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["levelhead.info"], "installed", lambda name: name != "levelhead._jax_ffi")
    assert any("levelhead.jax: this build did not find jaxlib" in reason for reason in lh.info().off)
