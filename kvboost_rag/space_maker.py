"""From an engine's options and the model as it is now to a key space: the check, the canonical context, the stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.answering import ReusePath
from kvboost_rag.canonical import CanonicalContext
from kvboost_rag.chunking import Chunker
from kvboost_rag.contexts import head_ids, other_context_ids, text_ids
from kvboost_rag.encode import Encoder
from kvboost_rag.errors import ContextWindowError
from kvboost_rag.keys import prefix_seed
from kvboost_rag.model import ModelRunner, SpareMemory, check_build, check_support, fingerprint, model_lock
from kvboost_rag.plan import Planner
from kvboost_rag.prefix import Prefix, PrefixCache
from kvboost_rag.prompt import Renderer
from kvboost_rag.quantize import KVFormat
from kvboost_rag.sensitivity import SensitivityMeter
from kvboost_rag.spaces import Reuse, Space
from kvboost_rag.store import MemoryStore, StoreOptions
from kvboost_rag.tokens import Tokens
from kvboost_rag.types import Span, SpanKind, TokenIds
from kvboost_rag.usage import UsageLedger

__all__ = ["SpaceMaker"]

_MEASURED_TOKENS = 128


@dataclass(frozen=True, eq=False)
class SpaceMaker:
    """Makes the key spaces of one engine.

    Parameters
    ----------
    model, tokenizer, namespace, kv_format
        What keys depend on.
    renderer, tokens, chunker, contexts
        What the canonical context and the chunks are made by.
    stores, memory, usage, prefixes
        Where KV is kept; the memory is shared by all spaces.
    spare
        Memory of finished requests, shared too.

    Raises
    ------
    UnsupportedModelError
        If the model is of a kind that is refused by name.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    namespace: str
    kv_format: KVFormat
    renderer: Renderer
    tokens: Tokens
    chunker: Chunker
    contexts: Sequence[str]
    stores: StoreOptions
    memory: MemoryStore
    usage: UsageLedger
    prefixes: PrefixCache
    spare: SpareMemory

    def __post_init__(self) -> None:
        """Refuse before any weight is read."""
        check_build(self.model)

    def fingerprint(self) -> str:
        """Fingerprint of the model as it is now."""
        # Another engine's forward changes the model's attention setting for its length.
        with model_lock(self.model):
            return fingerprint(self.model, self.tokenizer, self.namespace, self.kv_format.name)

    def make(self, fingerprint: str) -> Space:
        """Make the space of a fingerprint, with the model as it is now.

        Raises
        ------
        UnsupportedModelError
            If the KV can not be moved.
        ContextWindowError
            If the canonical context leaves no room for anything else.
        """
        with model_lock(self.model):
            runner = check_support(self.model, self.spare)
        head = head_ids(self.renderer, self.tokens)
        texts = [text_ids(self.renderer, self.tokens, text) for text in self.contexts]
        context = CanonicalContext.of(fingerprint, head, texts)
        _check_room(runner, context.length)
        meter = SensitivityMeter(runner, other_context_ids(head, self.renderer, self.tokens, self.contexts))
        encoder = Encoder(runner, self.tokens, self.chunker, context, fingerprint, meter, self.kv_format)
        a = runner.architecture
        # The context's key covers the model too, so that engines with other layouts may share a folder.
        store = self.stores.store(
            self.memory, self.usage, context.key, (a.layers, a.kv_heads, a.head_dim), a.dtype,
            partial(_prefill_rate, runner, context.token_ids),
        )  # fmt: skip
        # Where documents are encoded after more than the head.
        head_key = CanonicalContext.of(fingerprint, head).key if texts else None
        planner = Planner(store, prefix_seed(fingerprint), context.key, head_key)
        path = ReusePath(runner, planner, self.prefixes)
        return Space(fingerprint, store, Reuse(runner, encoder, planner, path, _head(encoder)))


def _check_room(runner: ModelRunner, tokens: int) -> None:
    window = runner.architecture.longest
    if window is not None and tokens >= window:
        raise ContextWindowError(
            f"head and longest of the context_documents have {tokens} tokens, but the model's context window is "
            f"{window}; give shorter context_documents"
        )


def _prefill_rate(runner: ModelRunner, some_ids: TokenIds) -> float:
    """Measure how many tokens a second the model computes, in the second of two forwards."""
    tokens = min(_MEASURED_TOKENS, runner.architecture.longest or _MEASURED_TOKENS)
    ids = torch.from_numpy(np.resize(some_ids if len(some_ids) else [0], tokens)).to(runner.device)
    slots, seconds = torch.arange(tokens, device=runner.device), 0.0
    for _ in range(2):
        cache, start = runner.new_cache(tokens), time.perf_counter()
        runner.encode(ids[None], slots, slots, cache, tokens)
        # An accelerator may still be at work; a number is there once it is done.
        float(cache.values.flatten()[-1])
        seconds = time.perf_counter() - start
    return tokens / seconds


def _head(encoder: Encoder) -> Prefix | None:
    ids = encoder.context.token_ids
    if not np.size(ids):
        return None
    span = Span(0, len(ids), SpanKind.COMPUTED)
    return Prefix(ids, encoder.context_kv.cache.sliced(0, len(ids)), (span,), "", pinned=True)
