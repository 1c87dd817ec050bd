"""`levelhead doctor MODEL --preflight`: the report, the JSON and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from levelhead.cli.main import main
from levelhead.models import Opened
from levelhead.preflight_checks.local import preflight_opened


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=99)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def test_a_model_without_tokenizer_is_flown_on_random_ids() -> None:
    model = llama()
    opened = Opened("llama", model, None, Path("llama"))
    result = preflight_opened(opened, "no words")
    assert result.passed
    assert result["padding independence"].verdict == result["causality"].verdict == "passed"
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, :8] = 0
    failed = preflight_opened(opened, "no words")
    assert not failed.passed
    assert failed["applied weights"].module == "model.layers.1.self_attn"


def test_doctor_prints_the_report_and_fails_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(), unk_token="[UNK]")
    opened = Opened("bert", model, tokenizer, tmp_path)
    monkeypatch.setattr("levelhead.models.open", lambda what: opened)
    monkeypatch.setattr("levelhead.models.check_openable", lambda what: None)
    assert main(["doctor", "bert", "--preflight"]) == 0
    assert "Pre-flight of BertModel: no findings" in capsys.readouterr().out
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight[:, :12] = 0
    assert main(["doctor", "bert", "--preflight", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)["preflight"]["findings"]
    assert [one["kind"] for one in found if one["severity"] != "note"] == ["heads without effect"]


def _words() -> object:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 5, "of": 6, "and": 7, "a": 8}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
