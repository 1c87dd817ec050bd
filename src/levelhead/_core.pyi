"""The compiled core: memory, sizes and options in, results written in place. It checks memory
safety and nothing else; `attention.py` explains a user's mistakes. Only `fast_attention` takes what
a user passed: it computes plain calls completely, and returns None for all others."""

from types import ModuleType
from typing import Any, TypeAlias, TypedDict

from numpy.typing import NDArray

_Memory: TypeAlias = NDArray[Any]  # or anything else with the buffer protocol

class _Info(TypedDict):
    isa: str
    available: list[str]
    built: list[str]
    threads: int

def forward(
    q: _Memory,
    k: _Memory,
    v: _Memory | None,
    *,
    out: _Memory | None = None,
    logsumexp: _Memory | None = None,
    acc: _Memory | None = None,
    sums: _Memory | None = None,
    counts: _Memory | None = None,
    sinks: _Memory | None = None,
    first_keys: _Memory | None = None,
    threads: int = 1,
    torchs_team: bool = False,
    # scale and, where they are not as usual, additive, cosine, log_n, causal, left, right, mask,
    # softcap, alibi, key_lengths, query_lengths, query_segments, key_segments, query_start,
    # query_runs, key_runs, dropout, seed, first_head: what attention.h has in Scoring
    **options: Any,
) -> None: ...
def backward(
    dout: _Memory,
    q: _Memory,
    k: _Memory,
    v: _Memory,
    out: _Memory,
    logsumexp: _Memory,
    *,
    dlogsumexp: _Memory | None = None,
    sums: _Memory | None = None,  # of `forward` over all keys, where these are a part of them
    sinks: _Memory | None = None,
    dq: _Memory | None = None,
    dk: _Memory | None = None,
    dv: _Memory | None = None,
    dmask: _Memory | None = None,
    dsinks: _Memory | None = None,
    dscale: _Memory | None = None,
    dadditive: _Memory | None = None,
    threads: int = 1,
    torchs_team: bool = False,
    **options: Any,  # those of `forward`
) -> None: ...
def fast_attention(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, threads: Any, as_query: bool = False
) -> Any | None: ...
def register_torch(torch: ModuleType) -> None: ...
def finish(acc: _Memory, sums: _Memory, sinks: _Memory | None, out: _Memory) -> None: ...
def merge(
    sums_a: _Memory,
    counts_a: _Memory,
    acc_a: _Memory | None,
    sums_b: _Memory,
    counts_b: _Memory,
    acc_b: _Memory | None,
    shift: int,
    sums: _Memory,
    counts: _Memory,
    acc: _Memory | None,
) -> None: ...
def exponential(x: _Memory, out: _Memory) -> None: ...
def burn(rounds: int, threads: int) -> int: ...
def sweep(array: _Memory, piece: int, threads: int) -> float: ...
def info() -> _Info: ...
def set_isa(name: str) -> str: ...
def default_threads() -> int: ...
