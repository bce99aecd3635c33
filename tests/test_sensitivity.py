"""The sensitivity that is stored with a document is what another context changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine
from kvboost_rag.generic_texts import PROBE_TEXT
from kvboost_rag.model import ModelRunner
from kvboost_rag.sensitivity import SensitivityMeter

TEXTS = ["It was seven.", "The zebra ran over the plain. It was fast and striped, and it saw a lion there."]


def encoded_values(runner: ModelRunner, context: list[int], own: list[int]) -> torch.Tensor:
    """``[layers, kv_heads, tokens, head_dim]`` by one forward over everything."""
    ids = torch.tensor(context + own)
    cache, positions = runner.new_cache(len(ids)), torch.arange(len(ids))
    runner.encode(ids[None], positions, positions, cache, len(ids))
    return cache.values[:, 0, :, len(context) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_relative_change_of_the_values_of_layers_1_and_2(family):
    runner = ModelRunner(tiny_model(family))
    one, other, documents = [3, 4, 5], [9, 8, 7, 6, 5], [[10, 20, 30, 40], [50, 60]]
    values = [encoded_values(runner, one, own) for own in documents]
    expected = []
    for own, here in zip(documents, values, strict=True):
        there = encoded_values(runner, other, own)
        size = here[1:3].square().sum(dim=(1, 3)).mean(-1, keepdim=True)
        expected.append(((there - here)[1:3].square().sum(dim=(1, 3)) / size).mean(dim=0))
    padded = [torch.nn.functional.pad(v, (0, 0, 0, 4 - v.shape[2])) for v in values]
    ids = torch.tensor([[10, 20, 30, 40], [50, 60, 60, 60]])
    got = SensitivityMeter(runner, np.array(other)).measure(ids, [4, 2], torch.stack(padded, dim=1))
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        assert (g - e).abs().max() < 1e-4
        assert g.min() > 0


def test_after_the_same_context_nothing_changes():
    runner = ModelRunner(tiny_model("llama"))
    values = encoded_values(runner, [3, 4, 5], [10, 20, 30])
    (got,) = SensitivityMeter(runner, np.array([3, 4, 5])).measure(torch.tensor([[10, 20, 30]]), [3], values[:, None])
    assert got.max() < 1e-9


def test_it_is_kept_with_the_chunks_in_both_tiers_and_reaches_the_plan(tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    with KVBoostEngine(model, tokenizer, cache_dir=tmp_path) as engine:
        engine.add_documents(documents)
        other = engine._context_ids([PROBE_TEXT])
        assert len(other) > len(PROBE_TEXT)
        kept = {i: engine._library._store.get(i, entry_ids(engine, i)).sensitivity for i in engine._library._store}
        assert all(0 < s.min() and s.dtype == torch.float32 for s in kept.values())
    with KVBoostEngine(model, tokenizer, cache_dir=tmp_path) as engine:
        engine.add_documents(documents)
        for prefix, sensitivity in kept.items():
            assert torch.equal(engine._library._store.get(prefix, entry_ids(engine, prefix)).sensitivity, sensitivity)


def entry_ids(engine: KVBoostEngine, prefix: str):
    return next(c.token_ids for r in engine._registry for c in r.chunks if c.key.prefix == prefix)
