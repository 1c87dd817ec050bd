"""The recipes of docs/remedies.md for the Hugging Face Trainer, run: a clip keeps logits bounded, an alarm comes at
once."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import clip_run
import levelhead as lh
from levelhead.remedies import QKClip

TAU, SEED, RATE, STEPS = clip_run.TAU, 5, 6.0, 60


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, **options))


def trained(model: Any, path: Path, callback: Any, **options: Any) -> list[dict[str, Any]]:
    """The training logs."""
    rows = np.random.default_rng(0).integers(0, 50, (32, 12)).tolist()
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, **options}
    made = TrainingArguments(str(path), use_cpu=True, seed=1, lr_scheduler_type="constant", **arguments)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, made, train_dataset=data, callbacks=[callback])
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_a_training_that_diverges_does_not_with_one_more_argument() -> None:
    """The loss is NaN without a clip. bench/results/clip-run.json has more seeds, and longer runs."""
    without, callback = lh.sinks.hf_callback(on_finding=None), lh.sinks.hf_callback(on_finding=None, qk_clip=TAU)
    lost = clip_run.trained(SEED, RATE, without, STEPS)
    kept = clip_run.trained(SEED, RATE, callback, STEPS)
    assert math.isnan(lost[-1]["loss"]) and len(lost) <= STEPS == len(kept)
    first = next(n for n, row in enumerate(kept) if row["attention/clipped_heads"])
    assert [row["loss"] for row in lost[: first + 1]] == [row["loss"] for row in kept[: first + 1]]
    assert max(row["attention/all/max_logit"] for row in lost[:-1]) > 1000 and "attention/clipped_heads" not in lost[1]
    assert max(row["attention/all/max_logit"] for row in kept) < 10 * TAU  # what one step of such a size adds
    assert sum(row["loss"] for row in kept[-10:]) < 9.6 * kept[0]["loss"]
    assert 0 < kept[-1]["attention/clip_factor"] < 1
    assert callback.clip is None and not callback.watch.attached
    modules = callback.watch.model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_a_clip_follows_the_optimiser_once_for_all_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    step = QKClip.step
    monkeypatch.setattr(QKClip, "step", lambda clip: said.append(step(clip)) or said[-1])
    logs = trained(llama(), tmp_path, lh.sinks.hf_callback(qk_clip=1e-3, on_finding=None), max_steps=2)
    assert [x.largest for x in said] == pytest.approx([row["attention/all/max_logit"] for row in logs], rel=1e-6)
    assert [len(x) for x in said] == [row["attention/clipped_heads"] for row in logs] and said[0]


def test_a_clip_of_a_compiled_training_clips_as_one_that_is_not(tmp_path: Path) -> None:
    """The passes of its first step run as written: a compiled graph does not show whose the rows are."""
    logs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
        callback = lh.sinks.hf_callback(qk_clip=1e-3, on_finding=None)
        logs.append(trained(llama(), tmp_path, callback, max_steps=2, gradient_accumulation_steps=1, **options))
        assert callback.watch.compiled == compiled
    assert torch._dynamo.eval_frame._stance.stance == "default"
    for name in ("attention/clipped_heads", "attention/clip_factor"):
        plain, compiled_logs = ([row[name] for row in each] for each in logs)
        assert compiled_logs == pytest.approx(plain, rel=1e-4)
    assert all(row["attention/clipped_heads"] for row in logs[1])


@pytest.mark.parametrize("bad", [{"qk_clip": 0}, {"qk_clip": 100.0, "every": 2}, {"qk_clip": 100.0, "rows": 8}])
def test_a_clip_needs_every_step_and_every_row(bad: dict[str, Any]) -> None:
    for make in (lh.sinks.hf_callback, lh.sinks.lightning_callback):
        with pytest.raises(lh.LevelheadError, match=f"{list(bad)[-1]}: expected .* got"):
            make(**bad)


def test_a_wrong_scale_is_told_in_the_first_logged_step(tmp_path: Path) -> None:
    model = llama(num_key_value_heads=2)
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        logs = trained(model, tmp_path, lh.sinks.hf_callback(), max_steps=2)
    said = [str(x.message) for x in warned if str(x.message).startswith("levelhead")]
    assert len(said) >= 1 and "wrong scale" in said[0] and "self_attn" in said[0]
    assert logs[0]["attention/findings"] >= 1
