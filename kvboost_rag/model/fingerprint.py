"""Identity of everything that decides what KV a token gets."""

from __future__ import annotations

import json

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.errors import UnsupportedModelError
from kvboost_rag.keys import fingerprint_of
from kvboost_rag.model.adapters import adapters_of, canonical_name, idle_weights, is_adapter_layer
from kvboost_rag.model.tensors import plain_parts

__all__ = ["FORMAT_VERSION", "fingerprint", "weights_digest"]

FORMAT_VERSION = 3
"""Raised whenever stored KV would be read differently."""


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, namespace: str = "", kv_format: str = "native"
) -> str:
    """Digest of weights, adapters in use, tokenizer, template, dtype, attention, RoPE, formats and namespace.

    Returns
    -------
    str
        32 hexadecimal digits, equal across processes and machines.
    """
    return fingerprint_of(
        {
            "format": str(FORMAT_VERSION),
            "kv_format": kv_format,
            "namespace": namespace,
            "weights": weights_digest(model),
            "adapter": adapters_of(model),
            "class": type(model).__name__,
            "config": _config(model),
            "dtype": str(model.dtype),
            "attention": str(model.config._attn_implementation),
            "tokenizer": _tokenizer(tokenizer),
            "template": json.dumps(tokenizer.chat_template, sort_keys=True, default=str),
        }
    )


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of every parameter and persistent buffer, but not of adapters that are loaded without being in use.

    About ten gigabytes a second on a CPU. Weights have the names that they have without adapters, so that a model whose
    adapters are disabled, or merged and saved, is known as what it is.

    Raises
    ------
    UnsupportedModelError
        If something among the weights is no tensor.
    """
    digest = xxhash.xxh3_128()
    idle = _idle_prefixes(model)
    for name, tensor in sorted(model.state_dict().items()):
        if (name + ".").startswith(idle):
            continue
        if not isinstance(tensor, Tensor):
            raise UnsupportedModelError(
                f"weight {name!r} of {type(model).__name__} is a {type(tensor).__name__} and no tensor, so that models "
                "can not be told apart by it. Quantise by torchao, or run this model with reuse='off'"
            )
        for part, plain in plain_parts(tensor):
            digest.update(f"{canonical_name(name)}{part}|{plain.dtype}|{tuple(plain.shape)}|".encode())
            digest.update(_bytes(plain))
    return digest.hexdigest()


def _idle_prefixes(model: PreTrainedModel) -> tuple[str, ...]:
    layers = ((name, layer) for name, layer in model.named_modules() if is_adapter_layer(layer))
    return tuple(
        f"{name}.{container}.{adapter}." for name, layer in layers for container, adapter in idle_weights(layer)
    )


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _config(model: PreTrainedModel) -> str:
    config = model.config.to_dict()
    # What saving or loading adds, and what is a part of the fingerprint in its own right.
    for name in ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return xxhash.xxh3_128_hexdigest((type(tokenizer).__name__ + vocabulary).encode())
