"""Turn retrieved documents into KV once and reuse it wherever a retriever puts them in the prompt."""

import logging

from kvboost_rag.embedding import Embedder
from kvboost_rag.engine import KVBoostEngine
from kvboost_rag.errors import (
    ContextWindowError,
    EngineClosedError,
    KVBoostError,
    ModelChangedError,
    ModelOutputError,
    UnsupportedModelError,
    UntrustedDocumentError,
)
from kvboost_rag.prompt import Layout
from kvboost_rag.report import Located, Report, Result, Scored, Stats
from kvboost_rag.store import RedisTier
from kvboost_rag.types import Document, Span, SpanKind

__all__ = [
    "ContextWindowError",
    "Document",
    "Embedder",
    "EngineClosedError",
    "KVBoostEngine",
    "KVBoostError",
    "Layout",
    "Located",
    "ModelChangedError",
    "ModelOutputError",
    "RedisTier",
    "Report",
    "Result",
    "Scored",
    "Span",
    "SpanKind",
    "Stats",
    "UnsupportedModelError",
    "UntrustedDocumentError",
]

__version__ = "0.1.0"

logging.getLogger("kvboost_rag").addHandler(logging.NullHandler())
