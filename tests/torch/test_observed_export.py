"""`observed_attention` in `torch.export`, with and without Dynamo, where lengths are dynamic or options are numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import levelhead as lh
from levelhead.torch import observed_attention

pytestmark = pytest.mark.usefixtures("alone")

KEYS, QUERIES = Dim("keys", min=2, max=64), Dim("queries", min=2, max=64)
LENGTHS = {  # which lengths are dynamic: queries and keys of the trace, and of further calls
    "one for both": ([(8, 8), (13, 13)], ({2: KEYS}, {2: KEYS}, {2: KEYS})),
    "of the keys": ([(4, 8), (4, 13)], ({}, {2: KEYS}, {2: KEYS})),
    "each": ([(4, 8), (5, 13), (9, 9)], ({2: QUERIES}, {2: KEYS}, {2: KEYS})),
    "none": ([(4, 8)], ({}, {}, {})),
}


class Observed(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options = {name: x(q, k) if callable(x) else x for name, x in self.options.items()}
        out, seen = observed_attention(q, k, v, **options)
        return out, seen.sums, seen.counts


def tensors(queries: int, keys: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(queries + keys)
    return tuple(torch.randn(1, 2, n, 4, generator=generator) for n in (queries, keys, keys))


def same_as_eager(options: dict[str, Any], lengths: str, *, strict: bool) -> None:
    model = Observed(options)
    calls, dynamic = LENGTHS[lengths]
    exported = export(model, tensors(*calls[0]), dynamic_shapes=dynamic, strict=strict).module()
    for sizes in calls:
        for found, wanted in zip(exported(*tensors(*sizes)), model(*tensors(*sizes)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6, equal_nan=True)


@pytest.fixture(params=["core", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setenv("LEVELHEAD_OBSERVE", "torch")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_causal_mask_follows_the_lengths(lengths: str, strict: bool) -> None:
    same_as_eager({"causal": True}, lengths, strict=strict)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (2, 0), "alibi": True},
        {"causal": True, "query_start": lambda q, k: k.shape[2] - q.shape[2]},
        {"causal": True, "scale": lambda q, k: k.shape[2] ** -0.5},
        {"key_lengths": lambda q, k: k.shape[2] - 1},
    ],
    ids=["plain", "window", "start", "scale", "key lengths"],
)
def test_numbers_that_come_from_the_lengths(options: Any) -> None:
    same_as_eager(options, "each", strict=False)


@pytest.mark.parametrize("name", ["key_lengths", "query_lengths"])
@pytest.mark.parametrize("given", [0, 1, 3, [1]])
def test_lengths_that_are_numbers_are_in_the_graph(name: str, given: Any) -> None:
    """A traced call is described as one of one token, and what fitted there was left out."""
    same_as_eager({name: given}, "none", strict=False)
    same_as_eager({name: given}, "each", strict=False)


def test_what_cannot_be_exported_names_what_can() -> None:
    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return lh.attention(q, k, v)

    with pytest.raises(Exception, match="use levelhead.torch.scaled_dot_product_attention"):
        export(Plain(), tensors(4, 4), strict=False)
