"""`levelhead cluster-bench`: the bytes it expects, and its command.

`levelhead.distributed.Trace` counts what ranks really move, in processes started here. No time is asserted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from levelhead.cli import main
from levelhead.cluster import cases, report, session
from levelhead.cluster.problem import PASSES, SPLITS, Problem
from levelhead.cluster.traffic import PLANS, traffic
from levelhead.distributed import Split, Trace, attention
from ranks import Ranks
from sharded import group_of

SMALL = Problem(tokens=4096, heads=12, groups=12, width=64, causal=True)


# ---- bytes


def _moved(rank: int, world: int, tokens: int, heads: int) -> list[tuple[Any, ...]]:
    """What a rank received in every plan, pass and split, and what was to be expected."""
    group = group_of(world)
    if rank >= world:
        return []
    found = []
    for plan in PLANS:
        queries = 5 if plan == "decode" else None
        problem = Problem(tokens, heads, heads // 2, 8, causal=queries is None, queries=queries)
        for split in SPLITS:
            made: Split = getattr(Split, split)(tokens, world)
            for passes in PASSES:
                trace = Trace()
                _step(problem, plan, made, passes, rank, group, trace)
                due = traffic(plan, problem, world, passes, made.lengths, rank)
                found.append((plan, split, passes, trace.received, due))
    return found


def _step(problem: Problem, plan: str, split: Split, passes: str, rank: int, group: Any, trace: Trace) -> None:
    draw = torch.Generator().manual_seed(0)
    heads, groups = (1, problem.heads), (1, problem.groups)
    q = torch.randn((*heads, problem.rows, problem.width), generator=draw)
    k, v = (torch.randn((*groups, problem.tokens, problem.width), generator=draw) for _ in "kv")
    q = q if plan == "decode" else split.shard(q, rank)
    parts = [q, split.shard(k, rank), split.shard(v, rank)]
    parts = [x.clone().requires_grad_(passes == "train") for x in parts]
    where = (None, split) if plan == "decode" else split
    out = attention(*parts, plan=plan, split=where, causal=problem.causal, group=group, trace=trace, threads=1)
    if passes == "train":
        out.backward(torch.ones_like(out))


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("tokens", [24, 29])
def test_every_byte_is_expected(three: Ranks, world: int, tokens: int) -> None:
    seen = three.run(_moved, world, tokens, 12)
    assert [len(each) > 0 for each in seen] == [rank < world for rank in range(3)]
    for each in seen:
        for plan, split, passes, received, due in each:
            case = (world, tokens, plan, split, passes)
            assert received == due.payload + due.agreement, case
            assert due.bound <= due.payload, case


@pytest.mark.parametrize("plan", ["all-gather", "ring", "ulysses"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_in_the_words_of_the_docs(plan: str, world: int) -> None:
    p = dataclasses.replace(SMALL, heads=16, groups=8)
    kv, q = p.tokens * p.kv * 4, p.tokens * p.heads * p.width * 4
    part = (world - 1) / world
    forward = {"all-gather": part * kv, "ring": part * kv, "ulysses": part / world * (2 * q + kv)}
    assert traffic(plan, p, world, "forward").bound == pytest.approx(forward[plan])
    train = traffic(plan, p, world, "train").bound - forward[plan]
    backward = {"all-gather": 2 * part * kv, "ring": 2 * part * kv, "ulysses": part / world * (3 * q + 2 * kv)}
    assert train == pytest.approx(backward[plan])


# ---- the command


def launch(*arguments: str, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    inside = ["-m", "levelhead", "cluster-bench", *arguments]
    if ranks is not None:
        start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        inside = [*start, *inside]
    environment = {k: v for k, v in os.environ.items() if k not in session.TORCHRUN}
    return subprocess.run(
        [sys.executable, *inside],
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        env=environment | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
    )


def test_without_torchrun_it_says_how() -> None:
    done = launch()
    assert (done.returncode, done.stdout) == (2, "")
    assert "torchrun --nproc-per-node 2 -m levelhead cluster-bench" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--threads", "0"), "threads: expected 1 to"),
        (("--threads", "10000"), "threads: expected 1 to"),
        (("--json", "no/such/directory/x.json"), "--json: expected a file in a directory"),
        (("--json", "."), "--json: expected a file, got the directory"),
    ],
)
def test_bad_input_is_refused_before_ranks_meet(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of two ranks; the other one never comes: nobody may wait for it.
    for name, value in zip(session.TORCHRUN, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["cluster-bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and words in told.err


def test_two_ranks_through_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = launch("--tiny", "--threads", "1", "--json", str(file), ranks=2)
    assert done.returncode == 0, done.stderr
    run = json.loads(file.read_text())
    expected = cases.cells(cases.TINY, 2)
    assert (run["world"], run["hosts"], run["threads"], run["left_out"]) == (2, 1, 1, {})
    assert [(c["kind"], c["plan"], c["passes"], c["split"]) for c in run["cells"]] == [
        (c.kind, c.plan, c.passes, c.split) for c in expected
    ]
    for cell in run["cells"]:
        assert cell["right"], cell
        sums = zip(cell["bytes"]["payload"], cell["bytes"]["agreement"], strict=True)
        assert cell["ranks"]["received"] == [a + b for a, b in sums]
        assert sum(cell["ranks"]["sent"]) == sum(cell["ranks"]["received"])
        assert len(cell["seconds"]) == cases.TINY.rounds
        assert {"same_threads", "all_cpus"} == cell["alone"].keys()
    assert done.stdout == "".join(f"{line}\n" for line in report.report(run))
    assert "all answers are those of one process" in done.stdout
    assert "strong, 96 tokens, causal" in done.stderr  # progress keeps out of stdout


def test_worlds_that_heads_do_not_divide_by_do_without_ulysses() -> None:
    assert cases.left_out(cases.FULL, 5) == {"ulysses": "12 heads do not divide by 5 ranks"}
    assert not any(cell.plan == "ulysses" for cell in cases.cells(cases.FULL, 5))
