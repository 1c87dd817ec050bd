"""Architectures of the zoo that need more than the rules."""

from __future__ import annotations

from typing import Any

# Architectures that do not run in a second.
LEFT_OUT: dict[str, str] = {
    "sam2": "runs at 1024 x 1024 only",
    "sam2_hiera_det_model": "runs at 1024 x 1024 only",
    "sam2_vision_model": "runs at 1024 x 1024 only",
    "swin2sr": "too deep in every size",
}

# Fields with other values than the rules give; a dict changes a configuration inside.
_RESNET = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128]}
    | {"depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]},
}
CHANGES: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 12, "num_time_features": 1},
    "bamba": {"attn_layer_indices": [1]},
    "bridgetower": {"hidden_size": 64, "num_attention_heads": 4, "text_config": {"hidden_size": 64}},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "informer": {"prediction_length": 4, "context_length": 12, "num_time_features": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_linear": {"num_experts_per_token": 2, "num_expert_group": 1},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "sam": {
        "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4},
        "vision_config": {"output_channels": 32},
    },
    "sam_hq": {
        "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4},
        "vision_config": {"output_channels": 32},
    },
    "table-transformer": _RESNET,
    "time_series_transformer": {"prediction_length": 4, "context_length": 12, "num_time_features": 1},
}
