"""Graphs that `torch.compile` makes of watched modules, read when the compiler gets them; they are not changed.

While such a graph runs, nothing in it is followed operator by operator: which operators there are is up to the
compiler, and the calls that it has were inserted by `compiled`. So a softmax by hand in a graph is not measured. It is
named, and so are modules whose code runs in part between graphs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import fx, nn

from levelhead.torch.swap import Layer
from levelhead.watching import graph_sites
from levelhead.watching.graph_calls import TARGETS

IN_GRAPH = "a softmax by hand in a compiled graph, which is not followed: run it once without torch.compile"
OPERATOR = "calls the operator of SDPA itself in a compiled graph, which is not read: run it without torch.compile"
BETWEEN = "code between compiled graphs (a graph break), in which no softmax by hand is looked for"
EARLIER = "its graph was compiled before the watch began and is not read: compile it later, or run it once as it is"
MAYBE_EARLIER = "did not run while watched, or in a graph that was compiled before the watch began: that is not read"

KINDS: WeakSet[type] = WeakSet()  # classes of watched modules
_found: WeakKeyDictionary[type, dict[str, None]] = WeakKeyDictionary()  # by class of module: equal blocks share a graph
_read_kinds: WeakSet[type] = WeakSet()  # classes whose graphs were read
_apart: WeakSet[type] = WeakSet()  # those whose hooks have graphs of their own
_whole: WeakSet[type] = WeakSet()  # those whose code was compiled to its end


class _Running(threading.local):
    graphs = 0


_running = _Running()


def running() -> bool:
    """Whether a graph of a watched module runs now."""
    return _running.graphs > 0


def found_in(module: nn.Module) -> list[str]:
    """What graphs of this class of modules have that is not observed."""
    found = list(_found.get(type(module), ()))
    apart = type(module) in _apart and type(module) not in _whole and BETWEEN not in found
    return [*found, BETWEEN] if apart else found


def was_read(module: nn.Module) -> bool:
    """Whether a graph of this class of modules was compiled while watched."""
    return type(module) in _read_kinds


def anything_compiled() -> bool:
    """Whether this process holds a graph. Of one that was compiled before the watch began, nothing else is known."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.output_codes.seen)


# Hooks change lists and frames of a watch while Dynamo traces them, and restore these. Dynamo refuses to trace that
# inside an activation checkpoint, unless what is traced may stay without effect when backward runs it again.
_IN_CHECKPOINTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


class Compiler:
    """Reads every graph between `hold` and `release`."""

    def __init__(self) -> None:
        self._layer: Layer | None = None
        self._setting: bool | None = None  # before `hold`; None: torch has none

    def hold(self) -> None:
        """Begins, if the compiler is loaded: nothing is compiled before."""
        graphs = sys.modules.get("torch._dynamo.output_graph")
        if graphs is not None and self._layer is None:
            self._layer = Layer(graphs.OutputGraph, "call_user_compiler", _over)
            self._setting = getattr(torch._dynamo.config, _IN_CHECKPOINTS, None)
            self._set(True)

    def release(self) -> None:
        if self._layer is not None:
            self._layer.undo()
            self._set(self._setting)
        self._layer = None

    def _set(self, value: bool | None) -> None:
        if self._setting is not None:
            setattr(torch._dynamo.config, _IN_CHECKPOINTS, value)


COMPILER = Compiler()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def hook_is_traced(depth: int) -> bool:
    """Called by the first hook of a module while Dynamo traces it, inside so many others."""
    COMPILER.hold()  # the compiler may have been loaded since the watch began
    graph_sites.begin_run(depth + 1)
    tracer = graph_sites.traced_by()
    traced = None if tracer is None else tracer.output.root_tx
    if traced is not None and _is_hook(traced.output):
        module = traced.f_locals.get("module")
        if isinstance(module, nn.Module):
            _apart.add(type(module))
    return True


