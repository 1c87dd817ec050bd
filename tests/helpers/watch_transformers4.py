"""What `test_watch_transformers4` runs with transformers 4: prints one line of JSON per case."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import levelhead as lh
from tiny_models import MODELS
from watched import outcome

torch.set_num_threads(1)


def report(name: str, implementation: str, *, served: bool = False) -> None:
    tiny = MODELS[name]
    model = tiny.make(implementation)
    interface = type(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
    module = sys.modules[type(model).__module__]
    before = (interface.__getitem__, getattr(module, "eager_attention_forward", None))
    with lh.torch.huggingface.use(model) if served else nullcontext():
        plain = outcome(model, lambda: model(**tiny.inputs()))
        with lh.watch(model) as w:
            looked_at = outcome(model, lambda: model(**tiny.inputs()))
    line = {
        "version": transformers.__version__,
        "case": [name, implementation, served],
        "how": sorted({record.facts.how for record in w.last.records}),
        "modules": sorted(record.module for record in w.last.records),
        "heads": sorted({len(record.tally) for record in w.last.records}),
        "kv_heads": sorted({record.facts.kv_heads for record in w.last.records}),
        "softcap": sorted({record.facts.softcap or 0.0 for record in w.last.records}),
        "readings": sorted({record.facts.scale_reading for record in w.last.records}),
        "unseen": [seen.module for seen in w.coverage() if not seen.seen],
        "identical": all(torch.equal(a, b) for a, b in zip(plain, looked_at, strict=True)),
        "restored": before == (interface.__getitem__, getattr(module, "eager_attention_forward", None)),
    }
    if implementation != "flex_attention" and "generate" in dir(model) and name == "Llama":
        given = tiny.inputs()["input_ids"]
        wanted = model.generate(given, max_new_tokens=6, do_sample=False)
        with lh.watch(model):
            found = model.generate(given, max_new_tokens=6, do_sample=False)
        line["identical"] = line["identical"] and torch.equal(wanted, found)
    print(json.dumps(line))


for name in ("Llama", "BERT", "Gemma-2"):
    report(name, "eager")
for name in ("Llama", "BERT"):
    report(name, "sdpa")
    report(name, "sdpa", served=True)
report("Gemma-2", "sdpa")
