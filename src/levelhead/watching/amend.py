"""What a remedy has changed about a module's attention calls, looked up while the module runs.

A remedied module carries an `Amendment`; hooks keep a stack of the running ones, and the wrappers of `intercept` apply
the innermost. If only the scale is another number, the same function computes the call as before, else levelhead. Which
modules can be remedied, and the proof that a remedy works, is in `remedies`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from levelhead.call import scaling
from levelhead.errors import bad_value
from levelhead.torch import sdpa
from levelhead.watching.measure import Call

ATTRIBUTE = "_levelhead_amendment"
_UNSAVED = "_levelhead_unsaved"  # on a module: what remedies changed that its state_dict does not have


def cap_of(call: Call) -> float | None:
    """What bends a call's logits, remedies included."""
    return call.scoring.softcap


@dataclass
class Amendment:
    """Plain data, so that a copy of the module is remedied as well."""

    softcap: float | None = None
    rule: Any = None  # of levelhead.call.scaling; None: the scale that the call passes
    q_norm: nn.Module | None = None  # of q and k at the call, (..., D)
    k_norm: nn.Module | None = None
    hooks: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: Any) -> Amendment:
        q_norm, k_norm = copy.deepcopy((self.q_norm, self.k_norm), memo)
        return Amendment(self.softcap, self.rule, q_norm, k_norm)

    @property
    def empty(self) -> bool:
        return self.softcap is None and self.rule is None and self.q_norm is None

    def over(self, q: Tensor, k: Tensor, scale: Any, softcap: float | None = None) -> Terms:
        """What the call is to be computed with."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        softcap = softcap if self.softcap is None else self.softcap
        if self.rule is None:
            return Terms(q, k, scale, softcap)
        heads = q.shape[-3] if q.dim() > 2 else 1
        factors, cosine, log_n = _resolved(self.rule, heads, q.shape[-1])
        same = len(set(factors)) == 1
        return Terms(q, k, factors[0] if same else factors, softcap, cosine, log_n)

    def for_interface(self, name: str, module: nn.Module, query: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a call of transformers' interface, amended."""
        ours = is_ours(name, query)
        if name == "sdpa" and not ours:  # calls torch's function, where the amendment applies
            return options
        terms = self.over(query, query, options.get("scaling"), options.get("softcap"))
        exotic = terms.cosine or terms.log_n or isinstance(terms.scale, tuple)
        if not ours and (exotic or name == "eager"):
            given = f"{name!r} on {query.device.type} in {type(module).__name__}"
            advice = "Load the model with attn_implementation 'sdpa', or undo() the remedy"
            raise bad_value("model", "an attention implementation that can be amended so", given, advice)
        changed = {"scaling": terms.scale, "softcap": terms.softcap}
        if terms.cosine or terms.log_n:
            changed |= {"cosine": terms.cosine, "log_n": terms.log_n}
        return options | {name: x for name, x in changed.items() if x is not None}


class Terms(NamedTuple):
    """A call's amended part."""

    q: Tensor
    k: Tensor
    scale: Any  # a number, one per head, or None for 1/√D
    softcap: float | None = None
    cosine: bool = False
    log_n: bool = False

    @property
    def plain(self) -> bool:
        """Whether torch's own function can compute it."""
        more = self.softcap is not None or self.cosine or self.log_n
        return not more and not isinstance(self.scale, tuple)

    def sdpa(self, original: Callable[..., Any], v: Tensor, gqa: bool, **options: Any) -> Any:
        """The call in torch's convention."""
        if self.plain:
            return original(self.q, self.k, v, scale=self.scale, enable_gqa=gqa, **options)
        more: dict[str, Any] = {"softcap": self.softcap, "cosine": self.cosine, "log_n": self.log_n}
        return sdpa.extended(self.q, self.k, v, scale=self.scale, enable_gqa=gqa, **options, **more)

    def described(self, call: Call) -> Call:
        """The call of these q and k, with what torch's convention has no word for."""
        if self.cosine:
            q, k = (nn.functional.normalize(x, dim=-1) for x in (call.q, call.k))
            call = replace(call, q=q, k=k)
        changed: dict[str, Any] = {"softcap": self.softcap, "log_n": self.log_n}
        if isinstance(self.scale, tuple):
            changed["scale"] = torch.tensor(self.scale, dtype=torch.float64)
        return replace(call, scoring=call.scoring._replace(**changed))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolved(rule: Any, heads: int, d_k: int) -> tuple[tuple[float, ...], bool, bool]:
    resolved = scaling.resolve(rule, heads=heads, d_k=d_k)
    return tuple(resolved.factor.tolist()), resolved.cosine, resolved.log_n