def _over(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        watched = set(KINDS)
        local = getattr(getattr(self, "root_tx", None), "f_locals", {}).values()  # of the function that is compiled
        outer = (
            [] if _is_hook(self) else [type(x) for x in local if isinstance(x, nn.Module) and type(x) in watched][-1:]
        )
        kinds = [*outer, *(kind for node in _nodes(gm) for kind in _stack(node, watched))]
        if kinds:
            _read(gm, outer, watched)
            _read_kinds.update(kinds)
            if getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False):
                _found.setdefault(kinds[-1], {})[BETWEEN] = None
            elif not _is_hook(self):
                # Another method of a module may have a graph of its own.
                _whole.update(kinds if "forward" in self.root_tx.f_code.co_name else kinds[len(outer) :])
        graph = original(self, gm, *args, **kwargs)
        return _marked(graph) if kinds and getattr(self, "package", None) is None else graph

    return call_user_compiler


def _is_hook(output: Any) -> bool:
    return __name__.partition(".")[0] in str(output.root_tx.f_code.co_filename)


def _marked(graph: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        _running.graphs += 1
        try:
            return graph(*args, **kwargs)
        finally:
            _running.graphs -= 1

    return run


# ---- a softmax by hand in a graph

_PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm"}
_SOFTMAXES = {"softmax", "exp", "log_softmax"}
_FAR = 64  # nodes between a product and its softmax, or a softmax and its product


def _stack(node: fx.Node, watched: set[type]) -> list[type]:
    """The classes of the modules whose code a node is from, from the outermost."""
    return [kind for _, kind in node.meta.get("nn_module_stack", {}).values() if kind in watched]


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for inner in gm.modules():  # of checkpointing and other functions of functions
        if isinstance(inner, fx.GraphModule):
            yield from inner.graph.nodes


def _read(gm: fx.GraphModule, outer: list[type], watched: set[type]) -> None:
    observed, attending = set(), set()
    for node in _nodes(gm):
        stack = [*outer, *_stack(node, watched)]
        if stack and _is_observer(node):
            observed.add(stack[-1])
        # A container has no code of its own: that is of an exported module in it, whose own graph `coverage` asks.
        if stack and node.target in TARGETS and stack[-1].__module__ != nn.Sequential.__module__:
            attending.add(stack[-1])
        if stack and _name(node) in _SOFTMAXES and _is_by_hand(node):
            _found.setdefault(stack[-1], {})[IN_GRAPH] = None
    for kind in attending - observed:
        _found.setdefault(kind, {})[OPERATOR] = None


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_by_hand(softmax: fx.Node) -> bool:
    """Whether it is over a product of two activations, meets values, and is no call that is observed."""
    over = _reached(softmax, lambda node: node.all_input_nodes)
    after = _reached(softmax, lambda node: list(node.users))
    observed = any(map(_is_observed, (softmax, *softmax.all_input_nodes)))
    products = [node for node in over if _is_product(node) and not all(map(_was_observed, node.all_input_nodes))]
    return not observed and bool(products) and any(map(_is_product, after))


def _was_observed(factor: fx.Node, far: int = 8) -> bool:
    """Whether an observer gets this factor of a product, or what it is a view or a repetition of."""
    if _is_observed(factor):
        return True
    return far > 0 and len(factor.all_input_nodes) == 1 and _was_observed(factor.all_input_nodes[0], far - 1)


def _is_observed(node: fx.Node) -> bool:
    return any(map(_is_observer, _copies(node)))


def _reached(start: fx.Node, step: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """The nodes before or after one, up to the products."""
    seen, waiting = {start}, step(start)
    for node in waiting:
        if node not in seen and len(seen) < _FAR:
            seen.add(node)
            if not _is_product(node):
                waiting += step(node)
    return [node for node in seen if node is not start]


def _is_product(node: fx.Node) -> bool:
    return _name(node) in _PRODUCTS and not any(map(_is_parameter, node.all_input_nodes))


def _is_parameter(node: fx.Node) -> bool:
    while node.op == "call_method" and node.all_input_nodes:  # such as a transpose
        node = node.all_input_nodes[0]
    return isinstance(node.meta.get("example_value"), nn.Parameter)


def _copies(node: fx.Node, far: int = 5) -> Iterator[fx.Node]:
    """What gets a node, or a view or copy of it."""
    for user in node.users:
        yield user
        if far and _name(user) in ("detach", "to", "reshape", "view", "float"):
            yield from _copies(user, far - 1)


def _is_observer(node: fx.Node) -> bool:
    return node.op == "call_function" and "levelhead_watch.call" in str(node.target)
