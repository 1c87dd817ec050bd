"""The recipes of docs/remedies.md for the Hugging Face Trainer, run: a clip keeps logits bounded, an alarm comes at
once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import levelhead as lh

TAU, STEPS = 5.0, 10


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64, **options))


def trained(model: Any, path: Path, callback: Any, **options: Any) -> list[dict[str, Any]]:
    """The training logs."""
    rows = np.random.default_rng(0).integers(0, 50, (32, 12)).tolist()
    arguments = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, **options}
    made = TrainingArguments(str(path), use_cpu=True, seed=1, lr_scheduler_type="constant", **arguments)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, made, train_dataset=data, callbacks=[callback])
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_logits_that_explode_stay_bounded_by_one_argument(tmp_path: Path) -> None:
    hot = {"learning_rate": 0.3, "max_grad_norm": 0.0}  # far too large, as a run that diverges has it
    quiet = {"on_finding": None}
    without = trained(llama(num_key_value_heads=4), tmp_path, lh.sinks.hf_callback(**quiet), **hot)
    model, callback = llama(num_key_value_heads=4), lh.sinks.hf_callback(qk_clip=TAU, **quiet)
    with_clip = trained(model, tmp_path, callback, **hot)
    largest = [[row["attention/all/max_logit"] for row in rows] for rows in (without, with_clip)]
    assert largest[0][:2] == largest[1][:2]  # nothing was above the bound until then
    assert largest[0][-1] > 40 * TAU and largest[0][-1] > 2 * largest[0][-4]  # and it goes on
    assert max(largest[1]) < 6 * TAU  # what one step of such a size adds
    assert with_clip[0]["attention/clipped_heads"] == 0 and with_clip[-1]["attention/clipped_heads"] >= 4
    assert 0 < with_clip[-1]["attention/clip_factor"] < 1 and "attention/clipped_heads" not in without[-1]
    assert callback.clip is None and not callback.watch.attached
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


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
