"""Run chosen tokens at chosen positions through an unmodified transformers model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_rag.model.architecture import Architecture
from kvboost_rag.model.attention import chosen_tokens_attention, eager_attention_watched
from kvboost_rag.model.cache import KVCache, ProbeReached
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.masks import Columns
from kvboost_rag.model.spare import SpareMemory
from kvboost_rag.model.steering import Chooser, Halted, Steering, steered

__all__ = ["ModelRunner"]


class ModelRunner:
    """The one place where the model is run with stored KV.

    Parameters
    ----------
    model
        A loaded decoder-only model whose support was checked (see :mod:`kvboost_rag.model.support`).
    spare
        Memory of finished requests, which runners of one model may share; None takes its own.

    Attributes
    ----------
    architecture
        Shapes, layers and rotary tables of the model.
    """

    def __init__(self, model: PreTrainedModel, spare: SpareMemory | None = None) -> None:
        self.model = model
        self.architecture = Architecture.of(model)
        # transformers 5.2x renamed the argument and warns of the old name.
        names = inspect.signature(self.architecture.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.spare = SpareMemory() if spare is None else spare
        self._mask_free = model.config._attn_implementation == "sdpa"

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.device

    def new_cache(self, capacity: int, batch: int = 1, layers: int | None = None) -> KVCache:
        """Allocate a cache of ``capacity`` slots for the first ``layers``; its content is not defined until written."""
        a = self.architecture
        shape = (layers or a.layers, batch, a.kv_heads, capacity, a.head_dim)
        return KVCache(
            torch.empty(shape, dtype=a.dtype, device=self.device),
            torch.empty(shape, dtype=a.dtype, device=self.device),
        )

    def request_cache(self, capacity: int) -> KVCache:
        """Like :meth:`new_cache`, in the memory of an earlier request where that has become free."""
        a = self.architecture
        keys, values = self.spare.take((a.layers, 1, a.kv_heads, capacity, a.head_dim), a.dtype, self.device)
        cache = KVCache(keys[:, :, :, :capacity], values[:, :, :, :capacity])
        weakref.finalize(cache, self.spare.give, keys, values).atexit = False
        return cache

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        length: int,
        choosers: Mapping[int, Chooser] | None = None,
    ) -> Tensor:
        """Compute tokens in place over a cache and return the logits of the last one.

        Parameters
        ----------
        token_ids
            ``[tokens]`` int64.
        positions
            ``[tokens]`` int64, ascending; also the slots that are overwritten.
        cache
            Holds the KV of every position below ``length`` that is not among ``positions``.
        length
            Tokens of the whole sequence.
        choosers
            Layer -> chooser that narrows the token set at the layer's input. A chooser must keep the last token.

        Returns
        -------
        Tensor
            ``[vocabulary]`` in float32.
        """
        steps = {"choosers": choosers or {}}
        out = self._run(self.model, token_ids[None], positions, positions, cache, length, steps, logits_to_keep=1)
        return out.logits[0, -1].float()  # type: ignore[no-any-return,attr-defined]

    @torch.inference_mode()
    def question_attention(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, length: int, layers: Collection[int], last: int
    ) -> Tensor:
        """Run tokens through the lower layers and tell whom the last of them look at.

        Parameters
        ----------
        token_ids, positions, cache, length
            As for :meth:`forward`.
        layers
            Whose attention counts, at least one; nothing above them is run.
        last
            So many of the last tokens count, but not more than :data:`kvboost_rag.model.attention.MOST_WATCHED`.

        Returns
        -------
        Tensor
            ``[length]`` float32, mean over heads, layers and tokens; sums to 1.

        Raises
        ------
        ValueError
            If the model's attention implementation can not be watched.
        """
        # Under the lock from the start: another engine's forward changes the setting, and would run our hooks.
        with model_lock(self.model):
            seen = self._watched(token_ids, positions, cache, length, layers)
        return torch.stack(seen)[:, -last:].mean(dim=(0, 1))

    def _watched(
        self, token_ids: Tensor, positions: Tensor, cache: KVCache, length: int, layers: Collection[int]
    ) -> list[Tensor]:
        implementation = self.model.config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"question-guided repair needs attention weights, which {implementation!r} does not show; load the "
                "model with attn_implementation='sdpa', or choose another repair"
            )
        seen: list[Tensor] = []
        steps: dict[str, Any] = {"halt": max(layers) + 1}
        eager = [self.architecture.layer_modules[i] for i in layers] if implementation == "eager" else []
        if not eager:
            steps |= {"watch": frozenset(layers), "watcher": seen.append}
        with eager_attention_watched(eager, seen.append), suppress(Halted):
            self._run(self.architecture.decoder, token_ids[None], positions, positions, cache, length, steps)
        if not seen:
            raise ValueError(
                f"question-guided repair needs attention weights, which {type(self.model).__name__} does not show with "
                f"{implementation!r}; choose another repair, as sensitive"
            )
        return seen

    @torch.inference_mode()
    def score(self, token_ids: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """Like :meth:`forward`, but return the logits of every token: ``[tokens, vocabulary]`` in float32."""
        out = self._run(self.model, token_ids[None], positions, positions, cache, length, {})
        return out.logits[0].float()  # type: ignore[no-any-return,attr-defined]

    @torch.inference_mode()
    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Logits ``[vocabulary]`` of the last of ``[tokens]``, from the model run by itself."""
        known = inspect.signature(self.model.forward).parameters
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        with model_lock(self.model):
            logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False, **last_only).logits
        return logits[0, -1].float()

    @torch.inference_mode()
    def encode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        length: int,
        columns: Columns | None = None,
    ) -> None:
        """Fill a cache without computing logits.

        Parameters
        ----------
        token_ids
            ``[batch, tokens]`` int64; shorter rows are padded at their end with any token.
        positions, slots
            ``[tokens]`` int64: what is rotated by, and where it is written.
        cache
            Of the same batch size.
        length
            Slots visible to attention.
        columns
            Of these slots, where attention can not take each slot for its position.
        """
        steps = {"columns": columns}
        self._run(self.architecture.decoder, token_ids, positions, slots, cache, length, steps)

    @torch.inference_mode()
    def lower_values(self, token_ids: Tensor, slots: Tensor, cache: KVCache, length: int, layer: int) -> list[Tensor]:
        """Compute the values of layers 1 to ``layer``, and nothing above.

        Parameters
        ----------
        token_ids, slots, length
            As for :meth:`encode`, with positions equal to slots.
        cache
            With at least ``layer + 1`` layers.
        layer
            At least 1; layer 0 is left out because its values depend on no other token.

        Returns
        -------
        list[Tensor]
            ``[batch, kv_heads, tokens, head_dim]`` each.
        """
        cache.probe_layer = layer
        try:
            self._run(self.architecture.decoder, token_ids, slots, slots, cache, length, {})
        except ProbeReached as reached:
            return [*(cache.values[i].index_select(2, slots) for i in range(1, layer)), reached.values]
        finally:
            cache.probe_layer = None
        raise RuntimeError(f"layer {layer} never handed its values to the cache")

    def _run(
        self,
        module: torch.nn.Module,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        length: int,
        steps: Mapping[str, Any],
        **extra: int,
    ) -> object:
        a = self.architecture
        cache.length = length
        watched = bool(steps.get("watch"))
        with model_lock(self.model), chosen_tokens_attention(self.model, watched=watched) as in_blocks:
            steering = Steering(cache, positions, slots, a.windows, self._mask_free, a.dtype, in_blocks, **steps)
            with steered(a.layer_modules, steering):
                return self.call(module, token_ids, positions[None], cache, **extra)

    def call(
        self, module: torch.nn.Module, token_ids: Tensor, positions: Tensor, cache: Cache, **extra: int
    ) -> object:
        """Call the model, or a module of it, on ``[batch, tokens]`` ids and positions; its lock is the caller's."""
        # A four-dimensional mask is passed through untouched; layers get their own, or attention needs none.
        placeholder = torch.zeros((1, 1, 1, 1), dtype=self.architecture.dtype, device=self.device)
        return module(
            input_ids=token_ids,
            attention_mask=placeholder,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
            **extra,
        )
