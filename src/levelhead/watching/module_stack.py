"""The modules of a watched model, and a stack of those that are running.

Every module that may contain an attention call becomes a `WatchedModule`. Hooks keep a stack of the running ones, so
that a call is attributed to its module, and store what ran inside each. The hooks are plain functions that find their
`WatchedModule` on the module itself: this lets `torch.compile` trace them in one graph. Nothing is measured here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from levelhead.observation import Observation
from levelhead.torch.operators import Pass
from levelhead.watching.call_sites import Sites
from levelhead.watching.compiler_graphs import KINDS, hook_is_traced
from levelhead.watching.effective_scale import Ran, Read, columns, features_last, ran, reads
from levelhead.watching.functions.transformers import eager_is_understood, forms_softmax_by_hand
from levelhead.watching.graph_calls import Operators, calls_operator
from levelhead.watching.measure import Call, plain
from levelhead.watching.own_weights import own_weights, products
from levelhead.watching.shape_inference import infers_shapes
from levelhead.watching.uncounted_hooks import Before, counted, uncounted
from levelhead.watching.undisturbed import undisturbed
from levelhead.watching.watchable import number_of_heads, sounds_like_attention

ATTRIBUTE = "_levelhead_watched"
_EXPORT = "an export ran: that pass was not observed"
_KEPT = 24  # layers that ran in a module before a call: the projections are among the last
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Observed:
    """A call of levelhead's own functions, which computed it together with its statistics."""

    path: str
    observation: Observation
    q: Tensor
    k: Tensor
    options: Mapping[str, Any]
    again: Callable[[Any], Observation]  # observes the call under another scale
    shard: Any = None  # of `levelhead.distributed`: the rows of this rank


class Product(NamedTuple):
    """Scores that are `factor` times q kᵀ, bias and mask aside."""

    q: Tensor  # (B, H, T, D)
    k: Tensor
    factor: float | Tensor | None  # None: not one number


