"""The vector store beyond the standard suite: metrics, indexes, filters, diversity, folders, and its engine."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_kvboost import KVBoostVectorStore
from langchain_kvboost.vectors import Vectors
from test_engine import make_engine

from kvboost_rag import ContextWindowError

FAKE = DeterministicFakeEmbedding(size=16)
METRICS = ("cosine", "ip", "l2")
INDEXES = ("Flat", "HNSW16", "IVF4,Flat")


class Given(Embeddings):
    """Embeds a text ``"1 2"`` as the vector (1, 2)."""

    def embed_documents(self, texts):
        return [[float(x) for x in text.split()] for text in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


def documents(count: int) -> list[Document]:
    return [
        Document(id=f"d{i}", page_content=f"This is text number {i}.", metadata={"n": i, "even": i % 2 == 0})
        for i in range(count)
    ]


def filled(count: int = 40, **options) -> KVBoostVectorStore:
    return KVBoostVectorStore.from_documents(documents(count), FAKE, **options)


def nearest(store_texts, query: str, metric: str) -> list[int]:
    """Order by hand."""
    vectors, wanted = np.array(FAKE.embed_documents(store_texts)), np.array(FAKE.embed_query(query))
    if metric == "l2":
        return list(np.argsort(((vectors - wanted) ** 2).sum(axis=1)))
    if metric == "cosine":
        vectors, wanted = vectors / np.linalg.norm(vectors, axis=1, keepdims=True), wanted / np.linalg.norm(wanted)
    return list(np.argsort(-(vectors @ wanted)))


@pytest.mark.parametrize("metric", METRICS)
def test_the_nearest_come_first_with_the_metrics_own_scores(metric):
    found = filled(metric=metric).similarity_search_with_score("a question", k=5)
    expected = nearest([d.page_content for d in documents(40)], "a question", metric)
    assert [d.metadata["n"] for d, _ in found] == expected[:5]
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=metric != "l2")


def test_scores_are_cosine_inner_product_and_squared_distance():
    scores = {}
    for metric in METRICS:
        store = KVBoostVectorStore.from_texts(["3 4"], Given(), metric=metric)
        ((_, scores[metric]),) = store.similarity_search_with_score("6 0")
    assert scores == {"cosine": pytest.approx(0.6), "ip": pytest.approx(18), "l2": pytest.approx(25)}


@pytest.mark.parametrize("metric", METRICS)
def test_relevance_lies_between_0_and_1_and_falls_with_distance(metric):
    found = filled(metric=metric).similarity_search_with_relevance_scores("a question", k=40)
    scores = [score for _, score in found]
    assert all(0 <= s <= 1 for s in scores)
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]


@pytest.mark.parametrize("index", INDEXES)
def test_more_than_there_are_gives_all(index):
    assert len(filled(9, index_factory=index).similarity_search("q", k=50)) == 9


@pytest.mark.parametrize("index", INDEXES)
def test_a_filter_is_exact_whatever_the_index(index):
    store = filled(index_factory=index)
    assert len(store.similarity_search("q", k=20, filter={"even": True})) == 20
    found = store.similarity_search("q", k=3, filter=lambda d: d.metadata["n"] in (7, 8))
    assert {d.id for d in found} == {"d7", "d8"}
    assert store.similarity_search("q", filter={"nothing": 1}) == []
    retriever = store.as_retriever(search_kwargs={"k": 2, "filter": {"n": 11}})
    assert [d.id for d in retriever.invoke("q")] == ["d11"]


@pytest.mark.parametrize("index", INDEXES)
def test_what_is_deleted_or_replaced_is_never_found(index):
    store = filled(index_factory=index)
    store.delete([f"d{i}" for i in range(30)])
    store.add_documents([Document(id="d35", page_content="Another text.", metadata={"n": -1})])
    found = store.similarity_search("q", k=99)
    assert {d.id for d in found} == {f"d{i}" for i in range(30, 40)}
    assert len(store) == 10
    assert store.get_by_ids(["d35"])[0].page_content == "Another text."
    # Dead vectors do not pile up.
    assert store._vectors.index.ntotal <= 21
    store.delete()
    assert store.similarity_search("q") == []
    store.add_documents(documents(8))
    assert len(store.similarity_search("q", k=8)) == 8


def test_documents_go_in_and_come_out_as_copies():
    given = Document(page_content="Some text.", metadata={"list": [1]})
    store = KVBoostVectorStore(FAKE)
    (first,) = store.add_documents([given])
    assert given.id is None
    given.metadata["list"].append(2)
    (out,) = store.similarity_search("q")
    out.metadata["list"].append(3)
    assert store.get_by_ids([first])[0].metadata == {"list": [1]}


def test_an_id_made_from_text_and_metadata_makes_adding_idempotent():
    store = KVBoostVectorStore(FAKE)
    first = store.add_texts(["one", "two", "one"], [{"a": 1}, {}, {"a": 2}])
    assert store.add_texts(["one", "two", "one"], [{"a": 1}, {}, {"a": 2}]) == first
    assert len(store) == 3


def test_mmr_prefers_what_is_unlike_the_chosen():
    texts = ["1 0.01", "1 0.02", "0.7 0.7", "0 1"]
    store = KVBoostVectorStore.from_texts(texts, Given())
    assert [d.page_content for d in store.max_marginal_relevance_search("1 0", k=2, lambda_mult=1.0)] == texts[:2]
    # 0.5 * cos(query, .) - 0.5 * cos(first, .): both others gain nothing, the opposite is penalised least.
    found = store.max_marginal_relevance_search("1 0", k=2, lambda_mult=0.3)
    assert [d.page_content for d in found] == [texts[0], texts[3]]
    by_vector = store.max_marginal_relevance_search_by_vector([1.0, 0.0], k=3, fetch_k=2)
    assert {d.page_content for d in by_vector} == set(texts[:3])


@pytest.mark.parametrize("index", INDEXES)
def test_mmr_works_with_every_index(index):
    found = filled(index_factory=index).max_marginal_relevance_search("q", k=4, filter={"even": True})
    assert len({d.id for d in found}) == 4
    assert all(d.metadata["even"] for d in found)


def test_too_few_texts_to_train_are_refused_and_nothing_is_added():
    store = KVBoostVectorStore(FAKE, index_factory="IVF16,Flat")
    with pytest.raises(ValueError, match="3 texts are too few to train"):
        store.add_documents(documents(3))
    assert len(store) == 0
    with make_engine() as engine:
        with pytest.raises(ValueError, match="too few"):
            filled(3, engine=engine, index_factory="IVF16,Flat")
        assert engine.documents == []
    store.add_documents(documents(40))
    assert len(store.similarity_search("q", k=4)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "dot"}, "'cosine', 'ip' or 'l2'"),
        ({"index_factory": "Nonsense"}, "faiss can not make index_factory='Nonsense'"),
    ],
)
def test_what_faiss_can_not_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KVBoostVectorStore.from_texts(["a"], FAKE, **options)


def test_bad_calls_are_refused():
    store = filled(3)
    with pytest.raises(ValueError, match="2 ids for 1 documents"):
        store.add_documents(documents(1), ids=["a", "b"])
    with pytest.raises(ValueError, match="k is 0"):
        store.similarity_search("q", k=0)
    with pytest.raises(TypeError, match="unknown arguments: fliter"):
        store.similarity_search("q", fliter={"n": 1})
    with pytest.raises(ValueError, match="length 4, but the index holds vectors of length 16"):
        store.similarity_search_by_vector([1.0] * 4)


# Folders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", INDEXES)
def test_a_folder_gives_back_the_same_store(tmp_path, metric, index):
    store = filled(metric=metric, index_factory=index)
    store.delete(["d3"])
    store.save_local(tmp_path / "store")
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == ["docs.jsonl", "index.faiss", "manifest.json"]
    loaded = KVBoostVectorStore.load_local(tmp_path / "store", FAKE)
    assert loaded.similarity_search_with_score("q", k=9) == store.similarity_search_with_score("q", k=9)
    loaded.add_documents([Document(id="new", page_content="A new text.")])
    assert len(loaded) == 40
    assert len(loaded.max_marginal_relevance_search("q", k=3)) == 3


def test_an_empty_store_can_be_saved(tmp_path):
    KVBoostVectorStore(FAKE).save_local(tmp_path)
    assert KVBoostVectorStore.load_local(tmp_path, FAKE).similarity_search("q") == []


def test_texts_of_any_kind_survive(tmp_path):
    texts = ["line\nbreak", "separator\u2028inside", "quote \" and \\ and \0", "emoji 🦓"]
    KVBoostVectorStore.from_texts(texts, FAKE, ids=list("abcd")).save_local(tmp_path)
    loaded = KVBoostVectorStore.load_local(tmp_path, FAKE)
    assert [d.page_content for d in loaded.get_by_ids(list("abcd"))] == texts


def test_metadata_that_are_no_json_are_refused_and_the_old_folder_stays(tmp_path):
    filled(3).save_local(tmp_path)
    store = filled(4)
    store.add_documents([Document(id="bad", page_content="text", metadata={"when": object()})])
    with pytest.raises(ValueError, match="metadata of document 'bad' can not be written as JSON"):
        store.save_local(tmp_path)
    assert len(KVBoostVectorStore.load_local(tmp_path, FAKE)) == 3


@pytest.mark.parametrize("name", ["index.faiss", "docs.jsonl"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_folder_is_refused_by_the_files_name(tmp_path, name, damage):
    filled(5).save_local(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        path.write_bytes(flipped if damage == "flip" else content[:half])
    with pytest.raises(ValueError, match=f"{name} is (missing|damaged)"):
        KVBoostVectorStore.load_local(tmp_path, FAKE)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', '{"format": 1, "metric": "l2"}'])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    filled(5).save_local(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json is (damaged|not of format|incomplete)"):
        KVBoostVectorStore.load_local(tmp_path, FAKE)


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_a_folder_that_is_no_store_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a folder|holds no manifest.json"):
        KVBoostVectorStore.load_local(tmp_path / folder, FAKE)


def test_a_crash_at_any_moment_leaves_the_old_content_or_the_new(tmp_path, monkeypatch):
    seen = set()
    replace, write = os.replace, Path.open
    for moment in range(12):
        folder = tmp_path / str(moment)
        filled(3).save_local(folder)
        steps = iter(range(100))

        def step(original, *args, moment=moment, steps=steps, **kwargs):
            if next(steps) == moment:
                raise OSError("the power went out")
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *a, step=step: step(replace, *a))
            patch.setattr(Path, "open", lambda *a, step=step, **k: step(write, *a, **k))
            try:
                filled(7).save_local(folder)
            except OSError:
                seen.add("crash")
        seen.add(len(KVBoostVectorStore.load_local(folder, FAKE)))
    assert seen == {"crash", 3, 7}


def test_the_folder_holds_no_pickle(tmp_path):
    filled(5).save_local(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["documents"] == 5
    assert all(json.loads(line) for line in (tmp_path / "docs.jsonl").read_text().splitlines())


# Engine --------------------------------------------------------------------------------------------------------------


def test_kv_is_computed_while_indexing_and_goes_with_the_document():
    with make_engine() as engine:
        store = filled(3, engine=engine)
        assert engine.get_document("d1").text == "This is text number 1."
        assert engine.get_document("d1").metadata["n"] == 1
        store.add_documents([Document(id="d1", page_content="It has another text now.")])
        assert engine.get_document("d1").text == "It has another text now."
        store.delete(["d1"])
        assert [d.id for d in engine.documents] == ["d0", "d2"]


def test_precompute_can_be_turned_off():
    with make_engine() as engine:
        filled(3, engine=engine, precompute=False)
        assert engine.documents == []


def test_a_text_too_long_for_the_model_leaves_store_and_engine_unchanged():
    with make_engine() as engine:
        store = filled(2, engine=engine)
        with pytest.raises(ContextWindowError):
            store.add_documents([Document(id="long", page_content="x" * 2000)])
        assert len(store) == len(engine.documents) == 2


def test_a_loaded_store_tells_its_engine(tmp_path):
    filled(3).save_local(tmp_path)
    with make_engine() as engine:
        KVBoostVectorStore.load_local(tmp_path, FAKE, engine=engine)
        assert {d.id for d in engine.documents} == {"d0", "d1", "d2"}


@pytest.mark.parametrize("index", ["Flat", "IVF2,Flat"])
def test_first_texts_added_from_threads_are_all_found(index, monkeypatch):
    # The window between looking for an index and setting one is small; a made index that takes a while opens it.
    made = Vectors._made
    monkeypatch.setattr(Vectors, "_made", lambda self, dim: (made(self, dim), time.sleep(0.02))[0])
    for _ in range(3):
        store, barrier = KVBoostVectorStore(FAKE, index_factory=index), Barrier(4)

        def add(n: int, store=store, barrier=barrier) -> None:
            barrier.wait()
            store.add_texts([f"text {n} {i}" for i in range(5)])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(4)))
        assert len(store) == store._vectors.index.ntotal == 20
        assert len(store.similarity_search("a question", k=30)) == 20


def test_ids_metadata_and_texts_that_do_not_match_are_refused():
    store = KVBoostVectorStore(FAKE)
    with pytest.raises(ValueError, match="1 ids for 2 documents; give one for each"):
        store.add_texts(["One.", "Two."], ids=["1"])
    with pytest.raises(ValueError, match="1 metadatas for 2 texts; give one for each"):
        store.add_texts(["One.", "Two."], [{"n": 1}])
    with pytest.raises(ValueError, match="0 ids for 2 documents"):
        KVBoostVectorStore.from_texts(["One.", "Two."], FAKE, ids=[])
    with pytest.raises(ValueError, match="texts is a single text; pass a list of texts"):
        store.add_texts("One.")
    assert len(store) == 0
    assert store.add_texts((t for t in ["One.", "Two."]), [{"n": 1}, {"n": 2}], ids=["1", "2"]) == ["1", "2"]
