"""Documents to try things on: a few real paragraphs that ship with the package, or the caller's own folder."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvboost_rag.types import Document

__all__ = ["DemoQuestion", "demo_documents", "demo_questions", "read_folder"]

logger = logging.getLogger(__name__)

_PASSAGE_CHARACTERS = 1200
_SUFFIXES = frozenset(
    ".c .cc .cpp .cs .css .csv .go .h .hpp .java .js .json .jsonl .kt .md .php .py .rb .rs .rst .scala .sh .sql .swift "
    ".tex .toml .ts .tsv .txt .yaml .yml".split()
)
_PARAGRAPH = re.compile(r"\S.*?(?=\n[ \t]*\n|\Z)", re.DOTALL)
_NAMED_IN_LOG = 20


@dataclass(frozen=True)
class DemoQuestion:
    """A question on the demo documents.

    Parameters
    ----------
    question
        As its author wrote it.
    answers
        Any of them is right.
    document_id
        The demo document that holds the answer.
    """

    question: str
    answers: tuple[str, ...]
    document_id: str


def demo_documents() -> list[Document]:
    """Return the 40 paragraphs that ship with the package; the article's title is in ``metadata["title"]``.

    They come from XQuAD (CC BY-SA 4.0); ``demo_data.LICENSE.md`` beside the data gives the attribution.
    """
    return [Document(row["id"], row["text"], metadata={"title": row["title"]}) for row in _rows("demo_data.jsonl")]


def demo_questions() -> list[DemoQuestion]:
    """Return the questions on :func:`demo_documents` that ship with the package.

    Of 48 questions drawn at random, these are the 14 that the embedded model answered at all by full prefill, with an
    earlier prompt; ``examples/document_order.py`` counts what it answers now.
    """
    rows = _rows("demo_questions.jsonl")
    return [DemoQuestion(row["question"], tuple(row["answers"]), row["document_id"]) for row in rows]


def read_folder(folder: str | Path) -> list[Document]:
    """Read the text files of a folder and its sub-folders, in the order of their paths.

    A file of more than 1200 characters is cut into passages at paragraph borders; a longer paragraph at line, sentence
    or word borders. Hidden files and folders, links to folders, empty files and files of other types are left out,
    and the log names them.

    Parameters
    ----------
    folder
        Holds text, markup, data or source files in UTF-8.

    Returns
    -------
    list[Document]
        The id is the file's path relative to ``folder``, with ``/`` between its parts; passages of one file add
        ``#1``, ``#2`` and so on.

    Raises
    ------
    ValueError
        The folder does not exist, holds no readable text, or a file is not UTF-8.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; pass a folder with text files")
    documents: list[Document] = []
    skipped: list[Path] = []
    for path in _walk(root, skipped):
        passages = _passages(_read(path)) if path.suffix.lower() in _SUFFIXES else []
        name = os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")
        documents += _documents(name, passages)
        skipped += [] if passages else [path]
    _log_skipped(root, skipped)
    if not documents:
        raise ValueError(f"{root} holds no text to read; put files such as .txt, .md, .rst or .py there")
    return documents


def _rows(name: str) -> list[dict[str, Any]]:
    text = (files(__package__) / name).read_text(encoding="utf-8")
    # Not splitlines(): it also cuts at line separators inside a text.
    return [json.loads(line) for line in text.split("\n") if line]


def _walk(root: Path, skipped: list[Path]) -> Iterator[Path]:
    """Yield the visible files, sorted by path, and add everything else to ``skipped``."""
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        path = Path(entry.path)
        hidden = entry.name.startswith(".")
        # Links to folders are not followed: one may lead back to where it is.
        if entry.is_dir(follow_symlinks=False) and not hidden:
            yield from _walk(path, skipped)
        elif entry.is_file() and not hidden:
            yield path
        else:
            skipped.append(path)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, or move it out of the folder"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _documents(name: str, passages: list[str]) -> list[Document]:
    if len(passages) == 1:
        return [Document(name, passages[0])]
    return [Document(f"{name}#{number}", passage) for number, passage in enumerate(passages, start=1)]


def _passages(text: str) -> list[str]:
    """Join neighbouring paragraphs as long as they fit; what lies between them stays as it is."""
    spans: list[tuple[int, int]] = []
    for start, end in _pieces(text):
        if spans and end - spans[-1][0] <= _PASSAGE_CHARACTERS:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return [text[start:end].rstrip() for start, end in spans]


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield where paragraphs lie, those over the limit cut."""
    for match in _PARAGRAPH.finditer(text):
        start, end = match.start(), match.end()
        while end - start > _PASSAGE_CHARACTERS:
            cut = _cut(text, start)
            yield start, cut
            start = cut + len(text[cut:end]) - len(text[cut:end].lstrip())
        if start < end:
            yield start, end


def _cut(text: str, start: int) -> int:
    """Find the best place to end a passage: after a line, else a sentence, else a word, else at the limit."""
    limit = start + _PASSAGE_CHARACTERS
    for border in ("\n", ". ", " "):
        # A border in the first half would leave a scrap.
        if (place := text.rfind(border, start + _PASSAGE_CHARACTERS // 2, limit)) >= 0:
            return place + len(border.rstrip(" "))
    return limit


def _log_skipped(root: Path, skipped: list[Path]) -> None:
    if skipped:
        names = [path.relative_to(root).as_posix() for path in skipped]
        rest = f" and {len(names) - _NAMED_IN_LOG} more" if len(names) > _NAMED_IN_LOG else ""
        logger.info(
            "left out in %s (hidden, empty, linked or of another type): %s%s",
            root,
            ", ".join(names[:_NAMED_IN_LOG]),
            rest,
        )
