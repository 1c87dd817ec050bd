"""Which modules of a watched model attend, and whether the calls of each were observed.

An observed module has the functions through which it was observed. A module that seems to attend, by its code or its
name, and was not observed, has the likely reason. None is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from levelhead.runs.record import Seen
from levelhead.torch.huggingface.survey import attending_modules
from levelhead.watching.by_hand import PATH, PATHS
from levelhead.watching.compiler_graphs import (
    BETWEEN,
    EARLIER,
    MAYBE_EARLIER,
    OPERATOR,
    anything_compiled,
    found_in,
    was_read,
)
from levelhead.watching.functions.unknown import called_by
from levelhead.watching.graph_calls import attending_script
from levelhead.watching.intercept_known import not_described
from levelhead.watching.module_stack import ATTRIBUTE, WatchedModule
from levelhead.watching.observe_call import TRANSFORMED
from levelhead.watching.probe import Probe
from levelhead.watching.watchable import clean

_ADDED_UP = "up to {} calls in one pass, from one place in its code, are added up"
_ONE_HEAD = "; calls of one head each: heads in a loop cannot be told apart"
_BELOW = "ran inside a transformation of torch.func: measured below it, operator by operator, without its scale"
_FAST_PATH = "its native fast path was left out of the compiled graph while watching: results differ by rounding"


def report(model: nn.Module, modules: Sequence[WatchedModule], *, compiled: bool, probe: Probe) -> tuple[Seen, ...]:
    """A line for every module that was observed or should have been."""
    by_code = {id(attending.module) for attending in attending_modules(model)}
    unknown = {id(w.module): names for w in modules if w.runs and not w.calls and (names := called_by(w.module))}
    by_code |= unknown.keys()
    observed = [watched.name for watched in modules if watched.calls]
    lines = []
    for watched in modules:
        unfollowed = [] if PATH in watched.paths else found_in(watched.module)
        if watched.calls and OPERATOR in unfollowed:  # in an earlier graph of this class
            unfollowed.remove(OPERATOR)
        elif watched.calls_operator and not watched.runs and compiled and OPERATOR not in unfollowed:
            unfollowed.append(OPERATOR)
        if probe.looked and BETWEEN in unfollowed:  # the code between graphs was followed
            unfollowed.remove(BETWEEN)
        unread = BETWEEN in unfollowed or _is_unread_graph(watched)
        if watched.calls:
            notes = [*unfollowed, *([_FAST_PATH] if watched.lost_fast_path else []), *_reasons(watched)]
            if watched.calls_in_a_pass > 1:
                notes.append(_ADDED_UP.format(watched.calls_in_a_pass) + (_ONE_HEAD if watched.single_head else ""))
            line = Seen(watched.name, watched.kind, True, ", ".join(watched.paths), watched.calls, "; ".join(notes))
            lines.append(line)
        elif watched.not_observed or {*unfollowed} - {BETWEEN} or unread or _is_missing(watched, observed, by_code):
            names = unknown.get(id(watched.module), []) if not watched.not_observed else []
            reason = not_described(", ".join(names)) if names else _reason(watched, unfollowed, compiled, probe)
            lines.append(Seen(watched.name, watched.kind, False, reason, 0))
    inside = [line.module for line in lines if line.how not in (BETWEEN, EARLIER)]
    unread_parts = [x for x in lines if x.how in (BETWEEN, EARLIER) and any(_is_inside(n, x.module) for n in inside)]
    return (*(line for line in lines if line not in unread_parts), *_scripted(model, modules))


def _reasons(watched: WatchedModule) -> Iterator[str]:
    """Why calls of an observed module were not."""
    for reason in watched.not_observed:
        yield _BELOW if reason == TRANSFORMED and watched.paths.keys() & {*PATHS} else reason


def _scripted(model: nn.Module, modules: Sequence[WatchedModule]) -> Iterator[Seen]:
    """Scripted modules that attend: no hook runs in them. Followed passes see them in the module around, if at all."""
    seen = [watched.name for watched in modules if watched.calls]
    for name, module in attending_script(model):
        around = name.rpartition(".")[0]
        if not any(around == one or around.startswith(f"{one}.") for one in seen):
            kind = getattr(module, "original_name", type(module).__name__)
            yield Seen(clean(name), kind, False, "is scripted; a call in it is seen with deep=True at best", 0)


def _is_missing(watched: WatchedModule, observed: list[str], by_code: set[int]) -> bool:
    """Whether it seems to attend, and no module inside or around it was observed instead."""
    if id(watched.module) not in by_code and not watched.attends:
        return False
    inside = any(_is_inside(name, watched.name) for name in observed)
    around = any(watched.name.startswith(f"{name}.") and name for name in observed)
    holds = any(_attends(child) for child in watched.module.modules() if child is not watched.module)
    return not (inside or around or (holds and id(watched.module) not in by_code))


def _is_inside(name: str, around: str) -> bool:
    return name.startswith(f"{around}." if around else "")


def _is_unread_graph(watched: WatchedModule) -> bool:
    return _is_compiled(watched.module) and not was_read(watched.module)


def _attends(module: nn.Module) -> bool:
    watched = getattr(module, ATTRIBUTE, None)
    return watched is not None and bool(watched.attends)


def _in_compiled_part(watched: WatchedModule) -> bool:
    """Whether it, or a module around it, is compiled by itself: no hook runs inside."""
    model, names = watched.watch.model, watched.name.split(".")
    around = {clean(name): module for name, module in model.named_modules() if _is_compiled(module)}
    return any(".".join(names[:n]) in around for n in range(len(names) + 1))


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _reason(watched: WatchedModule, unfollowed: list[str], compiled: bool, probe: Probe) -> str:
    if watched.not_observed or unfollowed:
        return "; ".join([*watched.not_observed, *unfollowed])
    if _is_unread_graph(watched):
        return EARLIER
    if not watched.runs and (compiled or _in_compiled_part(watched)):
        return "did not run while watched, or called no attention function in a compiled graph"
    if not watched.runs:
        return MAYBE_EARLIER if anything_compiled() else "did not run while watched"
    if probe.looked:
        return "ran, but no softmax over a product of two tensors was met in it"
    return "ran, but called no attention function; a softmax by hand is seen with deep=True"
