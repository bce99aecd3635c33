"""Documents to canonical KV: encoded once, after a context that no prompt has any part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvboost_rag.canonical import CanonicalContext, ContextKV
from kvboost_rag.chunking import Chunker
from kvboost_rag.errors import ContextWindowError
from kvboost_rag.keys import chain, content_key
from kvboost_rag.model import ModelRunner
from kvboost_rag.quantize import KVFormat
from kvboost_rag.sensitivity import SensitivityMeter
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Chunk, ChunkKey, ChunkKV, Document, TokenIds

__all__ = ["Encoder"]

# Rows times padded length of one ingest forward: enough rows for a CPU, little padding.
_BATCH_TOKENS = 512
# Slots of one ingest forward; each row has the canonical context's KV once more.
_BATCH_SLOTS = 8192


class Encoder:
    """Cuts documents into chunks and computes their KV.

    Parameters
    ----------
    runner
        Runs the model.
    tokens
        Tokenises documents.
    chunker
        Chooses the chunks' boundaries.
    context
        What documents are encoded after.
    fingerprint
        Of the model, part of every key.
    meter
        Measures what the context changes.
    kv_format
        How the KV is handed out.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokens: Tokens,
        chunker: Chunker,
        context: CanonicalContext,
        fingerprint: str,
        meter: SensitivityMeter,
        kv_format: KVFormat,
    ) -> None:
        self._runner = runner
        self._tokens = tokens
        self._chunker = chunker
        self._fingerprint = fingerprint
        self._meter = meter
        self._kv_format = kv_format
        self.context = context
        self.context_kv = ContextKV(context, runner)

    def chunks(self, document: Document) -> tuple[Chunk, ...]:
        """Cut a document into chunks, with their keys.

        Raises
        ------
        ValueError
            If the document holds no text.
        ContextWindowError
            If it does not fit the model's context window behind the canonical context.
        """
        text = document.text.strip()
        ids, offsets = self._tokens.document_with_offsets(text)
        if not len(ids):
            raise ValueError(f"document {document.id!r} is empty; leave it out or give it text")
        window, needed = self._runner.architecture.longest, self.context.length + len(ids)
        kind = "" if window == self._runner.architecture.max_positions else " for reuse"
        if window is not None and needed > window:
            raise ContextWindowError(
                f"document {document.id!r} has {len(ids)} tokens, {needed} with the canonical context, but the "
                f"model's context window{kind} is {window}; split it into passages"
            )
        return self._cut(document.id, ids, self._chunker.boundaries(text, offsets, len(ids)))

    def _cut(self, document_id: str, ids: TokenIds, ends: Sequence[int]) -> tuple[Chunk, ...]:
        starts = (0, *ends)
        unkeyed = ChunkKey("", "")
        return self.keyed([Chunk(unkeyed, document_id, i, ids[starts[i] : end]) for i, end in enumerate(ends)])

    def keyed(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Give all chunks of a document the keys of this model and context."""
        out, key = [], self.context.key
        for chunk in chunks:
            key = chain(key, chunk.token_ids)
            out.append(replace(chunk, key=ChunkKey(key, content_key(self._fingerprint, chunk.token_ids))))
        return tuple(out)

    def encode(self, documents: Sequence[Sequence[Chunk]]) -> Iterator[list[ChunkKV]]:
        """Compute KV, in batches of documents of similar length.

        Parameters
        ----------
        documents
            The chunks of each document.

        Yields
        ------
        list[ChunkKV]
            All chunks of one document, in an order of documents that is not the given one.
        """
        ids = [np.concatenate([chunk.token_ids for chunk in chunks]) for chunks in documents]
        for batch in _batches([len(i) for i in ids], self.context_kv.cache.capacity):
            for row, (keys, values, sensitivity) in enumerate(self._encode_batch([ids[i] for i in batch])):
                entries = _sliced(documents[batch[row]], keys, values, sensitivity)
                yield [self._kv_format.stored(entry) for entry in entries]

    def _encode_batch(self, ids: Sequence[TokenIds]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield keys, values and sensitivity of each document."""
        runner, kv = self._runner, self.context_kv
        begin, context = self.context.length, kv.cache.capacity
        width = max(len(i) for i in ids)
        # Padding stands behind a document's own tokens, where causal attention never looks.
        padded = np.stack([np.pad(i, (0, width - len(i)), mode="edge") for i in ids])
        cache = runner.new_cache(context + width, len(ids))
        cache.keys[:, :, :, :context] = kv.cache.keys
        cache.values[:, :, :, :context] = kv.cache.values
        slots = torch.arange(context, context + width, device=runner.device)
        positions = slots - context + begin
        token_ids = torch.from_numpy(padded).to(runner.device)
        columns = kv.columns and kv.columns.to(positions.device).followed_by(positions)
        runner.encode(token_ids, positions, slots, cache, context + width, columns)
        sensitivities = self._meter.measure(token_ids, [len(i) for i in ids], cache.values[:, :, :, context:])
        rotation = runner.architecture.rotation
        for row, (own, sensitivity) in enumerate(zip(ids, sensitivities, strict=True)):
            end = context + len(own)
            tables = rotation.tables(begin, begin + len(own))
            keys = rotation.unrotate(cache.keys[:, row, :, context:end], tables)
            yield keys, cache.values[:, row, :, context:end], sensitivity


def _batches(lengths: Sequence[int], context: int) -> Iterator[list[int]]:
    """Group indexes so that rows times the longest length, alone and with the context, stays under the batch size."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        rows = len(batch) + 1
        if batch and (rows * lengths[i] > _BATCH_TOKENS or rows * (context + lengths[i]) > _BATCH_SLOTS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _sliced(chunks: Sequence[Chunk], keys: Tensor, values: Tensor, sensitivity: Tensor) -> list[ChunkKV]:
    """Cut ``[layers, kv_heads, tokens, head_dim]`` and ``[tokens]`` into chunks that own their memory."""
    entries, start = [], 0
    for chunk in chunks:
        end = start + len(chunk.token_ids)
        own = slice(start, end)
        entries.append(
            ChunkKV(chunk, keys[:, :, own].clone(), values[:, :, own].clone(), sensitivity[own].clone())
        )
        start = end
    return entries
