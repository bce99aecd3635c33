"""What an engine costs before it holds any document: seconds of the check at load, and memory beside the model's."""

from __future__ import annotations

import argparse
import json
import time

from kvboost_rag import KVBoostEngine
from kvboost_rag.loading import load_model
from kvboost_rag.model import check_support


def resident_bytes() -> int:
    """Return the memory of this process, from Linux's ``/proc``."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def measured(name: str) -> dict[str, float]:
    """Load a model, run it once, check it, and make an engine."""
    model, tokenizer = load_model(name)
    weights = sum(p.nbytes for p in model.parameters())
    model(**tokenizer("A first forward.", return_tensors="pt"))
    bare, start = resident_bytes(), time.perf_counter()
    check_support(model)
    check, start = time.perf_counter() - start, time.perf_counter()
    with KVBoostEngine(model, tokenizer):
        engine = time.perf_counter() - start
        return {"check_s": check, "engine_s": engine, "weights_bytes": weights, "bare_bytes": bare,
                "engine_bytes": resident_bytes(), "more": resident_bytes() / bare - 1}  # fmt: skip


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--json", action="store_true")
options = parser.parse_args()
numbers = measured(options.model)
print(json.dumps(numbers) if options.json else "\n".join(f"{k}: {v:.4g}" for k, v in numbers.items()))
