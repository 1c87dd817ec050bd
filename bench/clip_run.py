"""A training that diverges without QK-clip and does not with it, by the recipe for the Hugging Face Trainer.

A tiny Llama learns to repeat a sequence; a guess costs ln 16. Its attention is eager under float16 autocast, so a
product of q and k beyond 65,504 is infinite, and then the loss is NaN. SGD with momentum, no clipping of gradients; q
and k projections have ten or twenty times the rate of the rest, so that logits grow within some dozens of steps. Both
runs of a seed have the same model, data, optimiser and schedule; `qk_clip=` of the callback is the only difference. The
settings were chosen on the seeds 0 and 1, and are measured on others. AdamW was tried first, on seed 0 at rates of 0.01
and 0.1: logits reached 2,300 within 150 steps, so nothing was NaN, but the loss stayed that of a guess; with a clip it
was learned.

    python bench/clip_run.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import levelhead as lh
from about import machine, versions

SEEDS = range(2, 10)
TAU, STEPS, WARM_UP = 20.0, 150, 10
RATE, RATES_OF_Q_AND_K = 0.3, (3.0, 6.0)
VOCABULARY, HALF, BATCH = 16, 8, 16  # tokens of a sequence's first half
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class InHalf(LlamaForCausalLM):
    """A Llama whose forward pass is in float16, on a CPU too."""

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        with torch.autocast("cpu", torch.float16):
            return super().forward(input_ids=input_ids, labels=labels, **others)


class StopAtNaN(TrainerCallback):
    """A loss that is no number stays none."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            control.should_training_stop = True


def repeats(seed: int, count: int) -> list[dict[str, list[int]]]:
    """Sequences whose second half repeats the first, which is the only part that is learned."""
    first = np.random.default_rng(seed).integers(0, VOCABULARY, (count, HALF))
    hidden = np.full_like(first, -100)
    rows = (np.concatenate(pair, 1).tolist() for pair in ((first, first), (hidden, first)))
    return [{"input_ids": x, "labels": y} for x, y in zip(*rows, strict=True)]


def trained(seed: int, rate: float, callback: Any, steps: int = STEPS) -> list[dict[str, float]]:
    """The training logs, at a rate for q and k, under a callback of levelhead's."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2 * HALF, **SIZES)
    model = InHalf._from_config(config, attn_implementation="eager")
    groups: dict[float, list[Any]] = {RATE: [], rate: []}
    for name, parameter in model.named_parameters():
        groups[rate if "q_proj" in name or "k_proj" in name else RATE].append(parameter)
    optimiser = torch.optim.SGD([{"params": each, "lr": its} for its, each in groups.items()], momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM_UP))
    with tempfile.TemporaryDirectory() as path:
        arguments = TrainingArguments(
            path,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            seed=seed,
            max_grad_norm=0.0,
            use_cpu=True,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data, both = repeats(seed, STEPS * BATCH), [callback, StopAtNaN()]
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimiser, schedule), callbacks=both)
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def run(seed: int, rate: float, **options: Any) -> dict[str, Any]:
    logs = trained(seed, rate, lh.sinks.hf_callback(on_finding=None, **options))
    losses, largest = ([row[name] for row in logs] for name in ("loss", "attention/all/max_logit"))
    finite = [x for x in losses if math.isfinite(x)]
    return {
        "rate": rate,
        "seed": seed,
        "qk_clip": options.get("qk_clip"),
        "nan_at": None if len(finite) == len(losses) else len(finite) + 1,
        "first_loss": round(losses[0], 4),
        "last_loss": round(float(np.mean(finite[-10:])), 4),
        "largest_logit": round(float(np.nanmax(largest)), 1),
        "steps_with_clips": sum(row.get("attention/clipped_heads", 0) > 0 for row in logs),
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| rate of q and k | QK-clip | NaN | at step | loss at the end, median | largest logit |",
        "|---|---|---|---|---|---|",
    ]
    for rate in RATES_OF_Q_AND_K:
        for tau in (None, TAU):
            some = [x for x in runs if x["rate"] == rate and x["qk_clip"] == tau]
            lost = sorted(x["nan_at"] for x in some if x["nan_at"] is not None)
            steps = f"{lost[0]} to {lost[-1]}" if lost else "-"
            ends = [math.nan if x["nan_at"] else x["last_loss"] for x in some]
            loss = "NaN" if 2 * len(lost) > len(some) else f"{np.nanmedian(ends):.2f}"
            sizes = sorted(x["largest_logit"] for x in some)
            span = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f}"
            word = "no" if tau is None else f"{tau:g}"
            lines.append(f"| {rate:g} | {word} | {len(lost)} of {len(some)} | {steps} | {loss} | {span} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    runs = []
    for rate in RATES_OF_Q_AND_K:
        for seed in SEEDS:
            for clip in ({}, {"qk_clip": TAU}):
                runs.append(run(seed, rate, **clip))
                print(runs[-1], flush=True)
    lines = table(runs)
    print("\n".join(lines))
    if options.json:
        about = {**machine(1), "versions": versions(), "method": __doc__}
        found = {"about": about, "steps": STEPS, "guess": math.log(VOCABULARY), "runs": runs, "tables": {"runs": lines}}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
