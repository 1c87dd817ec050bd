"""`deep=None`: which observed passes are followed operator by operator (`by_hand`), without being asked.

Those are the first, second, fourth, eighth … pass, and a module's run under circumstances in which it was not followed
yet: its first run, training or evaluation, with or without gradients, other flags, another number of calls. What no
hook can notice, such as a counter inside a module, is found at the next power of two. Once a softmax by hand is found,
all later observed passes are followed. `in_words` says in words what happened.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.watching.by_hand import PATH, PATHS
from levelhead.watching.measure import plain
from levelhead.watching.module_stack import WatchedModule
from levelhead.words import module_title, plural

_CIRCUMSTANCES = 16  # of one module: beyond, a change is no reason to follow it
_NAMED = 3  # modules listed by name


class _Known:
    """In which circumstances a module was followed."""

    def __init__(self) -> None:
        self.passes = 0  # in which it was the outermost module
        self.changes = 0
        self.looked: set[Any] = set()
        self.calls: set[int] = set()  # of attention functions, in one run


class Probe:
    """Which runs are followed, and what came of it."""

    def __init__(self, deep: bool | None) -> None:
        self._deep = deep
        self.modules: Sequence[WatchedModule] = ()  # of the model
        self._lock = threading.RLock()  # several threads may run it
        self._passes = self._looks = 0  # observed ones, and those of them that were followed whole
        self._looking = 0  # runs that are being followed now
        self._known: dict[int, _Known] = {}  # by number of the module
        self._found: tuple[WatchedModule, ...] = ()
        self._found_in = 0  # the number of the first pass in which one was
        self._functions_too = False  # attention functions were called as well

    @property
    def may_follow(self) -> bool:
        return self._deep is not False

    @property
    def follows_all(self) -> bool:
        """Whether every observed pass is followed, because it was asked for."""
        return self._deep is True

    @property
    def looked(self) -> bool:
        """Whether a softmax by hand would have been found."""
        return self._looks > 0

    def begin_run(self, watched: WatchedModule, args: Any, *, outermost: bool, followed: bool) -> bool:
        """Whether the run of a module that begins now is followed; `followed`: it is already, with the one around."""
        with self._lock:
            begins = self._begins(watched, args, outermost, followed)
            self._looking += begins and not followed
        for one in self.modules if begins and not followed else ():
            one.attends, one.feeds = one.attends or None, one.feeds or None  # not known again
        return begins

    def _begins(self, watched: WatchedModule, args: Any, outermost: bool, followed: bool) -> bool:
        known = self._known.setdefault(watched.number, _Known())
        if outermost:
            self._passes += 1
            known.passes += 1
            # Another thread may be about to find something: what this pass has would be missed.
            asked = self._deep or self._found or self._looking
            followed = bool(asked) or known.passes & (known.passes - 1) == 0
        if self._deep:
            self._looks += outermost
            return True
        now = _circumstances(watched.module, args)
        if now not in known.looked and (followed or known.changes < _CIRCUMSTANCES):
            known.looked.add(now)
            known.changes += 1
            followed = True
        self._looks += outermost and followed
        return followed

    def end_run(self, watched: WatchedModule, *, followed: bool, whole: bool) -> None:
        """`whole`: it did not end early."""
        known = self._known.get(watched.number)
        if known is None or self._deep:
            return
        with self._lock:
            if followed and whole:
                known.calls.add(watched.measured)
            elif not whole or (watched.measured not in known.calls and known.changes < _CIRCUMSTANCES):
                known.looked.clear()  # its next run is followed

    def end_look(self) -> None:
        """A run that was followed has ended."""
        with self._lock:
            self._looking -= 1
            if self._deep or self._found:
                return
            self._found = tuple(watched for watched in self.modules if watched.paths.keys() & set(PATHS))
            self._found_in = self._passes
            self._functions_too = any(watched.paths.keys() - set(PATHS) for watched in self.modules)

    def in_words(self, *, seen: bool, ran: bool, compiled: bool) -> str:
        """What happened, in a sentence; "" if all attention called functions. `seen`: whether any was observed."""
        if compiled and not seen:
            before = "no attention call was observed in the compiled model"
            return f"{before}; a softmax by hand is not looked for in it: run it once without torch.compile"
        if self._found:
            before = "some attention calls no known function" if self._functions_too else _NO_FUNCTION
            path = PATH if any(PATH in watched.paths for watched in self._found) else PATHS[-1]
            what = f"{'a ' * path.startswith('softmax')}{path}"
            return (
                f"{before}; {what} was found in pass {self._found_in} in {_listed(self._found)}. "
                "Since then observed passes are followed operator by operator, which takes time; deep=False never does"
            )
        if seen:
            return ""
        if not ran:
            return "the model did not run while it was watched, or in a graph that was compiled before"
        if not self.may_follow:
            return f"{_NO_FUNCTION}; a softmax by hand was not looked for (deep=False)"
        return (
            f"no attention was found: {_NO_FUNCTION}, and no softmax over a product of two activations was met among "
            "torch's operators; what custom operators, compiled functions and other libraries compute is not followed"
        )


_NO_FUNCTION = "no attention function was called"
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)


def _circumstances(module: nn.Module, args: Any) -> Any:
    """What may decide which code a module runs, as far as it is cheap to ask: numbers count and are left out."""
    flags = tuple((name, x) for name, x in vars(module).items() if x is None or isinstance(x, bool | str))
    held = tuple(id(x) for x in vars(module).values() if isinstance(x, _FUNCTIONS))
    given = tuple(_kind(x) for x in args) if isinstance(args, tuple) else ()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), id(type(module).forward), flags, held, given


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return (x.dtype, *(n == 1 for n in x.shape)) if plain(x) else type(x)
    return x if x is None or isinstance(x, bool | str) else type(x)


def _listed(modules: Sequence[WatchedModule]) -> str:
    kinds = ", ".join(kind for kind in Counter(watched.kind for watched in modules))
    names = ", ".join(module_title(watched.name) for watched in modules[:_NAMED])
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return f"{plural(len(modules), 'module')}: {kinds} ({names}{more})"
