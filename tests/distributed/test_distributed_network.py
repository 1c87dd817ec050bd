"""Ranks in separate network namespaces, made here: the data crosses a real network, over a link with a limited rate
where overlap is measured.

Making namespaces takes root. Without it these tests are deselected, with a line in the report; where CI=true they are
required, and fail.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded import PLANS, Case, together
from sharded_truth import check

ADDRESSES = ("10.213.77.1", "10.213.77.2", "10.213.77.3")
RATE = "100mbit"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """A namespace for each rank, linked to a common bridge."""

    def __init__(self) -> None:
        mark = os.getpid() % 100_000
        self.switch = f"lh{mark}-switch"
        self.spaces = [f"lh{mark}-{i}" for i, _ in enumerate(ADDRESSES)]
        self.cables = [f"lhv{mark}{i}" for i, _ in enumerate(ADDRESSES)]
        self.made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        for space in (self.switch, *self.spaces):
            ip("netns", "add", space)
            self.made.append(space)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for space, cable, address in zip(self.spaces, self.cables, ADDRESSES, strict=True):
            plug = ("peer", "name", cable, "netns", self.switch)
            ip("link", "add", cable, "netns", space, "type", "veth", *plug)
            ip("-n", self.switch, "link", "set", cable, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", space, "link", "set", cable, "up")
            ip("-n", space, "link", "set", "lo", "up")

    def limit(self) -> None:
        """Limits the sending rate of each rank to RATE."""
        shape = ["root", "tbf", "rate", RATE, "burst", "32kb", "latency", "100ms"]
        for space, cable in zip(self.spaces, self.cables, strict=True):
            command = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", cable, *shape]
            subprocess.run(command, check=True, capture_output=True, timeout=60)

    def run(self, what: str, directory: Path) -> list[Any]:
        """Runs `what` of network_rank.py on a rank in each namespace; returns the results they wrote."""
        script = Path(__file__).parents[1] / "helpers" / "network_rank.py"
        started = []
        for rank, (space, cable) in enumerate(zip(self.spaces, self.cables, strict=True)):
            env = {**os.environ, "GLOO_SOCKET_IFNAME": cable, "MASTER_ADDR": ADDRESSES[0]}
            env |= {"MASTER_PORT": "29517", "RANK": str(rank)}
            env |= {"WORLD_SIZE": str(len(self.spaces))}
            command = ["ip", "netns", "exec", space, sys.executable, str(script), what]
            command += [str(directory / f"{rank}.pickle"), cable]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, env=env, text=True, **pipes))
        try:
            told = [process.communicate(timeout=240)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert all(process.returncode == 0 for process in started), "\n".join(told)
        files = (directory / f"{rank}.pickle" for rank in range(len(self.spaces)))
        return [pickle.loads(file.read_bytes()) for file in files]

    def remove(self) -> None:
        for space in self.made:
            ip("netns", "del", space)
        self.made = []


def _reason() -> str:
    try:
        Network().remove()
    except (PermissionError, FileNotFoundError) as error:
        return str(error)
    return ""


pytestmark = pytest.mark.needs("ranks in network namespaces", _reason())


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.remove()


def test_ranks_with_addresses_of_their_own(network: Network, tmp_path: Path) -> None:
    """The results equal those of one process, and the data did cross the link."""
    found = network.run("cases", tmp_path)
    cases: list[Case] = found[0]["cases"]
    assert {case.plan for case in cases} == set(PLANS)
    for i, case in enumerate(cases):
        check(case, together(case, [rank["found"][i] for rank in found]))
    for rank in found:
        assert rank["sent"] > 0
        assert rank["on the cable"] >= rank["sent"]


def test_transfers_overlap_the_kernel(network: Network, tmp_path: Path) -> None:
    """On a slow link, the transfer of the next block overlaps the computation, in both passes."""
    network.limit()
    for rank in network.run("ring", tmp_path):
        assert rank["on the cable"] >= rank["sent"] > 0
        events = [tuple(event) for event in json.loads(rank["events"])]

        def only(kind: str, what: str, events: list[Any] = events) -> list[tuple[float, float]]:
            return [(begin, end) for k, w, begin, end in events if (k, w) == (kind, what)]

        forward, backward = only("compute", "forward"), only("compute", "backward")
        assert len(forward) == len(backward) == 3  # one for each block
        pairs = []
        for step in (0, 1):
            coming = only("transfer", f"block {step + 1} of the ring")
            assert len(coming) == 2  # forward and backward
            pairs += zip(coming, (forward[step], backward[step]), strict=True)
        (sums,) = only("transfer", "gradients of step 1 of the ring")
        pairs.append((sums, backward[2]))
        # Started before the kernel and finished after it began: they overlap.
        for (posted, arrived), (begun, _) in pairs:
            assert posted < begun < arrived
