"""Plan "ring": keys and values are passed around, and every rank computes on one block while the next arrives. Memory
per rank is that of a few shards, whatever the number of ranks.

The states of blocks are joined in rank order: blocks arrive from rank r down to 0, then from the last down to r + 1,
each joined on the left of those before it. In the backward pass the sums of a block's gradients are sent one step
behind the block, in float32. They begin on the rank after the block's owner; the owner adds its own part at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.distributed import local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import KeyBlock, OutputGradients
from levelhead.distributed.plan import ForwardResult, PackedKeys, buffers, by_row, read, through_rows
from levelhead.distributed.wire import Pending
from levelhead.state import State
from levelhead.torch.operators import wide


class _KeyRing:
    """The blocks of keys as they arrive, in two buffers: one to read, one to receive."""

    def __init__(self, call: Agreement, own: KeyBlock, tag: int) -> None:
        self.wire, self.packing, self._tag = call.wire, PackedKeys(own, call.keys), tag
        self._buffers = [self.wire.buffer(self.packing.most, own.k.dtype) for _ in range(2)]
        self._current = self.packing.pack(own, self._buffers[0])
        self._pending: Pending | None = None

    def owner(self, step: int) -> int:
        """The owner of the block of a step."""
        return (self.wire.rank - step) % self.wire.world

    def begin(self, step: int) -> KeyBlock:
        """The block of this step; starts the transfer of the next."""
        if step + 1 < self.wire.world:
            numbers = self.packing.numbers(self.owner(step + 1))
            self._next = self._buffers[(step + 1) % 2][:numbers]
            what = f"block {step + 1} of the ring"
            self._pending = self.wire.shift(self._current, self._next, self._tag + step, what)
        return self.packing.block(self._current, self.owner(step))

    def end(self, step: int) -> None:
        """Waits for the next block."""
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._current = None, self._next


def forward(call: Agreement, own: KeyBlock, *, stats: bool, precise: bool) -> ForwardResult:
    """This rank's rows over all keys."""
    rows, _ = by_row(call)
    rows = rows.widened() if precise else rows
    ring = _KeyRing(call, own, tag=0)
    joined: dict[bool, State] = {}  # True: of ranks up to this one
    for step in range(call.wire.world):
        block = ring.begin(step)
        states = local.observe(rows, block.widened() if precise else block, call.wire.trace)
        before = ring.owner(step) <= call.wire.rank
        joined[before] = local.join(states, joined[before]) if before in joined else states
        ring.end(step)
    whole = local.join(joined[True], joined[False]) if False in joined else joined[True]
    call.verify_counts(whole, call.rows)
    return read(call, whole, stats=stats, precise=precise)


def backward(call: Agreement, own: KeyBlock, gradients: OutputGradients, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients by name; those of keys and values from every rank's rows."""
    rows, factor = by_row(call)
    world = call.wire.world
    ring, sums = _KeyRing(call, own, tag=world), _GradientRing(call, own, tag=2 * world)
    grads = buffers(rows, wanted)
    for step in range(world):
        block = ring.begin(step)
        into = {name: torch.empty_like(x) for name, x in grads.items() if name != "mask"}
        if step > 0:
            into.pop("sinks", None)  # the same from every block: used once
        if "mask" in grads:
            into["mask"] = grads["mask"]
        if wanted & {"k", "v"}:
            into |= sums.own_part(step, ring.owner(step)).named()
        local.differentiate(rows, block, gradients, into, call.wire.trace)
        for name in grads.keys() & into.keys() - {"mask"}:
            grads[name] += into[name]
        if wanted & {"k", "v"}:
            sums.pass_on(step, ring.owner(step))
        ring.end(step)
    if "q" in grads:
        grads["q"] = through_rows(grads["q"], factor)
    if wanted & {"k", "v"}:
        grads |= sums.mine().named(wanted)
    return grads


class _GradientRing:
    """The gradients of keys and values, summed by the ranks that a block passes.

    This rank writes its own part to one of two buffers (the other one is still being sent), and receives the sums of
    the ranks before it in one of two more.
    """

    def __init__(self, call: Agreement, own: KeyBlock, tag: int) -> None:
        self._wire, self._packing, self._tag = call.wire, PackedKeys(own, call.keys), tag
        numbers, real = self._packing.most, wide(own.k.dtype)
        self._home = torch.empty(self._packing.numbers(self._wire.rank), dtype=real)
        self._own = [torch.empty(numbers, dtype=real) for _ in range(2)]
        self._arriving = [self._wire.buffer(numbers, real) for _ in range(2)]
        self._pending: Pending | None = None

    def own_part(self, step: int, owner: int) -> KeyBlock:
        """The buffer for this rank's part of a block."""
        return self._packing.block(self._own[step % 2] if step > 0 else self._home, owner)

    def pass_on(self, step: int, owner: int) -> None:
        """Adds the sums of earlier ranks, and sends the result after its block."""
        if step == 0:
            return
        total = self._own[step % 2][: self._packing.numbers(owner)]
        self._add_arrived(step, total)
        following = (owner - 1) % self._wire.world
        buffer = self._arriving[(step + 1) % 2][: self._packing.numbers(following)]
        what = f"gradients of step {step} of the ring"
        self._pending = self._wire.shift(total.to(buffer.device), buffer, self._tag + step, what)

    def _add_arrived(self, step: int, total: Tensor) -> None:
        if self._pending is not None:
            self._pending.wait()
            total += self._arriving[step % 2][: total.numel()].cpu()

    def mine(self) -> KeyBlock:
        """The sums for this rank's own keys and values, with the parts of all ranks."""
        self._add_arrived(self._wire.world, self._home)
        return self._packing.block(self._home, self._wire.rank)