def is_ours(name: str, query: Tensor) -> bool:
    """Whether levelhead computes an amended call of transformers' interface."""
    return name in ("sdpa", "eager") and query.device.type == "cpu"


def has_no_description(options: dict[str, Any]) -> bool:
    """Whether such a call is known by the statistics of its pass alone."""
    return "cosine" in options or isinstance(options.get("scaling"), tuple)


# ---- which module is running


class _Stack(threading.local):
    def __init__(self) -> None:
        self.running: list[Amendment | None] = []


_stack = _Stack()
_traced: list[Amendment | None] = []  # while Dynamo traces, which supports lists but no thread-locals


def current() -> Amendment | None:
    """That of the innermost remedied module that is running."""
    if torch.compiler.is_compiling():
        return _traced[-1] if _traced else None
    # A graph that broke within a module leaves its entry with the traced ones.
    running = _stack.running or _traced
    return running[-1] if running else None


def of(module: nn.Module) -> Amendment | None:
    """That of a module; None: it is not remedied."""
    amendment: Amendment | None = module.__dict__.get(ATTRIBUTE)
    return amendment


def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook."""
    if isinstance(module, nn.MultiheadAttention):
        if args[4] if len(args) > 4 else kwargs.get("need_weights", True):
            advice = "Pass need_weights=False: a remedied call forms no weights; or undo() it"
            raise bad_value("need_weights", "False", "True", advice)
        if torch.compiler.is_compiling():  # takes its function whole, and the call in it with it
            torch._dynamo.graph_break("a remedied nn.MultiheadAttention runs uncompiled")
    running = _traced if torch.compiler.is_compiling() else _stack.running
    running.append(of(module))


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, called after exceptions, too."""
    if torch.compiler.is_compiling():
        if _traced:
            _traced.pop()
        return
    running = _stack.running or _traced
    if running and running[-1] is of(module):
        running.pop()


def amend(module: nn.Module, **fields: Any) -> None:
    """Adds these changes to a module's amendment."""
    amendment = of(module)
    if amendment is None:
        before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(leave, always_call=True)
        amendment = Amendment(hooks=(before, after))
        object.__setattr__(module, ATTRIBUTE, amendment)
    for name, value in fields.items():
        setattr(amendment, name, value)


def restore(module: nn.Module, *names: str) -> None:
    """Removes these changes, and with the last one the hooks."""
    amendment = of(module)
    if amendment is None:
        return
    for name in names:
        setattr(amendment, name, None)
    if amendment.empty:
        for hook in amendment.hooks:
            hook.remove()
        del module.__dict__[ATTRIBUTE]


def keep_in_mind(module: nn.Module, name: str, words: str | None) -> None:
    """Remembers a change that no state_dict has; None: it is undone. A copy of the module has it, too."""
    marks = {**module.__dict__.get(_UNSAVED, {}), name: words}
    kept = {name: each for name, each in marks.items() if each is not None}
    module.__dict__.pop(_UNSAVED, None)
    if kept:
        object.__setattr__(module, _UNSAVED, kept)


def unsaved(model: nn.Module) -> tuple[str, ...]:
    """A line for every remedy that is in force and in no state_dict."""
    counts: dict[str, int] = {}
    for module in model.modules():
        for words in module.__dict__.get(_UNSAVED, {}).values():
            counts[words] = counts.get(words, 0) + 1
    return tuple(f"{words} is in force in {n} modules: {NOT_SAVED}" for words, n in counts.items())


NOT_SAVED = "a state_dict does not have it, apply it again after loading"
