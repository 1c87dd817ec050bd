"""The cells of the benchmark: what is computed, on which shape, and the bar it is held to.

Data only: nothing here makes an array or knows of a peer. Names are stable, so that results of
different days can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from levelhead.errors import LevelheadValueError, expected


@dataclass(frozen=True, slots=True)
class Bar:
    """What a cell must reach: the ratio or the share of the FMA peak, never below the floor."""

    ratio: float = 1.1  # fastest peer's time / ours
    peak: float | None = None  # ... or this share of the measured FMA peak
    floor: float = 1.1  # which no share of the peak excuses
    bandwidth: float | None = None  # and this share of the measured memory bandwidth
    against: str | None = None  # one peer instead of the fastest
    without: str | None = None  # a peer that is compared with, but not what the ratio was set for

    def __str__(self) -> str:
        if self.ratio < 1:
            return f"at most {1 / self.ratio - 1:+.0%}"
        text = f"≥ {self.ratio:.3g}×"
        if self.against:
            text += f" {self.against}"
        if self.without:
            text += f" ({self.without} aside)"
        if self.peak:
            text += f" or ≥ {self.peak:.0%} of peak (≥ {self.floor:.3g}×)"
        if self.bandwidth:
            text += f" and ≥ {self.bandwidth:.0%} of bandwidth"
        return text


# The project's table of numbers to hold, row by row.
DENSE = Bar(1.25, peak=0.80)
SHORT = BFLOAT16 = Bar(1.5, peak=0.75)
FLOAT16 = Bar(1.5)
TINY = Bar(1.1, against="PyTorch")
DECODE = Bar(3.0, bandwidth=0.85)
WINDOW = Bar(8.0, without="FlexAttention")  # set for those that cannot skip what is hidden
MASKED = Bar(1.25)
# At most 8 % over the call without them. Stated for d 64; a wider head has more work per logit to
# hide them behind, so it is held to the same.
STATISTICS = Bar(1 / 1.08, floor=1 / 1.08)
FLOOR = Bar()  # every cell without a row of its own

OFF = "statistics off"  # what stands in for the peers where levelhead is compared with itself


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
    caller: Literal["numpy", "torch"] = "numpy"  # whose arrays levelhead is given
    peers: bool = True  # False: beyond what the peers can be asked for
    observed: bool = False  # statistics on, against statistics off
    quick: bool = False  # part of --quick
    weighed: bool = False  # peak memory is measured too
    fit: str | None = None  # cells that share this name give one exponent of cost in T

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


def _square(
    name: str, family: str, bar: Bar, T: int, D: int, H: int, E: int | None = None, **more: object
) -> Case:
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
                    f"{kind}-d{D}-{T}", kind, DENSE, T, D, _heads(T), causal=causal,
                    quick=key in quick, weighed=key in weighed,
                    fit=f"{kind} d{D}" if T >= 1024 else None,
                )  # fmt: skip


def _short(T: int, prefix: str, family: str, bar: Bar, dtype: str, quick: bool) -> Case:
    rows = max(1, 16384 // (8 * T))  # 16384 tokens over batch and 8 heads
    name = f"{prefix}-{T}"
    return _square(name, family, bar, T, 64, 8, B=rows, dtype=dtype, quick=quick)


def _halves() -> Iterator[Case]:
    for dtype, short, bar in (("bfloat16", "bf16", BFLOAT16), ("float16", "f16", FLOAT16)):
        for kind, causal in KINDS:
            for T in (512, 1024, 2048, 4096):
                yield _square(
                    f"{short}-{kind}-{T}", dtype, bar, T, 64, _heads(T), dtype=dtype,
                    causal=causal, quick=kind == "causal" and T == 512,
                )  # fmt: skip
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
            f"window-{T}", "window", WINDOW if T == 4096 else FLOOR, T, 64, _heads(T), window=256,
            quick=T == 1024, weighed=T in (4096, 16384), fit="window 256",
        )  # fmt: skip
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
                    f"statistics-{kind}-d{D}-{T}", "statistics", STATISTICS, T, D, _heads(T),
                    causal=causal, observed=True, quick=(kind, D, T) == ("dense", 64, 1024),
                )  # fmt: skip


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


CASES: tuple[Case, ...] = (
    *_grid(),
    *(_short(T, "short", "short", SHORT, "float32", T == 64) for T in (8, 16, 32, 64, 128, 256)),
    *_halves(),
    *_tiny(),
    *_grouped(),
    *_masked(),
    *_statistics(),
    *_others(),
)


def select(patterns: Sequence[str] = (), *, quick: bool = False) -> list[Case]:
    """Cases whose name matches any of the patterns (all of them without a pattern).

    >>> [case.name for case in select(["tiny-*"])]
    ['tiny-numpy', 'tiny-torch']
    """
    found = [case for case in CASES if case.quick or not quick]
    if patterns:
        found = [c for c in found if any(fnmatchcase(c.name, pattern) for pattern in patterns)]
    if not found:
        advice = "`levelhead bench --list` prints the names"
        given = ", ".join(patterns)
        raise LevelheadValueError(expected("case", "names or patterns of cases", given, advice))
    return found
