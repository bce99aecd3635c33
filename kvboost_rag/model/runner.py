"""Run chosen tokens at chosen positions through an unmodified transformers model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost_rag.model.architecture import Architecture
from kvboost_rag.model.attention import chosen_tokens_attention
from kvboost_rag.model.cache import KVCache
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.steering import Chooser, Steering, steered

__all__ = ["ModelRunner"]


class ModelRunner:
    """The one place where the model is run with stored KV.

    Parameters
    ----------
    model
        A loaded decoder-only model whose support was checked (see :mod:`kvboost_rag.model.support`).

    Attributes
    ----------
    architecture
        Shapes, layers and rotary tables of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.architecture = Architecture.of(model)
        # transformers 5.2x renamed the argument and warns of the old name.
        names = inspect.signature(self.architecture.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._mask_free = model.config._attn_implementation == "sdpa"

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.device

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Allocate a cache of ``capacity`` slots; its content is not defined until written."""
        a = self.architecture
        shape = (a.layers, batch, a.kv_heads, capacity, a.head_dim)
        return KVCache(
            torch.empty(shape, dtype=a.dtype, device=self.device),
            torch.empty(shape, dtype=a.dtype, device=self.device),
        )

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
        out = self._run(self.model, token_ids[None], positions, positions, cache, length, choosers, logits_to_keep=1)
        return out.logits[0, -1].float()  # type: ignore[no-any-return,attr-defined]

    @torch.inference_mode()
    def score(self, token_ids: Tensor, positions: Tensor, cache: KVCache, length: int) -> Tensor:
        """Like :meth:`forward`, but return the logits of every token: ``[tokens, vocabulary]`` in float32."""
        out = self._run(self.model, token_ids[None], positions, positions, cache, length, None)
        return out.logits[0].float()  # type: ignore[no-any-return,attr-defined]

    @torch.inference_mode()
    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Logits ``[vocabulary]`` of the last of ``[tokens]``, from the model run by itself."""
        with model_lock(self.model):
            logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits
        return logits[0, -1].float()

    @torch.inference_mode()
    def encode(self, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, length: int) -> None:
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
        """
        self._run(self.architecture.decoder, token_ids, positions, slots, cache, length, None)

    def _run(
        self,
        module: torch.nn.Module,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        length: int,
        choosers: Mapping[int, Chooser] | None,
        **extra: int,
    ) -> object:
        a = self.architecture
        cache.length = length
        # A four-dimensional mask is passed through untouched; each layer then gets its own from the hook.
        placeholder = torch.zeros((1, 1, 1, 1), dtype=a.dtype, device=self.device)
        with model_lock(self.model), chosen_tokens_attention(self.model) as in_blocks:
            steering = Steering(cache, positions, slots, a.windows, choosers or {}, self._mask_free, a.dtype, in_blocks)
            with steered(a.layer_modules, steering):
                return module(
                    input_ids=token_ids,
                    attention_mask=placeholder,
                    position_ids=positions[None],
                    use_cache=True,
                    **{self._cache_name: cache},
                    **extra,
                )
