"""Messages or text, with or without documents, to the segments of one rendered prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvboost_rag.types import Document

__all__ = ["Layout", "Message", "Prompt", "Renderer", "Segment"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# Private-use characters: they stand in no text that a person writes, and templates pass them through.
_MARK = "\ue0b0{}\ue0b1"
_MARKS = re.compile("\ue0b0([0-9]+)\ue0b1")


@dataclass(frozen=True)
class Layout:
    """How documents are put into a prompt when the caller hands them over apart.

    Parameters
    ----------
    system
        System message, if the caller's messages hold none.
    lead_in
        Text between the start of the user's message and the first document.
    separator
        Text between two documents.
    question
        Text after the last document; ``{question}`` stands for the user's message.
    chat
        Whether a question is put into a user's message; False leaves the chat template out, as models that only
        continue text want it.
    """

    system: str | None = None
    lead_in: str = "Documents:\n\n"
    separator: str = "\n\n"
    question: str = "\n\nUsing only the text above, answer: {question}"
    chat: bool = True

    def __post_init__(self) -> None:
        """Refuse a layout that would drop the question."""
        if "{question}" not in self.question:
            raise ValueError("layout.question must hold {question}, the place of the user's message")
        if self.system is not None and not self.chat:
            raise ValueError("layout.system needs a chat template; with chat=False write it into lead_in")


@dataclass(frozen=True)
class Segment:
    """A part of the rendered prompt: a document, or text between documents."""

    text: str
    document: Document | None = None


class Renderer:
    """Applies the chat template and puts documents in their places.

    Parameters
    ----------
    tokenizer
        Its chat template is used for messages.
    layout
        Places of the documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> None:
        self._tokenizer = tokenizer
        self._layout = layout

    @property
    def head(self) -> str:
        """Everything that a laid-out prompt holds before its first document."""
        mark = Document("", "")
        segments = self.render("x", [mark], {})
        return "".join(segment.text for segment in segments[: _index_of(segments, mark)])

    @property
    def separator(self) -> str:
        """Text between two documents."""
        return self._layout.separator

    def is_raw(self, prompt: Prompt, documents: Sequence[Document]) -> bool:
        """Whether the prompt is text to be continued as it stands, outside any template."""
        return isinstance(prompt, str) and not (documents and self.uses_template)

    @property
    def uses_template(self) -> bool:
        """Whether questions go through the chat template."""
        return self._layout.chat and bool(self._tokenizer.chat_template)

    def render(
        self, prompt: Prompt, documents: Sequence[Document], options: Mapping[str, Any]
    ) -> list[Segment]:
        """Render a prompt.

        Parameters
        ----------
        prompt
            Messages (``role`` and ``content``), or text. Text with documents is a question and is laid out as a user's
            message; text without documents is taken as it stands.
        documents
            Put, in this order, before the last user message's text.
        options
            Further arguments of the chat template, such as ``enable_thinking``.

        Raises
        ------
        ValueError
            If there is nothing to answer, a message is malformed, or the tokenizer has no template for messages.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("the prompt is empty; give a question or text to continue")
            if self.is_raw(prompt, documents):
                return self._segments(self._laid_out(prompt, documents) if documents else prompt, documents)
            prompt = [{"role": "user", "content": prompt}]
        return self._segments(self._template(self._placed(_checked(prompt), documents), options), documents)

    def _laid_out(self, question: str, documents: Sequence[Document]) -> str:
        marks = self._layout.separator.join(_MARK.format(i) for i in range(len(documents)))
        return self._layout.lead_in + marks + self._layout.question.replace("{question}", question)

    def _placed(self, messages: list[dict[str, Any]], documents: Sequence[Document]) -> list[dict[str, Any]]:
        if self._layout.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._layout.system})
        if documents:
            last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
            if last is None:
                raise ValueError("documents go into the last user message, and there is none; add one")
            messages[last]["content"] = self._laid_out(messages[last]["content"], documents)
        return messages

    def _template(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template for messages; pass the prompt as text, or set "
                "tokenizer.chat_template"
            )
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )
        return str(rendered)

    @staticmethod
    def _segments(text: str, documents: Sequence[Document]) -> list[Segment]:
        if not documents:
            return [Segment(text)]
        parts = _MARKS.split(text)
        if [int(i) for i in parts[1::2]] != list(range(len(documents))):
            raise ValueError("the chat template does not keep the user's text whole, so documents can not be placed")
        segments = []
        for i, part in enumerate(parts):
            segments.append(Segment(part) if i % 2 == 0 else Segment(documents[int(part)].text, documents[int(part)]))
        return [s for s in segments if s.text or s.document]


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError("there are no messages; give at least one with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} is not a mapping with a role and a content")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {i} ({message['role']}) has no text as its content")
        if _MARKS.search(message["content"]):
            raise ValueError(f"message {i} holds the private-use characters U+E0B0 and U+E0B1; remove them")
    if not any(message["content"].strip() for message in messages):
        raise ValueError("every message is empty; give a question")
    return [dict(message) for message in messages]


def _index_of(segments: Sequence[Segment], document: Document) -> int:
    return next(i for i, segment in enumerate(segments) if segment.document is document)
