"""`levelhead::observe` as an operator, and a watch that uses it: under Triton's interpreter, run by
`test_interpreter.py`.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import IDS, SWEEP, B, H, S, T, described, merged, tensors
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.errors import OutOfResources

import levelhead as lh
from levelhead.device import choice, launch
from levelhead.device.operator import hiding, observe
from levelhead.errors import LevelheadError
from levelhead.torch import masks
from levelhead.watching import measure, taken_rows
from levelhead.watching.measure import Call, call_of
from levelhead.watching.watch import Watch

TOGETHER = ("causal", "bias", "soft cap", "ALiBi", "segments", "query lengths")


def arguments(names: tuple[str, ...] = (), **further: Any) -> tuple[Any, ...]:
    q, k = tensors()
    scoring = described(q, k, merged(names))._replace(seed=None)
    return (q, k, *scoring, further.get("rows"), further.get("first_keys"), further.get("hiding"), 0)


# ---- the operator


@pytest.mark.parametrize("kind", ["plain", "all", "rows", "strides"] if SWEEP else ["all", "strides"])
def test_opcheck(kind: str) -> None:
    given = list(arguments(TOGETHER if kind == "all" else ()))
    if kind == "rows":
        given = list(
            arguments(("causal",), rows=torch.tensor([1, 5]), first_keys=torch.zeros((B, 2), dtype=torch.int64))
        )
    if kind == "strides":
        given[:2] = (x.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2] for x in given[:2])
    given[0] = given[0].detach().requires_grad_(kind in ("plain", "all"))
    torch.library.opcheck(torch.ops.levelhead.observe.default, tuple(given))


def test_statistics_have_no_gradient() -> None:
    q, k = (x.requires_grad_() for x in tensors())
    found = observe(q, k, described(q.detach(), k.detach(), {}))
    assert not any(x.requires_grad for x in found)


def test_compiled_and_exported() -> None:
    q, k = tensors()
    scoring = described(q, k, {"causal": True})._replace(seed=None)

    class Seen(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return observe(q * 2, k, scoring)[0].amax((0, 2))

    want = Seen()(q, k)
    torch.testing.assert_close(
        torch.compile(Seen(), fullgraph=True, backend="inductor" if SWEEP else "aot_eager")(q, k), want
    )
    exported = torch.export.export(Seen(), (q, k))
    assert "levelhead.observe" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(q, k), want)


def test_vmap_is_one_more_batch_axis() -> None:
    q, k = (torch.stack([x, 2 * x]) for x in tensors())
    mask = torch.rand(2, 1, T, S) < 0.8
    scoring = described(q[0], k[0], {"causal": True, "segments": (IDS[:, -T:], IDS)})
    want = [observe(a, b, scoring._replace(mask=m)) for a, b, m in zip(q, k, mask, strict=True)]
    got = torch.vmap(lambda a, b, m: observe(a, b, scoring._replace(mask=m)))(q, k, mask)
    for one, other in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(other))
    shared = torch.vmap(lambda a: observe(a, k[0], scoring)[0])(q)
    torch.testing.assert_close(shared[1], observe(q[1], k[0], scoring)[0])
    with pytest.raises(LevelheadError, match="scale"):
        torch.vmap(lambda x: observe(q[0], k[0], scoring._replace(scale=x))[0])(torch.ones(2, H))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q, k: (q.double(), k.double()), "float32, float16 or bfloat16"),
        (lambda q, k: (q[0], k[0]), "four axes"),
        (lambda q, k: (torch.cat([q, q[:, :1]], 1), torch.cat([k, k], 1)), "multiple of G"),
        (lambda q, k: (q, k[..., :8]), "four axes"),
    ],
)
def test_bad_input_is_one_clear_error(change: Any, word: str) -> None:
    q, k = tensors()
    with pytest.raises(LevelheadError, match=word):
        observe(*change(q, k), described(q, k, {}))


# ---- a watch


def call(**fields: Any) -> Call:
    q, k = tensors(S=T)
    return call_of(q, k, 0.3, **fields)


MASK = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(1)) < 0.8
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "left": 3},
    "lengths": {"key_lengths": torch.tensor([4, 9])},
    "rows that do not exist": {"query_lengths": torch.tensor([4, 9])},
    "padding": {"mask": (torch.arange(T) > 2).expand(B, 1, 1, T)},
    "a mask": {"mask": MASK},
    "a stand-in for -inf": {"mask": torch.where(MASK, 0.0, -1e9)},
    "packed": {"query_segments": torch.arange(T).expand(B, T) // 4, "key_segments": torch.arange(T).expand(B, T) // 4},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("sample", [None, 4])
def test_the_tally_is_the_cores(name: str, sample: int | None) -> None:
    made = call(**CALLS[name])
    assert measure._path(made, None) == choice.TRITON
    rows = None if sample is None else taken_rows.places(B, T, sample, 0, made.q.device)
    found, core, plain = (measure.tallied(made, rows=rows, by_torch=x) for x in (None, False, True))
    torch.testing.assert_close(found.double(), core.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), plain.double(), rtol=1e-5, atol=1e-5)
    assert measure._path(made, None) == choice.TRITON, "it failed, and plain torch served"


NUMBERS: dict[str, Tensor] = {
    "-1e4": torch.where(MASK, 0.0, -1e4),
    "-1e9 of bfloat16": torch.where(MASK, 0.0, -1e9).bfloat16(),
    "two stand-ins": torch.where(MASK, torch.randn(T, T), torch.where(torch.rand(T, T) < 0.5, -1e4, -1e9)),
    "the floor, of bfloat16": torch.where(MASK, 0.0, -5000.0).bfloat16(),
    "slopes": -30.0 * torch.arange(3000.0)[None] + torch.arange(3.0)[:, None],
    "the lowest of float16": torch.where(MASK, 0.0, -65504.0).half(),
    "nan and inf": torch.tensor([0.0, math.nan, math.inf, -math.inf, -1e9]),
    "all hidden": torch.full((3, 4), -1e9),
    "nothing hidden": torch.zeros(5),
    "stretched": torch.tensor([0.0, -1e9]).expand(7, 2),
    "a slice": torch.where(torch.arange(40.0).view(4, 10) > 30, -1e9, 0.0)[:, ::2],
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("reach", [0.0, 3000.0])
def test_the_kernel_finds_what_hides(name: str, reach: float) -> None:
    found = hiding(NUMBERS[name], torch.tensor(reach, dtype=torch.float64))
    assert found == masks.hiding(NUMBERS[name], reach, wait=False)


def test_functions_and_float64_take_another_path() -> None:
    made = call()
    assert measure._path(Call(made.q.double(), made.k.double(), made.scoring), None) == choice.CORE
    assert measure._path(Call(made.q, made.k, made.scoring, mask_mod=lambda b, h, q, k: q >= k), None) == choice.CORE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.blocks, self.recomputed = nn.ModuleList([Block(), Block()]), recomputed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x


class NoWaiting(TorchDispatchMode):
    """Refuses to read a number from a tensor, or to make one of the host's numbers: both wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


