"""`deep=None`: attention by hand is looked for without being asked, where no attention function was called.

After a forward pass in which nothing was seen, or not everything that seems to attend, the next observed pass is
followed operator by operator (`by_hand`). If a softmax is found, all later observed passes are followed; else none.
`in_words` says in words what happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from levelhead.watching.module_stack import WatchedModule
from levelhead.words import module_title, plural

_LOOKS = 3  # passes after which it is decided that nothing is missing
_NAMED = 3  # modules listed by name


class Probe:
    """Which passes are followed, and what came of it."""

    def __init__(self, deep: bool | None) -> None:
        self._deep = deep
        self._passes = 0  # observed ones that ended
        self._due = False
        self._tried = 0  # the number of the pass that was followed to see; 0: none yet
        self._found: tuple[WatchedModule, ...] = ()
        self._what = ""  # its path
        self._nothing_before = False  # no call at all was seen before that pass

    @property
    def follows(self) -> bool:
        """Whether a pass that begins now is followed."""
        return bool(self._deep) or self._due or bool(self._found)

    @property
    def due(self) -> bool:
        """Whether the next observed pass is followed to see if there is a softmax by hand."""
        return self._due

    @property
    def looked(self) -> bool:
        """Whether a softmax by hand would have been found."""
        return bool(self._deep) or bool(self._tried)

    def passed(self, modules: Sequence[WatchedModule], paths: Sequence[str], missed: Callable[[], bool]) -> None:
        """An observed pass ended; `paths`: of calls that only a followed one shows; `missed`: whether a module
        that seems to attend was."""
        self._passes += 1
        if self._deep is not None or self._tried:
            return
        if self._due:
            self._due, self._tried = False, self._passes
            self._found = tuple(watched for watched in modules if watched.paths.keys() & set(paths))
            self._what = paths[0] if any(paths[0] in watched.paths for watched in self._found) else paths[-1]
        elif self._passes <= _LOOKS:
            self._nothing_before = not any(watched.calls for watched in modules)
            self._due = self._nothing_before or missed()
            for watched in modules if self._due else ():
                watched.attends, watched.feeds = watched.attends or None, watched.feeds or None  # not known again

    def in_words(self, *, seen: bool, compiled: bool) -> str:
        """What happened, in a sentence; "" if nothing was missed. `seen`: whether any call was observed."""
        if compiled and not seen:
            before = "no attention function was called in the compiled model"
            return f"{before}; a softmax by hand is not looked for in it: run it once without torch.compile"
        if self._found:
            before = "no attention function was called" if self._nothing_before else "not all attention was seen"
            what = f"{'a ' * self._what.startswith('softmax')}{self._what}"
            return (
                f"{before}; {what} was found on a probe of pass {self._tried} in {_listed(self._found)}. "
                "Since then observed passes are followed operator by operator, which takes time; deep=False never does"
            )
        if self._tried:
            before = "not all attention was seen" if seen else _NONE
            return f"{before}: a probe of pass {self._tried} found no {_SOFTMAX}"
        if self._due:
            passes = "1 pass" if self._passes == 1 else f"{self._passes} passes"
            before = "by some modules that seem to attend" if seen else f"in {passes}"
            return (
                f"no attention function was called {before}. One more observed pass looks for a softmax by hand; "
                "deep=True looks from the first pass on"
            )
        if seen:
            return ""
        if not self._passes:
            return "the model did not run while it was watched"
        if self._deep:
            return f"{_NONE}: no attention function was called, and there is no {_SOFTMAX}"
        return "no attention function was called; a softmax by hand was not looked for (deep=False)"


_NONE = "no attention was found"
_SOFTMAX = "softmax over a product of two activations"


def _listed(modules: Sequence[WatchedModule]) -> str:
    kinds = ", ".join(kind for kind in Counter(watched.kind for watched in modules))
    names = ", ".join(module_title(watched.name) for watched in modules[:_NAMED])
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return f"{plural(len(modules), 'module')}: {kinds} ({names}{more})"