class GradientInputs(NamedTuple):
    """The inputs of a call whose gradients are measured."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    parts: tuple[int, int] = (1, 1)  # over how many ranks the queries lie, and the keys
    views: tuple[Callable[[Tensor], Tensor], ...] = ()  # make (B, H, T, D) of q, k and v, if they are not


class Recorder(Protocol):
    """What hooks and wrappers need of the watch whose model is running."""

    model: nn.Module
    child_names: dict[int, str]  # by id of the module
    compiled: bool  # whether a compiled graph of the model has run
    describers: Mapping[Any, Callable[..., Any]]  # by function: what users taught this watch
    gradients: bool  # whether they are wanted
    probe: Any  # a `Probe`: which runs are followed operator by operator

    def wanted(self) -> bool: ...  # whether a call that runs now is measured

    def around(self, watched: WatchedModule) -> Iterable[WatchedModule]: ...  # the modules that contain it

    def begin_forward(self) -> None: ...  # of the whole model

    # Measures a call that other code computed.
    def record_call(self, frame: Frame, path: str, call: Call) -> None: ...

    # The same, which counts once the result is called, with further facts; `product`: what its ready-made scores were
    # computed from.
    def measure_call(self, frame: Frame, path: str, call: Call, product: Product) -> Callable[..., None]: ...

    # Adds a call that levelhead computed together with its statistics; `observed`: by one of its own functions.
    def record_pass(self, frame: Frame, path: str, computed: Pass) -> None: ...
    def record_observed(self, frame: Frame, observed: Observed) -> None: ...

    # Measures the gradients of a call when backward computes them, if they are wanted.
    def follow_gradients(self, frame: Frame, inputs: GradientInputs) -> None: ...


class WatchedModule:
    """A module of a watched model, and what is known about its calls."""

    def __init__(self, name: str, module: nn.Module, watch: Recorder) -> None:
        self.name, self.module, self.watch = name, module, watch
        self.kind = type(module).__name__
        KINDS.add(type(module))
        self.number = next(_numbers)
        # Compiled code passes this to the operator, which looks the module up by it. A tensor may change without
        # another compilation, and on the CPU reading it waits for no device.
        self.handle = torch.tensor([self.number, 0], device="cpu")
        self.heads = number_of_heads(module)
        self.eager_is_understood = eager_is_understood(module)
        self.softmax_by_hand = self.heads is not None and forms_softmax_by_hand(module)
        # None: not known yet, so what runs inside is measured as if it did.
        self.attends = True if sounds_like_attention(module) else None
        # Whether attention is called in it or in a module inside; None: not known yet. Then what runs in it matters.
        self.feeds: bool | None = None
        self.weights = own_weights(module)
        self.calls_operator = calls_operator(module)
        self.reads = reads(module) or 0
        self.calls = 0
        self.runs = 0
        self.lost_fast_path = False  # its native fast path would have run in a graph
        self.calls_in_a_pass = 0  # measured calls that one record adds up, at most
        self.measured = 0  # calls in its last run
        self.single_head = False  # whether the last of them had one head
        self.paths: dict[str, None] = {}  # functions through which its calls were observed, in order
        self.not_observed: dict[str, None] = {}  # reasons why calls of it were not observed
        self.ever_ran: set[str] = set()  # names of children
        self.sites = Sites()
        self.graph_sites: dict[tuple[int, int], Any] = {}  # as `Frame.sites`, of its calls in graphs

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy of a watched model is not watched

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


WATCHED_MODULES: dict[int, WatchedModule] = {}  # of all attached watches, by number


class Frame:
    """One run of a watched module, in one thread. Inside a compiled model: one tracing of it."""

    def __init__(self, watched: WatchedModule) -> None:
        self.watched = watched
        self.ran: list[Ran] = []  # inside it, since it was entered
        self.inputs: list[Ran] = []  # of a module that holds weights itself
        self.traced: list[Traced] = []  # the same as `ran`, in a graph
        self.calls = 0  # traced inside it
        self.serial = 0  # which run it is; while Dynamo traces, not known
        self.sites: dict[tuple[int, int], Any] = {}  # by heads and number: places in the code that called attention
        self.place: Any = None  # of its call, in a graph
        self.following: list[Any] = []  # gradients whose call is not recorded yet
        self.busy = False  # inside a call that is being measured already
        self.softmax_is_call = False  # inside a function whose softmax is the call
        self.via = ""  # path of the transformers function that is running
        self.uncounted: Before = []  # hooks, meanwhile
        self.mode: Operators | None = None  # active while a graph runs
        self.below = 0  # how many frames of compiled code it runs in
        self.calls_before = 0  # of the module
        self.kv_heads = 0  # passed to that function, before it repeated them; 0: not known
        self.given: tuple[Read, Read] | None = None  # query and key of `F.multi_head_attention_forward`
        self.empty: bool | None = None  # whether it runs over memory that holds no data; None: not asked yet

    @property
    def watch(self) -> Recorder:
        return self.watched.watch


# ---- the stack


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()
traced: list[Frame | None] = []  # the same while Dynamo traces, which supports lists but no thread-locals


def exporting() -> bool:
    """Whether the pass only makes a graph to be kept (torch.export, jit.trace, ONNX, fx): nothing of a watch may be in
    it."""
    if torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None or torch.fx._symbolic_trace._is_fx_tracing_flag:
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None


def current() -> Frame | None:
    """The innermost watched module that is running."""
    if torch.compiler.is_compiling():
        return traced[-1] if traced else None
    frame = _stack.frames[-1] if _stack.frames else None
    if len(traced) > (0 if frame is None else frame.below):  # between the graphs of a compiled module
        return traced[-1]
    return frame


def depth(watch: Recorder) -> int:
    """How many modules of a watch are running in this thread, one in another."""
    return sum(frame.watch is watch for frame in _stack.frames)


def runs_empty() -> bool:
    """Whether what runs now is fed with memory that holds no data: it is no pass of the model."""
    frame = _stack.frames[-1] if _stack.frames else None
    if frame is None:  # a graph that runs by itself
        return infers_shapes()
    if frame.empty is None:
        frame.empty = infers_shapes()
    return frame.empty


def pass_number(frame: Frame) -> int | None:
    """Which pass a call in this frame belongs to; None: not known, in a compiled graph that runs by itself."""
    around = next((one for one in _stack.frames if one.watch is frame.watch), None)
    return None if around is None else around.serial


def heads_around(frame: Frame, *, several: bool) -> int | None:
    """The number of heads, from the attributes of the running module, or with `several` of one around it."""
    if frame.watched.heads is not None or not several:
        return frame.watched.heads
    around = [each.watched for each in _stack.frames if each.watch is frame.watch]
    return next((watched.heads for watched in reversed(around) if watched.heads is not None), None)


def enter(module: nn.Module, args: Any) -> None:
    """A forward pre-hook."""
    watched = getattr(module, ATTRIBUTE, None)
    if exporting():
        if watched is not None and watched.attends and not torch.compiler.is_dynamo_compiling():
            watched.not_observed[_EXPORT] = None
        return
    if torch.compiler.is_compiling():
        hook_is_traced(len(traced))
        traced.append(None if watched is None else Frame(watched))
        if watched is not None and watched.weights:
            for x in args:
                if isinstance(x, Tensor):
                    _trace_ran(INPUT, x, module)
        return
    if watched is None or watched.module is not module:
        return
    if module is watched.watch.model:
        leave_all(watched.watch)  # after Ctrl-C no hook ran, and old frames remain
    if not _stack.frames and module is watched.watch.model:
        traced.clear()  # the same
    watched.runs += 1
    frame = Frame(watched)
    frame.serial, frame.below, frame.calls_before = next(_numbers), len(traced), watched.calls
    _stack.frames.append(frame)
    if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
        frame.uncounted = uncounted(module.modules())
    if watched.calls_operator:
        frame.mode = Operators()
        frame.mode.__enter__()  # type: ignore[no-untyped-call]
    if watched.weights and _matters(frame) and watched.watch.wanted():
        with undisturbed():
            frame.inputs = [columns("input", None, None, x) for x in args if _is_output(x)]


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, called after exceptions, too."""
    if exporting():
        return
    if torch.compiler.is_compiling():
        _trace_leave(traced.pop() if traced else None, output)
        return
    watched = getattr(module, ATTRIBUTE, None)
    if watched is None or not _stack.frames or _stack.frames[-1].watched is not watched:
        return
    frame = _stack.frames.pop()
    counted(frame.uncounted)
    watched.measured = watched.calls - frame.calls_before
    if frame.mode is not None:
        frame.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if output is not None and watched.watch.wanted():  # ran whole
        watched.attends = watched.attends or False
        watched.feeds = watched.feeds or False
    if frame.ran and _stack.frames and not watched.feeds and _stack.frames[-1].watch is frame.watch:
        # A projection may be one inside a module of its own, with more behind it.
        _stack.frames[-1].ran += [replace(one, inner=True) for one in frame.ran if not one.inner]
    child_ran(module, args, output if not watched.feeds else None)  # what attends is no projection


