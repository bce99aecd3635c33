"""The comparison of a prompt's KV with full prefill's."""

from __future__ import annotations

import pytest
import torch
from tiny import CORE, tiny_model, tiny_tokenizer

from kvboost_rag import Document, KVBoostEngine, SpanKind
from kvboost_rag.deviation import relative_distance

ZEBRA = Document("zebra", "The zebra ran over the plain. It was fast and striped, and it saw a lion.")
MUSIC = Document("music", "A fugue begins with one voice alone. Others join, one by one, each with the same theme.")
PROMPT = {"prompt": "Why?", "documents": [ZEBRA, MUSIC]}


def made(family="llama", **options):
    engine = KVBoostEngine(tiny_model(family), tiny_tokenizer(), **options)
    engine.add_documents([ZEBRA, MUSIC])
    return engine


@pytest.mark.parametrize("family", CORE)
def test_exact_tokens_and_the_lowest_layer_do_not_deviate(family):
    with made(family) as engine:
        found = engine.deviation(**PROMPT, repair="none")
    layers, tokens = found.values.shape
    assert found.keys.shape == (layers, tokens)
    assert tokens == found.spans[-1].end
    exact = [s for s in found.spans if s.kind is SpanKind.EXACT]
    assert any(s.document_id == "zebra" for s in exact)
    for span in exact:
        assert found.values[:, span.start : span.end].max() < 1e-4
    # The second document was moved: what depends on the token alone is the same all the same.
    assert found.keys[0].max() < 1e-4
    assert found.values[0].max() < 1e-4
    assert found.mean("zebra") < 1e-4 < 1e-3 < found.mean("music")


def test_a_repair_of_everything_leaves_no_deviation_and_a_smaller_one_some():
    with made() as engine:
        means = [engine.deviation(**PROMPT, repair=f"selective:{n}").mean() for n in (0, 40, 10_000)]
    assert means[0] > means[1] > means[2]
    assert means[2] < 1e-4


def test_a_deviation_keeps_no_prompt():
    with made() as engine:
        before = engine.stats.prefix_bytes
        engine.deviation(**PROMPT)
        assert engine.stats.prefix_bytes == before


def test_what_can_not_be_compared_is_refused():
    with KVBoostEngine(tiny_model("llama"), tiny_tokenizer(), reuse="off") as engine:
        with pytest.raises(ValueError, match="nothing is reused for this prompt: reuse is off"):
            engine.deviation("Why?")
    with made() as engine:
        found = engine.deviation(**PROMPT)
        with pytest.raises(ValueError, match="does not hold document 'rain'"):
            found.mean("rain")


def test_the_distance_is_relative_to_the_reference():
    reference = torch.ones(1, 2, 3, 2)
    own = reference.clone()
    own[0, :, 1] = 0.0
    own[0, :, 2] = 1.5
    torch.testing.assert_close(relative_distance(own, reference), torch.tensor([[0.0, 1.0, 0.5]]))
