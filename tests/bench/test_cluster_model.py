"""The cost model of bench/cluster: its laws, its simulation, its fit, and the tables and the picture made from it.

No time is asserted: times are measured by bench/cluster_scaling.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from cluster import paper_tables, simulate, tables, winners, winners_plot
from cluster.fit import Measured, errors, fit, non_negative
from cluster.load import FORWARD, flops, load
from cluster.scaling_model import KINDS, Link, Machine, amounts, predict
from cluster.winners import ALONE, memory
from levelhead.cluster import cases
from levelhead.cluster.problem import PASSES, SPLITS, Problem
from levelhead.cluster.traffic import PLANS, traffic
from levelhead.distributed import Split
from levelhead.errors import LevelheadValueError
from support import script

NOTHING = Machine(**dict.fromkeys(KINDS, 0.0))
CORE = Machine(
    forward=1 / 60e9,
    blocks=1 / 50e9,
    backward=1 / 40e9,
    read=1 / 8e9,
    written=1 / 4e9,
    copy=1 / 2e9,
    merge=1 / 3e9,
    message=30e-6,
    call=2e-4,
)
SMALL = Problem(tokens=4096, heads=12, groups=12, width=64, causal=True)


# ---- who computes how much


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_load_is_that_of_the_split(split: str, world: int) -> None:
    n = 30 * world
    made: Split = getattr(Split, split)(n, world)
    at = [made.positions(rank) for rank in range(world)]
    pairs = np.array(
        [[(at[r][:, None] >= at[(r - step) % world]).sum() for step in range(world)] for r in range(world)]
    )
    found = load(Problem(n, 1, 1, 8, causal=True), split, world)
    room = n / world  # a shard's diagonal: whole in one rank's block, missing in another's
    assert np.abs(found.busiest - pairs.max(0)).max() <= room
    assert np.abs(found.mean - pairs.mean(0)).max() <= room
    assert found.mean.sum() * world == pytest.approx(pairs.sum(), rel=1e-9)


def test_a_contiguous_causal_split_is_nearly_twice_as_slow_as_a_balanced_one() -> None:
    imbalance = {split: load(SMALL, split, 64).imbalance for split in SPLITS}
    assert imbalance["contiguous"] == pytest.approx((2 * 64 - 1) / 64, rel=0.02)
    assert imbalance["zigzag"] == imbalance["striped"] == 1


# ---- the model


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("passes", PASSES)
def test_more_work_and_slower_links_take_longer(plan: str, passes: str) -> None:
    def total(tokens: int = 4096, gbit: float = 10.0, latency: float = 1e-5) -> float:
        queries = 8 if plan == "decode" else None
        problem = Problem(tokens, 16, 8, 64, causal=queries is None, queries=queries)
        link = Link(gbit * winners.GBIT, latency)
        return predict(plan, problem, 8, CORE, link, passes=passes).total

    assert total() < total(tokens=8192)
    assert total(gbit=10) < total(gbit=1) < total(gbit=0.01)
    assert total() < total(latency=1e-2)
    assert total(gbit=math.inf, latency=0) == pytest.approx(total(gbit=1e9, latency=0))


def test_one_rank_moves_nothing() -> None:
    for plan in PLANS:
        for passes in PASSES:
            found = predict(plan, SMALL, 1, CORE, Link(1.0, 1.0), passes=passes)
            assert (found.wire, found.exposed, found.cpu["copy"]) == (0, 0, 0)


def test_without_a_wire_the_model_is_its_amounts() -> None:
    for plan in PLANS:
        todo = amounts(plan, SMALL, 4, "train", "zigzag")
        found = predict(plan, SMALL, 4, CORE, passes="train")
        assert found.total == pytest.approx(sum(todo[kind] * CORE.of(kind) for kind in KINDS))


def test_ranks_on_shared_cores_gain_nothing_beyond_them() -> None:
    pure = dataclasses.replace(NOTHING, forward=1e-10, blocks=1e-10, backward=1e-10, cores=2)
    times = [predict("ring", SMALL, world, pure).total for world in (1, 2, 4, 8)]
    assert times[0] == pytest.approx(2 * times[1], rel=1e-3)
    assert times[1:] == pytest.approx([times[1]] * 3, rel=1e-3)


@pytest.mark.parametrize("passes", PASSES)
def test_a_ring_hides_a_fast_wire_and_shows_a_slow_one(passes: str) -> None:
    fast, slow = Link(1e15), Link(1e3)
    hidden = predict("ring", SMALL, 8, CORE, fast, passes=passes)
    plain = predict("ring", SMALL, 8, CORE, passes=passes)
    assert hidden.total == pytest.approx(plain.total)
    shown = predict("ring", SMALL, 8, CORE, slow, passes=passes)
    assert shown.exposed == pytest.approx(shown.wire, rel=1e-3)
    for link in (fast, Link(1e9), slow):
        with_it = predict("ring", SMALL, 8, CORE, link, passes=passes)
        without = predict("ring", SMALL, 8, CORE, link, passes=passes, overlap=False)
        assert with_it.total <= without.total
        assert without.exposed == without.wire == pytest.approx(with_it.wire)


def test_the_wire_carries_what_the_traffic_says() -> None:
    for plan in PLANS:
        for passes in PASSES:
            moved = traffic(plan, SMALL, 8, passes)
            wire = predict(plan, SMALL, 8, CORE, Link(1.0), passes=passes).wire
            assert wire == pytest.approx(moved.payload + moved.agreement)


# ---- the simulation


@pytest.mark.parametrize("world", [1, 2, 5, 16])
@pytest.mark.parametrize(("compute", "wire"), [(1.0, 0.0), (1.0, 0.25), (0.5, 2.0), (0.0, 1.0)])
def test_even_ranks_are_the_closed_form(world: int, compute: float, wire: float) -> None:
    each = np.full((world, world), compute)
    others = world - 1
    ring = simulate.ring(each, wire)
    assert ring.total == pytest.approx(others * max(compute, wire) + compute)
    apart = simulate.ring(each, wire, overlap=False)
    assert apart.total == pytest.approx(others * (compute + wire) + compute)
    gathered = simulate.all_gather(each.sum(1), wire)
    assert gathered.total == pytest.approx(others * wire + world * compute)
    assert np.allclose(ring.waited, others * max(wire - compute, 0))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bandwidth", [1e6, 1e9, 1e13])
def test_simulation_and_model_agree(split: str, overlap: bool, bandwidth: float) -> None:
    world, n = 6, 600
    problem = Problem(n, 2, 2, 16, causal=True)
    only = dataclasses.replace(NOTHING, blocks=1 / 1e9)
    made: Split = getattr(Split, split)(n, world)
    at = [made.positions(rank) for rank in range(world)]
    pairs = np.array(
        [[float((at[r][:, None] >= at[(r - step) % world]).sum()) for step in range(world)] for r in range(world)]
    )
    compute = flops(problem, pairs, FORWARD) * only.blocks
    wire = n / world * problem.kv * problem.size / bandwidth
    simulated = simulate.ring(compute, wire, overlap=overlap).total
    found = predict("ring", problem, world, only, Link(bandwidth), split=split, overlap=overlap)
    talk = traffic("ring", problem, world, "forward").agreement / bandwidth
    assert simulated == pytest.approx(found.total - talk, rel=0.03)


def test_a_straggler_holds_everybody_up_and_jitter_adds_up() -> None:
    even = np.ones((32, 32))
    slow = simulate.ring(even * simulate.straggler(32, 3.0)[:, None], 0.1)
    assert slow.total == pytest.approx(96)
    assert slow.waited.max() > 0 == slow.waited[16]
    shaken = simulate.jitter((32, 32), 0.3)
    slack, tight = (simulate.ring(shaken, wire).total for wire in (0.1, 1.0))
    # A fast wire leaves slack in which neighbours catch up; a wire as slow as the kernel has none.
    assert shaken.sum(1).max() <= slack < 1.05 * shaken.sum(1).max()
    assert tight > 1.2 * simulate.ring(even, 1.0).total
    assert simulate.jitter((1000, 1000), 0.3).mean() == pytest.approx(1, abs=1e-3)


# ---- the fit


def test_constants_are_found_again() -> None:
    machine = dataclasses.replace(CORE, cores=2)
    cells = [
        Measured(
            cell.plan,
            cell.problem,
            world,
            cell.passes,
            cell.split,
            predict(cell.plan, cell.problem, world, machine, passes=cell.passes, split=cell.split).total,
        )
        for world in (1, 2, 4)
        for cell in cases.cells(cases.FULL, world)
    ]
    found = fit(cells, cores=2)
    assert [found.of(kind) for kind in KINDS] == pytest.approx([CORE.of(k) for k in KINDS], rel=1e-4)
    assert errors(found, cells).largest < 1e-4
    slower = [dataclasses.replace(cell, seconds=cell.seconds * 2) for cell in cells]
    assert errors(found, slower).bias == pytest.approx(-0.5, abs=1e-3)


def test_constants_are_never_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(matrix, np.array([2.0, 3.0, 4.0])) == pytest.approx([1.0, 1.0])
    assert non_negative(matrix, -np.ones(3)).tolist() == [0.0, 0.0]


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(LevelheadValueError, match="at least 9 measurements"):
        fit([Measured("ring", SMALL, 2, "forward", "zigzag", 1.0)], cores=2)
    with pytest.raises(LevelheadValueError, match="at least one measurement"):
        errors(CORE, [])


# ---- who wins


def test_winners_on_paper() -> None:
    paper = winners.Paper()
    assert winners.winner(paper, CORE, 256, 4096, 1.0).plan == ALONE
    few = winners.winner(paper, CORE, 2**15, 8, 1.0)
    assert few.plan == "ulysses" == min(few.every, key=lambda plan: few.every[plan])
    close = winners.winner(paper, CORE, 2**20, 8, 1.0)
    assert close.plan == "all-gather"  # slower than ulysses by less than the model knows
    assert min(close.every.values()) < close.seconds < winners.CLOSE * min(close.every.values())
    many = winners.winner(paper, CORE, 2**20, 16, 1.0)
    assert "ulysses" not in many.every  # 8 groups do not divide
    assert many.plan == "ring"
    huge = winners.winner(paper, CORE, 2**26, 1024, 100.0)
    assert list(huge.every) == ["ring"] and huge.why == "all keys do not fit into one host"
    assert winners.winner(paper, CORE, 2**30, 2, 100.0).every == {}


def test_tokens_to_hide_a_wire() -> None:
    paper = winners.Paper(latency=0.0)
    for gbit in winners_plot.LINKS:
        each = winners.tokens_to_hide(paper, CORE, gbit)
        for factor, hidden in ((0.9, False), (1.1, True)):
            problem = paper.problem(round(64 * each * factor))
            found = predict("ring", problem, 64, paper.host(CORE), paper.link(gbit))
            talk = traffic("ring", problem, 64, "forward").agreement / paper.link(gbit).bandwidth
            assert (found.exposed - talk < 1e-9) == hidden


def test_the_picture_has_a_square_for_every_place(tmp_path: Path) -> None:
    light, dark = winners_plot.plot(CORE, winners.Paper(), tmp_path)
    assert (light.name, dark.name) == ("scaling-light.svg", "scaling-dark.svg")
    squares = [
        rect
        for rect in ET.parse(light).iter("{http://www.w3.org/2000/svg}rect")
        if rect.find("{http://www.w3.org/2000/svg}title") is not None
    ]
    places = len(winners_plot.LINKS) * len(winners_plot.WORLDS) * len(winners_plot.TOKENS)
    assert len(squares) == places
    assert light.read_text() != dark.read_text()


def test_memory_of_a_ring_shrinks_with_the_world_and_of_a_gather_does_not() -> None:
    for passes in PASSES:
        ring = [memory("ring", SMALL, world, passes) for world in (4, 8, 16)]
        assert ring[0] == pytest.approx(2 * ring[1]) == pytest.approx(4 * ring[2])
        whole = SMALL.tokens * SMALL.kv * SMALL.size
        assert memory("all-gather", SMALL, 1024, passes) > whole


# ---- the page


def test_the_page_is_what_its_file_says(root: Path) -> None:
    page = root / "docs" / "scaling.md"
    made = script(root, "tables")
    text = page.read_text()
    assert page in made.DOCUMENTS
    assert made.filled(text) == text, "python bench/tables.py"
    shown = {name for _, name, _ in made.PLACE.findall(text)}
    assert shown == tables.TABLES.keys() | paper_tables.TABLES.keys()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_what_its_file_says(root: Path, theme: str, tmp_path: Path) -> None:
    (file,) = (root / "bench" / "results").glob("cluster-*.json")
    core = tables.machine(json.loads(file.read_text()))
    winners_plot.plot(core, winners.Paper(), tmp_path)
    name = f"scaling-{theme}.svg"
    assert (root / "docs" / "plots" / name).read_text() == (tmp_path / name).read_text()


def test_links_that_may_not_be_made_are_named(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script(root, "cluster_scaling")
    file = tmp_path / "cluster.json"
    monkeypatch.setattr(bench, "measured", lambda world, size: {"world": world, "size": size})
    monkeypatch.setenv("PATH", str(tmp_path))  # where no `ip` is
    monkeypatch.setattr(sys, "argv", ["cluster_scaling.py", "--tiny", "--json", str(file)])
    bench.main()
    found = json.loads(file.read_text())
    assert found["runs"] == [{"world": world, "size": "tiny"} for world in (1, 2, 3, 4)]
    assert found["left_out"] == dict.fromkeys(("1 Gbit/s", "0.25 Gbit/s"), "ip is not installed")
