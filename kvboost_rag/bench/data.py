"""Question files, checked line by line."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kvboost_rag.bench.quality import normalised
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Document

__all__ = ["Sample", "filled", "fitted", "read_samples"]

_LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class Sample:
    """A question with its documents.

    Parameters
    ----------
    id, question
        As in the file.
    documents
        In the file's order. The text is the title, a line break, and the text, because some questions can only be
        answered with the title; the id is a digest of it, so that samples share equal documents.
    answers
        Any of them is right.
    choices
        Options of which one is right, or None.
    """

    id: str
    question: str
    documents: tuple[Document, ...]
    answers: tuple[str, ...]
    choices: tuple[str, ...] | None = None

    @property
    def prompt(self) -> str:
        """The question, with lettered options where there are choices."""
        if self.choices is None:
            return self.question
        options = "".join(f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=False))
        return f"{self.question}{options}\nAnswer with the letter of the right option."

    @property
    def right_letters(self) -> tuple[str, ...]:
        """Letters of the options that are right, which may be given by letter or by text."""
        given = {normalised(answer) for answer in self.answers}
        lettered = zip(_LETTERS, self.choices or (), strict=False)
        return tuple(letter for letter, choice in lettered if normalised(choice) in given or letter in self.answers)


def read_samples(path: Path, limit: int | None = None) -> list[Sample]:
    """Read the first samples of a file of JSON lines; blank lines and further fields are passed over.

    Parameters
    ----------
    path
        In UTF-8.
    limit
        How many; None for all.

    Raises
    ------
    ValueError
        Naming the line and the field that can not be used.
    """
    samples: dict[str, Sample] = {}
    for where, line in _lines(path):
        if len(samples) == limit:
            break
        sample = _sample(_object(line, where), where)
        if sample.id in samples:
            raise ValueError(f"{where}: id {sample.id!r} comes twice; give each sample its own")
        samples[sample.id] = sample
    if not samples:
        raise ValueError(f"{path} holds no samples; put one JSON object on each line")
    return list(samples.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path.name} line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8; convert the file") from error
            if line.strip():
                yield where, line


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}); put one whole object on each line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object; it needs id, question, documents and answers")
    return row


def _sample(row: Mapping[str, Any], where: str) -> Sample:
    documents = tuple(
        _document(item, f"{where}: documents[{i}]") for i, item in enumerate(_list(row, "documents", where))
    )
    sample = Sample(
        _text(row, "id", where), _text(row, "question", where), documents, _texts(row, "answers", where),
        None if row.get("choices") is None else _texts(row, "choices", where),
    )  # fmt: skip
    if sample.choices is not None:
        _check_choices(sample, where)
    return sample


def _check_choices(sample: Sample, where: str) -> None:
    assert sample.choices is not None
    if not 2 <= len(sample.choices) <= len(_LETTERS):
        raise ValueError(f"{where}: choices holds {len(sample.choices)} options; give 2 to {len(_LETTERS)}, or null")
    if not sample.right_letters:
        raise ValueError(f"{where}: none of answers is an option of choices; write it as the option or its letter")


def _document(item: Any, where: str) -> Document:
    if not isinstance(item, dict):
        raise ValueError(f"{where} is not an object; it needs title and text")
    title = item.get("title") or ""
    if not isinstance(title, str):
        raise ValueError(f"{where}: title is not a string; write one, or leave it out")
    text = f"{title}\n{_text(item, 'text', where)}".strip()
    return _named(text, title)


def _named(text: str, title: str) -> Document:
    return Document(xxhash.xxh3_128_hexdigest(text.encode()), text, metadata={"title": title})


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {field} is {_shown(value)}; write a string that is not empty")
    return value


def _list(row: Mapping[str, Any], field: str, where: str) -> list[Any]:
    value = row.get(field)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {field} is {_shown(value)}; write a list that is not empty")
    return value


def _texts(row: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    values = _list(row, field, where)
    if not all(isinstance(v, str) and v.strip() for v in values):
        raise ValueError(f"{where}: {field} holds something else than text; write strings that are not empty")
    return tuple(values)


def _shown(value: Any) -> str:
    return "missing or null" if value is None else f"{value!r:.40}"


def fitted(sample: Sample, tokens: Tokens, max_documents: int | None, max_document_tokens: int | None) -> Sample:
    """Cut a sample's documents to what the run allows.

    First every document (title and text) is cut after ``max_document_tokens`` tokens. Then, since the data does not
    mark the documents that matter, those that hold an answer as whole words are kept first, next those whose title is
    in the question, next the others, each in the file's order; what is kept stays in the file's order.

    Parameters
    ----------
    sample
        As read.
    tokens
        The model's tokenizer.
    max_documents, max_document_tokens
        None for no limit.
    """
    documents = sample.documents
    if max_document_tokens is not None:
        documents = tuple(_cut(document, tokens, max_document_tokens) for document in documents)
    if max_documents is not None:
        ranks = [_rank(document, sample) for document in documents]
        kept = sorted(range(len(documents)), key=ranks.__getitem__)[:max_documents]
        documents = tuple(documents[i] for i in sorted(kept))
    return replace(sample, documents=documents)


def filled(samples: Sequence[Sample], tokens: Tokens, document_tokens: int | None) -> list[Sample]:
    """Put documents of the following samples between each sample's own, for prompts of one length.

    Own documents keep their order and lie evenly spread. The others come in the file's order, from its beginning again
    after its end, each once; the last one is cut. A sample that has as many tokens already stays as it is, and so does
    one for which the file does not hold enough, with all there is.

    Parameters
    ----------
    samples
        As :func:`fitted` made them.
    tokens
        The model's tokenizer.
    document_tokens
        In each prompt; None adds nothing.
    """
    if document_tokens is None:
        return list(samples)
    lengths = {d.id: len(tokens.document(d.text)) for s in samples for d in s.documents}
    out = []
    for i, sample in enumerate(samples):
        room = document_tokens - sum(lengths[d.id] for d in sample.documents)
        others = {d.id: d for s in (*samples[i + 1 :], *samples[:i]) for d in s.documents}
        for own in sample.documents:
            others.pop(own.id, None)
        added = _taken(others.values(), lengths, tokens, room)
        out.append(replace(sample, documents=_spread(sample.documents, added)))
    return out


def _taken(documents: Iterable[Document], lengths: Mapping[str, int], tokens: Tokens, room: int) -> list[Document]:
    out = []
    for document in documents:
        if room <= 0:
            break
        out.append(_cut(document, tokens, room))
        room -= lengths[document.id]
    return out


def _spread(own: Sequence[Document], others: Sequence[Document]) -> tuple[Document, ...]:
    """Put own documents into the middles of as many equal parts of the others."""
    out = list(others)
    for k in reversed(range(len(own))):
        out.insert(len(others) * (2 * k + 1) // (2 * len(own)), own[k])
    return tuple(out)


def _cut(document: Document, tokens: Tokens, limit: int) -> Document:
    ids, offsets = tokens.document_with_offsets(document.text)
    if len(ids) <= limit:
        return document
    text = document.text[: offsets[limit - 1][1]] if offsets else str(tokens.tokenizer.decode(ids[:limit]))
    return _named(text.strip() or document.text, document.metadata["title"])


def _rank(document: Document, sample: Sample) -> int:
    if any(_holds(document.text, answer) for answer in sample.answers):
        return 0
    return 1 if _holds(sample.question, document.metadata["title"]) else 2


def _holds(text: str, words: str) -> bool:
    wanted = normalised(words)
    return bool(wanted) and f" {wanted} " in f" {normalised(text)} "
