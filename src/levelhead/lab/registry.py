"""Every claim of the lab by its id, in the order of the notes.

A claim's id is how its file's name begins: C11a is in `claims/c11a_low_entropy.py`. The file is imported when its claim
is requested.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from levelhead.errors import bad_type, bad_value
from levelhead.lab.claim import Claim

ALL = "all"
_FILES = sorted(path.stem for path in (Path(__file__).parent / "claims").glob("c[0-9]*.py"))
MODULES = {f"C{file.partition('_')[0][1:].lstrip('0')}": f"levelhead.lab.claims.{file}" for file in _FILES}


def claim(id: str) -> Claim:
    """The claim of this id, in any case.

    >>> claim("c1").id
    'C1'
    """
    claim: Claim = import_module(MODULES[_known(id)]).CLAIM
    return claim


def claims() -> list[Claim]:
    """All of them."""
    return [claim(id) for id in MODULES]


def chosen(ids: str | Iterable[str]) -> list[Claim]:
    """The claims with these ids, each once, in the order of the notes; "all" is every id."""
    if not isinstance(ids, str | Iterable):
        raise bad_type("ids", "ids of claims", f"a {type(ids).__name__}", _advice())
    names = [ids] if isinstance(ids, str) else list(ids)
    if not names:
        raise bad_value("ids", "at least one id", "none", _advice())
    wanted: set[str] = set()
    for id in names:
        wanted |= MODULES.keys() if str(id).lower() == ALL else {_known(id)}
    return [claim(id) for id in MODULES if id in wanted]


def _known(id: str) -> str:
    spelled = {known.lower(): known for known in MODULES}
    if str(id).lower() not in spelled:
        raise bad_value("id", "the id of a claim", repr(id), _advice())
    return spelled[str(id).lower()]


def _advice() -> str:
    return f'Choose from {", ".join(MODULES)}, or "{ALL}"'
