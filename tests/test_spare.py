"""Memory of finished requests is used again, and never while somebody holds it."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.model import ModelRunner
from kvboost_rag.model.spare import SpareMemory

CPU = torch.device("cpu")


def address(cache) -> int:
    return cache.keys.data_ptr()


def test_a_cache_is_free_as_soon_as_nobody_holds_it():
    runner = ModelRunner(tiny_model("llama"))
    gc.disable()
    try:
        first = runner.request_cache(50)
        where = address(first)
        second = runner.request_cache(50)
        assert address(second) != where
        del first
        third = runner.request_cache(45)
        assert address(third) == where
        assert third.capacity == 45
        assert address(runner.request_cache(40)) not in (where, address(second))
    finally:
        gc.enable()


def test_what_does_not_fit_is_not_taken():
    spare, shape = SpareMemory(), (2, 1, 3, 40, 8)
    for other, dtype in (((2, 1, 3, 41, 8), torch.float32), ((2, 1, 3, 31, 8), torch.float32), (shape, torch.float16)):
        spare.give(torch.empty(shape), torch.empty(shape))
        keys, values = spare.take(other, dtype, CPU)
        assert keys.shape == values.shape == other
        assert keys.dtype == dtype
    spare.give(torch.empty(shape), torch.empty(shape))
    assert spare.take((2, 1, 3, 35, 8), torch.float32, CPU)[0].shape == shape
    spare.give(torch.empty(shape), torch.empty(shape))
    spare.close()
    spare.give(torch.empty(shape), torch.empty(shape))
    assert spare.take((2, 1, 3, 35, 8), torch.float32, CPU)[0].shape[3] == 35


def test_answers_do_not_depend_on_what_the_memory_held():
    texts = [f"Document number {i} tells of {w} and of nothing else." for i, w in enumerate("xyz")]
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0) as engine:
        engine.add_documents([Document(str(i), text) for i, text in enumerate(texts)])
        options = {"documents": ["2", "0", "1"], "repair": "none"}
        fresh = engine.score("Why?", [1, 2, 3], **options).logits
        engine.score("Why, how?", [1, 2, 3], documents=["1", "2", "0"], repair="none")
        spare = engine._runner.spare._pair
        assert spare is not None
        with torch.inference_mode():
            spare[0].fill_(9.0)
            spare[1].fill_(9.0)
        again = engine.score("Why?", [1, 2, 3], **options).logits
        assert engine._runner.spare._pair[0].data_ptr() == spare[0].data_ptr()
        assert torch.equal(again, fresh)
    assert engine._runner.spare._pair is None


@pytest.mark.parametrize("longer", [1, 4])
def test_a_longer_buffer_does_not_keep_prompts_out_of_the_prefix_cache(longer):
    text = "Document one tells of nothing else at all. "
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0) as engine:
        engine.generate(text * longer + "Then more.", max_tokens=1)
        cache = engine._runner.new_cache(len(engine.tokenize(text)) + 2)
        engine._prefixes._max_bytes = cache.keys.nbytes + cache.values.nbytes
        for expected in (False, True, True):
            report = engine.generate(text, max_tokens=1).report
            assert (report.tokens(SpanKind.EXACT) > 0) is expected
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for e in engine._prefixes._entries
                if not e.pinned for t in (e.cache.keys, e.cache.values)}  # fmt: skip
        assert engine.stats.prefix_bytes == sum(held.values()) <= engine._prefixes._max_bytes


def test_inference_mode_of_a_caller_leaves_nothing_behind():
    texts = [f"Document number {i} tells of {w} and of nothing else." for i, w in enumerate("xyz")]
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0) as engine:
        engine.add_documents([Document(str(i), text) for i, text in enumerate(texts)])
        options = {"documents": ["2", "0", "1"], "max_tokens": 4, "temperature": 0.0}
        with torch.inference_mode():
            first = engine.generate("Why?", **options).token_ids
        assert engine.generate("Why?", **options).token_ids == first


def test_nothing_is_kept_after_close():
    engine = KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0)
    stream = engine.stream("Why did it run?", max_tokens=9)
    next(stream)
    engine.close()
    stream.close()
    del stream
    assert engine._runner.spare._pair is None
    assert not engine._abandoned


def test_a_stream_keeps_its_memory_while_others_ask():
    texts = [f"Document number {i} tells of {w} and of nothing else." for i, w in enumerate("xyz")]
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), max_prefix_bytes=0) as engine:
        engine.add_documents([Document(str(i), text) for i, text in enumerate(texts)])
        options = {"documents": ["2", "0", "1"], "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        alone = engine.generate("Why?", **options).token_ids
        stream, got = engine.stream("Why?", **options), []
        for delta in stream:
            got += delta.token_ids
            engine.generate("Who?", **options)
        assert tuple(got) == alone
