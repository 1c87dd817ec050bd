"""While which runs of modules the mode of `by_hand` is active: hooks begin it and end it.

A pass that is followed is followed whole. In any other observed pass a module that runs under new circumstances
(`probe`) is followed by itself.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from levelhead.watching.by_hand import Deep
from levelhead.watching.legacy_constructors import LEGACY_CONSTRUCTORS
from levelhead.watching.module_stack import ATTRIBUTE, Recorder, depth
from levelhead.watching.undisturbed import undisturbed


class _Running(threading.local):
    def __init__(self) -> None:
        self.modes: dict[int, tuple[Deep, int]] = {}  # by id of the watch: its mode, and the depth where it began


_running = _Running()


def begin(module: nn.Module, args: Any) -> None:
    """A forward pre-hook, after that of `module_stack`."""
    watched = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling() or watched is None or watched.module is not module:
        return
    watch = watched.watch
    if not watch.probe.may_follow:
        return
    level = depth(watch)
    if level == 1:
        end(watch)  # after Ctrl-C no hook ran, and an old mode remains
    if level == 0 or not watch.wanted():  # 0: it is being exported
        return
    following = id(watch) in _running.modes
    with undisturbed():
        begins = watch.probe.begin_run(watched, args, outermost=level == 1, followed=following)
    if begins and not following:
        with undisturbed():
            mode = Deep(watch)
        _running.modes[id(watch)] = mode, level
        LEGACY_CONSTRUCTORS.hold()
        mode.__enter__()  # type: ignore[no-untyped-call]


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook, after that of `module_stack`; called after exceptions, too."""
    watched = getattr(module, ATTRIBUTE, None)
    if torch.compiler.is_compiling() or watched is None or watched.module is not module:
        return
    watch = watched.watch
    if not watch.probe.may_follow or not watch.wanted():
        return
    running = _running.modes.get(id(watch))
    watch.probe.end_run(watched, followed=running is not None, whole=output is not None)
    if running is not None and running[1] > depth(watch):
        end(watch)


def end(watch: Recorder) -> None:
    """Removes the mode, if it is still active."""
    mode, _ = _running.modes.pop(id(watch), (None, 0))
    if mode is None:
        return
    LEGACY_CONSTRUCTORS.release()
    mode.close()
    if _get_current_dispatch_mode() is mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    watch.probe.end_look()
