"""The model as transformers runs it, without any reuse: for ``reuse="off"`` and models that can not reuse."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvboost_rag.model.locking import model_lock

__all__ = ["PlainSession"]

_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


class PlainSession:
    """A prefill followed by single steps over the model's own cache, whatever its kind.

    Parameters
    ----------
    model
        Any causal language model of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._carried: dict[str, Any] = {}
        self._seen = 0
        # Only the last token's logits are wanted; those of a whole prompt would cost up to a third of a prefill.
        known = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        # Before transformers 5.2, recurrent models ask for it once they carry a state.
        self._wants_position = "cache_position" in known

    @torch.inference_mode()
    def forward(self, token_ids: Tensor) -> Tensor:
        """Append ``[tokens]`` int64 to the session; return the last token's logits ``[vocabulary]`` in float32."""
        ids = token_ids[None].to(self._model.device)
        if self._carried and self._wants_position:
            self._carried["cache_position"] = torch.arange(self._seen, self._seen + ids.shape[1], device=ids.device)
        self._seen += ids.shape[1]
        with model_lock(self._model):
            out = self._model(input_ids=ids, use_cache=True, **self._last_only, **self._carried)
        # Looked up among the keys, because asking a recent transformers for an old name warns.
        self._carried = {name: out[name] for name in list(out.keys()) if name in _CACHE_NAMES}
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def fresh(self) -> PlainSession:
        """Begin anew with the same model."""
        return PlainSession(self._model)
