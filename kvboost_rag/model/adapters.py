"""PEFT adapters (LoRA and its kin), told from the layers they put into a model; nothing here imports peft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvboost_rag.errors import UnsupportedModelError

__all__ = ["adapters_of", "canonical_name", "idle_weights", "in_use", "is_adapter_layer", "unwrapped"]


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside a ``PeftModel``, with the adapters in its layers; any other model as it is.

    Raises
    ------
    UnsupportedModelError
        If the wrapper itself takes part in the forward, so that the model inside computes something else.
    """
    inner = getattr(model, "get_base_model", None)
    if inner is None:
        return model
    configs: dict[str, Any] = model.peft_config
    for name, config in configs.items():
        why = _beyond_layers(config)
        if why:
            raise UnsupportedModelError(
                f"adapter {name!r} ({type(config).__name__}) can not reuse KV: {why}. Use an adapter that lives in the "
                "layers, such as LoRA, or pass the base model"
            )
    base: PreTrainedModel = inner()
    return base


def _beyond_layers(config: Any) -> str:
    if getattr(config, "is_prompt_learning", False):
        return "it puts states of its own before every prompt"
    if getattr(config, "alora_invocation_tokens", None):
        return "it begins to act at a token of the prompt"
    if str(getattr(config, "peft_type", "")).endswith("XLORA"):
        return "it weighs its parts anew for every prompt"
    return ""


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that PEFT wrapped."""
    return "_disable_adapters" in vars(module)


def in_use(layer: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that a wrapped layer adds to what its base computes; merged ones are in the base."""
    own = vars(layer)
    if own["_disable_adapters"] or own.get("merged_adapters"):
        return ()
    active = own.get("_active_adapter") or ()
    return (active,) if isinstance(active, str) else tuple(active)


def idle_weights(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Container and adapter of the weights in a wrapped layer that take no part in a forward."""
    used = in_use(layer)
    names: tuple[str, ...] = getattr(layer, "adapter_layer_names", ())
    for container in names:
        held: Any = getattr(layer, container, None)
        if hasattr(held, "keys"):
            yield from ((container, adapter) for adapter in held.keys() if adapter not in used)


def adapters_of(model: nn.Module) -> str:
    """Describe the adapters in use, layer by layer: names and what scales or shapes them, but not their weights."""
    rows = [
        (canonical_name(name), [(adapter, _settings(layer, adapter)) for adapter in in_use(layer)])
        for name, layer in model.named_modules()
        if is_adapter_layer(layer) and in_use(layer)
    ]
    return json.dumps(rows, sort_keys=True, default=str)


def _settings(layer: nn.Module, adapter: str) -> dict[str, Any]:
    names: tuple[str, ...] = getattr(layer, "other_param_names", ())
    held: dict[str, Any] = {name: getattr(layer, name, None) for name in names}
    return {name: own[adapter] for name, own in held.items() if hasattr(own, "keys") and adapter in own}


def canonical_name(name: str) -> str:
    """Name that a weight or module of the base has without any adapter."""
    return name.replace(".base_layer", "").replace(".original_module", "")
