"""`levelhead.jax.watch`: a model of Flax NNX, Equinox or Keras 3, or any function, and its attention's statistics.

Nothing is called back and nothing is kept: `watch(model)(x)` returns the model's result and what was seen, as arrays of
the same trace. Attention that goes through JAX's own function, Keras's, Equinox's module or levelhead is seen; a
softmax that a model writes out itself is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from inspect import Signature, signature
from typing import Any

import jax

from levelhead.errors import bad_type
from levelhead.jax import drop_in
from levelhead.jax.collecting import Collector, collecting, current, followed, measured, measuring
from levelhead.jax.seen import Layer, Seen

# Of Equinox there are none: its layers are mapped over tokens, and seen where its own attention applies them.
_PROJECTIONS = {"flax.nnx": ("Linear", "LinearGeneral", "Einsum"), "keras.layers": ("Dense", "EinsumDense")}


def watch(model: Callable[..., Any]) -> Callable[..., tuple[Any, Seen]]:
    """The model as a function that also returns what was seen of its attention.

    It belongs inside jit and grad: return what was seen as a further result (`has_aux=True`). A model that is mapped
    over a batch (Equinox) is watched inside of `jax.vmap`.

    >>> q = jax.numpy.ones((1, 6, 2, 8))
    >>> out, seen = watch(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True))(q)
    >>> seen.run().last.records[0].heads.rows.tolist()
    [6, 6]
    """
    if not callable(model):
        raise bad_type("model", "a module or a function", type(model).__name__, "Pass what computes the output")

    owner = getattr(model, "__self__", model)  # of a method, as Keras's stateless_call

    def watched(*args: Any, **keywords: Any) -> tuple[Any, Seen]:
        modules = dict(_modules(owner))
        names = {id(module): name for name, module in modules.items()}
        kinds = {type(module) for module in modules.values()}
        with collecting(names, lambda: [*_classes(kinds), *_functions()]) as collector:
            out = model(*args, **keywords)
        return out, Seen(tuple(collector.calls), getattr(owner, "__name__", type(owner).__name__))

    return watched


# ---- modules of a model


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Every module of a model with its name; of a function there is none."""
    frameworks = {name: sys.modules[name] for name in ("flax.nnx", "equinox", "keras") if name in sys.modules}
    if "flax.nnx" in frameworks and isinstance(model, frameworks["flax.nnx"].Module):
        for path, module in frameworks["flax.nnx"].iter_modules(model):
            yield ".".join(map(str, path)), module
    elif "keras" in frameworks and isinstance(model, frameworks["keras"].layers.Layer):
        yield "", model
        for layer in model._flatten_layers(include_self=False):
            yield (layer.path or layer.name).replace("/", "."), layer
    elif "equinox" in frameworks and isinstance(model, frameworks["equinox"].Module):
        kind = frameworks["equinox"].Module
        yield from _equinox_modules(model, kind, "")


def _equinox_modules(node: Any, kind: type, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, kind):
        yield name, node
        parts = [(field, getattr(node, field, None)) for field in vars(type(node))["__dataclass_fields__"]]
    elif isinstance(node, list | tuple):
        parts = [(str(i), part) for i, part in enumerate(node)]
    elif isinstance(node, dict):
        parts = [(str(key), part) for key, part in node.items()]
    else:
        return
    for part, child in parts:
        yield from _equinox_modules(child, kind, f"{name}.{part}".lstrip("."))


def _classes(kinds: set[type]) -> Iterator[tuple[Any, str, Any]]:
    """`__call__` of the classes of a model, each once: the class that defines it."""
    found = ((sys.modules.get(module), names) for module, names in _PROJECTIONS.items())
    layers = tuple(getattr(module, name) for module, names in found if module is not None for name in names)
    attention = _equinox_attention()
    kinds = kinds if attention is None else kinds | {attention}  # a function may hold one
    for owner in {next((base for base in kind.__mro__ if "__call__" in vars(base)), None) for kind in kinds} - {None}:
        call = vars(owner)["__call__"]
        yield owner, "__call__", followed(_measured_by_equinox(call) if owner is attention else call, layers)


# ---- attention functions


def _functions() -> Iterator[tuple[Any, str, Any]]:
    yield jax.nn, "dot_product_attention", measuring(jax.nn.dot_product_attention, "jax.nn", _as_in_jax)
    keras = sys.modules.get("keras.src.backend.jax.nn")
    if keras is not None:
        yield keras, "dot_product_attention", measuring(keras.dot_product_attention, "keras", _as_in_keras)
    written_out = sys.modules.get("keras.src.layers.attention.multi_head_attention")
    if written_out is not None:
        owner, name = written_out.MultiHeadAttention, "_compute_attention"
        yield owner, name, _measured_by_keras(vars(owner)[name])
    for module in ("flax.nnx.nn.attention", "flax.linen.attention"):
        flax = sys.modules.get(module)
        if flax is not None:  # NNX: with dropout, or where weights are sown; Linen: always
            name = "dot_product_attention_weights"
            yield (
                flax,
                name,
                measuring(getattr(flax, name), "flax", partial(_as_in_flax, signature(getattr(flax, name)))),
            )


