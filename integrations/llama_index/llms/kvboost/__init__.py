"""LlamaIndex classes that reuse the KV of retrieved nodes: an LLM, and what goes around it in a query engine."""

from importlib.util import find_spec

if find_spec("llama_index.core") is None:
    raise ImportError('llama_index.llms.kvboost needs llama-index-core: pip install "kvboost-rag[llama-index]"')

from llama_index.llms.kvboost.embeddings import MiniLMEmbedding
from llama_index.llms.kvboost.errors import RequestError
from llama_index.llms.kvboost.handlers import RetrievalHandler, collect_reports, track_retrievals
from llama_index.llms.kvboost.layout import question_layout
from llama_index.llms.kvboost.llm import KVBoostLLM
from llama_index.llms.kvboost.nodes import add_nodes
from llama_index.llms.kvboost.postprocessor import KVBoostPostprocessor
from llama_index.llms.kvboost.query_engine import KVBoostQueryEngine
from llama_index.llms.kvboost.synthesizer import KVBoostSynthesizer

__all__ = [
    "KVBoostLLM",
    "KVBoostPostprocessor",
    "KVBoostQueryEngine",
    "KVBoostSynthesizer",
    "MiniLMEmbedding",
    "RequestError",
    "RetrievalHandler",
    "add_nodes",
    "collect_reports",
    "question_layout",
    "track_retrievals",
]
