"""`levelhead.jax.watch`: statistics leave with a model's results, and findings are those that PyTorch models get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import linen, nnx

import levelhead as lh

lj = lh.jax
B, T, WIDTH, HEADS = 2, 24, 64, 4
D_K = WIDTH // HEADS


def tokens(seed: int = 0, *lead: int) -> Any:
    return jax.random.normal(jax.random.key(seed), (*(lead or (B,)), T, WIDTH))


# ---- wrong scales, in modules of Flax


class Attention(nnx.Module):
    """Projections, a function, and a scale in two places: before the call and with it."""

    def __init__(
        self, before: float = 1.0, scale: float | None = None, attend: Any = None, fused: bool = False
    ) -> None:
        rngs = nnx.Rngs(0)
        self.fused, self.before, self.scale, self.attend = fused, before, scale, attend
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs) if fused else None
        self.query, self.key, self.value = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        parts = jnp.split(self.qkv(x), 3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.reshape(*part.shape[:-1], HEADS, D_K) for part in parts)
        attend = self.attend or jax.nn.dot_product_attention
        return self.out(attend(q * self.before, k, v, scale=self.scale).reshape(x.shape))


def ours(q: Any, k: Any, v: Any, scale: Any = None) -> Any:
    return lj.attention(q, k, v, scale=scale, layout="BTNH")


WRONG: dict[str, tuple[dict[str, Any], float]] = {  # and the effective scale
    "1/sqrt(d) of the model": ({"scale": WIDTH**-0.5}, WIDTH**-0.5),
    "applied twice": ({"before": D_K**-0.5}, 1 / D_K),
    "no scale": ({"scale": 1.0}, 1.0),
    "1/d_k": ({"scale": 1 / D_K, "attend": ours}, 1 / D_K),
    "multiplied": ({"scale": D_K**0.5, "fused": True}, D_K**0.5),
    "on q alone, a fourth root": ({"before": D_K**-0.25, "scale": 1.0, "attend": ours}, D_K**-0.25),
}
RIGHT: dict[str, dict[str, Any]] = {
    "the default": {},
    "before the call": {"before": D_K**-0.5, "scale": 1.0},
    "fused projections": {"fused": True},
    "levelhead": {"attend": ours},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_scale_is_found_from_one_pass(name: str) -> None:
    given, scale = WRONG[name]
    _, seen = lj.watch(Attention(**given))(tokens())
    findings = lh.diagnose(seen)
    record = seen.run().last.records[0]
    assert record.facts.scale_reading == "projections" and record.facts.model_width == WIDTH
    assert record.facts.effective_scale == pytest.approx(scale, rel=1e-4)
    assert [finding.kind for finding in findings if "scale" in finding.kind] == ["wrong scale"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_is_silent(name: str) -> None:
    _, seen = lj.watch(Attention(**RIGHT[name]))(tokens())
    assert list(lh.diagnose(seen)) == []
    assert seen.run().last.records[0].facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-4)


# ---- a transformer of Flax NNX


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **keywords: Any) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **keywords)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, **keywords: Any) -> Any:
        x = x + self.attention(self.norm(x), **keywords)
        return x + jax.nn.gelu(self.mlp(x))


class Transformer(nnx.Module):
    def __init__(self, **keywords: Any) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs, **keywords) for _ in range(2)])

    def __call__(self, x: Any, **keywords: Any) -> Any:
        for block in self.blocks:
            x = block(x, **keywords)
        return x


def test_a_flax_transformer_trains_a_step_with_statistics(tmp_path: Path) -> None:
    model = Transformer()
    causal = jnp.tril(jnp.ones((T, T), bool))[None, None]

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            out, seen = lj.watch(model)(x, mask=causal)
            return (out**2).mean(), seen

        (value, seen), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        return value, seen, gradients

    value, seen, gradients = step(model, tokens())
    loss = nnx.grad(lambda model, x: (model(x, mask=causal) ** 2).mean())
    plain = jax.tree.leaves(nnx.jit(loss)(model, tokens()))
    for mine, theirs in zip(jax.tree.leaves(gradients), plain, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert np.isfinite(value)
    run = seen.run()
    assert [record.module for record in run.last.records] == ["blocks.0.attention", "blocks.1.attention"]
    assert [seen.facts.scale_reading for seen in run.last.records] == ["projections"] * 2
    first = run.last.records[0]
    q, k = (getattr(model.blocks[0].attention, name)(model.blocks[0].norm(tokens())) for name in ("query", "key"))
    expected = lj.observe(q, k, layout="BTNH", causal=True).heads
    np.testing.assert_allclose(first.heads.max_logit, expected.max_logit.max(0), rtol=1e-5)
    np.testing.assert_allclose(first.heads.mean_entropy, expected.mean_entropy.mean(0), rtol=1e-5)
    np.testing.assert_allclose(first.heads.q_rms, np.sqrt((np.asarray(q) ** 2).mean((0, 1, 3))), rtol=1e-5)
    assert list(lh.diagnose(seen)) == []
    # What is recorded is what PyTorch models leave: files, sinks and reports take it.
    run.save(tmp_path / "run.json")
    assert lh.diagnose(tmp_path / "run.json").verdict == lh.diagnose(run).verdict
    sink = lh.sinks.JSONL(tmp_path / "run.jsonl")
    sink(seen.snapshot(3))
    sink.close()
    assert lh.sinks.read(tmp_path / "run.jsonl").last.step == 3
    assert "blocks.0.attention" in lh.diagnose(run)._repr_html_() + run._repr_html_()


def test_flax_attention_sows_through_a_scan_of_layers() -> None:
    def block(key: Any) -> Any:
        return Block(nnx.Rngs(key), attention_fn=lj.flax_attention)

    blocks = nnx.vmap(block, in_axes=0, out_axes=0)(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    def forward(blocks: Any, x: Any) -> Any:
        layer = nnx.scan(lambda x, block: block(x, sow_weights=True), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return layer(x, blocks)

    out = forward(blocks, tokens())
    seen = lj.sown(nnx.pop(blocks, nnx.Intermediate))
    assert [call.module for call in seen.calls] == ["attention"]
    assert seen.calls[0].tally.shape[:2] == (3, HEADS)
    record = seen.run().last.records[0]
    assert record.heads.rows.tolist() == [3 * B * T] * HEADS
    plain = nnx.merge(nnx.graphdef(blocks), nnx.state(blocks))
    assert np.isfinite(out).all() and plain is not None


def test_a_call_that_cannot_leave_says_so() -> None:
    x = tokens()[:, :, None]
    inner: Callable[..., Any] = jax.checkpoint(lambda x: jax.nn.dot_product_attention(x, x, x))
    with pytest.raises(lh.LevelheadError, match="flax_attention"):
        jax.jit(lj.watch(lambda x: inner(x)))(x)
    assert jax.nn.dot_product_attention.__module__.startswith("jax")
    np.testing.assert_allclose(inner(x), jax.nn.dot_product_attention(x, x, x), atol=1e-6)  # nothing is left wrapped


def test_what_was_traced_before_is_not_missed() -> None:
    x = tokens()[:, :, None]
    inner = jax.jit(lambda x: jax.nn.dot_product_attention(x, x, x))
    inner(x)
    with pytest.raises(lh.LevelheadError, match="flax_attention"):
        lj.watch(inner)(x)


def test_flax_attention_with_dropout_is_seen() -> None:
    x, mask = tokens(), nnx.make_causal_mask(tokens()[..., 0])
    model = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), dropout_rate=0.1)
    for deterministic in (True, False):
        _, seen = lj.watch(model)(x, mask=mask, deterministic=deterministic)
        (record,) = seen.run().last.records
        assert record.facts.how == "flax" and record.facts.scale_reading == "projections"
    ours = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), attention_fn=lj.flax_attention)
    np.testing.assert_allclose(ours(x, mask=mask), model(x, mask=mask, deterministic=True), atol=1e-6)
    expected = lj.watch(ours)(x, mask=mask)[1].run().last.records[0].heads.mean_entropy
    np.testing.assert_allclose(record.heads.mean_entropy, expected, rtol=1e-5)


def test_flax_linen_is_seen() -> None:
    x, model = tokens(), linen.MultiHeadDotProductAttention(HEADS)
    weights, mask = model.init(jax.random.key(0), x, x), linen.make_causal_mask(tokens()[..., 0])
    out, seen = jax.jit(lj.watch(model.apply))(weights, x, x, mask=mask)
    np.testing.assert_allclose(out, model.apply(weights, x, x, mask=mask), atol=1e-6)
    (record,) = seen.run().last.records
    assert (record.facts.how, record.facts.masked) == ("flax", True)
    ours = linen.MultiHeadDotProductAttention(HEADS, attention_fn=lj.flax_attention)
    expected = lj.watch(ours.apply)(weights, x, x, mask=mask)[1].run().last.records[0]
    np.testing.assert_allclose(record.heads.mean_entropy, expected.heads.mean_entropy, rtol=1e-5)


# ---- Equinox and Keras


class Encoder(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self) -> None:
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm)(x)
        return x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((T, T), bool)))


def test_equinox_is_watched_inside_of_its_vmap() -> None:
    model, x = Encoder(), tokens(0, 3)
    out, seen = eqx.filter_jit(jax.vmap(lambda x: lj.watch(model)(x)))(x)
    np.testing.assert_allclose(out, jax.vmap(model)(x), atol=1e-5)
    record = seen.run().last.records[0]
    assert record.module == "attention" and record.facts.scale_reading == "projections"
    assert record.heads.rows.tolist() == [3 * T] * HEADS
    assert [finding for finding in lh.diagnose(seen) if finding.severity != "note"] == []


def test_an_equinox_module_in_a_function_is_seen() -> None:
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    _, seen = lj.watch(lambda x: layer(x, x, x))(tokens()[0])
    assert [call.facts.how for call in seen.calls] == ["equinox"]


def test_keras_attention_that_is_written_out_is_seen() -> None:
    x = tokens()
    layer = keras.layers.MultiHeadAttention(HEADS, D_K, dropout=0.3)
    plain, mask = layer(x, x), np.tril(np.ones((1, T, T), bool))
    _, seen = lj.watch(layer)(x, x)
    _, masked = lj.watch(lambda x: layer(x, x, attention_mask=mask, return_attention_scores=True))(x)
    _, causal = lj.watch(lambda x: layer(x, x, use_causal_mask=True))(x)
    assert [len(one.calls) for one in (seen, masked, causal)] == [1, 1, 1] and plain.shape == x.shape
    assert seen.run().last.records[0].facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-4)
    np.testing.assert_allclose(masked.calls[0].tally, causal.calls[0].tally, rtol=1e-5)


def test_a_keras_model_trains_a_step_with_statistics() -> None:
    layer = keras.layers.MultiHeadAttention(HEADS, D_K)
    plain, fixed = layer(tokens(), tokens()), [x.value for x in layer.non_trainable_variables]

    @jax.jit
    def step(trained: Any, x: Any) -> Any:
        def loss(trained: Any) -> Any:
            (out, _), seen = lj.watch(layer.stateless_call)(trained, fixed, x, x)
            return (out**2).mean(), (out, seen)

        return jax.value_and_grad(loss, has_aux=True)(trained)

    (_, (out, seen)), gradients = step([x.value for x in layer.trainable_variables], tokens())
    np.testing.assert_allclose(out, plain, atol=1e-5)
    assert all(np.abs(x).max() > 0 for x in gradients[:1])
    record = seen.run().last.records[0]
    assert record.facts.scale_reading == "projections"
    assert record.facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-4)


def test_keras_on_jax() -> None:
    inputs = keras.Input((T, WIDTH))
    attention = keras.layers.MultiHeadAttention(HEADS, D_K, name="heads")
    model = keras.Model(inputs, keras.layers.Dense(4)(attention(inputs, inputs, use_causal_mask=True)))
    out, seen = lj.watch(model)(tokens())
    np.testing.assert_allclose(out, model(tokens()), atol=1e-5)
    record = seen.run().last.records[0]
    assert record.module.endswith("heads") and record.facts.how == "keras"
    assert record.facts.effective_scale == pytest.approx(D_K**-0.5, rel=1e-4)
    assert list(lh.diagnose(seen)) == []
