"""What kvboost_rag needs to know of a model's build, read from the loaded model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvboost_rag.errors import UnsupportedModelError

__all__ = ["Architecture", "refuse"]

REMEDY = "Use a decoder with rotary position embedding, or run this model with reuse='off'."


def refuse(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    """Make the error that names the model, the cause and the remedy."""
    return UnsupportedModelError(f"{type(model).__name__} can not reuse KV: {why}. {REMEDY}")


@dataclass(frozen=True, eq=False)
class Architecture:
    """Shapes and parts of a model.

    Parameters
    ----------
    layers, kv_heads, head_dim
        Shape of the KV of one token.
    dtype
        Of keys and values.
    max_positions
        The context window in tokens, or None if the configuration states none.
    windows
        Per layer, the width of its sliding window or None.
    decoder
        The stack without the output head.
    layer_modules
        The decoder layers.
    rotary
        The model's rotary embedding.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_positions: int | None
    windows: tuple[int | None, ...]
    decoder: nn.Module
    layer_modules: nn.ModuleList
    rotary: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> Architecture:
        """Read a model's build.

        Raises
        ------
        UnsupportedModelError
            If a part is missing or of a kind whose KV can not be moved.
        """
        config = model.config
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise refuse(model, "its decoder layers are not found under the name 'layers'")
        heads = config.num_attention_heads
        return cls(
            layers=len(layers),
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            max_positions=getattr(config, "max_position_embeddings", None),
            windows=_windows(model, len(layers)),
            decoder=decoder,
            layer_modules=layers,
            rotary=_rotary(model, decoder),
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @torch.inference_mode()
    def rotary_tables(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions ``start .. end - 1``: ``[tokens, rotary_dim]`` each, float32."""
        device = next(self.decoder.parameters()).device
        positions = torch.arange(start, end, device=device)[None]
        # The tensor only tells the module which dtype to return.
        cos, sin = self.rotary(torch.empty(1, device=device, dtype=torch.float32), positions)
        return cos[0], sin[0]


def _windows(model: PreTrainedModel, layers: int) -> tuple[int | None, ...]:
    config = model.config
    window = getattr(config, "sliding_window", None)
    types: list[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * layers
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise refuse(model, f"layers of type {', '.join(unknown)} keep more than keys and values per token")
    return tuple(known[t] for t in types[:layers])


def _rotary(model: PreTrainedModel, decoder: nn.Module) -> nn.Module:
    found: list[nn.Module] = [m for name, m in decoder.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if not found:
        raise refuse(model, "it has no rotary position embedding (ALiBi and learned positions can not be moved)")
    if len(found) > 1:
        raise refuse(model, "it has a rotary embedding per layer")
    kinds: Any = getattr(model.config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in kinds.values()):
        raise refuse(model, "its layers rotate by different bases")
    kind = kinds.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise refuse(model, f"its rotation ('{kind}') changes with the length of the prompt")
    return found[0]
