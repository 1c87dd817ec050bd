"""Plan "ring": keys and values go round, and every rank computes on what it has while the next
block arrives. Memory per rank is that of a few shards, whatever the world's size.

The states of blocks are joined so that earlier ranks stand on the left: blocks arrive from rank
r down to 0, then from the last down to r + 1, each put in front of what came before it. In the
backward pass the sums of a block's gradients travel one step behind the block, in float32; they
begin with the rank after its owner, and the owner's own part waits for them at home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead import state
from levelhead.distributed import local
from levelhead.distributed.call import Agreement
from levelhead.distributed.local import Block, Result
from levelhead.distributed.plan import Cargo, Seen, by_row, through_rows, zeros
from levelhead.distributed.wire import Pending
from levelhead.state import State
from levelhead.torch.operators import wide


class _Round:
    """Blocks of keys as they come by: two pieces of memory, one to read and one to receive."""

    def __init__(self, call: Agreement, k: Tensor, v: Tensor, tag: int) -> None:
        self.wire, self.cargo, self._tag = call.wire, Cargo(k, v, call.keys), tag
        self._rooms = [self.wire.buffer(self.cargo.most, k.dtype) for _ in range(2)]
        self._here = self.cargo.pack(k, v, self._rooms[0])
        self._pending: Pending | None = None

    def owner(self, step: int) -> int:
        """Whose block is here in a step."""
        return (self.wire.rank - step) % self.wire.world

    def begin(self, step: int) -> Block:
        """The block of this step; the next one is under way."""
        if step + 1 < self.wire.world:
            numbers = self.cargo.numbers(self.owner(step + 1))
            self._coming = self._rooms[(step + 1) % 2][:numbers]
            what = f"block {step + 1} of the ring"
            self._pending = self.wire.shift(self._here, self._coming, self._tag + step, what)
        return self.cargo.block(self._here, self.owner(step))

    def end(self, step: int) -> None:
        """Waits for the next block."""
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._here = None, self._coming


def forward(call: Agreement, k: Tensor, v: Tensor, *, stats: bool) -> Seen:
    """This rank's rows over all keys."""
    rows, _ = by_row(call)
    ring = _Round(call, k, v, tag=0)
    before: State | None = None  # of ranks up to this one
    after: State | None = None
    for step in range(call.wire.world):
        seen = local.observe(rows, ring.begin(step), call.wire.trace)
        if ring.owner(step) <= call.wire.rank:
            before = seen if before is None else local.join(seen, before)
        else:
            after = seen if after is None else local.join(seen, after)
        ring.end(step)
    assert before is not None
    whole = before if after is None else local.join(before, after)
    if call.verify:
        call.confirm(call.check_counts(whole.counts[..., state.COUNT], call.rows))
    return Seen(*local.read(whole, call.rows), whole if stats else None)


def backward(
    call: Agreement, k: Tensor, v: Tensor, result: Result, kept: tuple[Tensor, ...], wanted: set[str]
) -> dict[str, Tensor]:
    """Gradients by name; those of keys and values from every rank's rows."""
    rows, factor = by_row(call)
    world = call.wire.world
    ring, sums = _Round(call, k, v, tag=world), _Sums(call, k, v, tag=2 * world)
    found = zeros(rows, wanted)
    for step in range(world):
        block = ring.begin(step)
        into = {name: torch.empty_like(x) for name, x in found.items() if name != "mask"}
        if step > 0:
            into.pop("sinks", None)  # the same from every block: taken once
        if "mask" in found:
            into["mask"] = found["mask"]
        if wanted & {"k", "v"}:
            into["k"], into["v"] = sums.room(step, ring.owner(step))
        local.differentiate(rows, block, result, into, call.wire.trace)
        for name in found.keys() & into.keys() - {"mask"}:
            found[name] += into[name]
        if wanted & {"k", "v"}:
            sums.pass_on(step, ring.owner(step))
        ring.end(step)
    if "q" in found:
        found["q"] = through_rows(found["q"], factor)
    if wanted & {"k", "v"}:
        both = dict(zip(("k", "v"), sums.mine(), strict=True))
        found |= {name: x for name, x in both.items() if name in wanted}
    return found


class _Sums:
    """The gradients of keys and values, summed by the ranks that a block visits.

    What this rank adds to a visitor's is written to one of two pieces of memory (the other one is
    still being sent), what came from the rank before to one of two more.
    """

    def __init__(self, call: Agreement, k: Tensor, v: Tensor, tag: int) -> None:
        self._wire, self._cargo, self._tag = call.wire, Cargo(k, v, call.keys), tag
        numbers, real = self._cargo.most, wide(k.dtype)
        self._home = torch.empty(self._cargo.numbers(self._wire.rank), dtype=real)
        self._own = [torch.empty(numbers, dtype=real) for _ in range(2)]
        self._arriving = [self._wire.buffer(numbers, real) for _ in range(2)]
        self._pending: Pending | None = None

    def room(self, step: int, owner: int) -> tuple[Tensor, Tensor]:
        """Where to write this rank's part for a block."""
        room = self._own[step % 2] if step > 0 else self._home
        return self._cargo.parts(room, self._cargo.split.lengths[owner])

    def pass_on(self, step: int, owner: int) -> None:
        """Adds what earlier ranks found, and sends the sum after its block."""
        if step == 0:
            return
        total = self._own[step % 2][: self._cargo.numbers(owner)]
        self._add_arrived(step, total)
        following = (owner - 1) % self._wire.world
        room = self._arriving[(step + 1) % 2][: self._cargo.numbers(following)]
        what = f"gradients of step {step} of the ring"
        self._pending = self._wire.shift(total.to(room.device), room, self._tag + step, what)

    def _add_arrived(self, step: int, total: Tensor) -> None:
        if self._pending is not None:
            self._pending.wait()
            total += self._arriving[step % 2][: total.numel()].cpu()

    def mine(self) -> tuple[Tensor, Tensor]:
        """The sums of this rank's own keys and values, the others' back home."""
        self._add_arrived(self._wire.world, self._home)
        return self._cargo.parts(self._home, self._cargo.split.lengths[self._wire.rank])
