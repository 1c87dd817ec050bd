"""Trainers over two ranks, one of which has a finding: what it asks of the trainer, all ranks do."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from levelhead.sinks import hf_callback, lightning_callback
from ranks import Ranks

WORLD, SHOWN, LAST = 2, 3, 5  # ranks, the step that has the finding, the last step


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(WORLD, timeout=30.0)
    yield ranks
    ranks.close()


def over_ranks(rank: int) -> None:
    """What a launcher tells a trainer."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already


def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this rank gathers by `all_gather_object` from here on."""
    seen: list[Any] = []
    gather = dist.all_gather_object

    def counted(everything: Any, own: Any, group: Any = None) -> None:
        seen.append(own)
        gather(everything, own, group=group)

    monkeypatch.setattr(dist, "all_gather_object", counted)
    return seen


def hugging_face(rank: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Queries of rank 1 alone become large in one step."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    over_ranks(rank)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=50, max_position_embeddings=32))

    def large(module: Any, given: Any, out: Any) -> Any:
        return out * 1e7 if rank == 1 and trainer.state.global_step >= SHOWN - 1 else out

    model.model.layers[0].self_attn.q_proj.register_forward_hook(large)
    made = TrainingArguments(
        path,
        max_steps=LAST,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    rows = torch.randint(0, 50, (4 * LAST, 8), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, made, train_dataset=data, callbacks=[hf_callback(**options)])
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        seen = exchanges(patch)
        began = time.perf_counter()
        trainer.train()
        dist.barrier()
    words = [own for own in seen if isinstance(own, list) and set(own) <= {"save", "stop"}]
    saved = sorted(name.name for name in Path(path).glob("checkpoint-*"))
    return {"end": trainer.state.global_step, "words": words, "saved": saved, "seconds": time.perf_counter() - began}


@pytest.mark.parametrize(
    ("options", "end", "saved", "words"),
    [
        ({"on_finding": "save"}, LAST, [SHOWN], LAST),
        ({"on_finding": ["save", "stop"]}, SHOWN, [SHOWN], SHOWN),
        ({"on_finding": "stop", "every": 3}, SHOWN, [], 1),
        ({"on_finding": "stop", "after_step": id}, SHOWN, [], SHOWN),
        ({"on_finding": "stop", "gather": True}, SHOWN, [], 0),
        ({"on_finding": "warn"}, LAST, [], 0),
    ],
    ids=["save", "save and stop", "every third step", "counted early", "gathered", "warn"],
)
def test_every_rank_does_what_the_finding_of_one_asks(
    two: Ranks, tmp_path: Path, options: dict[str, Any], end: int, saved: list[int], words: int
) -> None:
    """And nothing is exchanged where findings ask nothing, or ranks have the same ones."""
    for rank, found in enumerate(two.run(hugging_face, str(tmp_path), options)):
        assert found["end"] == end and found["seconds"] < 25
        assert found["saved"] == [f"checkpoint-{step}" for step in saved]
        assert len(found["words"]) == words
        assert all(not said or rank == 1 for said in found["words"])


def lightning(rank: int, path: str) -> dict[str, Any]:
    import pytorch_lightning as pl

    over_ranks(rank)

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)

        def training_step(self, batch: Any, index: int) -> Any:
            (x,) = batch
            large = 1e7 if rank == 1 and self.trainer.global_step >= SHOWN - 1 else 1.0
            return self.attention(x * large, x, x, need_weights=False)[0].square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-4)

    rows = torch.randn(4 * LAST, 10, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "default_root_dir": path}
    callback = lightning_callback(on_finding="stop")
    trainer = pl.Trainer(
        max_steps=LAST, accelerator="cpu", devices=WORLD, strategy="ddp", callbacks=[callback], **quiet
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Tiny(), data)
    dist.barrier()
    return {"end": trainer.global_step}


def test_lightning_stops_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    assert two.run(lightning, str(tmp_path)) == [{"end": SHOWN}] * WORLD
