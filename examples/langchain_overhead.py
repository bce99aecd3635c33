"""What a chain costs before the first token: ``chain.stream`` against the engine called directly, side by side.

Run it with ``python examples/langchain_overhead.py``; it needs the extras ``demo`` and ``langchain``.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_kvboost import ChatKVBoost, KVBoostVectorStore, MiniLMEmbeddings

from kvboost_rag import KVBoostEngine
from kvboost_rag.demo_documents import demo_documents, demo_questions

SYSTEM = "Answer from this:\n\n{context}"
ROUNDS = 4


def first_token(stream: Iterator[Any]) -> float:
    """Seconds until a stream yields something."""
    start = time.perf_counter()
    next(stream)
    return time.perf_counter() - start


def joined(documents: list[Document]) -> str:
    """Join texts, as chains usually do."""
    return "\n\n".join(document.page_content for document in documents)


# No KV of earlier prompts: both ways are to do the same work every time.
engine = KVBoostEngine.from_pretrained("smollm2", max_prefix_bytes=0)
known = [Document(id=d.id, page_content=d.text) for d in demo_documents()[:20]]
store = KVBoostVectorStore.from_documents(known, MiniLMEmbeddings(), engine=engine)
chat = ChatKVBoost(engine=engine, temperature=0, max_tokens=2)
chain = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{question}")]) | chat

ratios = []
for question in [q.question for q in demo_questions()][:8] * ROUNDS:
    context = joined(store.similarity_search(question, k=4))
    messages = [
        {"role": "system", "content": SYSTEM.format(context=context)},
        {"role": "user", "content": question},
    ]
    before = first_token(engine.stream(messages, temperature=0, max_tokens=2))
    through = first_token(chain.stream({"context": context, "question": question}))
    after = first_token(engine.stream(messages, temperature=0, max_tokens=2))
    ratios.append(2 * through / (before + after))
print(f"time to the first token, chain / engine: median {statistics.median(ratios):.3f} of {len(ratios)} questions")
