"""The zoo of tiny Hugging Face models: the rules shrink any configuration, and the inputs run the model."""

from __future__ import annotations

import pytest
import torch

import huggingface_zoo as zoo


def test_most_architectures_are_known() -> None:
    names = zoo.architectures()
    assert len(names) >= 400
    assert len({zoo.classes(name)[0] for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("llama", {"input_ids"}),
        ("t5", {"input_ids", "decoder_input_ids"}),
        ("clip", {"input_ids", "pixel_values"}),
        ("qwen2_vl", {"input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids"}),
        ("whisper", {"input_features", "decoder_input_ids"}),
        ("detr", {"pixel_values"}),
    ],
)
def test_a_specimen_runs_and_can_be_built_again(name: str, inputs: set[str]) -> None:
    found = zoo.specimen(name)
    assert set(found.inputs) == inputs
    assert sum(p.numel() for p in found.model.parameters()) < 1_000_000
    again = zoo.specimen(name, found.recipe, "eager")
    assert again.model.config._attn_implementation == "eager"
    for (key, a), (_, b) in zip(found.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), key
