"""Inputs for any transformers model, made from the names of its forward's arguments.

Several guesses, in the order in which they are tried: the first with which the model runs is right.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from huggingface_shrink import FIRST_TOKEN, LAST_TOKEN, number_of, whole_sides

BATCH, TOKENS, DECODED = 2, 12, 7
Inputs = dict[str, Any]


def guesses(model: Any) -> Iterator[Inputs]:
    """Candidate keyword arguments of the model's forward; pictures and sound with text first, text alone last."""
    names = list(inspect.signature(model.forward).parameters)
    config = model.config
    text = _text(names, config)
    for signal in _signals(names, config):
        if text:
            yield from _with_placeholders(model, text, signal)
        else:
            yield signal
    if text:
        yield text
        if "decoder_input_ids" in names:
            yield text | {"decoder_input_ids": tokens(DECODED, 2)}


def tokens(count: int, seed: int = 1, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (batch, count), generator=generator)


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _text(names: list[str], config: Any) -> Inputs:
    found: Inputs = {}
    if "input_ids" in names:
        found["input_ids"] = tokens(TOKENS)
        if "bbox" in names:
            corners = torch.randint(0, 40, (BATCH, TOKENS, 2), generator=torch.Generator().manual_seed(5))
            found["bbox"] = torch.cat([corners, corners + 9], -1)
    if "decoder_input_ids" in names and (found or getattr(config, "is_encoder_decoder", False)):
        found["decoder_input_ids"] = tokens(DECODED, 2)
    return found


def _signals(names: list[str], config: Any) -> Iterator[Inputs]:
    vision = next(
        (c for n in ("vision_config", "backbone_config", "encoder") if (c := getattr(config, n, None))), config
    )
    size = number_of(vision, ("image_size", "img_size", "input_size", "pretrain_image_size"), 32)
    try:
        height, width = whole_sides(size)
    except (TypeError, ValueError):
        height = width = 32
    channels = number_of(vision, ("num_channels", "in_channels", "in_chans", "num_image_channels"), 3)
    channels = channels if type(channels) is int else 3
    frames = number_of(config, ("num_frames", "frames_per_clip"), 2)
    sides = list(dict.fromkeys([(height, width), (32, 32), (64, 64), (224, 224)]))
    decoder = {"decoder_input_ids": tokens(DECODED, 2)} if "decoder_input_ids" in names else {}
    if "pixel_values" in names:
        if {"image_grid_thw", "grid_thw", "image_grid_hws"} & set(names):
            yield from _patches(names, vision, channels)
        if "spatial_shapes" in names or ("pixel_attention_mask" in names and hasattr(vision, "num_patches")):
            patch = number_of(vision, ("patch_size",), 8)
            flat = noise(BATCH, 16, channels * patch * patch)
            shapes = torch.tensor([[4, 4]] * BATCH)
            yield {"pixel_values": flat, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(BATCH, 16).long()}
        for h, w in sides:
            picture = noise(BATCH, channels, h, w)
            extra = {"image_sizes": torch.tensor([[h, w]] * BATCH)} if "image_sizes" in names else {}
            yield {"pixel_values": picture} | extra
            if extra or re.search("tile|idefics|smol|crops|num_images|aspect", " ".join(names) + type(config).__name__):
                yield {"pixel_values": picture[:, None]} | extra
                yield {"pixel_values": torch.stack([picture] * 3, 1)} | extra
            if (h, w) == sides[0]:
                yield {"pixel_values": noise(BATCH, int(frames), channels, h, w)}
    for name in ("pixel_values_videos", "videos"):
        if name in names and "pixel_values" not in names:
            yield {name: noise(BATCH, int(frames), channels, height, width)}
    if "input_values" in names:
        long, mels = number_of(config, ("max_length",), 64), number_of(config, ("num_mel_bins",), 16)
        yield {"input_values": 0.1 * noise(BATCH, 2000)} | decoder
        yield {"input_values": 0.1 * noise(BATCH, 1, 2000)} | decoder
        yield {"input_values": noise(BATCH, int(long), int(mels))} | decoder
    for name in ("input_features", "audio_features", "audio_values"):
        if name in names:
            mels = int(number_of(config, ("num_mel_bins", "input_feat_size", "feature_size", "input_dim"), 16))
            places = int(number_of(config, ("max_source_positions",), 32))
            for shape in ((mels, 2 * places), (64, mels), (mels, 64), (1, 64, mels), (1, 1001, mels)):
                features = {name: noise(BATCH, *shape)}
                yield features | decoder
                if "feature_attention_mask" in names or "input_features_mask" in names:
                    mask = "feature_attention_mask" if "feature_attention_mask" in names else "input_features_mask"
                    yield features | {mask: torch.ones(BATCH, max(shape[-2:]), dtype=torch.long)} | decoder
    if "grid_thw" in names and "hidden_states" in names:
        yield from (
            {"hidden_states": x["pixel_values"], "grid_thw": x["grid_thw"]} for x in _patches(names, vision, channels)
        )
    if "past_values" in names:
        yield from _series(names, config)
    if "inputs" in names:
        yield {"inputs": tokens(TOKENS)}
    for name in ("hidden_states", "inputs_embeds", "encoder_hidden_states"):
        if name in names and "input_ids" not in names:
            width = number_of(config, ("hidden_size", "d_model", "embed_dim"), 32)
            yield {name: noise(BATCH, TOKENS, width)}


