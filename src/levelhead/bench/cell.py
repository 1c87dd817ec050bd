"""One cell of the benchmark: each peer that can compute the case is checked, then timed.

A peer that is missing, refuses, fails or is wrong is recorded with the reason; it does not end the run, and is not
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from levelhead.bench import limits, measure, memory, peers, problems
from levelhead.bench.calls import Call, Parts, Question, Refused
from levelhead.bench.cases import Case

_OPTIONS = ("causal", "window", "mask", "alibi", "softcap", "padding", "packed", "gradients", "additive", "model")
_PATIENT = 2.0  # seconds; a slow peer whose call takes longer than this gets one seed only


@dataclass(frozen=True, slots=True)
class Effort:
    """How often is measured, and what."""

    rounds: int
    seeds: int
    memory: bool
    left_out: tuple[str, ...] = ()  # peers that take too long to get ready
    long: float = measure.LONG  # seconds; longer calls are timed less often
    least: float = limits.LEAST  # seconds per measurement of the machine's limits
    array: int = limits.ARRAY  # bytes read to measure the bandwidth


@dataclass(frozen=True, slots=True)
class Contender:
    """A variant whose answer is right."""

    variant: str
    call: Call
    seconds: float  # roughly
    errors: measure.Errors


def measured(case: Case, threads: int, effort: Effort, tell: Callable[[str], None]) -> dict[str, Any]:
    try:
        problem = problems.make(case)
    except Refused as refusal:  # what the cell is about is not installed
        return dict(_described(case), results=[], refused={}, missing=str(refusal))
    tell("truth")
    truth = problem.truth()
    refused: dict[str, str] = {}
    ready: dict[str, Contender] = {}
    for peer in (peers.OURS, *peers.against(case)):
        tell(peer.name)
        if peer.name in effort.left_out:
            refused[peer.name] = "left out of --quick: compiling takes longer than measuring"
            continue
        chosen, reasons = contender(peer, problem, threads, truth, _fastest_peer(ready))
        refused |= reasons
        if chosen is not None:
            ready[peer.name] = chosen
    if not case.peers:
        refused |= {peer.name: "not asked: the cell is beyond most peers" for peer in peers.PEERS}
    plans = _plans(ready, effort)
    described = _described(case, problem)
    beside = _limits(described, ready, threads)
    plans |= {
        name: measure.plan(measure.timed(limit.run), float("inf"), rounds=effort.rounds, long=effort.long)
        for name, limit in beside.items()
    }
    runs = {name: c.call.run for name, c in ready.items()} | {name: limit.run for name, limit in beside.items()}
    timings = measure.bursts(runs, plans, tell)
    for name, limit in beside.items():
        described[limit.field] = max(described.get(limit.field, 0.0), limit.units / timings[name].best / 1e9)
    errors = _errors(case, ready, plans, threads, effort.seeds)
    results = [_result(name, chosen.variant, timings[name], errors[name]) for name, chosen in ready.items()]
    for result in results if effort.memory and case.weighed else ():
        tell(f"memory of {result['name']}")
        result["memory"] = memory.extra(case, result["name"], result["variant"], threads)
    return dict(described, results=results, refused=refused)


def contender(
    peer: peers.Implementation, problem: Question, threads: int, truth: Parts, fastest: float = float("inf")
) -> tuple[Contender | None, dict[str, str]]:
    """The fastest variant that gives the right answer, and why others do not count."""
    reason = peer.missing()
    if reason is not None:
        return None, {peer.name: reason}
    try:
        variants = peer.variants(problem, threads)
    except Refused as refusal:
        return None, {peer.name: str(refusal)}
    reasons, right = {}, []
    for variant, build in variants.items():
        try:
            call = build()
            errors = measure.errors(problem.sampled(call.read(call.run())), truth)
            wrong = _wrong(problem.case, errors)
            if wrong:
                reasons[variant] = wrong
                continue
            taken = measure.estimate(call.run, fastest)
            fastest = min(fastest, taken)
            right.append(Contender(variant, call, taken, errors))
        except Exception as failure:  # whatever a library raises must not end the run
            words = str(failure).strip().splitlines() or [""]
            reasons[variant] = f"{type(failure).__name__}: {words[0][:160]}"
    best = min(right, key=lambda contender: contender.seconds, default=None)
    if best is None:
        return None, {peer.name: "; ".join(f"{v}: {why}" for v, why in reasons.items())}
    return best, {f"{peer.name}, {variant}": why for variant, why in reasons.items()}


def _wrong(case: Case, errors: measure.Errors) -> str | None:
    allowed = measure.MODEL_TOLERANCE if case.model else measure.TOLERANCE[case.dtype]
    for name, error in errors.items():
        if not error.relative <= allowed:  # NaN too
            return f"wrong: relative error {error.relative:.1e} of {name}"
    return None


def _fastest_peer(ready: dict[str, Contender]) -> float:
    return min((c.seconds for name, c in ready.items() if name != peers.OURS.name), default=float("inf"))


def _plans(ready: dict[str, Contender], effort: Effort) -> dict[str, measure.Plan]:
    plans, fastest = {}, _fastest_peer(ready)
    for name, contender in ready.items():
        limit = float("inf") if name == peers.OURS.name else fastest  # levelhead is measured in full, even where slow
        plans[name] = measure.plan(contender.seconds, limit, rounds=effort.rounds, long=effort.long)
    return plans


def _limits(described: dict[str, Any], ready: dict[str, Contender], threads: int) -> dict[str, limits.Limit]:
    """What is timed in turns with the implementations, where the work is counted: the nearer of the two limits."""
    if described["flops"] is None or peers.OURS.name not in ready:
        return {}
    seconds = ready[peers.OURS.name].seconds
    return limits.beside(threads, seconds, described["bytes"], memory=described["decode"])


def _errors(
    case: Case, ready: dict[str, Contender], plans: dict[str, measure.Plan], threads: int, seeds: int
) -> dict[str, list[measure.Errors]]:
    by_name = {peer.name: peer for peer in (peers.OURS, *peers.against(case))}
    errors = {name: [contender.errors] for name, contender in ready.items()}
    if case.model:  # its weights are the same with every seed, and its truth takes long
        return errors
    for seed in range(1, seeds):
        problem = problems.make(case, seed)
        truth = problem.truth()
        for name, contender in ready.items():
            if contender.seconds > _PATIENT and plans[name].rounds == 1:
                continue
            call = by_name[name].variants(problem, threads)[contender.variant]()
            errors[name].append(measure.errors(problem.sampled(call.read(call.run())), truth))
    return errors


def _described(case: Case, problem: Question | None = None) -> dict[str, Any]:
    options = {name: value for name in _OPTIONS if (value := getattr(case, name))}
    shape = {letter: getattr(case, letter) for letter in "BHGTSDE"}
    described = dict(name=case.name, family=case.family, shape=shape, dtype=case.dtype, options=options)
    described |= {name: getattr(case, name) for name in ("caller", "observed", "decode", "fit")}
    return described | dict(
        bar=asdict(case.bar), flops=problem and problem.flops(), bytes=problem and problem.traffic()
    )


def _result(name: str, variant: str, timing: measure.Timing, errors: list[measure.Errors]) -> dict[str, Any]:
    parts = {part: measure.joined([e[part] for e in errors]) for part in errors[0]}
    error: dict[str, Any] = asdict(measure.overall(parts)) | dict(seeds=len(errors))
    if len(parts) > 1:
        error["parts"] = {part: asdict(joined) for part, joined in parts.items()}
    return dict(
        name=name,
        variant=variant,
        best=timing.best,
        median=timing.median,
        error=error,
        calls_per_sample=timing.calls_per_sample,
        samples=[float(f"{taken:.5g}") for taken in timing.samples],
    )
