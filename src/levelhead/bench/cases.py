"""The cells of the benchmark: what is computed, on which shape, and the bar it is held to.

Data only: no arrays, no peers. Names are stable, so that results of different days can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from levelhead.bench.bars import (
    ADDITIVE,
    BFLOAT16,
    DECODE,
    DENSE,
    FLOAT16,
    FLOOR,
    LONG_MODEL,
    MASKED,
    MODEL,
    SHORT,
    STATISTICS,
    TINY,
    TRAINING,
    TRAINING_ONE_HEAD,
    WINDOW,
    Bar,
)
from levelhead.errors import LevelheadValueError, expected

Work: TypeAlias = Literal["attention", "training", "additive", "model"]

OFF = "statistics off"  # in place of the peers where levelhead is compared with itself


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    family: str
    bar: Bar
    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int
    dtype: str = "float32"
    causal: bool = False
    window: int | None = None  # so many keys up to and including the query's own position
    mask: Literal["bool", "float"] | None = None  # (T, S), the same for every head
    alibi: bool = False
    softcap: float | None = None
    padding: bool = False  # batch rows of different lengths
    packed: bool = False  # several sequences in one row
    gradients: bool = False  # one step of training: forward and backward
    additive: int | None = None  # scores w_v · tanh(W_q q + W_k k), so many numbers wide
    model: str | None = None  # attention inside a whole model; the shape is one layer's
    caller: Literal["numpy", "torch"] = "numpy"  # the kind of arrays that levelhead gets
    peers: bool = True  # False: larger than the peers can compute
    observed: bool = False  # statistics on, against statistics off
    quick: bool = False  # part of --quick
    weighed: bool = False  # peak memory is measured too
    fit: str | None = None  # cells that share this name give one exponent of cost in T

    @property
    def work(self) -> Work:
        """What kind of thing is computed; it decides on arrays, truth and peers."""
        if self.model:
            return "model"
        if self.additive:
            return "additive"
        return "training" if self.gradients else "attention"

    @property
    def decode(self) -> bool:
        """Bound by memory rather than by arithmetic: one query row."""
        return self.T == 1

    @property
    def grouped(self) -> bool:
        return self.G != self.H

    @property
    def plain(self) -> bool:
        """Nothing between the dot product and the softmax but the scale."""
        return not (self.causal or self.altered)

    @property
    def altered(self) -> bool:
        """More than causal: something that a peer may need a mask or a bias for."""
        hiding = self.window or self.mask or self.padding or self.packed
        return bool(hiding or self.alibi or self.softcap)


def _square(name: str, family: str, bar: Bar, T: int, D: int, H: int, E: int | None = None, **more: object) -> Case:
    sizes = dict(B=1, H=H, G=H, T=T, S=T, D=D, E=E or D)
    return Case(name, family, bar, **(sizes | more))  # type: ignore[arg-type]


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
KINDS = (("dense", False), ("causal", True))


def _heads(T: int) -> int:
    """As many as keep a call below about two seconds on two cores."""
    return max(1, min(8, 16384 // T))


def _grid() -> Iterator[Case]:
    quick = {("dense", 64, 1024), ("causal", 64, 1024), ("causal", 128, 512)}
    weighed = {("dense", 64, T) for T in (1024, 4096, 16384)}
    for kind, causal in KINDS:
        for D in (64, 128):
            for T in LENGTHS:
                key = (kind, D, T)
                yield _square(
                    f"{kind}-d{D}-{T}",
                    kind,
                    DENSE,
                    T,
                    D,
                    _heads(T),
                    causal=causal,
                    quick=key in quick,
                    weighed=key in weighed,
                    fit=f"{kind} d{D}" if T >= 1024 else None,
                )


def _short(T: int, prefix: str, family: str, bar: Bar, dtype: str, quick: bool) -> Case:
    rows = max(1, 16384 // (8 * T))  # 16384 tokens over batch and 8 heads
    name = f"{prefix}-{T}"
    return _square(name, family, bar, T, 64, 8, B=rows, dtype=dtype, quick=quick)


def _halves() -> Iterator[Case]:
    for dtype, short, bar in (("bfloat16", "bf16", BFLOAT16), ("float16", "f16", FLOAT16)):
        for kind, causal in KINDS:
            for T in (512, 1024, 2048, 4096):
                yield _square(
                    f"{short}-{kind}-{T}",
                    dtype,
                    bar,
                    T,
                    64,
                    _heads(T),
                    dtype=dtype,
                    causal=causal,
                    quick=kind == "causal" and T == 512,
                )
        for T in (64, 256):
            yield _short(T, f"{short}-short", dtype, bar, dtype, False)


def _grouped() -> Iterator[Case]:
    yield _square("gqa-prefill-1024", "grouped", DENSE, 1024, 128, 32, G=8, causal=True)
    for name, G, S, bar in (
        ("gqa-decode-8192", 8, 8192, DECODE),
        ("gqa-decode-1024", 8, 1024, FLOOR),
        ("mha-decode-8192", 32, 8192, FLOOR),
        ("mha-decode-1024", 32, 1024, FLOOR),
    ):
        quick = name == "gqa-decode-8192"
        yield _square(name, "decode", bar, 1, 128, 32, G=G, S=S, quick=quick)


def _masked() -> Iterator[Case]:
    for T in LENGTHS[1:]:
        yield _square(
            f"window-{T}",
            "window",
            WINDOW if T == 4096 else FLOOR,
            T,
            64,
            _heads(T),
            window=256,
            quick=T == 1024,
            weighed=T in (4096, 16384),
            fit="window 256",
        )
    for name, more in (
        ("mask-bool", dict(mask="bool")),
        ("mask-float", dict(mask="float")),
        ("alibi", dict(alibi=True)),
        # Low enough to bend most logits: a peer that ignored it would be caught.
        ("softcap", dict(softcap=2.0)),
        ("padding", dict(padding=True, B=4)),
        ("packed", dict(packed=True)),
    ):
        heads = 2 if name == "padding" else 8
        yield _square(name, "masked", MASKED, 2048, 64, heads, weighed=True, **more)


def _statistics() -> Iterator[Case]:
    for kind, causal in KINDS:
        for D in (64, 128):
            for T in (1024, 4096):
                yield _square(
                    f"statistics-{kind}-d{D}-{T}",
                    "statistics",
                    STATISTICS,
                    T,
                    D,
                    _heads(T),
                    causal=causal,
                    observed=True,
                    quick=(kind, D, T) == ("dense", 64, 1024),
                )


def _others() -> Iterator[Case]:
    for D, E in ((32, 32), (57, 57), (80, 80), (96, 96), (192, 128), (256, 256)):
        name = f"width-{D}" if D == E else f"width-{D}x{E}"
        yield _square(name, "widths", FLOOR, 1024, D, 8, E, quick=D == 80)
    yield _square("onehead-4096", "one head", FLOOR, 4096, 64, 1)
    yield _square("onehead-16x65536", "one head", FLOOR, 16, 64, 1, S=65536, quick=True)
    yield _square("long-131072", "long", FLOOR, 131072, 64, 1, causal=True, peers=False)


def _tiny() -> Iterator[Case]:
    yield _square("tiny-numpy", "tiny", TINY, 8, 16, 1, quick=True)
    yield _square("tiny-torch", "tiny", TINY, 8, 16, 1, caller="torch", quick=True)


def _training() -> Iterator[Case]:
    step: dict[str, Any] = dict(gradients=True, caller="torch")
    for kind, causal in KINDS:
        for D in (64, 128):
            for T in (512, 1024, 2048, 4096):
                yield _square(
                    f"training-{kind}-d{D}-{T}",
                    "training",
                    TRAINING,
                    T,
                    D,
                    min(8, 8192 // T),
                    causal=causal,
                    quick=(kind, D, T) == ("causal", 64, 1024),
                    weighed=(kind, D) == ("dense", 64),
                    **step,
                    fit=f"training {kind} d{D}" if T >= 1024 else None,
                )
        for T in (2048, 4096):
            name = f"training-onehead-{kind}-{T}"
            yield _square(name, "training", TRAINING_ONE_HEAD, T, 64, 1, causal=causal, **step)
    step["causal"] = True
    yield _square("training-gqa-1024", "training", TRAINING, 1024, 128, 16, G=4, **step)
    yield _square("training-gqa-2048", "training", TRAINING, 2048, 64, 9, G=3, **step)
    step["dtype"] = "bfloat16"
    yield _square("training-bf16-causal-1024", "training", TRAINING, 1024, 64, 8, **step)


def _additive() -> Iterator[Case]:
    scores: dict[str, Any] = dict(additive=64, caller="torch")
    for T, heads, bar in ((128, 4, FLOOR), (512, 4, ADDITIVE), (1024, 2, FLOOR)):
        name = f"additive-{T}"
        yield _square(name, "additive", bar, T, 64, heads, weighed=T > 128, **scores)
    name = "additive-gradients-512"
    yield _square(name, "additive", ADDITIVE, 512, 64, 4, gradients=True, weighed=True, **scores)


def _models() -> Iterator[Case]:
    for name, T, B, padding in (("128", 128, 16, False), ("padded-128", 128, 16, True), ("512", 512, 4, False)):
        yield _square(
            f"model-minilm-{name}", "model", MODEL, T, 32, 12, B=B, padding=padding, model="minilm", caller="torch"
        )
    # Attention is a quarter of SmolLM2's arithmetic at 2048 tokens, two fifths at 4096.
    for T, bar in ((512, MODEL), (2048, MODEL), (4096, LONG_MODEL)):
        yield _square(f"model-smollm2-{T}", "model", bar, T, 64, 9, G=3, causal=True, model="smollm2", caller="torch")


CASES: tuple[Case, ...] = (
    *_grid(),
    *(_short(T, "short", "short", SHORT, "float32", T == 64) for T in (8, 16, 32, 64, 128, 256)),
    *_halves(),
    *_tiny(),
    *_grouped(),
    *_masked(),
    *_statistics(),
    *_others(),
    *_training(),
    *_additive(),
    *_models(),
)


def select(patterns: Sequence[str] = (), *, skip: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """Cases whose name matches any of the patterns (all of them without a pattern), unless skipped.

    >>> [case.name for case in select(["tiny-*"], skip=["*-torch"])]
    ['tiny-numpy']
    """
    chosen = [case for case in CASES if case.quick or not quick]
    if patterns:
        chosen = [case for case in chosen if _matches(case, patterns)]
    chosen = [case for case in chosen if not _matches(case, skip)]
    if not chosen:
        advice = "`levelhead bench --list` prints the names"
        given = ", ".join([*patterns, *(f"without {pattern}" for pattern in skip)])
        raise LevelheadValueError(expected("case", "names or patterns of cases", given, advice))
    return chosen


def _matches(case: Case, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(case.name, pattern) for pattern in patterns)
