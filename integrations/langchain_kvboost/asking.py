"""A call of the chat model to what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage

from kvboost_rag import Document as EngineDocument
from kvboost_rag import KVBoostEngine
from langchain_kvboost.documents import find, register, restore_reprs, to_engine
from langchain_kvboost.messages import Abilities, Prompt, artifact_documents, extend_system, translate
from langchain_kvboost.placing import BEFORE, most_used_first, place
from langchain_kvboost.structured import Grammar, json_grammar
from langchain_kvboost.tools import Reader, ToolRequest

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
    abilities = Abilities.of(_template(engine, tools))
    if register_documents:
        register(engine, artifact_documents(messages))
    prompt, notes = _restored(translate(messages, abilities), engine)
    prompt, options = _with_documents(engine, prompt, call, register_documents)
    template_options = dict(template_options)
    if tools.tools and abilities.lists_tools:
        template_options["tools"] = list(tools.tools)
    elif tools.tools:
        prompt = extend_system(prompt, tools.description)
    grammar = tools.grammar if tools.forced else None
    if tools.forced:
        prompt = [*prompt, {"role": "assistant", "content": tools.begun}]
        template_options["continue_final_message"] = True
    elif call.get("response_format") is not None:
        prompt, grammar = _formatted(prompt, call["response_format"])
    if grammar is not None:
        options["logits_processor"] = [Grammar(grammar, engine.tokenizer, engine.model.config.vocab_size)]
    return Composed(prompt, {**options, "template_options": template_options}, tools.reader(), notes)


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


def _formatted(prompt: Prompt, form: Mapping[str, Any]) -> tuple[Prompt, str]:
    """Read OpenAI's ``response_format``; ``json_schema`` shows the schema to the model."""
    kind = form.get("type")
    if kind == "json_object":
        return prompt, json_grammar(form.get("schema", {"type": "object"}))
    if kind != "json_schema":
        raise ValueError(f"response_format of type {kind!r} is not known; pass 'json_schema' or 'json_object'")
    schema = form["json_schema"]["schema"]
    shown = f"Answer with JSON that follows this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    return extend_system(prompt, shown), json_grammar(schema)


def _template(engine: KVBoostEngine, tools: ToolRequest) -> str:
    if not engine.tokenizer.chat_template:
        # The engine says what to do about it.
        return ""
    return str(engine.tokenizer.get_chat_template(tools=list(tools.tools) or None))
