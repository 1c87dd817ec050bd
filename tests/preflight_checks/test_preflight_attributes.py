"""`lh.preflight` leaves what modules keep in attributes as it was, and passes do not see each other's."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from levelhead.errors import LevelheadError
from levelhead.preflight_checks.attributes import Kept
from watched import one_thread  # noqa: F401


class Slots:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k: Any = None


class Plain:
    seen = 0  # of the class until an instance has its own

    def __init__(self) -> None:
        self.parts = {"k": [torch.zeros(2)]}


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Any] = {"a": [1]}
        self.ordered, self.counter, self.members = OrderedDict(a=1, b=2), Counter("aab"), {1}
        self.last: deque[int] = deque([1], maxlen=3)
        self.slots, self.plain, self.random = Slots(), Plain(), random.Random(0)
        self.register_buffer("cache", None)

    def forward(self) -> None:
        self.by_name["a"].append(2)
        self.by_name["b"] = 3
        self.ordered.move_to_end("a")
        self.counter.update("ab")
        self.members.add(2)
        self.last.extend((2, 3, 4))
        self.slots.k = 1
        self.plain.seen += 1
        self.plain.parts["k"][0] += 1
        self.plain.parts["v"] = [self]
        self.new = self.cache = torch.ones(2)
        self.random.random()

    def content(self) -> Any:
        held = (self.by_name, list(self.ordered), self.counter, self.members, list(self.last), self.slots.k)
        plain = (vars(self.plain).keys(), self.plain.parts.keys(), self.plain.parts["k"][0].tolist())
        return repr((held, plain, self.cache, hasattr(self, "new"), self.random.getstate()))


def test_every_container_and_object_is_put_back() -> None:
    model = nn.Sequential(Keeping())
    objects, before = dict(vars(model[0])), model[0].content()
    kept = Kept(model)
    for _ in range(2):
        model[0]()
        assert model[0].content() != before
        kept.put_back()
        assert model[0].content() == before
    assert all(vars(model[0])[name] is x for name, x in objects.items())
    assert not kept.unknown


class Cached(nn.Module):
    """A decoder whose cache is an object, or a dict."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        self.cache = cache

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        held = self.cache if isinstance(self.cache, dict) else self.cache.__dict__
        both = {name: p(x) for name, p in (("k", self.k_proj), ("v", self.v_proj))}
        held |= {name: torch.cat((held[name], y), 1) if name in held else y for name, y in both.items()}
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (self.q_proj(x), held["k"], held["v"]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


def test_a_cache_in_an_object_or_a_dict_is_left_alone() -> None:
    for cache in ({}, Plain()):
        result = lh.preflight(Cached(cache), torch.randint(40, (3, 12)))
        assert result.passed and result["batch independence"].verdict == "passed"
        assert "k" not in (cache if isinstance(cache, dict) else vars(cache))
        assert "attributes put back" not in [check.name for check in result.checks]


def test_what_cannot_be_copied_is_named() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    model = Cached({})
    model.steps = {"of": numbers()}
    result = lh.preflight(model, torch.randint(40, (3, 12)))
    assert "steps['of'] (generator)" in result["attributes put back"].moved


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = Cached({})
    with pytest.raises(LevelheadError, match=r"meta device \(embed.weight"):
        lh.preflight(model, torch.randint(40, (3, 12)))


def test_the_first_line_says_that_causality_was_not_judged() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 9, 32)
    first = str(lh.preflight(layer, (x, x, x))).splitlines()[0]
    assert first.endswith("no findings; not judged: causality (pass causal=True or causal=False)")
    assert str(lh.preflight(layer, (x, x, x), causal=False)).splitlines()[0].endswith(": no findings")
    assert str(lh.preflight(Cached({}), torch.randint(40, (3, 12)))).splitlines()[0].endswith(": no findings")
