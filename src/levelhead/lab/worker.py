"""One experiment in a process of its own: an order on stdin, progress and the finding on stdout.

A line of JSON each. What an experiment prints itself goes to stderr. Stdin stays open as long as the lab lives; when it
closes, however the lab ended, the worker ends too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from importlib import import_module
from typing import Any, TextIO

from levelhead.errors import LevelheadError
from levelhead.lab.claim import Claim, Params, Tell, UndecidedError
from levelhead.lab.result import outcome_json


def perform(claim: Claim, params: Params, seed: int, tell: Tell) -> dict[str, Any]:
    """Runs the experiment; what cannot be decided here is a finding as well."""
    try:
        return outcome_json(claim.experiment(params, seed, tell))
    except UndecidedError as error:
        why = {"why": str(error)}
        return {"theory": None, "measured": why, "stderr": None, "verdict": "undecided", "details": {}}


def main() -> None:
    """Runs the order on stdin."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_lab, daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(share: float, words: str) -> None:
        _send(answers, share=float(share), words=words)

    try:
        claim: Claim = import_module(order["module"]).CLAIM
        _send(answers, found=perform(claim, order["params"], order["seed"], tell))
    except LevelheadError as error:
        _send(answers, refused=str(error))
    except Exception:
        _send(answers, crashed=traceback.format_exc())


def _end_with_the_lab() -> None:
    sys.stdin.read()
    os._exit(1)


def _send(answers: TextIO, **message: Any) -> None:
    print(json.dumps(message, allow_nan=False), file=answers, flush=True)
