"""Every claim of the lab by its id, in the order of the notes.

A claim's file is imported when its claim is requested. The table from claims to files is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from levelhead.errors import LevelheadTypeError, LevelheadValueError, expected
from levelhead.lab.claim import Claim

ALL = "all"
_FILES = {
    "C1": "c01_variance",
    "C1a": "c01a_values",
    "C2": "c02_spread",
    "C3": "c03_scaling",
    "C4": "c04_softmax",
    "C5": "c05_one_hot",
    "C6": "c06_jacobian",
    "C7": "c07_vanishing",
    "C7a": "c07a_honest_half",
    "C8": "c08_overflow",
    "C8a": "c08a_shifted",
    "C9": "c09_flat",
    "C9a": "c09a_correlated",
    "C10": "c10_width",
    "C11": "c11_level",
    "C11a": "c11a_low_entropy",
    "C12": "c12_training",
    "C13": "c13_additive",
    "C13a": "c13a_bounded",
    "C14": "c14_parallel",
    "C15": "c15_heads",
    "C16": "c16_generalise",
}
MODULES = {id: f"levelhead.lab.claims.{file}" for id, file in _FILES.items()}


def claim(id: str) -> Claim:
    """The claim of this id, in any case.

    >>> claim("c1").id
    'C1'
    """
    found: Claim = import_module(MODULES[_known(id)]).CLAIM
    return found


def claims() -> list[Claim]:
    """All of them."""
    return [claim(id) for id in MODULES]


def chosen(ids: str | Iterable[str]) -> list[Claim]:
    """The claims with these ids, each once, in the order of the notes; "all" is every id."""
    if not isinstance(ids, str | Iterable):
        given = f"a {type(ids).__name__}"
        raise LevelheadTypeError(expected("ids", "ids of claims", given, _advice()))
    given_ids = [ids] if isinstance(ids, str) else list(ids)
    if not given_ids:
        raise LevelheadValueError(expected("ids", "at least one id", "none", _advice()))
    wanted: set[str] = set()
    for id in given_ids:
        wanted |= MODULES.keys() if str(id).lower() == ALL else {_known(id)}
    return [claim(id) for id in MODULES if id in wanted]


def _known(id: str) -> str:
    spelled = {known.lower(): known for known in MODULES}
    name = str(id).lower()
    if name not in spelled:
        raise LevelheadValueError(expected("id", "the id of a claim", repr(id), _advice()))
    return spelled[name]


def _advice() -> str:
    return f'Choose from {", ".join(MODULES)}, or "{ALL}"'
