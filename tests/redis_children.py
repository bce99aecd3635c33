"""A process that ingests documents over a Redis server and ends without closing its engine."""

from __future__ import annotations

import json
import sys

import torch
from test_exact_limits import DOCUMENTS, TEXTS
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import KVBoostEngine, RedisTier
from kvboost_rag.chunking import AdaptiveChunker


def main(url: str) -> None:
    torch.set_num_threads(1)
    tier = RedisTier(url, prefill_rate=1.0)
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), chunker=AdaptiveChunker(target=24), store=tier)
    engine.add_documents(DOCUMENTS)
    result = engine.generate("Why?", documents=list(TEXTS), max_tokens=8, temperature=0)
    sys.stdout.write(json.dumps({"token_ids": result.token_ids, "reused": result.report.reused_share}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
