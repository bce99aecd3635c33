"""Puts documents into the messages of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost_rag import Document, KVBoostEngine
from langchain_kvboost.messages import Prompt

__all__ = ["BEFORE", "most_used_first", "place"]

BEFORE = "before"
"""Before the text of the last human message, as the engine's layout wants it: its first document can be exact."""

_SEPARATOR = "\n\n"


def place(prompt: Prompt, documents: Sequence[Document], where: str) -> Prompt:
    r"""Put documents into a prompt, whole, with an empty line between two.

    Parameters
    ----------
    prompt
        Of the engine.
    documents
        In the order that they are to have; none leaves nothing but the text around them.
    where
        ``"after"`` the text of the last human message, in the ``"system"`` message behind its text, or any other text
        that stands once in the prompt and is replaced, as ``"{documents}"``. (``"before"`` is left to the engine.)

    Raises
    ------
    ValueError
        If there is no such place.
    """
    if not documents and where in ("after", "system"):
        return prompt
    parts = _joined(documents)
    if where == "after":
        return _replaced(prompt, _last_user(prompt), lambda content: [*content, _SEPARATOR, *parts])
    if where == "system":
        if prompt[0]["role"] != "system":
            return [{"role": "system", "content": parts}, *prompt]
        return _replaced(prompt, 0, lambda content: [*content, _SEPARATOR, *parts])
    found = [(i, n) for i, m in enumerate(prompt) for n, part in enumerate(_parts(m)) if _holds(part, where)]
    count = sum(str(part).count(where) for m in prompt for part in _parts(m) if isinstance(part, str))
    if count != 1:
        raise ValueError(
            f"documents_at={where!r} stands {count} times in the messages; write it once where the documents belong, "
            "or pass 'before', 'after' or 'system'"
        )
    ((i, n),) = found

    def cut(content: list[Any]) -> list[Any]:
        before, after = content[n].split(where)
        return [*content[:n], before, *parts, after, *content[n + 1 :]]

    return _replaced(prompt, i, cut)


def most_used_first(documents: Sequence[Document], engine: KVBoostEngine) -> list[Document]:
    """Order documents by how often prompts used them, so that many prompts begin alike; equals keep their order."""

    def used(document: Document) -> int:
        return engine.usage(document.id).used if engine.get_document(document.id) is not None else 0

    return sorted(documents, key=used, reverse=True)


def _joined(documents: Sequence[Document]) -> list[Any]:
    return [part for document in documents for part in (_SEPARATOR, document)][1:]


def _last_user(prompt: Prompt) -> int:
    users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        raise ValueError("documents_at='after' needs a human message, and there is none; add one")
    return users[-1]


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message["content"]
    return [content] if isinstance(content, str) else list(content)


def _holds(part: Any, where: str) -> bool:
    return isinstance(part, str) and where in part


def _replaced(prompt: Prompt, index: int, change: Any) -> Prompt:
    changed = {**prompt[index], "content": change(_parts(prompt[index]))}
    return [*prompt[:index], changed, *prompt[index + 1 :]]
