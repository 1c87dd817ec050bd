"""`lh.preflight` at its borders: designs that look like bugs and are none, bugs that hide behind padding or names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import levelhead as lh
from attention_bugs import Transformer, rotate, words
from levelhead.errors import LevelheadError
from levelhead.preflight_checks.result import Preflight
from watched import one_thread  # noqa: F401

H, D, WIDTH = 4, 16, 64


def wrong(result: Preflight) -> list[str]:
    return sorted({f.kind for f in result.findings if f.severity != "note"})


class Own(nn.Module):
    """Attention whose middle is a function of q, k, v (B, H, T, D)."""

    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        self.middle = middle
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.middle(q, k, v, **more).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *middles: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Own(middle) for middle in middles)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + (layer(x) if attention_mask is None else layer(x, keep=attention_mask))
        return x


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def by_hand(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """`change` makes logits of scaled products and of what is hidden."""

    def middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * D**-0.5
        return change(s, torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)).softmax(-1) @ v

    return middle


# ---- designs


def axial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RoPE of the tokens of an image that is 4 wide: half of a head for each axis."""
    at = torch.arange(q.shape[2])
    places = at // 4 - at, at % 4 - at  # `rotate` adds the place in line
    q, k = (torch.cat([rotate(half, p) for half, p in zip(x.chunk(2, -1), places, strict=True)], -1) for x in (q, k))
    return both(q, k, v)


class Directions(nn.Module):
    """One causal model forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = Model(causal), Model(causal)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.ahead(input_ids) + self.back(input_ids.flip(1)).flip(1)


class Tagger(nn.Module):
    """A causal model with one layer on top that sees everything."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.pool = Model(causal, causal, causal), Own(both)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.pool(self.model(input_ids))


