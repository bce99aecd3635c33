"""The retriever and the counting of retrievals, on a tiny model."""

from __future__ import annotations

import pytest
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_kvboost import (
    ChatKVBoost,
    KVBoostRetriever,
    KVBoostVectorStore,
    RetrievalFrequencyHandler,
    track_retrievals,
)
from test_engine import MUSIC, RAIN, ZEBRA, make_engine

TEXTS = {"zebra": ZEBRA, "music": MUSIC, "rain": RAIN}
DOCUMENTS = [Document(id=name, page_content=text) for name, text in TEXTS.items()]


@pytest.fixture
def engine():
    with make_engine(repair="none") as made:
        yield made


@pytest.fixture
def store():
    """A store that no engine knows of."""
    return KVBoostVectorStore.from_documents(DOCUMENTS, DeterministicFakeEmbedding(size=8))


@pytest.fixture
def plain(store):
    return store.as_retriever(search_kwargs={"k": 2})


def counts(engine) -> dict[str, int]:
    return {d.id: engine.usage(d.id).retrieved for d in engine.documents}


def ids(documents) -> set[str]:
    return {document.id for document in documents}


def test_it_returns_what_the_other_returns_and_computes_what_it_has_not_seen(engine, plain):
    found = KVBoostRetriever(retriever=plain, engine=engine).invoke("q")
    assert found == plain.invoke("q")
    assert ids(engine.documents) == ids(found)
    assert counts(engine) == dict.fromkeys(ids(found), 1)


async def test_async_is_the_same(engine, plain):
    found = await KVBoostRetriever(retriever=plain, engine=engine).ainvoke("q", k=1)
    assert ids(found) == ids(engine.documents)
    assert counts(engine) == dict.fromkeys(ids(found), 1)


def test_everything_can_be_turned_off(engine, plain):
    off = {"register_documents": False, "prefetch": False, "count": False}
    KVBoostRetriever(retriever=plain, engine=engine, **off).invoke("q")
    assert engine.documents == []
    KVBoostRetriever(retriever=plain, engine=engine, prefetch=False, count=False).invoke("q")
    assert set(counts(engine).values()) == {0}
    with pytest.raises(ValueError, match="k is 0"):
        KVBoostRetriever(retriever=plain, engine=engine, k=0).invoke("q")


def test_the_callbacks_of_the_inner_retriever_are_children(engine, plain):
    class Seen(BaseCallbackHandler):
        starts: list = []

        def on_retriever_start(self, serialized, query, *, run_id, parent_run_id=None, **kwargs):
            self.starts.append((run_id, parent_run_id))

    seen = Seen()
    KVBoostRetriever(retriever=plain, engine=engine).invoke("q", config={"callbacks": [seen]})
    (outer, none), (_, parent) = seen.starts
    assert (none, parent) == (None, outer)


def test_a_handler_counts_any_retriever(engine, plain):
    handler = RetrievalFrequencyHandler(engine, register_documents=True)
    for _ in range(2):
        found = plain.invoke("q", config={"callbacks": [handler]})
    assert handler.retrieved == dict.fromkeys(ids(found), 2) == counts(engine)


def test_what_the_engine_does_not_know_is_told_apart(engine, plain):
    handler = RetrievalFrequencyHandler(engine)
    plain.invoke("q", config={"callbacks": [handler]})
    assert (handler.retrieved, handler.unknown) == ({}, 2)


class Through(BaseRetriever):
    """Asks another retriever from inside a chain."""

    inner: BaseRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        chain = RunnableLambda(lambda text: self.inner.invoke(text)[:1])
        return chain.invoke(query, config={"callbacks": run_manager.get_child()})


@pytest.mark.parametrize("wrap", [lambda r: Through(inner=r), lambda r: EnsembleRetriever(retrievers=[r, r])])
def test_of_nested_retrievers_the_outermost_alone_counts(engine, plain, wrap):
    handler = RetrievalFrequencyHandler(engine, register_documents=True)
    found = wrap(plain).invoke("q", config={"callbacks": [handler]})
    assert handler.retrieved == dict.fromkeys(ids(found), 1)
    assert handler._inside == set()


def test_a_retriever_that_fails_counts_nothing_and_leaves_nothing(engine):
    class Broken(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            raise OSError("down")

    handler = RetrievalFrequencyHandler(engine)
    with pytest.raises(OSError, match="down"):
        Broken().invoke("q", config={"callbacks": [handler]})
    assert (handler.retrieved, handler.unknown, handler._inside) == ({}, 0, set())


async def test_tracking_needs_no_change_of_the_chain_and_never_counts_twice(engine, plain):
    inner = KVBoostRetriever(retriever=plain, engine=engine)
    with track_retrievals(engine) as handler:
        found = inner.invoke("q")
        await inner.ainvoke("q")
        Through(inner=inner).invoke("q")
    inner.invoke("q")
    assert sum(handler.retrieved.values()) == 2 * len(found) + 1
    assert sum(counts(engine).values()) == 3 * len(found) + 1


def test_retrieved_used_and_served_are_three_counters(engine, plain):
    retriever = KVBoostRetriever(retriever=plain, engine=engine)
    first, second = retriever.invoke("q")
    retriever.invoke("q")
    ChatKVBoost(engine=engine, temperature=0, max_tokens=2).invoke(f"{first.page_content} Why?")
    counted = [engine.usage(document.id) for document in (first, second)]
    assert [(u.retrieved, u.used, u.served) for u in counted] == [(2, 1, 1), (2, 0, 0)]


def test_the_most_used_document_can_come_first(engine):
    store = KVBoostVectorStore.from_documents(DOCUMENTS, DeterministicFakeEmbedding(size=8), engine=engine)
    chat = ChatKVBoost(engine=engine, temperature=0, max_tokens=2)
    chat.invoke(f"{RAIN} Why?")
    documents = store.get_by_ids(["zebra", "music", "rain"])
    answer = chat.with_documents(documents, most_used_first=True).invoke("Why?")
    assert list(answer.response_metadata["kvboost"]["documents"]) == ["rain", "zebra", "music"]
