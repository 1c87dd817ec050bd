"""The command line: info, tour, bench, doctor, explain, lab, page and cluster-bench.

Parses, calls the public API, prints. It computes nothing that the library does not offer, and keeps
stdout for data: errors go to stderr. Exit codes: 0 fine, 1 failed, 2 wrong usage or bad input;
`doctor`: 1 if it found something, `lab`: 1 if a verdict is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import levelhead as lh
from levelhead.cli import cluster_bench, doctor, explain, lab, page
from levelhead.show.text import colour_wanted

_EXAMPLES = """examples:
  levelhead info --json
  levelhead tour
  levelhead bench --quick
  levelhead doctor minilm
  levelhead explain "The dog chased the ball because it was fast." --token it
  levelhead lab run all
  levelhead page
"""

_WORDS = "Love Apple phones"  # the worked example
_HEADS, _TOKENS, _D = 4, 256, 64  # the problem whose heads are measured
_SEED = 0  # the tour shows the same numbers every time


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    arguments = _parser().parse_args(argv)
    try:
        return _print(arguments.run(arguments))
    except lh.LevelheadError as error:
        print(f"levelhead: {error}", file=sys.stderr)
        return int(arguments.failed)
    except KeyboardInterrupt:
        print("levelhead: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells have it
    except BrokenPipeError:  # the reader has seen enough (`levelhead tour | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print(texts: Iterator[str]) -> int:
    """Prints what a command yields; what it returns is the exit code."""
    while True:
        try:
            text = next(texts)
        except StopIteration as end:
            return end.value or 0
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="levelhead",
        description="Exact attention that can tell you whether every head is level.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(failed=1)
    parser.add_argument("--version", action="version", version=f"levelhead {lh.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="version, instruction set, threads, and why so")
    info.add_argument("--json", action="store_true", help="for programs")
    info.set_defaults(run=_info)
    tour = commands.add_parser("tour", help="attention on three words, on four heads, in a real model")
    tour.set_defaults(run=_tour, whole=parser)
    _add_bench(commands)
    doctor.add(commands)
    explain.add(commands)
    lab.add(commands)
    page.add(commands)
    cluster_bench.add(commands)
    return parser


def _info(arguments: argparse.Namespace) -> Iterator[str]:
    info = lh.info()
    yield json.dumps(dict(info), indent=2) if arguments.json else repr(info)


# ---- the benchmark ----------------------------------------------------------


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="speed, error and memory against every peer found")
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a dozen cells, under a minute (default)")
    size.add_argument("--full", action="store_true", help="every cell, more than an hour")
    bench.add_argument("--case", action="append", default=[], metavar="GLOB", help="only these cells; may be repeated")
    bench.add_argument("--skip", action="append", default=[], metavar="GLOB", help="not these; may be repeated")
    bench.add_argument("--threads", type=int, metavar="N", help="of everybody; default: all CPUs")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    bench.add_argument("--list", action="store_true", help="names, shapes and bars of the cells")
    bench.add_argument("--plot", nargs=2, type=Path, metavar=("FILE", "DIR"), help="draw the result in FILE")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> Iterator[str]:
    from levelhead.bench import cases, plot, progress, report, run  # few who run `info` need them

    if arguments.plot:
        source, folder = arguments.plot
        result = json.loads(source.read_text(encoding="utf-8"))
        for path in plot.plot(result, folder, source.stem.split("-")[0]):
            yield str(path)
        return
    quick = arguments.quick or not (arguments.full or arguments.case or arguments.list)
    chosen = cases.select(arguments.case, skip=arguments.skip, quick=quick)
    if arguments.list:
        yield from report.listing(chosen)
        return
    shown = progress.Progress(len(chosen))

    def save(result: dict[str, Any]) -> None:
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    try:
        effort = run.QUICK if quick else run.FULL
        result = run.bench(chosen, threads=arguments.threads, effort=effort, tell=shown.tell, save=save)
    finally:
        shown.close()
    yield from report.report(result)


# ---- the tour ---------------------------------------------------------------


def _tour(arguments: argparse.Namespace) -> Iterator[str]:
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
    """As one types it: with its path in a virtual environment that nobody has activated."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"python -m levelhead {words}"
    apart = sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ
    return f"{os.path.relpath(program) if apart else program.name} {words}"


def _real_model(arguments: argparse.Namespace) -> Iterator[str]:
    """The doctor on MiniLM, where it is installed; else what would get one there."""
    known = lh.models.available()["minilm"]
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing or known.path is None:
        yield "  Not installed here. This shows 72 heads of a sentence model:"
        if missing:
            yield '    pip install "levelhead[torch,models]"'
        if known.path is None:
            yield f"    {known.command}"
        yield "    levelhead doctor minilm"
        return
    yield from doctor.run(arguments.whole.parse_args(["doctor", known.name]))


def _three_words() -> Iterator[str]:
    from levelhead.explanation import terminal

    explained = lh.explain_text(_WORDS, model="random")
    story, width = explained.story(), shutil.get_terminal_size((100, 24)).columns
    yield from terminal.steps(story, colour=colour_wanted(sys.stdout), width=width)
    head = story.head
    error = np.abs(head.weights @ head.v - head.output).max()
    yield f"  lh.attention(Q, K, V) does all of it in one pass; weights V differs by {error:.0e}."
    yield f'  More of it, and other sentences: levelhead explain "{_WORDS}" --model random'


def _four_heads() -> Iterator[str]:
    random = np.random.default_rng(_SEED)
    q, k = random.standard_normal((2, _HEADS, _TOKENS, _D), dtype=np.float32)
    scaled = lh.observe(q, k, scale="1/sqrt(d_k)")
    plain = lh.observe(q, k, scale="none")
    yield 'with scale="1/sqrt(d_k)":'
    yield str(scaled)
    yield ""
    yield 'with scale="none":'
    yield str(plain)
    yield ""
    yield (
        f"Divided by √{_D} = {np.sqrt(_D):.0f}, logits have a spread of {_spread(scaled):.2f} "
        f"and a query attends to {_keys(scaled):.0f} of {_TOKENS} keys;\nundivided, the spread "
        f"is {_spread(plain):.2f} and only {_keys(plain):.1f} keys are left: "
        "that is what √d_k is for."
    )


def _spread(observation: lh.Observation) -> float:
    return float(np.sqrt(np.mean(observation.heads.var_logit)))


def _keys(observation: lh.Observation) -> float:
    return float(np.mean(observation.heads.effective_keys))


# ---- printing ---------------------------------------------------------------


def _heading(text: str) -> str:
    return f"\n\x1b[1m{text}\x1b[0m" if colour_wanted(sys.stdout) else f"\n{text}"
