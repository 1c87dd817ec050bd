"""C14: attention is parallel and takes long sequences. What of that is scaling's doing?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from levelhead import _core
from levelhead.attention import attention
from levelhead.bench import measure
from levelhead.info import info
from levelhead.lab.claim import Claim, Outcome, Params, Tell, UndecidedError, Verdict
from levelhead.lab.settings import numbers, whole
from levelhead.lab.verdict import median

DERIVATION = """\
A row of the output needs one query and all keys, and no other row: rows can be computed at the
same time, on as many threads as there are. n queries see n keys each, so time grows like n²;
with a window of w keys like n · w, which is linear. The scale is one multiplication per logit,
which the kernel does whatever the number is: it can change neither the exponents nor the use of
threads. One head and one sequence, so that there is nothing else to be parallel over.
An exponent is the slope of ln(time) over ln(n) on one thread. It is taken in every round, like
the ratios; the value is the median of the rounds. What threads give at best is measured in the
same rounds, by multiplications in registers that share nothing."""

SCALED, PLAIN = "1/sqrt(d_k)", "none"
DENSE, LINEAR = (1.7, 2.3), (0.7, 1.3)  # exponents that still count as 2 and 1
PARALLEL = 0.5  # of what threads add at best
IDLE = 0.9  # share of the CPUs that this process gets: below it the machine is busy
SAME = 0.1  # relative difference that counts as none
NOISY = 0.02  # relative standard error above which the claim is undecided
CALLS = 3  # in a round; the fastest counts
BURN = 1 << 21  # steps in registers, per thread: some milliseconds

Calls: TypeAlias = Mapping[tuple[Any, ...], Callable[[], Any]]
Times: TypeAlias = Mapping[tuple[Any, ...], NDArray[np.float64]]  # the best of every round


class Number(NamedTuple):
    value: float
    error: float


def experiment(params: Params, seed: int, tell: Tell) -> Outcome:
    lengths = numbers("lengths", params["lengths"], 64, 1 << 16, least=2)
    long = numbers("long", params["long"], 64, 1 << 18, least=2)
    rounds = whole("rounds", params["rounds"], 4, 1000)
    window = whole("window", params["window"], 1, 1 << 16)
    d_k = whole("d_k", params["d_k"], 1, 1024)
    threads = info().threads
    if threads < 2:
        raise UndecidedError("one thread only: nothing to be parallel with")
    random = np.random.default_rng(seed)
    qkv = random.standard_normal((3, max(*lengths, *long), d_k), np.float32)
    _need_idle(threads)
    times = _timed(_calls(qkv, lengths, long, window, threads), rounds, tell)
    _need_idle(threads)
    ratios = _ratios(times, lengths, long, threads)
    at_best = ratios["speed-up: registers"].value
    return Outcome(
        theory={
            "exponent: none": 2.0,
            "exponent: 1/sqrt(d_k)": 2.0,
            "exponent: window": 1.0,
            "speed-up: registers": float(threads),
            "speed-up: none": at_best,
            "speed-up: 1/sqrt(d_k)": at_best,
            "time: 1/sqrt(d_k) over none": 1.0,
        },
        measured={name: number.value for name, number in ratios.items()},
        stderr={name: number.error for name, number in ratios.items()},
        verdict=_verdict(ratios),
        details={"seconds": {" ".join(map(str, name)): best for name, best in times.items()}},
    )


def _calls(qkv: NDArray[Any], lengths: list[int], long: list[int], window: int, threads: int) -> Calls:
    def attend(n: int, **options: Any) -> Callable[[], Any]:
        q, k, v = qkv[:, :n]
        return partial(attention, q, k, v, **options)

    calls: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for scale in (PLAIN, SCALED):
        calls |= {(scale, n, 1): attend(n, scale=scale, threads=1) for n in lengths}
        most = attend(max(lengths), scale=scale, threads=threads)
        calls[scale, max(lengths), threads] = most
    calls |= {("window", n, 1): attend(n, window=(window - 1, 0), threads=1) for n in long}
    calls |= {("registers", 1, team): partial(_core.burn, BURN, team) for team in (1, threads)}
    return calls


def _need_idle(threads: int) -> None:
    if (granted := _granted(threads)) < IDLE:
        why = f"the machine is busy: of {threads} CPUs this process got {granted:.0%}"
        raise UndecidedError(f"{why}; try again when nothing else runs")


def _granted(threads: int) -> float:
    """The share of the CPUs that this process gets: its CPU time over what there would be."""
    used, begin = time.process_time(), time.perf_counter()
    _core.burn(10 * BURN, threads)
    share = (time.process_time() - used) / (threads * (time.perf_counter() - begin))
    return min(share, 1.0)


def _timed(calls: Calls, rounds: int, tell: Tell) -> Times:
    """In turns, so that a slow moment hits all alike."""
    by_name = {" ".join(map(str, key)): key for key in calls}
    plan = measure.Plan(rounds=rounds, warm=1, calls=CALLS)
    begun = 0

    def report(name: str) -> None:
        nonlocal begun
        tell(begun / (rounds * len(calls)), f"timing {name}")
        begun += 1

    runs = {name: calls[key] for name, key in by_name.items()}
    timed = measure.bursts(runs, dict.fromkeys(runs, plan), report)
    return {key: np.reshape(timed[name].samples, (rounds, CALLS)).min(1) for name, key in by_name.items()}


def _ratios(times: Times, lengths: list[int], long: list[int], threads: int) -> dict[str, Number]:
    most = max(lengths)

    def exponent(call: str, ns: list[int]) -> Number:
        logs = np.log([times[call, n, 1] for n in ns])
        return Number(*median(np.polyfit(np.log(ns), logs, 1)[0]))

    def speed_up(call: str, n: int, work: int = 1) -> Number:
        return Number(*median(work * times[call, n, 1] / times[call, n, threads]))

    scaled, plain = (times[scale, most, threads] for scale in (SCALED, PLAIN))
    return {
        "exponent: none": exponent(PLAIN, lengths),
        "exponent: 1/sqrt(d_k)": exponent(SCALED, lengths),
        "exponent: window": exponent("window", long),
        "speed-up: registers": speed_up("registers", 1, work=threads),  # each thread burns as much
        "speed-up: none": speed_up(PLAIN, most),
        "speed-up: 1/sqrt(d_k)": speed_up(SCALED, most),
        "time: 1/sqrt(d_k) over none": Number(*median(scaled / plain)),
    }


def _verdict(ratios: Mapping[str, Number]) -> Verdict:
    value = {name: number.value for name, number in ratios.items()}
    at_best = value["speed-up: registers"]
    if max(number.error / number.value for number in ratios.values()) > NOISY:
        return "undecided"
    grows = DENSE[0] < value[f"exponent: {SCALED}"] < DENSE[1]
    grows &= LINEAR[0] < value["exponent: window"] < LINEAR[1]
    parallel = value[f"speed-up: {SCALED}"] - 1 > PARALLEL * (at_best - 1)
    if not (grows and parallel):
        return "refuted"
    scaled_over_plain = [
        value[f"{quantity}: {SCALED}"] / value[f"{quantity}: {PLAIN}"] for quantity in ("exponent", "speed-up")
    ]
    changes = [abs(ratio - 1) for ratio in (*scaled_over_plain, value["time: 1/sqrt(d_k) over none"])]
    return "caveat" if max(changes) < SAME else "confirmed"


CLAIM = Claim(
    id="C14",
    claim="Scaling makes attention parallel over the sequence and fit for long sequences.",
    derivation=DERIVATION,
    criterion=(
        "Refuted if, scaled by 1/√d_k, time does not grow like n² (exponent 1.7 to 2.3), or with "
        "a window like n (0.7 to 1.3), or if all threads add less than half of what they add at "
        "best. Else confirmed if the time, its exponent or the speed-up differs by a tenth or "
        "more without the scale; else caveat: true of attention, but no gain of scaling. "
        "Undecided on one thread, if a standard error exceeds 2 %, or if other work takes over a "
        "tenth of the CPUs."
    ),
    expected="caveat",
    quick={"lengths": [1024, 2048, 4096], "long": [4096, 16384, 65536], "window": 128, "d_k": 64, "rounds": 5},
    full={"lengths": [1024, 2048, 4096, 8192, 16384], "rounds": 16},
    experiment=experiment,
    alone=True,
)
