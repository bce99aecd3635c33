"""The documents an engine knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvboost_rag.locate import Locator
from kvboost_rag.types import Chunk, Document, Match

__all__ = ["Registered", "Registry"]


@dataclass(frozen=True, eq=False)
class Registered:
    """A document with its tokens.

    Parameters
    ----------
    document
        As the caller gave it.
    text
        Its text without white space around it: what is tokenised and looked for.
    chunks
        Its chunks, in order.
    """

    document: Document
    text: str
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class Registry:
    """Documents by id and by text."""

    def __init__(self) -> None:
        self._documents: dict[str, Registered] = {}
        self._handles: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        # How many documents have a chunk: equal texts share their KV.
        self._users: Counter[str] = Counter()
        self._next_handle = 0
        self._locator = Locator()

    def put(self, registered: Registered) -> None:
        """Add a document; one with the same id is replaced."""
        self.remove(registered.document.id)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._locator.add(handle, registered.text)
        self._ids[handle] = registered.document.id
        self._handles[registered.document.id] = handle
        self._users.update(chunk.key.prefix for chunk in registered.chunks)
        self._documents[registered.document.id] = registered

    def remove(self, document_id: str) -> Registered | None:
        """Forget a document and return it; None if it is not known."""
        registered = self._documents.pop(document_id, None)
        if registered is not None:
            # An interrupt may have left a document half added; taking it away must work all the same.
            handle = self._handles.pop(document_id, -1)
            if self._ids.pop(handle, None) is not None:
                self._locator.remove(handle)
            self._users.subtract(chunk.key.prefix for chunk in registered.chunks)
        return registered

    def rekey(self, keyed: Callable[[Sequence[Chunk]], tuple[Chunk, ...]]) -> None:
        """Give the chunks of every document other keys; ``keyed`` takes and returns those of one document."""
        for document_id, registered in self._documents.items():
            self._documents[document_id] = replace(registered, chunks=keyed(registered.chunks))
        self._users = Counter(chunk.key.prefix for held in self._documents.values() for chunk in held.chunks)

    def get(self, document_id: str) -> Registered | None:
        """Return a document by its id."""
        return self._documents.get(document_id)

    def locate(self, text: str) -> list[tuple[Registered, Match]]:
        """Find known documents in a text, in the order of their places."""
        found = ((self._documents.get(self._ids.get(m.handle, "")), m) for m in self._locator.locate(text))
        return [(registered, match) for registered, match in found if registered is not None]

    def unused(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Keep the chunks that no known document has."""
        gone = [chunk for chunk in chunks if self._users[chunk.key.prefix] <= 0]
        for chunk in gone:
            self._users.pop(chunk.key.prefix, None)
        return gone

    def __iter__(self) -> Iterator[Registered]:
        """Iterate in the order of adding."""
        return iter(list(self._documents.values()))

    def __len__(self) -> int:
        """Count the documents."""
        return len(self._documents)

    def users(self, prefix: str) -> int:
        """How many known documents have the chunk with this prefix key."""
        return self._users[prefix]

    def is_used(self, prefix: str) -> bool:
        """Whether a known document has the chunk with this prefix key."""
        return self._users[prefix] > 0

    def missing(self, document_ids: Iterable[str]) -> list[str]:
        """Ids that are not known."""
        return [i for i in document_ids if i not in self._documents]

