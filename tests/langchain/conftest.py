"""One engine over the real small model for all of these tests."""

from __future__ import annotations

import pytest
from langchain_kvboost import MiniLMEmbeddings, share_engine

from kvboost_rag import KVBoostEngine


@pytest.fixture(scope="session")
def engine(smollm2):
    """Give the engine, which chat models also find under two names."""
    with KVBoostEngine(*smollm2, repair="none") as made:
        for name in ("smollm2", "smollm2-twin"):
            share_engine(name, made)
        yield made


@pytest.fixture(scope="session")
def embeddings():
    return MiniLMEmbeddings()
