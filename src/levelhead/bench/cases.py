"""The cells of the benchmark: what is computed, on which shape, and the bar it is held to.

Data only: no arrays, no peers. Names are stable, so that results of different days can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Literal, TypeAlias

from levelhead.bench import bars
from levelhead.bench.bars import Bar
from levelhead.errors import bad_value

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
    caller: Literal["numpy", "torch", "jax"] = "numpy"  # the kind of arrays that levelhead gets
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
    def only_causal(self) -> bool:
        """Causal and nothing else, with as many queries as keys: peers have a flag for it."""
        return self.causal and not self.altered and self.T == self.S

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


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
KINDS = ("dense", "causal")

_QUICK = {
    *("dense-d64-1024", "causal-d64-1024", "causal-d128-512", "short-64", "bf16-causal-512", "f16-causal-512"),
    *("tiny-numpy", "tiny-torch", "gqa-decode-8192", "window-1024", "statistics-dense-d64-1024", "width-80"),
    *("onehead-16x65536", "training-causal-d64-1024"),
}
_WEIGHED = {
    *("dense-d64-1024", "dense-d64-4096", "dense-d64-16384", "window-4096", "window-16384"),
    *("mask-bool", "mask-float", "alibi", "softcap", "padding", "packed"),
    *(f"training-dense-d64-{T}" for T in LENGTHS[:4]),
    *("additive-512", "additive-1024", "additive-gradients-512"),
}


def _square(name: str, family: str, bar: Bar, T: int, D: int, H: int, **more: object) -> Case:
    """A case whose other sizes follow from these, unless they are given."""
    fields = dict(B=1, H=H, G=H, T=T, S=T, D=D, E=D, quick=name in _QUICK, weighed=name in _WEIGHED)
    return Case(name, family, bar, **(fields | more))  # type: ignore[arg-type]


def _heads(T: int) -> int:
    """As many as keep a call below about two seconds on two cores."""
    return max(1, min(8, 16384 // T))


def _grid() -> Iterator[Case]:
    for kind, D, T in product(KINDS, (64, 128), LENGTHS):
        fit = f"{kind} d{D}" if T >= 1024 else None
        bar = bars.CAUSAL if kind == "causal" else bars.DENSE[D]
        yield _square(f"{kind}-d{D}-{T}", kind, bar, T, D, _heads(T), causal=kind == "causal", fit=fit)


def _short(T: int, prefix: str, family: str, bar: Bar, dtype: str) -> Case:
    rows = max(1, 16384 // (8 * T))  # 16384 tokens over batch and 8 heads
    return _square(f"{prefix}-{T}", family, bar, T, 64, 8, B=rows, dtype=dtype)


def _halves() -> Iterator[Case]:
    for dtype, short, dense in (("bfloat16", "bf16", bars.PAIRS), ("float16", "f16", bars.DENSE[64])):
        for kind, T in product(KINDS, LENGTHS[:4]):
            name, bar = f"{short}-{kind}-{T}", bars.HALF_CAUSAL if kind == "causal" else dense
            yield _square(name, dtype, bar, T, 64, _heads(T), dtype=dtype, causal=kind == "causal")
        for T in (64, 256):
            yield _short(T, f"{short}-short", dtype, bars.SHORT, dtype)


def _grouped() -> Iterator[Case]:
    yield _square("gqa-prefill-1024", "grouped", bars.CAUSAL, 1024, 128, 32, G=8, causal=True)
    yield _square("gqa-decode-8192", "decode", bars.DECODE, 1, 128, 32, G=8, S=8192)
    yield _square("gqa-decode-1024", "decode", bars.FLOOR, 1, 128, 32, G=8, S=1024)
    yield _square("mha-decode-8192", "decode", bars.FLOOR, 1, 128, 32, S=8192)
    yield _square("mha-decode-1024", "decode", bars.FLOOR, 1, 128, 32, S=1024)


def _decoding() -> Iterator[Case]:
    """One query, or the few of a speculative step, against many keys; in the dtypes that users hold."""
    gqa, mha = partial(_square, D=128, H=32, G=8), partial(_square, D=128, H=32)
    mla = partial(_square, D=576, E=512, H=16, G=1)  # one kv head, wide
    for dtype, short in (("float32", "f32"), ("bfloat16", "bf16"), ("float16", "f16")):
        at_speed = bars.FLOOR if dtype == "float16" else bars.READ_ONCE
        for S in (8192, 32768):
            yield gqa(f"decode-gqa-{short}-{S}", "decode", at_speed, 1, S=S, dtype=dtype)
            # 16 rows share each key: arithmetic is the nearer limit, so no share of the bandwidth.
            yield mla(f"decode-mla-{short}-{S}", "decode", bars.FLOOR, 1, S=S, dtype=dtype)
        yield mha(f"decode-mha-{short}-8192", "decode", at_speed, 1, S=8192, dtype=dtype)
        yield mha(f"decode-mha-{short}-32768", "decode", at_speed, 1, H=8, S=32768, dtype=dtype)
        yield gqa(f"decode-mqa-{short}-8192", "decode", bars.FLOOR, 1, G=1, S=8192, dtype=dtype)
        for T in (4, 8):
            yield mha(f"verify-mha-{short}-{T}x8192", "decode", bars.FLOOR, T, S=8192, dtype=dtype)
            yield gqa(f"verify-gqa-{short}-{T}x8192", "decode", bars.FLOOR, T, S=8192, dtype=dtype, mask="bool")
        yield gqa(f"decode-batch-{short}-8192", "decode", bars.FLOOR, 1, B=4, S=8192, dtype=dtype, padding=True)


def _masked() -> Iterator[Case]:
    for T in LENGTHS[1:]:
        bar = bars.WINDOW if T == 4096 else bars.FLOOR
        yield _square(f"window-{T}", "window", bar, T, 64, _heads(T), window=256, fit="window 256")
    masked = partial(_square, family="masked", bar=bars.MASKED, T=2048, D=64)
    yield masked("mask-bool", H=8, mask="bool")
    yield masked("mask-float", H=8, mask="float")
    yield masked("alibi", H=8, alibi=True)
    yield masked("softcap", H=8, softcap=2.0)  # low enough to bend most logits: a peer that ignored it would be caught
    yield masked("padding", H=2, B=4, padding=True)
    yield masked("packed", H=8, packed=True)


def _statistics() -> Iterator[Case]:
    for kind, D, T in product(KINDS, (64, 128), (1024, 4096)):
        name, causal = f"statistics-{kind}-d{D}-{T}", kind == "causal"
        yield _square(name, "statistics", bars.STATISTICS, T, D, _heads(T), causal=causal, observed=True)


def _others() -> Iterator[Case]:
    for D, E in ((32, 32), (57, 57), (80, 80), (96, 96), (192, 128), (256, 256)):
        name = f"width-{D}" if D == E else f"width-{D}x{E}"
        yield _square(name, "widths", bars.FLOOR, 1024, D, 8, E=E)
    yield _square("onehead-4096", "one head", bars.FLOOR, 4096, 64, 1)
    yield _square("onehead-16x65536", "one head", bars.FLOOR, 16, 64, 1, S=65536)
    yield _square("long-131072", "long", bars.FLOOR, 131072, 64, 1, causal=True, peers=False)


def _training() -> Iterator[Case]:
    square = partial(_square, gradients=True, caller="torch")
    for kind in KINDS:
        causal = kind == "causal"
        for D, T in product((64, 128), LENGTHS[:4]):
            name, fit = f"training-{kind}-d{D}-{T}", f"training {kind} d{D}" if T >= 1024 else None
            yield square(name, "training", bars.TRAINING[kind], T, D, min(8, 8192 // T), causal=causal, fit=fit)
        for T in (2048, 4096):
            name = f"training-onehead-{kind}-{T}"
            yield square(name, "training", bars.TRAINING_ONE_HEAD, T, 64, 1, causal=causal)
    square = partial(square, causal=True)
    yield square("training-gqa-1024", "training", bars.TRAINING["causal"], 1024, 128, 16, G=4)
    yield square("training-gqa-2048", "training", bars.TRAINING["causal"], 2048, 64, 9, G=3)
    yield square("training-bf16-causal-1024", "training", bars.TRAINING["causal"], 1024, 64, 8, dtype="bfloat16")


def _jax() -> Iterator[Case]:
    """Arrays of JAX, both under jit."""
    for kind, D, T, gradients in product(KINDS, (64, 128), (512, 1024, 2048, 4096), (False, True)):
        name = f"jax-{'training-' if gradients else ''}{kind}-d{D}-{T}"
        heads = max(1, min(8, 8192 // T))
        yield _square(name, "jax", bars.JAX, T, D, heads, causal=kind == "causal", gradients=gradients, caller="jax")


def _additive() -> Iterator[Case]:
    square = partial(_square, additive=64, caller="torch")
    for T, heads, bar in ((128, 4, bars.FLOOR), (512, 4, bars.ADDITIVE), (1024, 2, bars.FLOOR)):
        yield square(f"additive-{T}", "additive", bar, T, 64, heads)
    yield square("additive-gradients-512", "additive", bars.ADDITIVE, 512, 64, 4, gradients=True)


def _models() -> Iterator[Case]:
    minilm = partial(_square, model="minilm", caller="torch")
    yield minilm("model-minilm-128", "model", bars.MODEL, 128, 32, 12, B=16)
    yield minilm("model-minilm-padded-128", "model", bars.MODEL, 128, 32, 12, B=16, padding=True)
    yield minilm("model-minilm-512", "model", bars.MODEL, 512, 32, 12, B=4)
    smollm2 = partial(_square, model="smollm2", caller="torch", causal=True, G=3)
    # Attention is a quarter of SmolLM2's arithmetic at 2048 tokens, two fifths at 4096.
    for T, bar in ((512, bars.MODEL), (2048, bars.MODEL), (4096, bars.LONG_MODEL)):
        yield smollm2(f"model-smollm2-{T}", "model", bar, T, 64, 9)


CASES: tuple[Case, ...] = (
    *_grid(),
    *(_short(T, "short", "short", bars.SHORT, "float32") for T in (8, 16, 32, 64, 128, 256)),
    *_halves(),
    _square("tiny-numpy", "tiny", bars.TINY, 8, 16, 1),
    _square("tiny-torch", "tiny", bars.TINY, 8, 16, 1, caller="torch"),
    *_grouped(),
    *_decoding(),
    *_masked(),
    *_statistics(),
    *_others(),
    *_training(),
    *_jax(),
    *_additive(),
    *_models(),
)


def select(patterns: Sequence[str] = (), *, skip: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """Cases whose name matches any of the patterns (all of them without a pattern), unless skipped.

    >>> [case.name for case in select(["tiny-*"], skip=["*-torch"])]
    ['tiny-numpy']
    """
    chosen = [case for case in CASES if (case.quick or not quick) and _matches(case, patterns or ["*"])]
    chosen = [case for case in chosen if not _matches(case, skip)]
    if not chosen:
        given = ", ".join([*patterns, *(f"without {pattern}" for pattern in skip)])
        raise bad_value("case", "names or patterns of cases", given, "`levelhead bench --list` prints the names")
    return chosen


def _matches(case: Case, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(case.name, pattern) for pattern in patterns)
