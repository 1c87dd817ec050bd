"""A sample of the sweeps over Hugging Face architectures; bench/results/huggingface.json has all of them."""

from __future__ import annotations

import pytest

import huggingface_use
import huggingface_watch
from huggingface_zoo import specimen

WRITTEN_OUT = ["bloom", "codegen", "cpmant", "deberta", "flaubert", "gpt_neo", "gptj", "mpt", "xlnet"]
OTHERS = ["falcon", "kosmos-2.5", "paligemma", "wavlm"]


@pytest.mark.parametrize("name", WRITTEN_OUT + OTHERS)
def test_levelhead_gives_what_the_model_gives(name: str) -> None:
    built = specimen(name, implementation="eager")
    found = huggingface_use.compared(built)
    assert set(found["cases"].values()) <= {"same", "not run"}, found
    assert {"plain", "gradients"} <= {case for case, word in found["cases"].items() if word == "same"}
    assert found["calls"] >= 4


@pytest.mark.parametrize("name", ["bert", "deepseek_v3", "gemma3", "llama", "t5", "vit"])
def test_nothing_is_found_in_a_fresh_model(name: str) -> None:
    found = huggingface_watch.watched(specimen(name))
    assert found["modules"] >= 2
    assert found["findings"] == found["unseen"] == []
    assert found["same"]