def watched(model: nn.Module, x: Tensor, plain_torch: bool | None = None, run: Any = None) -> list[Any]:
    with Watch(model, plain_torch=plain_torch) as w:
        with NoWaiting() if run is None else nullcontext():
            (model if run is None else run)(x).square().mean().backward()
        return [record.heads for record in w.last.records]


@pytest.mark.parametrize("kind", ["eager", "checkpointed", "compiled"])
def test_a_watched_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed passes count once, and in no pass the host waits for the device."""
    torch.manual_seed(0)
    model, x = Model(kind == "checkpointed"), torch.randn(2, 12, 32)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if kind == "compiled" else None
    calls: list[Any] = []
    monkeypatch.setattr("levelhead.device.operator._check", lambda *given: calls.append(given))
    found = watched(model, x, run=run)
    assert len(calls) == 2
    want = watched(model, x, plain_torch=True)
    for one, other in zip(found, want, strict=True):
        for name, values in asdict(other).items():
            np.testing.assert_allclose(getattr(one, name), values, rtol=2e-5, atol=2e-5, err_msg=name)


def test_a_kernel_that_fails_is_said_once_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_failures", [])
    monkeypatch.setattr("levelhead.device.operator._check", lambda *given: 1 / 0)
    made = call(causal=True)
    with pytest.warns(UserWarning, match="plain torch, which is slower.*ZeroDivisionError"):
        found = measure.tallied(made)
    torch.testing.assert_close(found, measure.tallied(made, by_torch=True))
    assert measure._path(made, None) == choice.TORCH
    assert "the Triton kernel failed: ZeroDivisionError" in repr(lh.info())


def test_a_kernel_that_does_not_fit_is_replaced_for_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_misfits", {})

    def launched(*given: Any) -> None:
        raise OutOfResources(120_000, 101_376, "shared memory")

    made, wider = call(), call_of(*tensors(S=T, D=32), 0.3)
    with monkeypatch.context() as changed:
        changed.setattr("levelhead.device.launch.observe", launched)
        with pytest.warns(UserWarning, match="statistics of float32 of width 16 by plain torch.*OutOfResources"):
            found = measure.tallied(made)
    torch.testing.assert_close(found, measure.tallied(made, by_torch=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(measure.tallied(made), found)
        measure.tallied(wider)  # by the kernel
    assert "plain torch for float32 of width 16: OutOfResources" in lh.info().watched["cpu"]


def test_many_batch_rows_and_far_strides() -> None:
    """No axis of a grid but the first has more than 65535 programs; offsets inside a tile have 32 bits."""
    grids: list[Any] = []

    class Grid:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return lambda *given, **meta: None

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(launch, "tally_kernel", Grid())
        launch.tallied(torch.empty(70_000, 2, 1, 8), torch.empty(70_000, 2, 1, 2), None, None, None)
    assert grids == [(140_000,)]
    far = torch.empty(1, 1, 64, 16, device="meta")
    for strides in ((1, 1, 1 << 25, 1), (1, 1, 1, 1 << 27)):
        assert launch._within_32_bits(far.as_strided(far.shape, strides)).is_contiguous()
    assert launch._within_32_bits(far.mT.contiguous().mT).stride(3) == 64


def test_info_names_the_path() -> None:
    assert lh.info().watched["cpu"].startswith("triton (LEVELHEAD_OBSERVE=triton")
