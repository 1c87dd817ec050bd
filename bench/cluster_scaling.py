"""Attention over 1, 2, 3 and 4 ranks of this machine, and over links of limited rate, as one file.

    python bench/cluster_scaling.py --json bench/results/cluster-NAME.json [--quick]
    python bench/cluster_scaling.py --plot bench/results/cluster-NAME.json docs/plots

Launches `levelhead cluster-bench` through torchrun, one thread per rank: once per world, then with two ranks in two
network namespaces whose only connection is a pair of virtual interfaces, held to a rate by a token bucket on both ends.
The namespaces need root; they are made here and removed again. Where that is not allowed, the file says so. Nothing is
merged or fitted here: `cluster` makes tables and constants from the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import tables, winners, winners_plot

WORLDS = (1, 2, 3, 4)
GBITS = (1.0, 0.25)  # rates of the links
PORT = 29517
LAUNCH = (sys.executable, "-m", "torch.distributed.run")


class NotAllowedError(Exception):
    """This process may not make network namespaces."""


def measured(world: int, size: str) -> dict[str, Any]:
    """A run of so many ranks on this machine."""
    with _file() as file:
        ranks = ("--standalone", "--nproc-per-node", str(world))
        _wait([_start([*LAUNCH, *ranks, *_bench(size, file)])])
        return json.loads(file.read_text()) | {"link": None}


def measured_over(gbit: float, size: str) -> dict[str, Any]:
    """A run of two ranks, each in a network of its own."""
    with _file() as file, _link(gbit) as (names, interfaces, addresses):
        started = []
        for rank, (name, interface) in enumerate(zip(names, interfaces, strict=True)):
            ranks = (
                "--nnodes",
                "2",
                "--node-rank",
                str(rank),
                "--nproc-per-node",
                "1",
                "--master-addr",
                addresses[0],
                "--master-port",
                str(PORT),
                "--local-addr",
                addresses[rank],
            )
            inside = ["ip", "netns", "exec", name, *LAUNCH, *ranks, *_bench(size, file)]
            started.append(_start(inside, GLOO_SOCKET_IFNAME=interface))
        _wait(started)
        link = {"gbit": gbit, "latency": 0.0, "how": "veth pair, a token bucket on both ends"}
        return json.loads(file.read_text()) | {"link": link}


def _bench(size: str, file: Path) -> list[str]:
    return ["-m", "levelhead", "cluster-bench", f"--{size}", "--threads", "1", "--json", str(file)]


@contextmanager
def _file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run.json"


def _start(command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
    quiet = {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(command, env=os.environ | quiet, stdout=subprocess.DEVNULL)


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all are done; the first that fails ends the others."""
    try:
        for process in started:
            if process.wait():
                raise SystemExit(f"levelhead cluster-bench failed ({process.returncode})")
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()


@contextmanager
def _link(gbit: float) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Two namespaces with a link of that rate: their names, interfaces and addresses."""
    mark = os.getpid() % 100000
    names = [f"levelhead-{mark}-{rank}" for rank in range(2)]
    interfaces = [f"lh{mark}r{rank}" for rank in range(2)]
    addresses = [f"10.203.77.{rank + 1}" for rank in range(2)]
    made = []
    try:
        for name in names:
            _ip("ip", "netns", "add", name)
            made.append(name)
        _ip(
            "ip",
            "link",
            "add",
            interfaces[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            interfaces[1],
            "netns",
            names[1],
        )
        for name, interface, address in zip(names, interfaces, addresses, strict=True):
            inside = ("ip", "netns", "exec", name)
            _ip(*inside, "ip", "address", "add", f"{address}/24", "dev", interface)
            _ip(*inside, "ip", "link", "set", interface, "up")
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, *_limit(interface, gbit))
        yield names, interfaces, addresses
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _limit(interface: str, gbit: float) -> list[str]:
    """A token bucket: 256 KiB may go at once, the rest at the rate; queued, not dropped."""
    rate = f"{round(gbit * 1000)}mbit"
    queue = ("burst", "256kb", "latency", "400ms")
    return ["tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *queue]


def _ip(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotAllowedError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise NotAllowedError(f"{' '.join(command)}: {done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="attention over ranks, as one file")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="measure, and write there")
    what.add_argument("--plot", nargs=2, type=Path, metavar=("FILE", "DIR"), help="draw the winners")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_const", const="tiny", dest="size")
    size.add_argument("--quick", action="store_const", const="quick", dest="size")
    arguments = parser.parse_args()
    if arguments.plot:
        source, folder = arguments.plot
        core = tables.machine(json.loads(source.read_text()))
        for path in winners_plot.plot(core, winners.Paper(), folder):
            print(path)
        return
    chosen = arguments.size or "full"
    result: dict[str, Any] = {"runs": [], "left_out": {}}
    for world in WORLDS:
        print(f"{world} ranks", file=sys.stderr)
        result["runs"].append(measured(world, chosen))
        _save(arguments.json, result)
    for gbit in GBITS:
        print(f"2 ranks over {gbit:g} Gbit/s", file=sys.stderr)
        try:
            result["runs"].append(measured_over(gbit, chosen))
        except NotAllowedError as error:
            print(error, file=sys.stderr)
            result["left_out"][f"{gbit:g} Gbit/s"] = str(error)
        _save(arguments.json, result)


def _save(file: Path, result: dict[str, Any]) -> None:
    file.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
