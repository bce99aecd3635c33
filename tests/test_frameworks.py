"""One engine behind LangChain and LlamaIndex at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_kvboost import ChatKVBoost
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvboost import KVBoostLLM

from kvboost_rag import KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

QUESTIONS = ["Who led them?", "When was it founded?", "Where is it?", "What is it made of?"]


@pytest.fixture(scope="module")
def documents():
    return sorted(demo_documents(), key=lambda document: len(document.text))[:4]


@pytest.fixture(scope="module")
def engine(smollm2, documents):
    with KVBoostEngine(*smollm2, max_prefix_bytes=0) as made:
        made.add_documents(documents)
        yield made


@pytest.fixture(scope="module")
def prompts(documents):
    return [
        f"{documents[i].text}\n\n{documents[(i + 1) % 4].text}\n\n{question}" for i, question in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def models(engine):
    return ChatKVBoost(engine=engine, max_tokens=5, temperature=0), KVBoostLLM(
        engine=engine, max_tokens=5, temperature=0
    )


@pytest.fixture(scope="module")
def serial(models, prompts):
    """Answers of both, one after the other; they ask for the same prompts in the same template."""
    chat, llm = models
    answers = [chat.invoke(prompt).content for prompt in prompts]
    assert answers == [llm.chat([ChatMessage(prompt)]).message.content for prompt in prompts]
    return answers


@pytest.mark.real
def test_eight_threads_of_two_frameworks_give_the_serial_answers(models, prompts, serial):
    chat, llm = models

    def ask(i: int) -> str:
        prompt = prompts[i // 2]
        return chat.invoke(prompt).content if i % 2 else llm.chat([ChatMessage(prompt)]).message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [serial[i // 2] for i in range(8)]


@pytest.mark.real
def test_asyncio_over_two_frameworks_gives_the_serial_answers(models, prompts, serial):
    chat, llm = models

    async def ask_all() -> list[str]:
        first = [chat.ainvoke(prompt) for prompt in prompts]
        second = [llm.achat([ChatMessage(prompt)]) for prompt in prompts]
        answers = await asyncio.gather(*first, *second)
        return [a.content for a in answers[:4]] + [a.message.content for a in answers[4:]]

    assert asyncio.run(ask_all()) == serial + serial