def _patches(names: list[str], vision: Any, channels: int) -> Iterator[Inputs]:
    patch = number_of(vision, ("patch_size",), 8)
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    for name in ("image_grid_thw", "grid_thw"):
        for time in dict.fromkeys([number_of(vision, ("temporal_patch_size",), 1), 1, 2]) if name in names else ():
            yield {"pixel_values": noise(BATCH * 16, channels * time * patch * patch), name: grid}
        if name in names:
            yield {"pixel_values": noise(BATCH * 16, channels, patch, patch), name: grid}
            yield {"pixel_values": noise(1, BATCH * 16, channels, patch, patch), name: grid}
    if "image_grid_hws" in names:
        yield {"pixel_values": noise(BATCH * 16, channels, patch, patch), "image_grid_hws": grid[:, 1:]}


def _series(names: list[str], config: Any) -> Iterator[Inputs]:
    length = int(number_of(config, ("context_length",), 32))
    lags = max(getattr(config, "lags_sequence", None) or [0])
    ahead = int(getattr(config, "prediction_length", None) or 4)
    size = int(getattr(config, "input_size", 1) or 1)
    inputs = int(getattr(config, "num_input_channels", 1) or 1)
    if "past_time_features" in names:
        features = int(getattr(config, "num_time_features", 0)) or 1
        shape = (length + lags,) if size == 1 else (length + lags, size)
        yield {
            "past_values": noise(BATCH, *shape),
            "past_time_features": noise(BATCH, length + lags, features),
            "past_observed_mask": torch.ones(BATCH, *shape),
            "future_values": noise(BATCH, ahead, *shape[1:]),
            "future_time_features": noise(BATCH, ahead, features),
        }
    yield {"past_values": noise(BATCH, length, inputs)}
    yield {"past_values": noise(BATCH, 32), "freq": torch.zeros(BATCH, 1, dtype=torch.long)}
    yield {"past_values": noise(BATCH, 32)}


def _with_placeholders(model: Any, text: Inputs, signal: Inputs) -> Iterator[Inputs]:
    """Text and signal; where the model puts features in the place of special tokens, as many of these."""
    config = model.config
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "media_token_index")
    sound = "pixel_values" not in signal
    wanted = [n for n in names if ("audio" in n) == sound]
    token = next((x for n in wanted if type(x := getattr(config, n, None)) is int), None)
    if "input_ids" not in text or token is None:
        yield signal | text
        return
    count = _features(model, signal)
    for each in [count] if count else [4, 16]:
        ids = torch.cat([text["input_ids"][:, :3], torch.full((BATCH, each), token), text["input_ids"][:, 3:]], 1)
        more: Inputs = {}
        parameters = inspect.signature(model.forward).parameters
        if "mm_token_type_ids" in parameters or "token_type_ids" in parameters:
            name = "mm_token_type_ids" if "mm_token_type_ids" in parameters else "token_type_ids"
            more = {name: (ids == token).long()}
        found = text | {"input_ids": ids} | signal
        yield found | more
        if more:
            yield found


def _features(model: Any, signal: Inputs) -> int:
    """How many features a row of the batch gets, by the model's own function."""
    inner = getattr(model, "model", model)
    for name in ("get_image_features", "get_audio_features"):
        function = getattr(model, name, None) or getattr(inner, name, None)
        if function is None or ("image" in name) != ("pixel_values" in signal):
            continue
        given = {key: x for key, x in signal.items() if key in inspect.signature(function).parameters}
        try:
            with torch.no_grad():
                out = function(**given)
        except Exception:  # the guess is wrong, or the function is another one
            return 0
        out = getattr(out, "pooler_output", None) if not isinstance(out, (Tensor, tuple, list)) else out
        out = torch.cat([x.reshape(-1, x.shape[-1]) for x in out]) if isinstance(out, (tuple, list)) else out
        if isinstance(out, Tensor) and out.dim() > 1:
            return out.reshape(-1, out.shape[-1]).shape[0] // BATCH
    return 0