def _as_in_jax(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **keywords: Any) -> Any:
    names = ("scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size")
    used = {name: x for name, x in keywords.items() if name in names}
    query, key, bias, mask = map(drop_in.with_batch, (query, key, bias, mask))
    return query, key, drop_in.as_options(query, key, bias, mask, **used)


def _as_in_keras(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **keywords: Any) -> Any:
    cap = keywords.pop("attn_logits_soft_cap", None)
    q, k, options = _as_in_jax(query, key, value, bias, mask, **keywords)
    return q, k, options | {"softcap": cap}


def _as_in_flax(parameters: Signature, *args: Any, **keywords: Any) -> Any:
    given = parameters.bind(*args, **keywords).arguments
    query, key, bias, mask = map(given.get, ("query", "key", "bias", "mask"))
    mask = mask if mask is None else mask.astype(bool)
    return _as_in_jax(query, key, None, bias, mask, is_causal=given.get("is_causal", False))


def _measured_by_keras(call: Any) -> Any:
    """Keras's layer, which writes its softmax out where it has dropout or returns the weights."""
    parameters = signature(call)

    @wraps(call)
    def run(*args: Any, **keywords: Any) -> Any:
        given = parameters.bind(*args, **keywords)
        given.apply_defaults()
        self, query, key, value, mask, _, scores, causal = given.arguments.values()
        collector = current()
        if collector is None or query.ndim != 4 or not (self._dropout > 0 or scores):
            return call(*args, **keywords)
        if mask is not None:
            mask = mask.astype(bool).reshape(*mask.shape[:-2], *(1,) * (4 - mask.ndim), *mask.shape[-2:])
        scale = self._inverse_sqrt_key_dim
        collector.attended("keras", *_as_in_jax(query, key, value, None, mask, scale=scale, is_causal=causal))
        with collector.pause():
            return call(*args, **keywords)

    return run


# ---- Equinox


def _equinox_attention() -> Any:
    return getattr(sys.modules.get("equinox.nn"), "MultiheadAttention", None)


def _measured_by_equinox(call: Any) -> Any:
    """`equinox.nn.MultiheadAttention`, which maps attention over its heads: queries and keys are projected once more,
    which XLA joins with the module's own."""

    def run(self: Any, query: Any, key_: Any, value: Any, mask: Any = None, **keywords: Any) -> Any:
        collector = current()
        if collector is not None:
            _measure_equinox(collector, self, query, key_, value, mask, keywords.get("process_heads"))
        return call(self, query, key_, value, mask, **keywords)

    return run


def _measure_equinox(
    collector: Collector, module: Any, query: Any, key: Any, value: Any, mask: Any, change: Any
) -> None:
    pairs = (("query_proj", query), ("key_proj", key), ("value_proj", value))
    projected = {name: jax.vmap(getattr(module, name))(x) for name, x in pairs}
    for name, x in pairs[:2]:
        layer = Layer(name, False, int(x.shape[-1]), x.shape[0])
        collector.layer(layer, projected[name])
    q, k, v = (x.reshape(x.shape[0], module.num_heads, -1) for x in projected.values())
    if change is not None:
        q, k, v = change(q, k, v)
    collector.attended("equinox", q, k, {"mask": mask})


# ---- Flax


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    module: Any = None,
    is_causal: bool = False,
    **unused: Any,
) -> Any:
    """For `nnx.MultiHeadAttention(attention_fn=levelhead.jax.flax_attention)`: computed by levelhead.

    Called with `sow_weights=True`, the module sows what was seen of the call as `nnx.Intermediate` "levelhead", through
    `nnx.scan` and `nnx.remat` too; `sown` reads it back.
    """
    if dropout_rate and not deterministic:
        wanted = "no dropout of weights"
        raise bad_type("dropout_rate", wanted, dropout_rate, "Pass deterministic=True, or use Flax's own attention_fn")
    mask = mask if mask is None else mask.astype(bool)  # make_causal_mask makes numbers
    if module is not None:
        from flax import nnx

        q, k, options = _as_in_jax(query, key, value, bias, mask, is_causal=is_causal)
        seen = measured("flax", q, k, options, "BTNH", "", type(module).__name__, [])
        module.sow(nnx.Intermediate, "levelhead", Seen((seen,), ""))
    return drop_in.dot_product_attention(query, key, value, bias, mask, is_causal=is_causal)


def sown(state: Any) -> Seen:
    """What `flax_attention` sowed, from `nnx.state(model, nnx.Intermediate)` or `nnx.pop(model, nnx.Intermediate)`."""
    if not hasattr(state, "flat_state"):
        advice = "Pass nnx.pop(model, nnx.Intermediate)"
        raise bad_type("state", "a state of Flax NNX", type(state).__name__, advice)
    calls = []
    for path, leaf in state.flat_state():
        if path[-1] == "levelhead":
            module = ".".join(map(str, path[:-1]))
            calls += [replace(call, module=module) for seen in leaf.get_value() for call in seen.calls]
    return Seen(tuple(calls), "")
