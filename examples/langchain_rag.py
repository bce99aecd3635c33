"""A retrieval chain of LangChain whose documents are computed once; only the two KVBoost classes are ours.

Run it with ``python examples/langchain_rag.py``; it needs the extras ``demo`` and ``langchain``.
"""

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_kvboost import ChatKVBoost, KVBoostVectorStore, MiniLMEmbeddings

TEXTS = [
    "The meeting is on Tuesday in the blue room, on the second floor behind the library.",
    "Lunch is served in the garden from noon to two: soup, bread and cheese for everyone.",
    "The library is open from nine to six, on Saturdays until one, and closed on Sundays.",
]

chat = ChatKVBoost(model="smollm2", temperature=0, max_tokens=24)
store = KVBoostVectorStore.from_texts(TEXTS, MiniLMEmbeddings(), engine=chat.get_engine())
retriever = store.as_retriever(search_kwargs={"k": 2})
PROMPT = "Documents:\n\n{context}\n\nUsing only the text above, answer: {question}"
prompt = ChatPromptTemplate.from_messages([("human", PROMPT)])


def joined(documents: list[Document]) -> str:
    """Join texts, as chains usually do."""
    return "\n\n".join(document.page_content for document in documents)


answer = {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | chat
for question in ("Where is the meeting?", "Which room is the meeting in?"):
    message = answer.invoke(question)
    used, read = message.usage_metadata, message.usage_metadata["input_token_details"]["cache_read"]
    print(f"{question} {message.text} ({read} of {used['input_tokens']} prompt tokens came from stored KV)")
for piece in (answer | StrOutputParser()).stream("When is lunch?"):
    print(piece, end="", flush=True)
print()
