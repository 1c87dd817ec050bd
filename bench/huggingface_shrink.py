"""Small configurations: the default configuration of any transformers architecture, with sizes that run in a second.

Sizes are chosen by the names of the fields. Which layers a model has is kept: each kind in `layer_types` occurs once.
"""

from __future__ import annotations

import math
import re
from typing import Any

WIDTH, INNER, HEADS, GROUPS, LAYERS, HEAD = 32, 64, 4, 2, 2, 8
VOCABULARY, POSITIONS, IMAGE, PATCH = 128, 128, 32, 8
FIRST_TOKEN, LAST_TOKEN = 5, 80  # of random text; special tokens are below and above

# Field names and their small values; the first rule that fits counts. None: the default stays.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"num_(nextn_predict|residual|feat_extract|adapter)_layers|num_mtp.*|.*vision_feature.*layer.*", None),
    (r"insert_layer_id|head_in_index|cross_layer_interval", None),
    (r"num_kv_shared_layers", 0),
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads)", 8),
    (r"(mamba_d_head|mamba_head_dim)", 8),
    (r"(mamba_d_state|ssm_state_size|state_size)", 8),
    (r"(mamba_chunk_size|chunk_size)", 8),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|.*start_layer.*", 1),
    (r"(.*_)?(num_hidden_layers|n_layers?|num_layers|num_.*_layers|.*_layers|.*_num_layers|depth|.*_depth)", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|kv_heads|n_head_kv|num_key_value_groups|multi_query_group_num)", GROUPS),
    (r"linear_num_key_heads", GROUPS),
    (r".*(attention_heads|num_heads|n_heads?|_heads|num_head|nhead|encoder_heads)", HEADS),
    (r".*(qk_rope_head_dim|qk_nope_head_dim)", HEAD // 2),
    (r".*(rotary_dim)", HEAD // 2),
    (r".*(head_dim|head_size|d_kv|dim_head|head_channels|_lora_rank|lora_rank|d_head)", HEAD),
    (r".*(query_pre_attn_scalar)", HEAD),
    (r".*(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn.*size|ffn_hidden_size|.*_ffn_size)", WIDTH),
    (
        r".*(intermediate_size|intermediate_dim|ffn_dim|d_ff|mlp_dim|n_inner|ffn_embed_dim|feedforward.*|ffn_size)",
        INNER,
    ),
    (r".*(experts_per_tok.*|num_selected_experts|moe_topk|moe_k|top_k_experts|num_experts_per_token)", 2),
    (r".*(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts|num_moe_experts)", 4),
    (r"n_group|topk_group|n_groups_moe", 1),
    (r"index_topk|index_block_size", 4),
    (r".*sliding_window(_size)?|local_attention|attention_window_size|attention_chunk_size", 6),
    (r"(.*_)?vocab_size.*|.*_vocab_size|num_embeddings_text", VOCABULARY),
    (r"max_2d_position_embeddings|max_relative_.*", None),
    (
        r"(max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx|max_.*positions|seq_length)",
        POSITIONS,
    ),
    (r"(.*_)?(pretrain_)?image_size|input_size|img_size", IMAGE),
    (r"(.*_)?patch_size", PATCH),
    (r"(num_conv_pos_embeddings)", 16),
    (r"(num_conv_pos_embedding_groups)", 4),
    (r"(num_queries|num_denoising|num_detection_tokens|num_query_tokens|num_latents|resampler_n_latents)", 8),
    (r"(train_num_points|num_position_embeddings)", 64),
    (r"(upsample_groups)", WIDTH),
    (r"(num_codevectors_per_group|codebook_size|num_embeddings)", 16),
    (r"(classifier_proj_size|codevector_dim|proj_codevector_dim|pooler_output_size|xvector_output_dim)", WIDTH),
    (r"(num_mel_bins|feature_size|num_filter_banks)", 16),
    (r".*(hidden_size|hidden_dim|hidden_dims|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim)", WIDTH),
    (r".*(projection_dim|projection_size|proj_dim|output_dim|out_dim|fusion_hidden_size|width|hidden_channels)", WIDTH),
    (r"(dim|embed_dims|encoder_dim|decoder_dim|latent_dim|bottleneck_dim|lstm_dim|model_dim|out_features_dim)", WIDTH),
)
_LISTS: tuple[tuple[str, Any], ...] = (
    (r"depths|layers|num_blocks|.*_depths|layer_depths", [1, 1, 1, 1, 1, 1]),
    (r"num_attention_heads|num_heads|.*_num_heads|num_head", [1, 2, 4, 8, 16, 32]),
    (r"(neck_)?hidden_sizes|embed_dims|encoder_hidden_sizes|embed_dim|.*hidden_sizes", [32, 64, 128, 256, 256, 256]),
    (r"conv_dim|tdnn_dim", [32] * 16),
    (r"global_attn_indexes|fullatt_block_indexes|full_attention_indexes|deepstack_visual_indexes", [1]),
    (r"image_size|img_size|input_size|pretrain_image_size", [IMAGE, IMAGE, IMAGE]),
    (r"patch_size", [PATCH, PATCH, PATCH]),
    (r"encode_proj_layers", None),
)
_TOKEN = re.compile(r".*(_token_id|_token_index|_token_ids|_token|_id|_idx)$")
_USUAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "padding_idx": 0}
# Fields without a default that a model needs.
_ABSENT = {
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": GROUPS,
    "shared_expert_intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
}
# Models that have sections of the rotary width by default, not in the configuration.
_SECTIONS = re.compile(r"qwen2.*(vl|omni)|glm4v|glm_ocr|glm46v|glm_image|hunyuan_vl")
_NO_TOKEN = re.compile(r"(problem|model|insert_layer|layer|head)_(type|id|idx)|.*layer_id")


