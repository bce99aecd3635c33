from __future__ import annotations

import asyncio

import pytest
from llama_index.llms.kvboost import KVBoostLLM, add_nodes
from llama_setup import TOOL_TEMPLATE, demo_index, with_template

from kvboost_rag import KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

DOCUMENTS = 20


@pytest.fixture(scope="session", autouse=True)
def event_loop_for_llamaindex():
    """LlamaIndex's synchronous code asks for an event loop; one that Python made on demand would never be closed."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="session")
def index():
    """The shortest of the demo's real paragraphs under real embeddings."""
    return demo_index(sorted(demo_documents(), key=lambda document: len(document.text))[:DOCUMENTS])


@pytest.fixture(scope="session")
def nodes(index):
    return list(index.docstore.docs.values())


@pytest.fixture(scope="session")
def engine(smollm2, nodes):
    """The real small model, which knows the index's nodes; no prompt is kept, so that tests do not help each other."""
    with KVBoostEngine(*smollm2, max_prefix_bytes=0) as made:
        assert len(add_nodes(made, nodes)) == DOCUMENTS
        yield made


@pytest.fixture(scope="session")
def tool_engine(smollm2):
    """The same model under a chat template that writes tools."""
    model, tokenizer = smollm2
    with KVBoostEngine(model, with_template(tokenizer, TOOL_TEMPLATE)) as made:
        yield made


@pytest.fixture
def llm(engine):
    return KVBoostLLM(engine=engine, max_tokens=6, temperature=0)


@pytest.fixture(scope="session")
def plain_engine(smollm2):
    """The same model without chat template and pad token."""
    model, tokenizer = smollm2
    plain = with_template(tokenizer, None)
    plain.pad_token = None
    with KVBoostEngine(model, plain, reuse="off") as made:
        yield made
