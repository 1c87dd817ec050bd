"""Padding: what stands in padded places must not change real tokens."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence

import torch

from levelhead.errors import LevelheadError
from levelhead.preflight_checks import padded_keys
from levelhead.preflight_checks.calls import seen_calls
from levelhead.preflight_checks.flight import Flight
from levelhead.preflight_checks.inputs import Batch, Key
from levelhead.preflight_checks.passes import Moved, Places, moved, taped
from levelhead.preflight_checks.places import Grid
from levelhead.preflight_checks.result import finding


def padding(flight: Flight, attending: Collection[str]) -> None:
    """Changes padded tokens; the others must stand still. `attending`: modules that do."""
    name, batch = "padding independence", flight.batch
    stream, key = next(iter(batch.streams()), None), batch.padding_mask()
    made = False
    if stream is not None and key is None and (masked := _with_mask(batch)) is not None:
        batch, key, made = masked, "attention_mask", True
    if stream is None or key is None:
        return flight.unknown(name, "padded tokens", "the batch has no padding mask (B, T)")
    grid = Grid(*batch.sizes(stream))
    if grid.tokens < 4 or not grid.clear:
        return flight.unknown(name, "padded tokens", "too few tokens, or as many rows as tokens")
    results, given = [], []
    causal = any(check.name == "causality" and check.verdict == "passed" for check in flight.checks)
    for side, padded, real in _paddings(batch, key, grid, left=causal):
        changed_batch = padded.changed(stream, ~real)
        try:
            before, after = taped(padded), taped(changed_batch)
        except LevelheadError:
            continue
        here = moved(before, after, _places(batch, stream, grid, real))
        if not here.size:
            here = padded_keys.exposed(padded, changed_batch, real) or here
        if not here.size:
            here = padded_keys.counted(padded, stream, real) or here
        if here.size and here.module and _hides(padded, here.module, real):
            what = (
                f"real tokens moved through {here.module}, whose softmax hides the padding: something else mixes tokens"
            )
            return flight.unknown(name, "the padded tokens", what)
        results.append((side, here))
        given.append((side, padded, real))
    changed = "the padded tokens" + (", of a padding made here" if made else "")
    known = [(side, here) for side, here in results if here.compared]
    if not known:
        return flight.unknown(name, changed, "no output has a place for every token")
    by_polarity: dict[str, list[tuple[str, Moved]]] = {}
    for side, here in known:
        by_polarity.setdefault(side.rsplit(" ", 1)[-1], []).append((side, here))
    right = [meaning for meaning, group in by_polarity.items() if all(not here.size for _, here in group)]
    if right:
        wrong = _of_other_rows([(b, real) for side, b, real in given if side.endswith(right[0])], key)
        if (wrong is None or len(right) > 1) and any(
            padded_keys.pooled(b, b.changed(stream, ~r), r) for _, b, r in given
        ):
            what = "no real token moved, and an output without tokens did: padded tokens are pooled, not attended to"
            return flight.unknown(name, changed, what)
        if wrong is None or len(right) > 1:
            return flight.passed(name, changed, "no real token moved")
        why = "Keys of real tokens are hidden from all queries of their row, at places where another row is padded: "
        why += "the padding mask of one row hides keys of others."
        advice = "Give every row its own mask, (B, 1, 1, S); look at the axis that is expanded or repeated."
        found = finding("padding mask of another row", "error", wrong, why, advice)
        return flight.failed(name, changed, "no real token moved, and real tokens are hidden", found)
    side, here = max(next(iter(by_polarity.values())), key=lambda pair: pair[1].size)
    module = here.module or ""
    if module not in attending:
        what = f"real tokens moved through {module or 'the model itself'}, which does not attend"
        return flight.unknown(name, changed, f"{what}: a convolution or pooling over tokens")
    if any(padded_keys.used_otherwise(b, key, real) for _, b, real in given):
        what = "the mask hides no key, and changes what enters the attention: it may be no padding mask"
        return flight.unknown(name, changed, what)
    why = "Padded tokens change the outputs of real ones: the padding mask does not reach the softmax of this module, "
    why += "or has no effect there. Results then depend on what a row is padded with and how far."
    advice = "Hide padded keys before the softmax: a bool mask (B, 1, 1, S) for scaled_dot_product_attention."
    found = finding("padding not masked", "error", module, why, advice, change=here.size)
    return flight.failed(name, changed, f"real tokens moved by {here.size:.2g} of the largest output", found)


def _of_other_rows(padded: Sequence[tuple[Batch, torch.Tensor]], key: Key) -> str | None:
    """The first module that hides a real key from all queries where another row is padded, and shows all without
    padding."""
    for batch, real in padded:
        elsewhere = (~real).any(0)
        unpadded = batch.with_({key: torch.full_like(batch[key], batch[key][real][0])})
        try:
            pairs = zip(seen_calls(batch)[1], seen_calls(unpadded)[1], strict=False)
        except LevelheadError:
            continue
        for call, plain in pairs:
            hidden, before = call.hidden(), plain.hidden()
            if hidden is None or before is None or (hidden.shape[0], hidden.shape[3]) != tuple(real.shape):
                continue
            unseen = hidden.all(2).all(1).cpu() & real  # (B, S): by no query of any head
            seen = hidden.shape == before.shape and not bool(before.all(2).any())
            if seen and bool(unseen.any()) and not bool(unseen[:, ~elsewhere].any()):
                return call.module
    return None


def _places(batch: Batch, stream: Key, grid: Grid, real: torch.Tensor) -> Places:
    """Real tokens; and all tokens of the decoder, which reads them."""
    other = batch.stream()
    mine = grid.at(real)
    if other is None or other == stream or batch.sizes(other) == batch.sizes(stream):
        return mine
    theirs = Grid(*batch.sizes(other)).at(torch.ones(batch.sizes(other), dtype=torch.bool))

    def places(x: torch.Tensor) -> torch.Tensor | None:
        found = mine(x)
        return theirs(x) if found is None else found

    return places


def _hides(batch: Batch, module: str, real: torch.Tensor) -> bool:
    """Whether all calls of a module hide all padded keys."""
    calls = [call for call in seen_calls(batch)[1] if call.module == module]
    hidden = [call.hidden() for call in calls if call.keys >= real.shape[1]]
    padded = ~real
    return bool(hidden) and all(
        x is not None and x.shape[0] == len(real) and bool(x.transpose(1, 3)[:, : real.shape[1]][padded].all())
        for x in hidden
    )


def _with_mask(batch: Batch) -> Batch | None:
    """For a Hugging Face model that takes an attention_mask and was given none."""
    ids = "input_ids"
    takes = "attention_mask" in inspect.signature(batch.model.forward).parameters
    if not hasattr(batch.model, "config") or not takes or ids not in batch.kwargs or "attention_mask" in batch.kwargs:
        return None
    return batch.with_({"attention_mask": torch.ones_like(batch.kwargs[ids])})


def _paddings(batch: Batch, key: Key, grid: Grid, *, left: bool) -> Iterator[tuple[str, Batch, torch.Tensor]]:
    """Padded batches and which of their tokens are real: as given, or one made by the mask, for either meaning of 1.
    `left`: also at the beginning, as tokens of a causal model cannot see padding at the end."""
    mask = batch[key]
    flat = mask.bool()
    for meaning in ("keep", "hide"):
        if meaning == "hide" and batch.names[key].endswith("attention_mask"):
            continue
        real = flat if meaning == "keep" else ~flat
        if real.any(1).all() and not real.all():
            yield f"as given {meaning}", batch, real
        elif real.all():
            yield f"right {meaning}", *_made(batch, key, slice(grid.tokens - max(1, grid.tokens // 3), None), meaning)
        if left and real.any(1).all():
            yield f"left {meaning}", *_made(batch, key, slice(0, max(1, grid.tokens // 3)), meaning)


def _made(batch: Batch, key: Key, where: slice, meaning: str) -> tuple[Batch, torch.Tensor]:
    """The batch with padding in its last row only."""
    made = torch.ones_like(batch[key], dtype=torch.bool)
    made[-1, where] = False
    return batch.with_({key: (made if meaning == "keep" else ~made).to(batch[key].dtype)}), made