def small(kind: Any, level: int, **changes: Any) -> Any:
    """A configuration of the class `kind`. Level 0 shrinks all it knows, 1 leaves widths of images and sound,
    2 changes only depth, vocabulary and tokens."""
    values = _small_values(kind(), level, {})
    return kind(**_merged(values, changes))


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    for key, x in changes.items():
        inner = isinstance(x, dict) and isinstance(values.get(key), dict)
        values[key] = _merged(values[key], x) if inner else x
    return values


def _small_values(config: Any, level: int, tokens: dict[str, int], *, inner: bool = False) -> dict[str, Any]:
    known = set(getattr(type(config), "__dataclass_fields__", {}))
    found = {key: x for key, x in vars(config).items() if key in known or not key.startswith("_")}
    values: dict[str, Any] = {}
    layers = _depth(found)
    deep = len(_kinds(found))
    for key, x in found.items():
        if key in ("dtype", "transformers_version", "id2label", "label2id", "architectures", "stage_names"):
            continue
        if key in ("out_features", "out_indices", "_out_features", "_out_indices"):
            continue
        if hasattr(x, "to_dict"):
            values[key] = {"model_type": x.model_type} | _small_values(x, level, tokens, inner=True)
        elif isinstance(x, (list, tuple)):
            new = _small_list(key, x, layers, max(LAYERS, deep), level)
            if new is not x:
                values[key] = new
            elif _TOKEN.match(key) and not _NO_TOKEN.match(key) and all(type(n) is int for n in x):
                values[key] = [_token(key, tokens)]
        elif key in ("rope_parameters", "rope_scaling") and isinstance(x, dict):
            values[key] = _small_rope(x, sections=bool(_SECTIONS.search(config.model_type)))
        elif x is None and key in _ABSENT and level < 2:
            values[key] = _ABSENT[key]
        elif type(x) is int:
            new = _small_number(key, x, level, tokens)
            if deep > LAYERS and _is_depth(key):
                new = min(x, deep)
            if new != x or (inner and key in known):  # the outer class may have other defaults than the inner one
                values[key] = new
    if "kv_lora_rank" in found:  # every head has its own keys, and the width of a head is a sum
        values.pop("head_dim", None)
        values.pop("qk_head_dim", None)
        values["num_key_value_heads"] = min(HEADS, found.get("num_attention_heads") or HEADS)
    for key, x in _USUAL.items():
        if key in found and found[key] is None and key != "padding_idx":
            values[key] = x
    return values


