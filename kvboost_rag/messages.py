"""Callers' messages: checked, and with marks where something happens to them once the template is applied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvboost_rag.forgery import parts_of
from kvboost_rag.types import Document, is_unicode

__all__ = ["CLOSE", "CUT", "DOCUMENT", "OPEN", "Cuts", "Guard", "Message", "Prompt", "checked", "enclosed"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# Private-use characters: they stand in no text that a person writes, and templates pass them through.
DOCUMENT = "\ue0b0{}\ue0b1"
OPEN, CLOSE, CUT = "\ue0b2", "\ue0b3", "\ue0b4"
_RESERVED = re.compile("[\ue0b0-\ue0b4]")
# Answers and instructions rightly hold markup of the template, as <tool_call>; what others wrote does not.
_HOLD_MARKUP = ("assistant", "system", "developer")


class Cuts(Protocol):
    """Says where a text has to be cut, see :meth:`kvboost_rag.tokens.Tokens.cuts`."""

    def __call__(self, text: str, *, markup: bool = True) -> list[int]:
        """Return places inside the text, ascending."""


class Guard:
    """Marks where callers' texts are to be cut, so that they forge no template tokens.

    Parameters
    ----------
    cuts
        See :meth:`kvboost_rag.tokens.Tokens.cuts`.
    """

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts

    def message(self, message: Message) -> dict[str, Any]:
        """Guard everything that a message holds."""
        markup = message["role"] not in _HOLD_MARKUP
        rest = {name: self._deep(value, markup) for name, value in message.items() if name != "content"}
        return {**rest, "content": self.text(message["content"], markup=markup)}

    def option(self, value: Any) -> Any:
        """Guard tools, documents and the like; a lone text is a switch of the template, or the template."""
        return value if isinstance(value, str) else self._deep(value, markup=True)

    def text(self, text: str, *, markup: bool = True) -> str:
        """Guard a text; markup of the template counts or keeps its meaning."""
        return CUT.join(parts_of(text, self._cuts(text, markup=markup)))

    def _deep(self, value: Any, markup: bool) -> Any:
        if isinstance(value, str):
            return self.text(_checked(value, "a message or template option"), markup=markup)
        if isinstance(value, (list, tuple)):
            return [self._deep(item, markup) for item in value]
        if isinstance(value, Mapping):
            return {self._deep(name, markup): self._deep(item, markup) for name, item in value.items()}
        return value


def checked(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Document]]:
    """Check messages; return them with marks in the place of their documents, and those documents."""
    if not messages:
        raise ValueError("there are no messages; give at least one with role and content")
    out: list[dict[str, Any]] = []
    documents: list[Document] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} is not a mapping with a role and a content; give it both")
        content = "".join(_part(part, f"message {i} ({message['role']})", documents) for part in _parts(message))
        out.append({**message, "content": content})
    if not any(message["content"].strip() for message in out):
        raise ValueError("the prompt is empty; give a question or text to continue")
    return out, documents


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else [content]


def _part(part: Any, where: str, documents: list[Document]) -> str:
    """Return a part of a message as text; a document is noted, and a mark stands for it."""
    if isinstance(part, Document):
        documents.append(part)
        return DOCUMENT.format(len(documents) - 1)
    if not isinstance(part, str):
        raise ValueError(f"{where} has no text as its content; give it a str, or a list of str and Document")
    return _checked(part, where)


def _checked(text: str, where: str) -> str:
    if _RESERVED.search(text) or not is_unicode(text):
        raise ValueError(
            f"{where} holds lone surrogates or private-use characters from U+E0B0 to U+E0B4; remove them"
        )
    return text


def enclosed(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Enclose what callers wrote, white space at its ends left outside, where a template may trim it."""
    out = []
    for message in messages:
        inner = message["content"].strip()
        before, _, after = message["content"].partition(inner) if inner else ("", "", message["content"])
        content = f"{before}{OPEN}{inner}{CLOSE}{after}" if inner else message["content"]
        out.append({**message, "content": content})
    return out
