"""What the options of a watch may be.

Checked before the model is touched. The callbacks of trainers check them too, when they are made: their watch begins
only when a training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from levelhead import checks
from levelhead.diagnosis import wrong_scale
from levelhead.errors import bad_type, bad_value
from levelhead.watching import alerts, ranks
from levelhead.watching.functions import taught
from levelhead.watching.taken_rows import AUTO

_Check: TypeAlias = Callable[[Any], Any]


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in one normal form each."""
    for name in given:
        if name not in _CHECKS:
            raise bad_value(name, f"one of the options {', '.join(_CHECKS)}", "another", "Check the spelling")
    return {name: _CHECKS[name](value) for name, value in given.items()}


def _count(name: str, value: Any) -> int:
    return checks.integer(name, value, "an integer of at least 1", "Leave it out for the usual", lambda n: n >= 1)


def _or_none(check: _Check, value: Any) -> Any:
    return None if value is None else check(value)


def _rows(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    what = f'an integer of at least 1, "{AUTO}", or None for all'
    return checks.integer("rows", value, what, "Leave it out for the usual", lambda n: n >= 1)


def _sinks(sinks: Any) -> list[Callable[..., Any]]:
    what, advice = "callables that take a snapshot", "Give a list, such as sinks=[print]"
    if not isinstance(sinks, Iterable) or isinstance(sinks, str):
        raise bad_type("sinks", what, checks.short_repr(sinks), advice)
    listed = list(sinks)
    for sink in listed:
        if not callable(sink):
            raise bad_type("sinks", what, checks.short_repr(sink), advice)
    return listed


_CHECKS: dict[str, _Check] = {
    "every": partial(_count, "every"),
    "sinks": _sinks,
    "rows": _rows,
    "deep": partial(_or_none, partial(checks.flag, "deep")),
    "gradients": partial(checks.flag, "gradients"),
    "counterfactual": partial(checks.flag, "counterfactual"),
    "expected_scale": partial(wrong_scale.checked, "expected_scale"),
    "history": partial(_count, "history"),
    "plain_torch": partial(_or_none, partial(checks.flag, "plain_torch")),
    "training_only": partial(checks.flag, "training_only"),
    "describe": taught.checked,
    "on_finding": alerts.checked,
    "gather": ranks.checked,
    "resume": partial(_or_none, partial(checks.path, "resume")),
}