def _small_rope(x: dict[str, Any], *, sections: bool = False) -> dict[str, Any]:
    """Sections of the rotary width, in the proportion that the width of a head allows."""
    if any(isinstance(inner, dict) for inner in x.values()):
        return {key: _small_rope(inner) if isinstance(inner, dict) else inner for key, inner in x.items()}
    if sections:
        x = {"mrope_section": [1, 1, 1]} | x
    for name in ("mrope_section", "xdrope_section"):
        if name in x:
            pairs = int(HEAD * x.get("partial_rotary_factor", 1.0)) // 2
            parts = len(x[name])
            rest = [pairs // parts] * (parts - 1)
            x = x | {name: [pairs - sum(rest), *rest] if pairs >= parts else [pairs - 1, 1, *[0] * (parts - 2)]}
    return x


def _small_number(key: str, x: int, level: int, tokens: dict[str, int]) -> int:
    if _TOKEN.match(key) and not _NO_TOKEN.match(key):
        return _token(key, tokens) if x > 2 or key in _USUAL else x
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            wide = size is not None and size not in (LAYERS, 0, 1, VOCABULARY)
            if size is None or (level == 2 and wide) or (level == 1 and wide and _is_signal(key)):
                return x
            return min(x, size)
    return x


def _is_signal(key: str) -> bool:
    return re.fullmatch(r".*(mel|feature|image|patch|conv|input|size_map|kernel|filter|positions).*", key) is not None


def _small_list(key: str, x: Any, layers: int, deep: int, level: int) -> Any:
    if not x:
        return x
    if all(isinstance(n, str) for n in x) and len(x) == layers:
        kinds = list(dict.fromkeys(x))
        return (kinds * deep)[:deep] if key == "layer_types" else list(x[:deep])
    for pattern, new in _LISTS:
        if re.fullmatch(pattern, key) and all(type(n) is int for n in x):
            if new is None or (level == 2 and key != "depths"):
                return x
            return [min(a, b) if key != "hidden_sizes" else b for a, b in zip(x, new, strict=False)]
    return list(x[:deep]) if len(x) == layers and layers > 4 else x


def _kinds(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(found.get("layer_types") or ()))


def _depth(found: dict[str, Any]) -> int:
    depths = [x for key, x in found.items() if _is_depth(key) and type(x) is int]
    return max(depths, default=0)


def _is_depth(key: str) -> bool:
    return key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def _token(key: str, tokens: dict[str, int]) -> int:
    key = key.replace("_index", "_id").replace("_ids", "_id")
    if key in _USUAL:
        return _USUAL[key]
    return tokens.setdefault(key, VOCABULARY - 1 - len(tokens))


def whole_sides(x: Any) -> tuple[int, int]:
    """Height and width, from a number or a pair."""
    if isinstance(x, (list, tuple)):
        return int(x[-2] if len(x) > 1 else x[0]), int(x[-1])
    return int(x), int(x)


def number_of(config: Any, names: tuple[str, ...], otherwise: int) -> Any:
    """The first of these fields that a configuration, or one inside it, has."""
    for name in names:
        if (x := getattr(config, name, None)) is not None:
            return x
    for inner in vars(config).values():
        if hasattr(inner, "to_dict"):
            x = number_of(inner, names, -math.inf)  # type: ignore[arg-type]
            if x != -math.inf:
                return x
    return otherwise
