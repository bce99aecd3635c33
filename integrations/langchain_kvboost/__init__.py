"""LangChain on kvboost_rag: swap one class, and documents that come again are not computed again."""

from importlib.util import find_spec

if find_spec("langchain_core") is None or find_spec("faiss") is None:
    raise ImportError('langchain_kvboost needs langchain-core and faiss: pip install "kvboost-rag[langchain]"')

from langchain_kvboost.chat_model import ChatKVBoost
from langchain_kvboost.counting import RetrievalFrequencyHandler, track_retrievals
from langchain_kvboost.embeddings import MiniLMEmbeddings
from langchain_kvboost.engines import release_engines, share_engine, shared_engine
from langchain_kvboost.llm import KVBoostLLM
from langchain_kvboost.retriever import KVBoostRetriever
from langchain_kvboost.vectorstore import KVBoostVectorStore

__all__ = [
    "ChatKVBoost",
    "KVBoostLLM",
    "KVBoostRetriever",
    "KVBoostVectorStore",
    "MiniLMEmbeddings",
    "RetrievalFrequencyHandler",
    "release_engines",
    "share_engine",
    "shared_engine",
    "track_retrievals",
]