def fed(frame: Frame) -> list[Ran]:
    """What ran before a call in this frame, there and in the modules around it, in order. Those modules are marked."""
    running = [*_stack.frames, *(one for one in traced if one is not None)]
    around = [one for one in running if one.watch is frame.watch]
    if frame not in around:  # a compiled graph's: what is around it has no frame
        around += [one for one in map(Frame, frame.watch.around(frame.watched)) if one.watched.weights]
        around.append(frame)
    everything: list[Ran] = []
    for one in around[: around.index(frame) + 1]:
        one.watched.feeds = True
        everything += [*map(_sampled, one.traced), *one.ran][-_KEPT:]
        if one.watched.weights:
            everything += products(one.watched.module, one.watched.weights, [*one.inputs, *frame.inputs, *everything])
    return everything


def _matters(frame: Frame) -> bool:
    """Whether what runs in it may be an origin of queries or keys: attention is called in it or beside it."""
    frames = _stack.frames[-2:] if _stack.frames and _stack.frames[-1] is frame else [frame]
    return any(one.watched.feeds is not False or one.watched.attends for one in frames)


def leave_all(watch: Recorder) -> None:
    """Removes all frames of a watch from this thread's stack."""
    for frame in _stack.frames:
        if frame.watch is watch:
            counted(frame.uncounted)
    _stack.frames[:] = [frame for frame in _stack.frames if frame.watch is not watch]


