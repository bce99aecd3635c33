"""Frozen dataclasses that travel between the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "Chunk",
    "ChunkKV",
    "ChunkKey",
    "Document",
    "Match",
    "Piece",
    "Placement",
    "Plan",
    "Quantized",
    "Span",
    "SpanKind",
    "TokenIds",
    "is_unicode",
]

TokenIds = npt.NDArray[np.int64]

_LONGEST_ID = 1 << 16
"""In characters. It stands in the header of every chunk's file, whose size has a limit."""


@dataclass(frozen=True)
class Document:
    """What a retriever returns.

    Parameters
    ----------
    id
        Identity of the document, at most 65,536 characters. Adding the same id with another text replaces the
        document.
    text
        The text as it appears in prompts; white space around it does not count.
    version
        Free label of the caller, shown in reports; the text alone decides whether KV is still valid.
    metadata
        Anything the caller wants back; never read by the engine.
    """

    id: str
    text: str
    version: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what could be neither found nor stored."""
        for name in ("id", "text"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"a document's {name} is a str, not {type(value).__name__}")
            if not is_unicode(value):
                raise ValueError(f"the {name} of document {self.id!r} holds lone surrogates; decode it as UTF-8")
        if len(self.id) > _LONGEST_ID:
            seen = f"{len(self.id)} characters, {self.id[:40]!r}..."
            raise ValueError(f"a document's id has {seen}; pass a name of at most {_LONGEST_ID}")


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8, as tokenizers want it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Match:
    """A registered document found in a text.

    Parameters
    ----------
    handle
        The number under which the document was registered with the locator.
    start, end
        Character offsets in the searched text; the matched text is a prefix of the stripped document.
    complete
        Whether the whole document was found; otherwise it is cut at its end.
    """

    handle: int
    start: int
    end: int
    complete: bool


@dataclass(frozen=True)
class ChunkKey:
    """The two keys of a chunk, as 32 hexadecimal digits each.

    Parameters
    ----------
    prefix
        Chained over the fingerprint and every token the model saw up to the chunk's end: equal means exact.
    content
        Over the fingerprint and the chunk's own tokens: equal means the same tokens after another history.
    """

    prefix: str
    content: str


@dataclass(frozen=True, eq=False)
class Chunk:
    """A slice of a document's tokens, the unit of storage."""

    key: ChunkKey
    document_id: str
    index: int
    token_ids: TokenIds


@dataclass(frozen=True, eq=False)
class Quantized:
    """Keys or values of a chunk in 8 or 4 bits each; :mod:`kvboost_rag.quantize` makes and reads it.

    A number is ``offset + scale * code``. The tokens behind ``first`` are cut into groups of one length (the last one
    may be shorter), each with a scale and an offset, either for every channel or for all channels together.

    Parameters
    ----------
    first
        ``[layers, kv_heads, sinks, head_dim]``: the first tokens as they are, the model's dtype; often none.
    codes
        ``[layers, kv_heads, tokens - sinks, head_dim]`` uint8; for 4 bits half as wide, the first half of the channels
        in the low four bits.
    scale, offset
        ``[layers, kv_heads, groups, head_dim or 1]`` float16, or float32 where float16 can not hold them.
    """

    first: Tensor
    codes: Tensor
    scale: Tensor
    offset: Tensor

    @property
    def shape(self) -> torch.Size:
        """``[layers, kv_heads, tokens, head_dim]``."""
        return torch.Size((*self.first.shape[:2], self.first.shape[2] + self.codes.shape[2], self.first.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype, which it came from and returns to."""
        return self.first.dtype

    @property
    def bits(self) -> int:
        """Bits of a code: 8 or 4."""
        return 8 * self.codes.shape[3] // self.first.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def __getitem__(self, layers: slice) -> Quantized:
        """View of some layers."""
        return replace(self, **{name: part[layers] for name, part in self.parts.items()})

    def to(self, device: torch.device | str) -> Quantized:
        """Put it on a device."""
        return replace(self, **{name: part.to(device) for name, part in self.parts.items()})


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """Keys and values of a chunk.

    Parameters
    ----------
    chunk
        Which tokens these are.
    keys
        ``[layers, kv_heads, tokens, head_dim]``, without rotation (position-free), the model's dtype or quantised.
    values
        The same shape.
    sensitivity
        ``[tokens]`` float32: how much each token's values changed when the document was encoded after another
        context, relative to the document's mean; see :mod:`kvboost_rag.sensitivity`.
    """

    chunk: Chunk
    keys: Tensor | Quantized
    values: Tensor | Quantized
    sensitivity: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, sensitivity and token ids."""
        tensors = self.keys.nbytes + self.values.nbytes + self.sensitivity.nbytes
        return int(tensors + self.chunk.token_ids.nbytes)

    @property
    def kv_dtype(self) -> str:
        """``native``, ``int8``, ``int4``, or both names with a slash where keys and values differ."""
        keys, values = (f"int{x.bits}" if isinstance(x, Quantized) else "native" for x in (self.keys, self.values))
        return keys if keys == values else f"{keys}/{values}"


class SpanKind(str, Enum):
    """Where the KV of a token came from."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    RECOMPUTED = "recomputed"
    COMPUTED = "computed"


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the prompt, tokenised by itself.

    Parameters
    ----------
    token_ids
        The tokens of the piece.
    document_id
        The document this is, or None for text between documents.
    chunks
        Its stored chunks; the piece's tokens are a prefix of theirs.
    reason
        Why a document is not reused, when something other than a missing entry is the cause.
    """

    token_ids: TokenIds
    document_id: str | None = None
    chunks: tuple[Chunk, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Span:
    """A run of prompt tokens with one origin.

    Parameters
    ----------
    start, end
        Token positions in the prompt.
    kind
        Where the KV came from.
    document_id
        The document, or None for other text.
    reason
        Why it is not an exact hit; empty where nothing is to be said.
    """

    start: int
    end: int
    kind: SpanKind
    document_id: str | None = None
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Placement:
    """Stored KV and where it goes.

    Parameters
    ----------
    position
        Prompt position of the first placed token.
    entry
        The stored chunk.
    start, end
        Which of the chunk's tokens are placed.
    same_history
        Whether the entry was encoded after the very tokens that stand before it here.
    """

    position: int
    entry: ChunkKV
    start: int
    end: int
    same_history: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """What of a prompt is reused and what is computed.

    Parameters
    ----------
    token_ids
        The whole prompt.
    spans
        Cover the prompt without gap or overlap, in order.
    placements
        Stored chunks to place.
    prefix_tokens
        How many leading tokens come from the prefix cache as they are; no repair touches them.
    """

    token_ids: TokenIds
    spans: tuple[Span, ...]
    placements: tuple[Placement, ...]
    prefix_tokens: int

    @property
    def repairable(self) -> list[Span]:
        """Approximate spans that were placed by this plan, each with a seam at its start."""
        return [s for s in self.spans if s.kind is SpanKind.APPROXIMATE and s.start >= self.prefix_tokens]

    @property
    def sensitivity(self) -> Tensor:
        """Of every prompt token, ``[tokens]`` float32; 0 where no history was changed by this plan."""
        out = torch.zeros(len(self.token_ids))
        for p in self.placements:
            if not p.same_history:
                out[p.position : p.position + p.end - p.start] = p.entry.sensitivity[p.start : p.end]
        return out

    @property
    def computed(self) -> list[Span]:
        """Spans without KV."""
        return [s for s in self.spans if s.kind is SpanKind.COMPUTED]
