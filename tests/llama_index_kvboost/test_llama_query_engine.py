"""Query engines, chat engines and agents over the real index: what they retrieve is reused and counted."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, RetrieverTool
from llama_index.llms.kvboost import (
    KVBoostLLM,
    KVBoostPostprocessor,
    KVBoostQueryEngine,
    KVBoostSynthesizer,
    RetrievalHandler,
    add_nodes,
    collect_reports,
    question_layout,
    track_retrievals,
)
from llama_index.llms.kvboost.synthesizer import pack
from llama_index_instrumentation import root_dispatcher
from llama_setup import observe

from kvboost_rag import KVBoostEngine, Layout, SpanKind

pytestmark = pytest.mark.real
QUESTION = "When was Warsaw's first stock exchange established?"


def reused(report):
    """Ids of the documents whose KV was taken from the store."""
    return {s.document_id for s in report.spans if s.document_id and s.kind is not SpanKind.COMPUTED}


def memory():
    """The one kind of chat memory that opens no database."""
    return ChatMemoryBuffer.from_defaults(token_limit=3000)


def retrieved(engine, ids):
    return [engine.usage(i).retrieved for i in ids]


@pytest.fixture
def retriever(index):
    return index.as_retriever(similarity_top_k=2)


@pytest.fixture
def ids(retriever):
    return [found.node.node_id for found in retriever.retrieve(QUESTION)]


class Fixed(BaseRetriever):
    """Returns what it is given, or raises it."""

    def __init__(self, result):
        self.result = result
        super().__init__()

    def _retrieve(self, query_bundle):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_plain_query_engine_reuses_known_nodes(index, llm, ids):
    with collect_reports() as reports:
        response = index.as_query_engine(llm=llm, similarity_top_k=2).query(QUESTION)
    assert reused(reports[0]) == set(ids)
    assert len(reports) == 1
    assert {found.node.node_id for found in response.source_nodes} == set(ids)


def test_streams_and_async_queries_give_the_same_answer(index, llm):
    options = {"similarity_top_k": 2, "precompute": False}
    plain = KVBoostQueryEngine.from_index(index, llm, **options)
    streaming = KVBoostQueryEngine.from_index(index, llm, streaming=True, **options)
    expected = str(plain.query(QUESTION))
    assert "".join(streaming.query(QUESTION).response_gen) == expected
    assert str(asyncio.run(plain.aquery(QUESTION))) == expected


def test_a_query_engine_precomputes_the_index_counts_the_final_nodes_and_drops_none(index, llm, ids):
    before = retrieved(llm.engine, ids)
    requests = llm.engine.stats.requests
    only_best = SimilarityPostprocessor(similarity_cutoff=max(n.score for n in index.as_retriever().retrieve(QUESTION)))
    engine = KVBoostQueryEngine.from_index(index, llm, similarity_top_k=2, node_postprocessors=[only_best])
    with collect_reports() as reports:
        engine.query(QUESTION)
    assert llm.engine.stats.requests == requests + 1
    assert reused(reports[0]) == {ids[0]}
    assert retrieved(llm.engine, ids) == [before[0] + 1, before[1]]


def test_nodes_are_registered_as_they_stand_in_prompts(llm):
    node = TextNode(
        id_="form", text="The kettle is in the cupboard over the sink.", metadata={"room": "kitchen", "secret": "x"},
        excluded_llm_metadata_keys=["secret"],
    )  # fmt: skip
    image = TextNode(id_="empty", text="", excluded_llm_metadata_keys=["room"])
    assert add_nodes(llm.engine, [node, NodeWithScore(node=node, score=1.0), image]) == ["form"]
    (found,) = llm.engine.locate("Context:\nroom: kitchen\n\nThe kettle is in the cupboard over the sink.\n---")
    assert found.document.id == "form"
    assert found.complete
    assert found.document.metadata == node.metadata
    llm.engine.remove_documents(["form"])


@pytest.mark.parametrize("how", ["postprocessor", "handler"])
def test_unknown_nodes_are_registered_when_they_are_retrieved(index, llm, how):
    node = TextNode(id_="new", text=f"The spare key of the boat house hangs behind the third beam, near the {how}.")
    found = [NodeWithScore(node=node, score=1.0)]
    if how == "postprocessor":
        KVBoostPostprocessor(engine=llm.engine, register_nodes=False, count=False).postprocess_nodes(found)
        assert "new" not in [document.id for document in llm.engine.documents]
        assert KVBoostPostprocessor(engine=llm.engine).postprocess_nodes(found) == found
    else:
        with track_retrievals(llm.engine, register_nodes=True):
            Fixed(found).retrieve("x")
    assert retrieved(llm.engine, ["new"]) == [1]
    response = llm.complete(f"{node.text}\n\nWhere is the key?")
    assert reused(response.raw["report"]) == {"new"}
    llm.engine.remove_documents(["new"])


def test_the_outermost_retriever_is_counted_once(llm, retriever, ids):
    before = retrieved(llm.engine, ids)
    fusion = QueryFusionRetriever([retriever, retriever], llm=llm, num_queries=1, similarity_top_k=2, use_async=False)
    nested = QueryFusionRetriever([retriever, retriever], llm=llm, num_queries=1, similarity_top_k=2, use_async=True)
    with track_retrievals(llm.engine):
        fusion.retrieve(QUESTION)
        nested.retrieve(QUESTION)
        asyncio.run(retriever.aretrieve(QUESTION))
        with pytest.raises(RuntimeError):
            Fixed(RuntimeError("no connection")).retrieve(QUESTION)
        # A retriever that failed must not look like one that is still going on.
        retriever.retrieve(QUESTION)
    retriever.retrieve(QUESTION)
    assert retrieved(llm.engine, ids) == [count + 4 for count in before]


def test_a_tracked_query_engine_counts_once(index, llm, ids):
    before = retrieved(llm.engine, ids)
    chain = KVBoostQueryEngine.from_index(index, llm, similarity_top_k=2, precompute=False)
    with track_retrievals(llm.engine):
        chain.retrieve(QueryBundle(QUESTION))
    assert retrieved(llm.engine, ids) == [count + 1 for count in before]


def test_handlers_leave_the_dispatcher_as_it_was(llm):
    before = list(root_dispatcher.event_handlers)
    with track_retrievals(llm.engine), collect_reports():
        assert [type(h) for h in root_dispatcher.event_handlers].count(RetrievalHandler) == 1
    assert root_dispatcher.event_handlers == before


def test_what_goes_wrong_while_counting_is_logged(llm, caplog):
    handler = RetrievalHandler(engine=llm.engine, register_nodes=True)
    with pytest.raises(ValueError):
        handler._count([NodeWithScore(node=TextNode(id_="x", text="lone \ud800 surrogate"))])
    assert "retrieved nodes were not counted" in caplog.text


def test_a_chat_engine_reuses_in_every_turn(index, llm, ids):
    chat = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=2, memory=memory())
    with collect_reports() as reports:
        chat.chat(QUESTION)
        chat.chat("And again: " + QUESTION)
    assert [reused(report) for report in reports] == [set(ids)] * 2


def test_an_agents_retriever_tool_gives_reusable_text(llm, retriever, ids):
    tool = RetrieverTool.from_defaults(retriever, name="search", description="Search.")
    output = tool.call(QUESTION)
    messages = [ChatMessage(role="user", content=QUESTION), ChatMessage(role="tool", content=output.content)]
    assert reused(llm.chat(messages).raw["report"]) == set(ids)


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"sunny in {city}"


def example(city):
    call = ToolCallBlock(tool_call_id=f"call{city}"[:9], tool_name="weather", tool_kwargs={"city": city})
    return [
        ChatMessage(role="user", content=f"What is the weather in {city}?"),
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(role="tool", content=f"sunny in {city}"),
        ChatMessage(role="assistant", content=f"It is sunny in {city}."),
    ]


# A model of 135M parameters calls a tool only if it has seen it done.
HISTORY = [message for city in ("Paris", "Rome", "Madrid") for message in example(city)]
TOOLS = [FunctionTool.from_defaults(weather)]


@pytest.fixture
def tool_llm(tool_engine):
    return KVBoostLLM(engine=tool_engine, max_tokens=40, temperature=0)


def test_tool_calls_of_the_real_model_are_read_whole_and_streamed(tool_llm):
    ask = {"user_msg": "What is the weather in Oslo?", "chat_history": HISTORY}
    whole = tool_llm.chat_with_tools(TOOLS, **ask)
    (call,) = tool_llm.get_tool_calls_from_response(whole)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})
    assert "tool_call" not in (whole.message.content or "")
    *parts, last = tool_llm.stream_chat_with_tools(TOOLS, **ask)
    assert [c.tool_kwargs for c in tool_llm.get_tool_calls_from_response(last)] == [{"city": "Oslo"}]
    assert not any(tool_llm.get_tool_calls_from_response(part, error_on_no_tool_call=False) for part in parts)
    assert str(tool_llm.predict_and_call(TOOLS, **ask)) == "sunny in Oslo"


def test_a_required_tool_that_is_not_called_is_an_error(tool_llm):
    with pytest.raises(ValueError, match="called no tool"):
        tool_llm.chat_with_tools(TOOLS, user_msg="Say hello.", tool_required=True, max_tokens=3)


# Of pydantic, when a workflow looks through its own attributes.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
def test_a_function_agent_calls_a_tool_and_answers(tool_llm):
    agent = FunctionAgent(tools=TOOLS, llm=tool_llm)

    async def main():
        return await agent.run(user_msg="What is the weather in Oslo?", chat_history=HISTORY, memory=memory())

    output = asyncio.run(main())
    assert [call.tool_kwargs for call in output.tool_calls] == [{"city": "Oslo"}]
    assert "Oslo" in output.response.content


def test_eight_threads_and_asyncio_give_the_serial_answers(index, llm):
    engine = index.as_query_engine(llm=llm.model_copy(update={"max_tokens": 3}), similarity_top_k=1)
    questions = [f"How old was Manning when he played Super Bowl {n}?" for n in range(50, 58)]
    serial = [str(engine.query(question)) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        assert [str(response) for response in pool.map(engine.query, questions)] == serial

    async def main():
        return await asyncio.gather(*map(engine.aquery, questions[:4]))

    assert [str(response) for response in asyncio.run(main())] == serial[:4]


def test_the_first_node_is_exact_in_the_layout_of_question_prompts(index, llm, smollm2):
    with KVBoostEngine(*smollm2, layout=question_layout(), max_prefix_bytes=0) as engine:
        own = KVBoostLLM(engine=engine, max_tokens=1, temperature=0)
        query_engine = KVBoostQueryEngine.from_index(index, own, similarity_top_k=1, precompute=False)
        with collect_reports() as reports:
            query_engine.query(QUESTION)
            query_engine.query("Say it again: " + QUESTION)
    kinds = {span.kind for span in reports[1].spans if span.document_id}
    assert kinds == {SpanKind.EXACT}


def test_a_layout_is_made_of_question_templates_only():
    template = ChatPromptTemplate.from_messages([("user", "Read {context_str}. Now {query_str}")])
    assert question_layout(template) == Layout(lead_in="Read ", question=". Now {question}")
    with pytest.raises(ValueError, match="by hand"):
        question_layout(ChatPromptTemplate.from_messages([("user", "Ask {query_str} of {context_str}")]))


def test_packing_keeps_texts_whole_and_in_order():
    texts = ["aa", " b\n", "", "ccc", "dddddddddd", "e"]
    assert pack(texts, lambda text: len(text) <= 7) == ["aa\n\nb", "ccc", "dddddddddd", "e"]
    assert pack([], bool) == []


def test_without_nodes_the_answer_is_llamaindexs_own(llm):
    assert str(KVBoostSynthesizer(llm).synthesize("x", [])) == "Empty Response"


def test_observing_sees_the_context_of_a_query(index, llm):
    with observe() as observed:
        index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION)
    assert len(observed.contexts) == len(observed.reports) == 1
