"""A call of the chat model to what the engine is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage

from kvboost_rag import Document as EngineDocument
from kvboost_rag import KVBoostEngine
from kvboost_rag.structured import Abilities, Reader, ToolRequest, shaped
from langchain_kvboost.documents import find, register, restore_reprs, to_engine
from langchain_kvboost.messages import Prompt, artifact_documents, translate
from langchain_kvboost.placing import BEFORE, most_used_first, place

__all__ = ["CALL_ARGUMENTS", "Composed", "chosen_documents", "compose"]

CALL_ARGUMENTS = ("documents", "documents_at", "most_used_first", "tools", "tool_choice", "response_format")


@dataclass(frozen=True, eq=False)
class Composed:
    """What the engine is asked, and how its answer is read.

    Parameters
    ----------
    prompt
        Messages of the engine.
    options
        Arguments of :meth:`kvboost_rag.KVBoostEngine.stream` that the messages decide.
    reader
        For this answer alone.
    notes
        What the caller should know about the prompt.
    """

    prompt: Prompt
    options: dict[str, Any]
    reader: Reader
    notes: list[str]


def compose(
    engine: KVBoostEngine,
    messages: Sequence[BaseMessage],
    call: Mapping[str, Any],
    template_options: Mapping[str, Any],
    *,
    register_documents: bool,
) -> Composed:
    """Put messages, documents, tools and schema together.

    Parameters
    ----------
    engine
        Which is to answer.
    messages
        Of LangChain.
    call
        Keyword arguments of the call, see `CALL_ARGUMENTS`.
    template_options
        Further arguments of the chat template.
    register_documents
        Whether documents that the engine has not seen are added to it.

    Raises
    ------
    ValueError
        If an argument can not be used.
    """
    tools = ToolRequest.of(call.get("tools") or (), call.get("tool_choice"))
    abilities = Abilities.of_tokenizer(engine.tokenizer, tools.tools)
    if register_documents:
        register(engine, artifact_documents(messages))
    prompt, notes = _restored(translate(messages, abilities), engine)
    prompt, options = _with_documents(engine, prompt, call, register_documents)
    form = shaped(prompt, tools, call.get("response_format"), abilities, template_options)
    processors = form.processors(engine.tokenizer, engine.model)
    if processors:
        options["logits_processor"] = processors
    options["template_options"] = form.template_options
    return Composed(form.prompt, options, tools.reader(), notes)


def chosen_documents(
    engine: KVBoostEngine, documents: Sequence[Document | EngineDocument | str], *, add: bool
) -> list[EngineDocument]:
    """Turn documents of any kind into those of the engine, registered if ``add`` is set.

    Raises
    ------
    ValueError
        If an id is not known.
    """
    listed = [documents] if isinstance(documents, (str, Document, EngineDocument)) else list(documents)
    foreign = [d for d in listed if isinstance(d, Document)]
    if add:
        register(engine, foreign)
        new = [d for d in listed if isinstance(d, EngineDocument) and engine.get_document(d.id) is None]
        engine.add_documents(new)
    return [_chosen(engine, document) for document in listed]


def _chosen(engine: KVBoostEngine, document: Document | EngineDocument | str) -> EngineDocument:
    if isinstance(document, EngineDocument):
        return document
    known = find(engine, document) if isinstance(document, Document) else document
    found = engine.get_document(known) if known is not None else None
    if found is None and not isinstance(document, Document):
        raise ValueError(f"document {document!r} is not known; add it first, or pass a Document")
    return found or to_engine(document)  # type: ignore[arg-type]  # a str was refused above


def _with_documents(
    engine: KVBoostEngine, prompt: Prompt, call: Mapping[str, Any], add: bool
) -> tuple[Prompt, dict[str, Any]]:
    if call.get("documents") is None:
        if "documents_at" in call or call.get("most_used_first"):
            raise ValueError("documents_at and most_used_first need documents; pass documents=[...] as well")
        return prompt, {}
    documents = chosen_documents(engine, call["documents"], add=add)
    if call.get("most_used_first"):
        documents = most_used_first(documents, engine)
    where = call.get("documents_at", BEFORE)
    if where == BEFORE:
        return prompt, {"documents": documents}
    return place(prompt, documents, where), {}


def _restored(prompt: Prompt, engine: KVBoostEngine) -> tuple[Prompt, list[str]]:
    notes: list[str] = []

    def restored(part: Any) -> Any:
        if not isinstance(part, str):
            return part
        text, new = restore_reprs(part, engine)
        notes.extend(new)
        return text

    changed = []
    for message in prompt:
        content = message["content"]
        new = restored(content) if isinstance(content, str) else [restored(part) for part in content]
        changed.append({**message, "content": new})
    return changed, notes
