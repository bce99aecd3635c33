"""How much of the documents' KV each LangChain path reuses: prints the table of docs/langchain.md.

Run it with ``python examples/langchain_paths.py``; it needs the extras ``demo`` and ``langchain``, and the packages
``langchain`` and ``langchain-classic``.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever, ParentDocumentRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.tools import create_retriever_tool, tool
from langchain_kvboost import ChatKVBoost, KVBoostLLM, KVBoostRetriever, KVBoostVectorStore, MiniLMEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from pydantic import Field

from kvboost_rag import KVBoostEngine
from kvboost_rag.demo_documents import demo_documents

QUESTION = "When did Tesla move to New York?"
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])


class Watch(BaseCallbackHandler):
    """Notes what the last answer's report says."""

    report: dict[str, Any]
    text: str

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        """Keep the report of an answer."""
        generation = response.generations[0][0]
        message = getattr(generation, "message", None)
        self.report = (message.response_metadata if message else generation.generation_info)["kvboost"]
        self.text = generation.text


class Reranker(BaseDocumentCompressor):
    """Turns the order round, as a reranker might, and adds a score to the metadata."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        """Return copies in another order."""
        scored = enumerate(reversed(documents))
        return [Document(page_content=d.page_content, metadata={**d.metadata, "rank": i}) for i, d in scored]


class Extractor(BaseDocumentCompressor):
    """Keeps the first half of each text."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        """Return shortened copies."""
        return [Document(page_content=d.page_content[: len(d.page_content) // 2]) for d in documents]


class Setting:
    """The documents, indexed, and what answers questions about them.

    Parameters
    ----------
    engine
        Of the real small model.
    embedding
        Of the real sentence encoder.
    """

    def __init__(self, engine: KVBoostEngine, embedding: MiniLMEmbeddings) -> None:
        self.engine = engine
        self.embedding = embedding
        shortest = sorted(demo_documents(), key=lambda d: len(d.text))[:24]
        self.documents = [
            Document(id=d.id, page_content=d.text, metadata={"title": d.metadata["title"]}) for d in shortest
        ]
        self.store = KVBoostVectorStore.from_documents(self.documents, embedding, engine=engine)
        self.retriever: BaseRetriever = self.store.as_retriever(search_kwargs={"k": 3})

    def share(self, report: dict[str, Any], context: Sequence[str]) -> float:
        """Share of the tokens of these texts that came from stored KV."""
        counts = report["documents"].values()
        reused = sum(c["exact"] + c["approximate"] + c["recomputed"] for c in counts)
        return float(reused / sum(len(self.engine.tokenizer.encode(text.strip())) for text in context))


Path = Callable[[Setting, dict[str, Any], Watch], Any]


def joined(documents: Sequence[Document]) -> str:
    """Join texts, as chains usually do."""
    return "\n\n".join(document.page_content for document in documents)


def stuff(s: Setting, options: dict[str, Any], retriever: BaseRetriever | None = None, **how: Any) -> Any:
    """Make a retrieval chain."""
    chain = create_stuff_documents_chain(ChatKVBoost(engine=s.engine, **options), PROMPT, **how)
    return create_retrieval_chain(retriever or s.retriever, chain)


def asked(chain: Any, watch: Watch) -> list[str]:
    """Run a retrieval chain; return the texts that it retrieved."""
    out = chain.invoke({"input": QUESTION}, config={"callbacks": [watch]})
    return [document.page_content for document in out["context"]]


def stuff_chain(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """create_retrieval_chain and create_stuff_documents_chain."""
    return asked(stuff(s, options), watch)


def lcel(s: Setting, options: dict[str, Any], watch: Watch, form: Any = joined) -> list[str]:
    """LCEL with format_docs."""
    given = {"context": s.retriever | form if form else s.retriever, "input": RunnablePassthrough()}
    chain = given | PROMPT | ChatKVBoost(engine=s.engine, **options)
    chain.invoke(QUESTION, config={"callbacks": [watch]})
    return [document.page_content for document in s.retriever.invoke(QUESTION)]


def lcel_repr(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """LCEL without format_docs (the repr of a list)."""
    return lcel(s, options, watch, None)


def document_prompt(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """document_prompt "[title] text"."""
    form = PromptTemplate.from_template("[{title}] {page_content}")
    return asked(stuff(s, options, document_prompt=form), watch)


def llm(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """KVBoostLLM behind a ChatPromptTemplate."""
    given = {"context": s.retriever | joined, "input": RunnablePassthrough()}
    chain = given | PROMPT | KVBoostLLM(engine=s.engine, **options)
    chain.invoke(QUESTION, config={"callbacks": [watch]})
    return [document.page_content for document in s.retriever.invoke(QUESTION)]


@wrap_model_call
def tool_first(request: Any, handler: Any) -> Any:
    """Have the tool called once, then answered: a model this small would not do so by itself."""
    begun = any(message.type == "tool" for message in request.messages)
    if not begun:
        return handler(request.override(tool_choice="any", model_settings={"max_tokens": 60}))
    return handler(request.override(tools=[]))


def agent(s: Setting, options: dict[str, Any], watch: Watch, search: Any) -> list[str]:
    """Let an agent search, and answer from what it found."""
    chat = ChatKVBoost(engine=s.engine, **options)
    made = create_agent(chat, [search], middleware=[tool_first])
    state = made.invoke({"messages": [("human", QUESTION)]}, config={"callbacks": [watch]})
    (call,) = [call for m in state["messages"] if m.type == "ai" for call in m.tool_calls]
    return [document.page_content for document in s.retriever.invoke(call["args"]["query"])]


def agent_content(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """create_agent and create_retriever_tool."""
    return agent(s, options, watch, create_retriever_tool(s.retriever, "search", "Searches the documents."))


def agent_artifact(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """create_agent and a tool with content and artifact."""

    @tool(response_format="content_and_artifact")
    def search(query: Annotated[str, Field(max_length=32)]) -> tuple[str, list[Document]]:
        """Search the documents."""
        found = s.store.similarity_search(query, k=3)
        return "\n\n".join(f"Source: {d.metadata}\nContent: {d.page_content}" for d in found), found

    return agent(s, options, watch, search)


def parents(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """ParentDocumentRetriever inside KVBoostRetriever."""
    inner = ParentDocumentRetriever(
        vectorstore=KVBoostVectorStore(s.embedding),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=0),
        search_kwargs={"k": 3},
    )
    inner.add_documents(s.documents)
    return asked(stuff(s, options, KVBoostRetriever(retriever=inner, engine=s.engine)), watch)


def several_queries(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """MultiQueryRetriever."""
    asking = ChatKVBoost(engine=s.engine, temperature=0, max_tokens=12)
    return asked(stuff(s, options, MultiQueryRetriever.from_llm(s.retriever, asking)), watch)


def mmr(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """MMR."""
    retriever = s.store.as_retriever(search_type="mmr", search_kwargs={"k": 3, "lambda_mult": 0.3})
    return asked(stuff(s, options, retriever), watch)


def reranked(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """ContextualCompressionRetriever with a reranker."""
    retriever = ContextualCompressionRetriever(base_compressor=Reranker(), base_retriever=s.retriever)
    return asked(stuff(s, options, retriever), watch)


def extracted(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """ContextualCompressionRetriever with an extractor."""
    retriever = ContextualCompressionRetriever(base_compressor=Extractor(), base_retriever=s.retriever)
    return asked(stuff(s, options, retriever), watch)


def with_documents(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """ChatKVBoost.with_documents."""
    found = s.retriever.invoke(QUESTION)
    ChatKVBoost(engine=s.engine, **options).with_documents(found).invoke(QUESTION, config={"callbacks": [watch]})
    return [document.page_content for document in found]


def turns(s: Setting, options: dict[str, Any], watch: Watch) -> list[str]:
    """Several turns, each with its own documents."""
    first, second = s.retriever.invoke(QUESTION), s.retriever.invoke("What is the Vistula?")[:1]
    messages = [
        ("human", f"{joined(first)}\n\n{QUESTION}"),
        ("ai", "In 1884."),
        ("human", f"{joined(second)}\n\nWhere does it end?"),
    ]
    ChatKVBoost(engine=s.engine, **options).invoke(messages, config={"callbacks": [watch]})
    return [document.page_content for document in (*first, *second)]


PATHS: tuple[Path, ...] = (
    stuff_chain, lcel, lcel_repr, document_prompt, agent_content, agent_artifact, parents, several_queries, mmr,
    reranked, extracted, with_documents, turns, llm,
)  # fmt: skip


def run(path: Path, setting: Setting, **options: Any) -> tuple[str, float]:
    """Run a path; return its answer and the share of its documents' tokens that came from stored KV."""
    watch = Watch()
    context = path(setting, {"temperature": 0, "max_tokens": 4, **options}, watch)
    return watch.text, setting.share(watch.report, context)


if __name__ == "__main__":
    # No KV of earlier prompts: what is reused comes from documents alone.
    made = KVBoostEngine.from_pretrained("smollm2", max_prefix_bytes=0)
    setting_ = Setting(made, MiniLMEmbeddings())
    print("| path | document tokens from stored KV |\n|---|---|")
    for path_ in PATHS:
        print(f"| {(path_.__doc__ or '').rstrip('.')} | {run(path_, setting_, repair='none')[1]:.1%} |", flush=True)
