"""LangChain's documents and the engine's: which is which, and where they stand in a text."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256

from langchain_core.documents import Document

from kvboost_rag import Document as EngineDocument
from kvboost_rag import KVBoostEngine

__all__ = ["cut_at", "find", "register", "restore_reprs", "to_engine"]

logger = logging.getLogger("kvboost_rag")

# As pydantic writes a Document into a prompt that was given a list of them.
_REPR = re.compile(r"""page_content=('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""")


def to_engine(document: Document, document_id: str | None = None) -> EngineDocument:
    """Turn a document of LangChain into one of the engine; without an id, its text gives it one."""
    text = document.page_content
    return EngineDocument(document_id or document.id or _text_id(text), text, metadata=document.metadata)


def find(engine: KVBoostEngine, document: Document) -> str | None:
    """Return the id under which the engine knows a document's text, or None.

    The text decides, because rerankers copy documents and extractors keep the id over another text.
    """
    text = document.page_content.strip()
    for candidate in (document.id, _text_id(document.page_content)):
        known = engine.get_document(candidate) if candidate else None
        if known is not None and known.text.strip() == text:
            return known.id
    located = engine.locate(text)
    if len(located) == 1 and located[0].complete and located[0].end - located[0].start == len(text):
        return located[0].document.id
    return None


def register(engine: KVBoostEngine, documents: Iterable[Document]) -> list[str]:
    """Make an engine know documents, and compute the KV of those that it has not seen.

    A known text keeps its id. A known id with another text is left alone: what a retriever returns may be an extract,
    and only an index replaces documents.

    Parameters
    ----------
    engine
        Where the documents go.
    documents
        In any order; texts may repeat. Empty ones are passed over, since no KV can be kept for them.

    Returns
    -------
    list[str]
        The engine's ids, in order, of all documents with a text.
    """
    ids: list[str] = []
    new: dict[str, EngineDocument] = {}
    for document in documents:
        if not document.page_content.strip():
            continue
        known = find(engine, document)
        if known is None:
            taken = document.id is not None and engine.get_document(document.id) is not None
            taken = taken or document.id in new
            added = to_engine(document, _text_id(document.page_content) if taken else None)
            new[added.id] = added
            known = added.id
        ids.append(known)
    if new:
        engine.add_documents(new.values())
    return ids


def cut_at(text: str, documents: Sequence[EngineDocument]) -> list[str | EngineDocument]:
    """Cut a text where documents stand in it, one behind the other; those that are not there are passed over."""
    parts: list[str | EngineDocument] = []
    done = 0
    for document in documents:
        inner = document.text.strip()
        start = text.find(inner, done) if inner else -1
        if start >= 0:
            parts += [text[done:start], document]
            done = start + len(inner)
    return [part for part in (*parts, text[done:]) if part]


def restore_reprs(text: str, engine: KVBoostEngine) -> tuple[str, list[str]]:
    """Put the true text of known documents where a prompt holds their repr, with escaped newlines and quotes.

    Returns
    -------
    text : str
        What the model is to read.
    notes : list[str]
        What was done, and what could not be; logged too.
    """
    counts = {"restored": 0, "unknown": 0}

    def true_text(match: re.Match[str]) -> str:
        try:
            content = str(ast.literal_eval(match[1]))
        except (SyntaxError, ValueError):
            # Text that only looks like a repr.
            return match[0]
        known = find(engine, Document(page_content=content)) is not None
        counts["restored" if known else "unknown"] += 1
        return f"page_content={content}" if known else match[0]

    restored = _REPR.sub(true_text, text)
    return restored, _noted(counts["restored"], counts["unknown"])


def _noted(restored: int, unknown: int) -> list[str]:
    notes = []
    remedy = "join their page_content in the chain instead"
    if restored:
        notes.append(f"the prompt held the repr of {restored} known documents; their text was put there; {remedy}")
    if unknown:
        notes.append(f"the prompt holds the repr of {unknown} documents that are not indexed; {remedy} and add them")
    for note in notes:
        logger.warning(note)
    return notes


def _text_id(text: str) -> str:
    return f"text-{sha256(text.strip().encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
