"""`levelhead doctor` as people run it: exit codes, stdout, files; and `lh.testing.assert_level`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import levelhead as lh
from levelhead.cli.main import main
from levelhead.diagnosis.diagnose import diagnose
from levelhead.runs import record
from levelhead.watching import doctor

QUERY = "encoder.layer.1.attention.self.query.weight"


def levelhead(*arguments: object, given: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "levelhead", "doctor", *map(str, arguments)],
        capture_output=True,
        input=given,
        env=os.environ | {"PYTHONUTF8": "1", "COLUMNS": "80"},
        timeout=280,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def here(capsys: pytest.CaptureFixture[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has torch and transformers already: an interpreter of its own takes 5 s."""
    code = main(["doctor", *map(str, arguments)])
    told = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, told.out, told.err)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one message on stderr, nothing on stdout."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("levelhead: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def minilm() -> Path:
    path = lh.models.available()["minilm"].path
    assert path is not None
    return path


def with_tokenizer(model: Any, path: Path, minilm: Path) -> Path:
    model.save_pretrained(path)
    for file in minilm.glob("*token*"):
        shutil.copy(file, path)
    for file in minilm.glob("vocab*"):
        shutil.copy(file, path)
    return path


def bert(**options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    return transformers.BertModel(transformers.BertConfig(**(sizes | options)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Path:
    """A freshly initialised BERT of two layers of four heads."""
    return with_tokenizer(bert(), tmp_path_factory.mktemp("models") / "small", minilm)


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """The same, as a run ends whose logits grew: the queries of its last layer are huge."""
    path = tmp_path_factory.mktemp("models") / "exploded"
    shutil.copytree(small, path)
    weights = load_file(path / "model.safetensors")
    weights[QUERY] = weights[QUERY] * 1e5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


# ---- real models ------------------------------------------------------------


def test_the_page_goes_to_stdout_if_asked() -> None:
    done = levelhead("minilm", "--tokens", 8, "--html", "-")
    assert done.returncode == 0 and done.stdout.startswith("<!doctype html>") and "wrote" not in done.stdout
    refused(levelhead("minilm", "--json", "-", "--html", "-"), "one of them on stdout")


def test_minilm_is_fine(tmp_path: Path) -> None:
    html = tmp_path / "heads.html"
    done = levelhead("minilm", "--json", "-", "--html", html)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)  # and nothing else
    assert {finding["severity"] for finding in found["findings"]} <= {"note"}
    run = record.from_json(found)
    assert [len(seen.tally) for seen in run.latest] == [12] * 6
    assert {seen.facts.scale for seen in run.latest} == {32**-0.5}
    assert found["counterfactual"]["as it is"] == found["counterfactual"]["1/sqrt(d_k)"]
    assert found["counterfactual"]["none"]["saturated"] > 36  # of 72
    page = html.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert page.count('class="cell"') == 72
    assert os.listdir(tmp_path) == ["heads.html"]


def test_smollm2_is_fine() -> None:
    done = levelhead("smollm2", "--tokens", 96)
    assert done.returncode == 0
    assert "270 heads in 30 attention modules" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "left out the last" in done.stdout


# ---- in one process: what is shown and written -------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["doctor", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_a_fresh_model_is_fine(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, small)
    assert code == 0
    for words in (
        "small (BertModel): 8 heads in 2 attention modules",
        "encoder.layer.*.attention.self",
        "The same heads under other scales:",
        "2 of 2 attention modules seen",
        "tokens of the built-in sample",
        "a forward pass takes",
        "watching took",
    ):
        assert words in out
    assert "\nhead " not in out
    assert run(capsys, small, "--table")[1].count("\nhead ") == 2


def test_a_model_that_exploded_is_not(exploded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, file = tmp_path / "a.html", tmp_path / "a.json"
    code, out = run(capsys, exploded, "--html", html, "--json", file)
    assert code == 1
    assert "error: " in out or "warning: " in out
    assert f"wrote {html}" in out and f"wrote {file}" in out
    assert 'class="finding error"' in (page := html.read_text()) or 'class="finding warning"' in page
    found = diagnose(file)
    assert found.worst in ("warning", "error")
    assert found.to_json() == [
        one | {"head": tuple(one["head"]) if isinstance(one["head"], list) else one["head"]}
        for one in json.loads(file.read_text())["findings"]
    ]


def test_against_names_what_changed_most(
    small: Path, exploded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, html = tmp_path / "a.json", tmp_path / "a.html"
    options = ("--against", small, "--json", file, "--html", html)
    code, out = run(capsys, exploded, *options)
    assert code == 1
    assert "From small (BertModel) to exploded (BertModel):" in out
    most = out[out.index("changed most:") :].splitlines()[1:]
    assert [line.split(",")[0].strip() for line in most[:4]] == ["encoder.layer.1.attention.self"] * 4
    found = json.loads(file.read_text())
    assert found["comparison"]["changes"][0]["module"] == "encoder.layer.1.attention.self"
    assert found["against"]["model"] == "small (BertModel)"
    assert "From small (BertModel) to exploded (BertModel)" in html.read_text()


def test_a_given_text_is_read(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One two three. " * 40)
    code, out = run(capsys, small, "--text", text, "--rows", 8, "--threads", 1)
    assert code == 0
    assert "of the text in 1 window" in out
    assert "maxima are lower bounds" in out


def test_threads_are_given_back(small: Path) -> None:
    before = torch.get_num_threads()
    doctor.doctor(small, "A few words.", threads=1)
    assert torch.get_num_threads() == before


def test_windows_hold_the_whole_text_and_no_padding(small: Path) -> None:
    opened = lh.models.open(small)
    tokenizer = opened.tokenizer
    text = "word " * 1200
    windows, left_out = doctor._windows(opened, text, 1100)
    assert left_out == 100
    assert sum(window.numel() for window in windows) == 1100 + 2 * 3
    for window in windows:
        assert window.shape[1] <= 512
        assert set(window[:, 0].tolist()) == {tokenizer.cls_token_id}
        assert set(window[:, -1].tolist()) == {tokenizer.sep_token_id}
        assert not (window == tokenizer.pad_token_id).any()


def test_an_encoder_with_a_decoder_is_read_through(tmp_path: Path, minilm: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=30522, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    path = with_tokenizer(transformers.T5ForConditionalGeneration(config), tmp_path / "t5", minilm)
    seen = doctor.doctor(path, "A few words to read.")
    assert len(seen.run.latest) == 3  # of the encoder, of the decoder, and across
    assert seen.healthy  # T5 ships without a scale


# ---- bad input: exit code 2 and one message, through a real process where that takes no seconds ----------


def test_an_unknown_name() -> None:
    refused(levelhead("gpt-9"), "'gpt-9'", "minilm")


@pytest.mark.parametrize("as_directory", [True, False])
def test_a_pickle(tmp_path: Path, as_directory: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1)}, file)
    (tmp_path / "config.json").write_text("{}")
    refused(levelhead(tmp_path if as_directory else file), "pytorch_model.bin")


@pytest.mark.parametrize("keep", [0, 4, 2000, -1])
def test_truncated_safetensors(small: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut"
    shutil.copytree(small, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    page = tmp_path / "page.html"
    refused(levelhead(path, "--html", page, "--json", "-"), "model.safetensors")
    assert not page.exists()


def test_a_model_without_attention(tmp_path: Path, minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    config = transformers.FNetConfig(vocab_size=30522, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    path = with_tokenizer(transformers.FNetModel(config), tmp_path / "fnet", minilm)
    capsys.readouterr()  # what saving the model printed
    refused(here(capsys, path, "--json", tmp_path / "a.json"), "a model with attention", "FNetModel")
    assert not (tmp_path / "a.json").exists()


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    """It reads random token ids, and says so; a text cannot be read."""
    bert().save_pretrained(tmp_path / "bare")
    examined = doctor.doctor(tmp_path / "bare", tokens=64)
    assert examined.tokens == 64 and examined.run.latest
    assert examined.run.notes[0] == "read 64 random token ids in 1 window of up to 64"
    assert any("no tokenizer beside the weights" in note for note in examined.run.notes)
    with pytest.raises(lh.LevelheadError, match="text: expected a tokenizer beside the weights"):
        doctor.doctor(tmp_path / "bare", "some words")


@pytest.mark.parametrize("text", [b"", b" \n\t ", b"\xff\xfe\x00broken"])
def test_text_that_is_none(small: Path, text: bytes) -> None:
    refused(levelhead(small, "--text", "-", given=text), "text")


def test_text_that_cannot_be_read(small: Path, tmp_path: Path) -> None:
    refused(levelhead(small, "--text", tmp_path / "none.txt"), "none.txt", "No such file")
    refused(levelhead(small, "--text", tmp_path), "Is a directory")


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_files_that_cannot_be_written(small: Path, tmp_path: Path, option: str) -> None:
    refused(levelhead(small, option, tmp_path / "no" / "such"), option)
    refused(levelhead(small, option, tmp_path), option, "the directory")


@pytest.mark.parametrize("option", ["--rows", "--tokens", "--threads"])
def test_numbers_that_are_too_small(small: Path, option: str) -> None:
    refused(levelhead(small, option, "0"), option.strip("-"), "at least 1")


def test_another_architecture_cannot_be_compared(
    small: Path, tmp_path: Path, minilm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = with_tokenizer(bert(num_attention_heads=8), tmp_path / "other", minilm)
    page = tmp_path / "page.html"
    capsys.readouterr()  # what saving the model printed
    done = here(capsys, small, "--against", other, "--html", page)
    refused(done, "has 8 heads of width 8, not 4 of 16", "one architecture")
    assert not page.exists()


def test_wrong_usage_talks_on_stderr() -> None:
    done = levelhead()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: levelhead doctor" in done.stderr


# ---- lh.testing.assert_level ------------------------------------------------


class Attention(nn.Module):
    """One layer with the scale of the test."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        self.scale = scale
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training and not torch.is_grad_enabled()
        q, k, v = (
            project(x).unflatten(-1, (4, 16)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.dropout(out.transpose(1, 2).flatten(2))


def attention(scale: float | None) -> Attention:
    torch.manual_seed(0)
    return Attention(scale)


X = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [X, (X,), [X], {"x": X}])
def test_a_level_model_passes_however_the_batch_comes(batch: Any) -> None:
    found = lh.testing.assert_level(attention(None), batch)
    assert [len(seen.tally) for seen in found.latest] == [4]


def test_the_model_is_left_as_it_was() -> None:
    model = attention(None)
    model.train()
    model.dropout.eval()
    lh.testing.assert_level(model, X)
    assert (model.training, model.q_proj.training, model.dropout.training) == (True, True, False)
    with pytest.raises(lh.LevelheadError, match="TypeError"):
        lh.testing.assert_level(model, (X, X))
    assert (model.training, model.dropout.training) == (True, False)


@pytest.mark.parametrize("scale", [1.0, 1 / 16, 1 / 8, 4.0])
def test_a_wrong_scale_fails_and_says_so(scale: float) -> None:
    with pytest.raises(AssertionError) as caught:
        lh.testing.assert_level(attention(scale), X)
    message = str(caught.value)
    for words in ("Attention is not level", "warning: wrong scale", "why: ", "try: "):
        assert words in message


def test_what_is_allowed_or_expected_passes() -> None:
    lh.testing.assert_level(attention(1.0), X, allow=["wrong scale"])
    lh.testing.assert_level(attention(1.0), X, expected_scale=1.0)


def test_seeing_nothing_is_no_pass() -> None:
    with pytest.raises(lh.LevelheadError, match="none was seen"):
        lh.testing.assert_level(nn.Linear(64, 64), X)
