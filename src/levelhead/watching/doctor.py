"""`doctor`: opens a model of this machine, runs it on a text, and diagnoses its heads.

`models` opens it, `watch` records, `diagnose` finds, `compare` compares. Nothing is trained or printed, and no weight
changes.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levelhead import checks, models
from levelhead.diagnosis.diagnose import diagnose
from levelhead.diagnosis.findings import Findings
from levelhead.errors import LevelheadValueError, bad_value
from levelhead.runs import record
from levelhead.runs.counterfactual import Counterfactual, counterfactual
from levelhead.runs.record import Run, Snapshot
from levelhead.words import plural

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 512  # tokens read at once, where the model can; what encoders of text were made for
TOKENS = 4096  # of a long text that are read by default
_BATCH = 4  # windows side by side
_WARM_UP = 16  # tokens, so that no timing holds what happens once

_RANDOM = "random token ids"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Examination:
    """The result of `doctor`."""

    run: Run  # one snapshot: the whole text
    findings: Findings
    counterfactual: Counterfactual
    seconds: Mapping[str, float] = field(default_factory=dict)  # open, forward, watched
    tokens: int = 0

    @property
    def healthy(self) -> bool:
        """Whether no finding is a warning or an error."""
        return all(finding.severity == "note" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The run, as `Run.save` has it, with the findings beside it."""
        return record.to_json(self.run) | {
            "findings": self.findings.to_json(),
            "counterfactual": {rule: dict(n) for rule, n in self.counterfactual.rules.items()},
            "seconds": dict(self.seconds),
            "tokens": self.tokens,
        }


@cache
def sample() -> str:
    """The text that is read when none is given."""
    return Path(__file__).with_name("sample.txt").read_text(encoding="utf-8")


def doctor(
    what: str | Path | models.Opened,
    text: str | None = None,
    *,
    tokens: int = TOKENS,
    rows: int | None = None,
    deep: bool | None = None,
    threads: int | None = None,
    expected_scale: float | str | None = None,
    tell: Tell | None = None,
) -> Examination:
    """Examines a local model.

    Args:
        what: whatever `models.open` takes, or what it gave.
        text: read by the model; None: a built-in sample of some 400 words, or random token ids where the model has no
            tokenizer; the run's notes say so.
        tokens: of the text at most; the rest is left out, and the run's notes say so.
        rows: query rows looked at per call; None: all.
        deep: also see attention that is written out by hand; None: where no attention function is called.
        threads: of torch meanwhile; None: as many as it has.
        expected_scale: the scale that is right for this model, where that is not 1/√d_k.
        tell: called with what is being done, for a line of progress.
    """
    for name, value in (("tokens", tokens), ("rows", rows), ("threads", threads)):
        if value is not None:
            checks.integer(name, value, "an integer of at least 1", "Leave it out for the usual", lambda n: n >= 1)
    if text is not None and not text.strip():
        advice = "Give at least a sentence, or leave it out for the built-in sample"
        raise bad_value("text", "some words", "none", advice)
    say = tell or (lambda words: None)
    say(f"opening {what}")
    began = time.perf_counter()
    opened = what if isinstance(what, models.Opened) else models.open(what)
    seconds = {"open": time.perf_counter() - began}
    bare = opened.tokenizer is None
    if bare and text is not None:
        advice = (
            "Copy tokenizer.json and its kin into the model's directory, or leave the text out for random token ids"
        )
        raise bad_value("text", f"a tokenizer beside the weights in {opened.path}", "none", advice)
    if bare:
        windows, left_out = _random_windows(opened, tokens), 0
    else:
        windows, left_out = _windows(opened, sample() if text is None else text, tokens)
    read = sum(window.numel() for window in windows)
    with _threads(threads):
        run, times = _watched(opened, windows, say, rows=rows, deep=deep, expected_scale=expected_scale)
    seconds |= times
    source = _RANDOM if bare else "tokens of the built-in sample" if text is None else "tokens of the text"
    run = replace(run, notes=(*run.notes, *_notes(read, windows, left_out, seconds, source)))
    say("diagnosing")
    return Examination(run, diagnose(run), counterfactual(run), seconds, read)


def _notes(
    read: int, windows: Sequence[Tensor], left_out: int, seconds: Mapping[str, float], source: str
) -> Iterator[str]:
    longest = max(window.shape[1] for window in windows)
    number = plural(sum(window.shape[0] for window in windows), "window")
    yield f"read {read} {source} in {number} of up to {longest}"
    if source == _RANDOM:
        yield "no tokenizer beside the weights: on random tokens, entropies and sinks are not those of a text"
    if left_out:
        yield f"left out the last {left_out} tokens"
    yield (
        f"opened in {seconds['open']:.1f} s; a forward pass takes {seconds['forward']:.2f} s, "
        f"{seconds['watched']:.2f} s with statistics under every scale"
    )


