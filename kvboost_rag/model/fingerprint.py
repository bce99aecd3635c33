"""Identity of everything that decides what KV a token gets."""

from __future__ import annotations

import json

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag.keys import fingerprint_of

__all__ = ["FORMAT_VERSION", "fingerprint", "weights_digest"]

FORMAT_VERSION = 2
"""Raised whenever stored KV would be read differently."""


def fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, namespace: str = "", kv_format: str = "native"
) -> str:
    """Digest of weights, adapter, tokenizer, template, dtype, attention, RoPE, formats and namespace.

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
            "adapter": _adapter(model),
            "config": _config(model),
            "dtype": str(model.dtype),
            "attention": str(model.config._attn_implementation),
            "tokenizer": _tokenizer(tokenizer),
            "template": json.dumps(tokenizer.chat_template, sort_keys=True, default=str),
        }
    )


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of every parameter and buffer, adapters included; about ten gigabytes a second on a CPU."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _adapter(model: PreTrainedModel) -> str:
    active = getattr(model, "active_adapters", None)
    try:
        names = active() if callable(active) else active
    except ValueError:  # transformers' way to say that none was ever loaded
        names = None
    return json.dumps(names or [], default=str)


def _config(model: PreTrainedModel) -> str:
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return xxhash.xxh3_128_hexdigest((type(tokenizer).__name__ + vocabulary).encode())
