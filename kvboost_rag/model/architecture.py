"""What kvboost_rag needs to know of a model's build, read from the loaded model itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_rag.errors import UnsupportedModelError
from kvboost_rag.model.locking import model_lock
from kvboost_rag.model.rotation import Rotation

__all__ = ["Architecture", "check_precision", "is_autocast", "refuse"]

REMEDY = "Use a decoder with rotary position embedding, or run this model with reuse='off'."


def refuse(model: PreTrainedModel, why: str, remedy: str = REMEDY) -> UnsupportedModelError:
    """Make the error that names the model, the cause and the remedy."""
    return UnsupportedModelError(f"{type(model).__name__} can not reuse KV: {why}. {remedy}")


def is_autocast(model: PreTrainedModel) -> bool:
    """Whether this thread runs the model in mixed precision."""
    return torch.is_autocast_enabled(model.device.type)


def check_precision(model: PreTrainedModel) -> None:
    """Refuse autocast, under which a model's keys and values have another dtype than its weights.

    Raises
    ------
    UnsupportedModelError
        If autocast is on for the model's device.
    """
    if is_autocast(model):
        remedy = "Leave autocast around the engine, and load the model with dtype=torch.bfloat16 for the same speed."
        raise refuse(model, "autocast is on, which changes the dtype of its keys and values", remedy)


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
    rotation
        How its layers turn their keys.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_positions: int | None
    windows: tuple[int | None, ...]
    decoder: nn.Module
    layer_modules: nn.ModuleList
    rotation: Rotation

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
        layers = _layers(model, decoder)
        windows, rotary = _windows(model, len(layers)), _rotary(model, decoder)
        kv_heads, head_dim = _kv_shape(model, len(layers))
        return cls(
            layers=len(layers),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=model.dtype,
            max_positions=getattr(config, "max_position_embeddings", None),
            windows=windows,
            decoder=decoder,
            layer_modules=layers,
            rotation=Rotation.declared(rotary, config, len(layers)),
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence over which KV can be reused; None if the configuration states none."""
        return min((n for n in (self.max_positions, self.rotation.limit) if n is not None), default=None)


@torch.inference_mode()
def _kv_shape(model: PreTrainedModel, layers: int) -> tuple[int, int]:
    """Key-value heads and head dimension, from one token: configurations name them in too many ways."""
    with model_lock(model):
        out = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True)
    # Looked up among the keys, because asking a recent transformers for an old name warns.
    cache = next((out[name] for name in list(out.keys()) if name in ("cache", "past_key_values")), None)
    own = getattr(cache, "layers", [])
    shapes = {tuple(t.shape[1::2]) for layer in own for t in (layer.keys, layer.values)}
    if len(own) != layers or len(shapes) != 1:
        raise refuse(model, "its layers keep keys and values of different shapes")
    heads, width = shapes.pop()
    return int(heads), int(width)


def _layers(model: PreTrainedModel, decoder: nn.Module) -> nn.ModuleList:
    """Find the stack of decoder layers by its length, for it has more than one name."""
    count = model.config.num_hidden_layers
    found = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise refuse(model, f"its {count} decoder layers are not found")
    return found[0]


def _windows(model: PreTrainedModel, layers: int) -> tuple[int | None, ...]:
    config = model.config
    window = getattr(config, "sliding_window", None)
    types: list[str] | None = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * layers
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise refuse(model, f"layers of type {', '.join(unknown)} attend or remember in a way that it does not know")
    return tuple(known[t] for t in types[:layers])


def _rotary(model: PreTrainedModel, decoder: nn.Module) -> nn.Module:
    found: list[nn.Module] = [m for name, m in decoder.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if not found:
        raise refuse(model, "it has no rotary position embedding (ALiBi and learned positions can not be moved)")
    if len(found) > 1:
        raise refuse(model, "it has a rotary embedding per layer")
    return found[0]