def would_be_fast(module: nn.MultiheadAttention) -> bool:
    with_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return not (module.training or with_gradients)


def child_ran(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of simple modules: the frame around them stores what came out."""
    if exporting():
        return
    if torch.compiler.is_compiling():
        _trace_ran(_width_read(module), output if isinstance(output, Tensor) else None, module)
        return
    frame = current()
    if frame is None:
        return
    around = frame.watched
    name = around.watch.child_names.get(id(module))
    if name is None:
        return
    around.ever_ran.add(name)
    if not _matters(frame) or not around.watch.wanted():
        return
    x = output[0] if isinstance(output, tuple) and output else output
    with undisturbed():
        if _is_output(x):
            busy, frame.busy = frame.busy, True  # taking a sample is no attention call
            frame.ran.append(ran(name, module, args, x))
            frame.busy = busy


def _is_output(x: Any) -> bool:
    return isinstance(x, Tensor) and plain(x) and x.dim() > 1 and x.numel() > 0 and x.is_floating_point()


# ---- the same while Dynamo traces


class Traced(NamedTuple):
    """A projection in a graph, and its output at some tokens."""

    rows: Tensor
    tokens: int
    reads: int  # or INPUT
    inner: bool = False


INPUT = -1  # it is what a module that holds weights itself was called with


def _sampled(one: Traced) -> Ran:
    return Ran("", None, None if one.reads == INPUT else one.reads, one.tokens, one.rows)


def _width_read(module: nn.Module) -> int:
    """How wide a projection's input is; 0: it is no projection."""
    for name in ("in_features", "in_channels", "nx"):
        width = getattr(module, name, None)
        if isinstance(width, int):
            return width
    return 0


def _trace_ran(reads: int, output: Tensor | None, module: nn.Module) -> None:
    """Stores a projection's output with the frame around it. Norms are not: the compiler fuses them with what follows,
    and a sample of their output would change how."""
    frame = traced[-1] if traced else None
    if frame is None or output is None or not reads or output.dim() < 2 or not output.is_floating_point():
        return
    x = features_last(module, output)
    frame.traced.append(Traced(torch.ops.levelhead_watch.rows(x.detach()), x.numel() // x.shape[-1], reads))


def _trace_leave(frame: Frame | None, output: Any) -> None:
    """What ran inside a child of a module may be a projection of it; what attends is none."""
    around = traced[-1] if traced else None
    if frame is None or around is None or frame.calls:
        return
    for one in frame.traced:
        if not one.inner:
            around.traced.append(Traced(one.rows, one.tokens, one.reads, True))
    if isinstance(output, Tensor):
        _trace_ran(frame.watched.reads, output, frame.watched.module)


def traced_before(watch: Recorder) -> list[Traced]:
    """The projections before a call that is traced now, in order, in the modules that are being traced."""
    found = []
    for frame in traced:
        if frame is not None and frame.watched.watch is watch:
            frame.calls += 1
            found += frame.traced[-_KEPT:]
    return found
