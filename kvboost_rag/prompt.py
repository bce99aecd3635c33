"""Messages or text, with or without documents, to the segments of one rendered prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvboost_rag.types import Document, is_unicode

__all__ = ["Layout", "Message", "Prompt", "Renderer", "Segment"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# Private-use characters: they stand in no text that a person writes, and templates pass them through.
_DOCUMENT = "\ue0b0{}\ue0b1"
_OPEN, _CLOSE = "\ue0b2", "\ue0b3"
_MARKS = re.compile("\ue0b0([0-9]+)\ue0b1")
_RESERVED = re.compile("[\ue0b0-\ue0b3]")


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
    """A part of the rendered prompt: a document, or text between documents.

    Parameters
    ----------
    text
        As rendered.
    document
        The document that this is.
    searchable
        Whether documents may be looked for: in what callers wrote, never in what template and layout add.
    """

    text: str
    document: Document | None = None
    searchable: bool = False


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
        """Everything that a laid-out prompt holds before its first document.

        Raises
        ------
        ValueError
            If the chat template does not keep what a user writes.
        """
        mark = Document("", "")
        segments = self.render("x", [mark], {})
        return "".join(segment.text for segment in takewhile(lambda s: s.document is not mark, segments))

    @property
    def separator(self) -> str:
        """Text between two documents."""
        return self._layout.separator

    @property
    def uses_template(self) -> bool:
        """Whether questions go through the chat template."""
        return self._layout.chat and bool(self._tokenizer.chat_template)

    def is_raw(self, prompt: Prompt, documents: Sequence[Document]) -> bool:
        """Whether the prompt is text to be continued as it stands, outside any template."""
        return isinstance(prompt, str) and not (documents and self.uses_template)

    def render(self, prompt: Prompt, documents: Sequence[Document], options: Mapping[str, Any]) -> list[Segment]:
        """Render a prompt.

        Parameters
        ----------
        prompt
            Messages (``role`` and ``content``), or text. Text with documents is a question and is laid out as a user's
            message; text without documents is taken as it stands. A message's content is text, or a list of texts and
            :class:`Document` objects, which stand in the prompt one behind the other.
        documents
            Put, in this order, before the last user message's text.
        options
            Further arguments of the chat template, such as ``enable_thinking``; with ``continue_final_message`` the
            answer goes on where the last message ends.

        Raises
        ------
        ValueError
            If there is nothing to answer, a message is malformed, or the tokenizer has no template for messages.
        """
        messages, inside = _checked([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if self.is_raw(prompt, documents):
            if options:
                raise ValueError("template_options have no use for a prompt without chat template; pass messages")
            question = _OPEN + messages[0]["content"] + _CLOSE
            return _segments(self._laid_out(question, range(len(documents))) if documents else question, documents)
        numbers = range(len(inside), len(inside) + len(documents))
        marked = self._template(self._placed(_marked(messages), numbers), options)
        plain = self._template(self._placed(messages, numbers), options)
        written = sum(bool(message["content"].strip()) for message in messages)
        whole = marked.count(_OPEN) == marked.count(_CLOSE) == written
        if not whole or marked.replace(_OPEN, "").replace(_CLOSE, "") != plain:
            # The template looks into what callers wrote; without marks, all of the text has to be searched.
            marked = _OPEN + plain + _CLOSE
        return _segments(marked, [*inside, *documents])

    def _laid_out(self, question: str, numbers: Sequence[int]) -> str:
        marks = self._layout.separator.join(map(_DOCUMENT.format, numbers))
        return self._layout.lead_in + marks + self._layout.question.replace("{question}", question)

    def _placed(self, messages: Sequence[Message], numbers: Sequence[int]) -> list[dict[str, Any]]:
        placed = [dict(message) for message in messages]
        if self._layout.system is not None and placed[0]["role"] != "system":
            placed.insert(0, {"role": "system", "content": self._layout.system})
        if numbers:
            last = max((i for i, m in enumerate(placed) if m["role"] == "user"), default=None)
            if last is None:
                raise ValueError("documents go into the last user message, and there is none; add one")
            placed[last]["content"] = self._laid_out(placed[last]["content"], numbers)
        return placed

    def _template(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template for messages; pass the prompt as text, or set "
                "tokenizer.chat_template"
            )
        ours = {"tokenize", "add_generation_prompt"} & set(options)
        if ours:
            raise ValueError(f"template_options can not set {', '.join(sorted(ours))}: the engine does")
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not options.get("continue_final_message"), **options
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return str(rendered)


def _checked(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Document]]:
    """Check messages; return them with marks in the place of their documents, and those documents."""
    if not messages:
        raise ValueError("there are no messages; give at least one with role and content")
    checked: list[dict[str, Any]] = []
    documents: list[Document] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} is not a mapping with a role and a content; give it both")
        content = "".join(_part(part, f"message {i} ({message['role']})", documents) for part in _parts(message))
        checked.append({**message, "content": content})
    if not any(message["content"].strip() for message in checked):
        raise ValueError("the prompt is empty; give a question or text to continue")
    return checked, documents


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else [content]


def _part(part: Any, where: str, documents: list[Document]) -> str:
    """Return a part of a message as text; a document is noted, and a mark stands for it."""
    if isinstance(part, Document):
        documents.append(part)
        return _DOCUMENT.format(len(documents) - 1)
    if not isinstance(part, str):
        raise ValueError(f"{where} has no text as its content; give it a str, or a list of str and Document")
    if _RESERVED.search(part) or not is_unicode(part):
        raise ValueError(
            f"{where} holds lone surrogates or private-use characters from U+E0B0 to U+E0B3; remove them"
        )
    return part


def _marked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Enclose what callers wrote, white space at its ends left outside, where a template may trim it."""
    marked = []
    for message in messages:
        inner = message["content"].strip()
        before, _, after = message["content"].partition(inner) if inner else ("", "", message["content"])
        enclosed = f"{before}{_OPEN}{inner}{_CLOSE}{after}" if inner else message["content"]
        marked.append({**message, "content": enclosed})
    return marked


def _segments(text: str, documents: Sequence[Document]) -> list[Segment]:
    """Cut a rendered text at its marks."""
    parts = _MARKS.split(text)
    if sorted(map(int, parts[1::2])) != list(range(len(documents))):
        raise ValueError("the chat template does not keep the user's text whole, so documents can not be placed")
    segments: list[Segment] = []
    inside = False
    for i, part in enumerate(parts):
        if i % 2:
            segments.append(Segment(documents[int(part)].text, documents[int(part)]))
            continue
        for piece in re.split(f"([{_OPEN}{_CLOSE}])", part):
            if piece in (_OPEN, _CLOSE):
                inside = piece == _OPEN
            elif piece:
                segments.append(Segment(piece, searchable=inside))
    return segments
