"""Messages or text, with or without documents, to the segments of one rendered prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvboost_rag.messages import CLOSE, CUT, DOCUMENT, OPEN, Cuts, Guard, Message, Prompt, checked, enclosed
from kvboost_rag.types import Document

__all__ = ["Layout", "Message", "Prompt", "Renderer", "Segment"]

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
    """A part of the rendered prompt: a document, or text between documents.

    Parameters
    ----------
    text
        As rendered.
    document
        The document that this is.
    searchable
        Whether documents may be looked for: in what callers wrote, never in what template and layout add.
    cuts
        Where the text is to be cut before it is tokenised, so that callers forge no template tokens.
    """

    text: str
    document: Document | None = None
    searchable: bool = False
    cuts: tuple[int, ...] = ()


class Renderer:
    """Applies the chat template and puts documents in their places.

    Parameters
    ----------
    tokenizer
        Its chat template is used for messages.
    layout
        Places of the documents.
    cuts
        Where a caller's text is to be cut, see :meth:`kvboost_rag.tokens.Tokens.cuts`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: Layout, cuts: Cuts) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._guard = Guard(cuts)

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

        Template tokens that a caller's texts spell stay plain text; only in a text that is taken as it stands do they
        keep their meaning.

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
        messages, inside = checked([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if self.is_raw(prompt, documents):
            if options:
                raise ValueError("template_options have no use for a prompt without chat template; pass messages")
            content = messages[0]["content"]
            question = OPEN + (self._guard.text(content) if documents else content) + CLOSE
            return _segments(self._laid_out(question, range(len(documents))) if documents else question, documents)
        messages = [self._guard.message(message) for message in messages]
        options = {name: self._guard.option(value) for name, value in options.items()}
        numbers = range(len(inside), len(inside) + len(documents))
        marked = self._template(self._placed(enclosed(messages), numbers), options)
        plain = self._template(self._placed(messages, numbers), options)
        written = sum(bool(message["content"].strip()) for message in messages)
        whole = marked.count(OPEN) == marked.count(CLOSE) == written
        if not whole or marked.replace(OPEN, "").replace(CLOSE, "") != plain:
            # The template looks into what callers wrote; without marks, all of the text has to be searched.
            marked = OPEN + plain + CLOSE
        return _segments(marked, [*inside, *documents])

    def _laid_out(self, question: str, numbers: Sequence[int]) -> str:
        marks = self._layout.separator.join(map(DOCUMENT.format, numbers))
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
        except Exception as error:
            # A template is a program that callers' messages and options run through: it may raise anything.
            raise ValueError(
                f"the chat template can not render these messages with these options: {error}; change or leave out "
                "what it names"
            ) from error
        return str(rendered)


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
        for piece in re.split(f"([{OPEN}{CLOSE}])", part):
            if piece in (OPEN, CLOSE):
                inside = piece == OPEN
            elif piece:
                uncut = piece.split(CUT)
                cuts = tuple(accumulate(map(len, uncut[:-1])))
                segments.append(Segment("".join(uncut), searchable=inside, cuts=cuts))
    return segments
