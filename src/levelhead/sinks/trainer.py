"""A watch for the length of one training: what the callbacks of every framework share.

It begins, steps, and ends in any case; no framework is used here. After a step is counted and its optimiser has
finished, QK-clip scales weights back, if a bound is given, and `after_step` runs. Over several ranks, what findings ask
of the trainer is asked on all of them: a rank that saved or stopped alone would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from levelhead import checks
from levelhead.errors import bad_type, bad_value
from levelhead.runs import sessions
from levelhead.runs.metrics import metrics
from levelhead.runs.record import Snapshot


class Watcher(Protocol):
    """What a callback needs of a watch."""

    @property
    def last(self) -> Snapshot: ...
    def attach(self) -> Any: ...
    def start_at(self, step: int) -> Any: ...
    def step(self) -> Any: ...
    def detach(self) -> Any: ...


def watch(model: Any, **options: Any) -> Watcher:
    """The watch itself, without evaluations between steps."""
    from levelhead.watching.watch import Watch  # with a model in hand: a file needs no torch

    return Watch(model, **{"training_only": True, **options})


class Training:
    """Holds the watch; the hooks of a framework call begin, step, fresh and detach."""

    def __init__(
        self,
        make: Callable[..., Watcher] = watch,
        after_step: Callable[[Any], object] | None = None,
        prefix: str = "attention",
        heads: bool = False,
        options: dict[str, Any] | None = None,
        qk_clip: float | None = None,
    ) -> None:
        if after_step is not None and not callable(after_step):
            advice = "It is called with the watch after each step"
            raise bad_type("after_step", "a callable", type(after_step).__name__, advice)
        checks.flag("heads", heads)
        super().__init__()  # the framework's own
        self.watch: Any = None  # readable after the training too
        self.after_step = after_step
        self.prefix, self.heads = prefix, heads
        self._asked: list[str] = []
        self._asks = False  # whether findings may ask something of the trainer
        self._steps = 0  # the number of the step that runs
        self._joined_after: int | None = None  # the step after which ranks join what they ask
        self._findings = 0
        self.qk_clip, self.clip = qk_clip, None
        self._clipped: dict[str, float] = {}  # metrics of the latest clip
        self._uncompiled = ExitStack()  # held until the first step is done
        usual = {"on_finding": "warn"} if make is watch else {}
        self._make, self._options = make, self._with_words({**usual, **(options or {})})
        if qk_clip is not None:
            self._refuse_unless_clippable(qk_clip)
        if make is watch:
            from levelhead.watching.options import checked  # as in `watch`

            self._options = checked(self._options)
        self._attached = False
        self._reported: Snapshot | None = None

    clip: Any  # a QKClip while it trains
    words: tuple[str, ...] = ("save", "stop")  # of on_finding, that the trainer answers

    def _refuse_unless_clippable(self, tau: Any) -> None:
        from levelhead.remedies.remedy import positive

        positive("qk_clip", tau, "Kimi K2 uses 100")
        for name, fine in (("every", (1,)), ("rows", (None, "auto"))):
            if (given := self._options.get(name, fine[0])) not in fine:
                advice = "A clip needs the largest logit of every step"
                raise bad_value(name, f"{fine[0]} with qk_clip", repr(given), advice)

    def _with_words(self, options: dict[str, Any]) -> dict[str, Any]:
        """The watch's options, with a function for each word that asks something of the trainer."""
        given = options.get("on_finding")
        if given is None:
            return options
        listed = list(given) if isinstance(given, list | tuple) else [given]

        def asking(word: str) -> Callable[[Any], None]:
            return lambda finding: self._asked.append(word)

        self._asks = any(isinstance(x, str) and x in self.words for x in listed)
        tell = [asking(x) if isinstance(x, str) and x in self.words else x for x in listed]
        return {**options, "on_finding": [self._count, *tell]}

    def _count(self, finding: Any) -> None:
        self._findings += 1

    def asked(self) -> list[str]:
        """What findings have asked of the trainer since the last time, on any rank; called after each step."""
        asked, self._asked = self._asked, []
        after, self._joined_after = self._joined_after, None
        if after is None:
            return asked
        from levelhead.watching.ranks import asked_anywhere

        return asked_anywhere(asked, after)

    def keep(self, step: int, **numbers: Any) -> None:  # not "log": Lightning gives callbacks its own
        """Numbers of a step, such as its loss, beside the statistics."""
        if self._attached and hasattr(self.watch, "log"):
            self.watch.log(step=step, **numbers)

    def begin(self, model: Any, done: int) -> None:
        """Starts a watch after `done` steps; one that an exception left behind is detached first.

        A snapshot then has the trainer's number for its step, in a resumed training too.
        """
        self.detach()
        self.watch, self._reported = self._make(model, **self._options), None
        self.watch.attach()
        self._attached = True
        self.watch.start_at(done + 1)
        self._steps = done + 1
        if self.qk_clip is not None:
            from levelhead.remedies.clip import QKClip
            from levelhead.remedies.remedy import uncompiled

            self.clip = QKClip(self.watch, self.qk_clip)
            # A compiled graph does not show which rows belong to which head: passes of the first step run as written.
            self._uncompiled = ExitStack()
            self._uncompiled.enter_context(uncompiled())

    def step(self) -> None:
        """An optimiser's step is done."""
        if self._attached:
            # Other steps have no findings, and ranks that gather have the same ones.
            apart = sessions.rank() is not None and self._options.get("gather", False) is False
            joins = self._asks and apart and getattr(self.watch, "observing", True)
            self.watch.step()
            self._joined_after = self._steps if joins else None
            self._steps += 1
            self._uncompiled.close()
            if self.clip is not None:
                said = self.clip()
                self._clipped = {f"{self.prefix}/clipped_heads": float(len(said))}
                self._clipped[f"{self.prefix}/clip_factor"] = min(said.heads.values(), default=1.0)
            if self.after_step is not None:
                self.after_step(self.watch)

    def fresh(self) -> dict[str, float]:
        """Metrics of the latest snapshot, once; empty if there is none since."""
        last = self.watch.last if self.watch is not None else None
        if last is None or last is self._reported or not last.records:
            return {}
        self._reported = last
        found = metrics(last, heads=self.heads, prefix=self.prefix) | self._clipped
        return found | ({f"{self.prefix}/findings": float(self._findings)} if self._findings else {})

    def detach(self) -> None:
        """Takes the watch off the model; a second time does nothing."""
        if self._attached:
            self._attached = False
            self._uncompiled.close()
            if self.clip is not None:
                self.clip.undo()
            self.clip, self._clipped = None, {}
            self.watch.detach()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