class Table(nn.Module):
    """Attention over columns, then over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.columns, self.over_rows = Own(both), Own(both)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.columns(x)
        return x + self.over_rows(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("make", [lambda: Model(axial), Directions, Tagger])
def test_a_design_is_no_bug(make: Callable[[], nn.Module]) -> None:
    assert wrong(lh.preflight(make(), words())) == []


def over_heads(x: Tensor) -> Tensor:
    return rotate(x.transpose(1, 2)).transpose(1, 2)


def test_a_rotation_that_is_none_is_not_called_absent() -> None:
    check = lh.preflight(Model(lambda q, k, v: both(over_heads(q), over_heads(k), v)), words())["relative positions"]
    assert check.verdict == "not judged"
    assert "the same angles" in check.moved


def test_attention_over_rows_is_named_and_judged_if_asked_for() -> None:
    model, x = Table(), torch.randn(3, 7, WIDTH)
    check = lh.preflight(model, x)["batch independence"]
    assert check.verdict == "not judged"
    assert "over_rows attends over the rows" in check.moved
    assert wrong(lh.preflight(model, x, independent=True)) == ["batch rows mixed"]
    assert lh.preflight(model, x, independent=False)["batch independence"].moved.startswith("independent=False")


def test_one_layer_of_a_causal_stack_that_sees_everything_is_an_error() -> None:
    result = lh.preflight(Model(causal, causal, both, causal), words())
    assert "not causal" in wrong(result)
    assert result["causality"].module == "layers.2"


# ---- masks


def _first(n: int, hidden: Tensor) -> Tensor:
    at = torch.arange(len(hidden)) < n
    return hidden & at & at[:, None]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mask with the wrong sign", lambda s, hidden: s.masked_fill(hidden, 1e4)),
        ("mask with the wrong sign", lambda s, hidden: s + hidden * 1e4),
        ("mask without effect", lambda s, hidden: s + (~hidden).float()),
        ("mask without effect", lambda s, hidden: s.masked_fill(hidden, -2.5)),
        ("mask without effect", lambda s, hidden: s + hidden * 1e-9),
        ("inverted mask", lambda s, hidden: s.masked_fill(hidden.flip(1), -torch.inf)),
        ("causal at the first tokens only", lambda s, hidden: s.masked_fill(_first(8, hidden), -torch.inf)),
        (None, lambda s, hidden: s + hidden * -1e4),
        (None, lambda s, hidden: s.masked_fill(hidden, -1e9)),
    ],
)
def test_what_a_mask_does_to_logits(kind: str | None, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = wrong(lh.preflight(Model(by_hand(change), by_hand(change)), words()))
    assert found == [] if kind is None else kind in found, found


class Cached(nn.Module):
    def __init__(self, top_left: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.top_left, self.past = Own(self._attend), top_left, torch.randn(2, H, 8, D)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((self.past, x), 2) for x in (k, v))
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool).tril(0 if self.top_left else S - T)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def test_a_causal_mask_that_does_not_count_the_cache() -> None:
    x = torch.randn(2, 4, WIDTH)
    assert wrong(lh.preflight(Cached(False), x)) == []
    assert wrong(lh.preflight(Cached(True), x)) == ["causal from the first key of a cache"]


# ---- padding


def keeping(fill: float) -> Callable[..., Tensor]:
    def middle(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        s = q @ k.mT * D**-0.5
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1) | ~keep[:, None, None].bool()
        return s.masked_fill(hidden, fill).softmax(-1) @ v

    return middle


def test_the_padding_mask_of_one_row_for_all() -> None:
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 9:] = 0

    def middle(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[1:2, None, None].bool())

    result = lh.preflight(Model(middle), words() | {"attention_mask": mask})
    assert wrong(result) == ["padding mask of another row"]


def test_nan_of_real_tokens_is_found_behind_padding() -> None:
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, :3] = 0
    batch = words() | {"attention_mask": mask}
    assert wrong(lh.preflight(Model(*[keeping(-1e9)] * 2), batch)) == []
    result = lh.preflight(Model(*[keeping(-torch.inf)] * 2), batch)
    assert "NaN in outputs" in wrong(result)
    assert result["finite outputs"].module == "layers.1"


# ---- the model and what belongs to it are left as they were


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attn, self.seen, self.kept = nn.BatchNorm1d(WIDTH), Own(causal), 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.steps += 1
        self.seen += 1
        self.kept.append(x)
        cache += 1
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return functional.dropout(self.attn(x), 0.1, self.training)


def test_assert_level_leaves_everything_as_it_was() -> None:
    model, x, cache = Stateful(), torch.randn(2, 5, WIDTH), torch.zeros(3)
    model.attn.eval()
    model.attn.q_proj.weight.grad = torch.ones(WIDTH, WIDTH)
    state = {name: y.clone() for name, y in model.state_dict().items()}
    generator = torch.get_rng_state()
    lh.testing.assert_level(model, (x, cache))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(y, state[name]) for name, y in model.state_dict().items())
    assert (model.training, model.attn.training) == (True, False)
    assert (model.seen, model.kept) == (0, [])
    assert torch.equal(cache, torch.zeros(3))
    assert torch.equal(model.attn.q_proj.weight.grad, torch.ones(WIDTH, WIDTH))


# ---- an earlier state


def test_against_takes_a_run_and_a_file(tmp_path: Path) -> None:
    from attention_bugs import BUGS

    earlier, folded = (BUGS["scale folded into weights"].make(bug) for bug in (False, True))
    with torch.no_grad(), lh.watch(earlier, deep=True) as watch:
        earlier(**words())
    torch.save({"model": earlier.state_dict()}, tmp_path / "earlier.pt")
    watch.run().save(tmp_path / "run.json")
    for before in (watch.run(), tmp_path / "earlier.pt", str(tmp_path / "run.json")):
        assert wrong(lh.preflight(folded, words(), against=before)) == ["scale folded into weights"]
    assert wrong(lh.preflight(earlier, words(), against=watch.run())) == []
    (tmp_path / "broken.pt").write_bytes(b"text")
    for bad in (tmp_path / "none.pt", tmp_path / "broken.pt", 3):
        with pytest.raises(LevelheadError, match="against: expected"):
            lh.preflight(Transformer("right"), words(), against=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("old", ["2.4.0", "2.9.1+cpu"])
def test_a_pickle_is_read_where_that_is_safe(old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-32434 and CVE-2026-24747: weights_only did not hold before PyTorch 2.10."""
    model = Transformer("right")
    torch.save(model.state_dict(), tmp_path / "earlier.pt")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(old))
    monkeypatch.setattr(torch, "load", lambda *args, **more: pytest.fail("it was read"))
    with pytest.raises(LevelheadError, match=r"2\.10 or newer.*earlier\.pt.*got PyTorch " + re.escape(old)):
        lh.preflight(model, words(), against=tmp_path / "earlier.pt")


# ---- what happens on the way


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT * D**-0.5).masked_fill(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), -1e9)
    return s.softmax(-1).softmax(-1) @ v


class DropsLogits(nn.Module):
    def __init__(self, before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.drop, self.before = Own(self._attend), nn.Dropout(0.1), before

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * D**-0.5
        return self.drop(s).softmax(-1) @ v if self.before else self.drop(s.softmax(-1)) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def test_one_softmax_of_logits_that_nothing_dropped() -> None:
    assert "softmax twice" in wrong(lh.preflight(Model(twice), words()))
    x = torch.randn(2, 7, WIDTH)
    assert wrong(lh.preflight(DropsLogits(True), x)) == ["dropout on logits"]
    assert wrong(lh.preflight(DropsLogits(False), x)) == []


def all_heads_at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT * D**-0.5).transpose(1, 2)
    return s.flatten(2).softmax(-1).view_as(s).transpose(1, 2) @ v


def gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mixture of heads: their weights sum to 1 over the heads as well."""
    return both(q, k, v) * q.sum(-1, keepdim=True).softmax(1)


def test_rows_sum_to_1_along_the_keys_of_each_head() -> None:
    result = lh.preflight(Model(all_heads_at_once), words())
    assert wrong(result) == ["softmax over the wrong axis"]
    assert "keys and heads together" in result.findings.to_json()[0]["why"]
    check = lh.preflight(Model(gated), words())["applied weights"]
    assert (check.verdict, "a row of its weights sums to" in check.moved) == ("not judged", True)
    assert lh.preflight(Model(causal), words())["applied weights"].verdict == "passed"


def test_keys_as_values() -> None:
    orders = (lambda q, k, v: causal(q, k, k)), (lambda q, k, v: causal(q, v, k)), (lambda q, k, v: causal(q, q, v))
    model = Model(*orders, causal)
    nn.init.zeros_(model.layers[3].q_proj.weight)  # keys have no effect yet
    nn.init.zeros_(model.layers[3].q_proj.bias)
    found = {(f.kind, f.module) for f in lh.preflight(model, words()).findings if f.severity != "note"}
    kinds = "values without effect", "keys and values swapped", "keys without effect"
    assert found == {(kind, f"layers.{n}") for n, kind in enumerate(kinds)}


class Grouped(nn.Module):
    """A core of its own, with settings around it."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bug, self.core, self.sliding_window = bug, Core(bug), 4
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, n) for n in (WIDTH, 32, 32, WIDTH))
        self.sinks = nn.Parameter(torch.zeros(H)) if bug == "sinks" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q), rotate(k)
        k, v = (x[:, :1].repeat(1, 2, 1, 1) if self.bug == "first head" else x for x in (k, v))
        k = k.repeat(1, 2, 1, 1) if self.bug == "tiled keys" else k.repeat_interleave(2, 1)
        return self.wo(self.core(q, k, v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))


class Core(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.window = bug, {"wide": 5, "narrow": 3, "no window": 99}.get(bug, 4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        back = at[:, None] - at
        product = q.half() @ k.half().mT if self.bug == "half" else q @ k.mT
        scale = 32**-0.5 if self.bug == "kv scale" else D**-0.5
        s = (product.float() * scale).masked_fill((back < 0) | (back >= self.window), -1e9)
        return s.softmax(-1) @ v


@pytest.mark.parametrize(
    ("bug", "kind"),
    [
        ("", None),
        ("tiled keys", "grouped heads in the wrong order"),
        ("first head", "grouped heads in the wrong order"),
        ("wide", "window off by one"),
        ("narrow", "window off by one"),
        ("no window", "window missing"),
        ("half", "fp16 product"),
        ("kv scale", "unusual scale"),
        ("sinks", "sinks missing"),
    ],
)
def test_a_core_of_its_own_is_judged_by_what_is_around_it(bug: str, kind: str | None) -> None:
    found = wrong(lh.preflight(Grouped(bug), torch.randn(2, 11, WIDTH)))
    assert found == [] if kind is None else kind in found, found


def test_a_pruned_head_of_torchs_module() -> None:
    for name, rows in (("out_proj.weight", (slice(None), slice(0, 16))), ("in_proj_weight", slice(-16, None))):
        layer, x = nn.MultiheadAttention(WIDTH, H, batch_first=True), torch.randn(2, 7, WIDTH)
        layer.get_parameter(name).data[rows] = 0.0
        assert wrong(lh.preflight(layer, (x, x, x))) == ["heads without effect"]


# ---- designs of models of transformers that were called bugs


class Contrastive(nn.Module):
    """Texts that look at every video: pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(both)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.model(input_ids).mean(1)
        return x[:, None] * x[None]


class ChoosesTokens(nn.Module):
    """A masked autoencoder draws the tokens that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Own(both)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[:2]).argsort(1)[:, :5, None].expand(-1, -1, WIDTH)
        return self.attn(x.gather(1, kept))


class Capped(nn.Module):
    """A pooling layer without a cap beside layers that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(by_hand(lambda s, hidden: (20 * (s / 20).tanh()).masked_fill(hidden, -1e9)))
        self.model.layers[0].softcap = 20.0
        self.pool = Own(both)
        self.pool.config = type("Config", (), {"attn_logit_softcapping": 20.0})()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.pool(self.model(input_ids))


class AsDict(Own):
    def forward(self, x: Tensor, **more: Any) -> Any:
        return {"context": super().forward(x)}


class GivesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = AsDict(both)
        self.attn.o_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)["context"]


def keys_of_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return both(rotate(q), rotate(k) * 0, v)


def test_designs_of_models_of_transformers() -> None:
    x = torch.randn(3, 11, WIDTH)
    for model, batch in ((Contrastive(), words()), (ChoosesTokens(), x), (Capped(), words()), (GivesDict(), x)):
        result = lh.preflight(model, batch)
        assert wrong(result) == []
        assert not any("a changed pass failed" in check.moved for check in result.checks)
    assert "RoPE on q only" not in wrong(lh.preflight(Model(keys_of_zero), words()))