# ---- the text ---------------------------------------------------------------


def _windows(opened: models.Opened, text: str, limit: int) -> tuple[list[Tensor], int]:
    """The text as batches (B, T) of token ids, short ones first, and how many were left out.

    Nothing is padded: a padded row would be a query like any other in the statistics.
    """
    import torch

    tokenizer = opened.tokenizer
    assert tokenizer is not None
    size = min(WINDOW, tokenizer.model_max_length, _positions(opened.model))
    special = tokenizer.num_special_tokens_to_add()
    plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not plain:
        raise bad_value("text", "at least one token", "none", "Give words the model's tokenizer knows")
    ids, number = plain[:limit], math.ceil(min(len(plain), limit) / max(size - special, 1))
    cuts = [len(ids) * i // number for i in range(number + 1)]  # windows of one size, give or take 1
    parts = [ids[begin:end] for begin, end in itertools.pairwise(cuts)]
    whole = [_framed(tokenizer, part, bool(special)) for part in parts]
    sizes = sorted({len(ids) for ids in whole})
    alike = [[ids for ids in whole if len(ids) == size] for size in sizes]
    batches = [group[i : i + _BATCH] for group in alike for i in range(0, len(group), _BATCH)]
    return [torch.tensor(batch) for batch in batches], max(len(plain) - limit, 0)


def _random_windows(opened: models.Opened, limit: int) -> list[Tensor]:
    """Random token ids in place of a text, the same every time: one batch."""
    import torch

    words = getattr(opened.model.config.get_text_config(), "vocab_size", None)
    if not isinstance(words, int) or words < 2:
        advice = "Copy tokenizer.json and its kin into the model's directory"
        raise bad_value("model", "a tokenizer, or a vocabulary to draw token ids from", "neither", advice)
    size = min(WINDOW, _positions(opened.model), limit)
    rows = max(1, min(_BATCH, limit // size))
    return [torch.randint(words, (rows, size), generator=torch.Generator().manual_seed(0))]


def _positions(model: Any) -> int:
    """How many positions the model has."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else WINDOW


def _framed(tokenizer: Any, ids: list[int], special: bool) -> list[int]:
    """A window with the marks its tokenizer puts around a text."""
    if not special:
        return ids
    marks = tokenizer("")["input_ids"]
    ends = {tokenizer.sep_token_id, tokenizer.eos_token_id}
    after = next((i for i, mark in enumerate(marks) if mark in ends), len(marks))
    return [*marks[:after], *ids, *marks[after:]]


# ---- the model --------------------------------------------------------------


def _watched(
    opened: models.Opened, windows: Sequence[Tensor], say: Tell, **watch_options: Any
) -> tuple[Run, dict[str, float]]:
    """Runs the model on the text, watched and then alone."""
    import torch

    from levelhead.watching.watch import watch

    model, options = opened.model, _options(opened.model)

    def read(name: str, parts: Sequence[Tensor]) -> float:
        began = time.perf_counter()
        for i, ids in enumerate(parts, 1):
            say(f"{name}: {i} of {len(parts)}")
            _forward(model, ids, options)
        return time.perf_counter() - began

    with torch.inference_mode(False), torch.no_grad():
        read("warming up", [windows[0][:1, :_WARM_UP]])
        with watch(model, counterfactual=True, **watch_options) as watched_model:
            watched = read("reading, watched", windows)
        alone = read("reading, alone", windows)
    run = watched_model.run()
    if not run.latest:
        looked = ", ".join(f"{line.module} ({line.how})" for line in run.coverage[:4])
        given = f"none that was seen: {looked}" if looked else f"{type(model).__name__} without any"
        advice = f"Watch it in your own code with lh.watch(model). {run.by_hand}"
        raise bad_value("model", "a model with attention", given, advice)
    whole: Snapshot = reduce(Snapshot.merged, run.snapshots)
    name = f"{opened.name} ({type(model).__name__})"
    return replace(run, model=name, snapshots=(whole,)), {"forward": alone, "watched": watched}


def _options(model: Any) -> dict[str, Any]:
    """Options that avoid work which no statistic needs: a cache, and logits over the vocabulary."""
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in known}


def _forward(model: Any, ids: Tensor, options: Mapping[str, Any]) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        options = {**options, "decoder_input_ids": ids}
    try:
        model(input_ids=ids, **options)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        if isinstance(error, LevelheadValueError):
            raise
        given = f"{type(model).__name__}, which failed: {error}"
        advice = "Watch it in your own code with lh.watch(model)"
        raise bad_value("model", "a model that reads text as token ids alone", given, advice) from error


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
