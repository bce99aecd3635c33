"""Engines that several LangChain objects share: a model is loaded once, when it is first asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_rag import KVBoostEngine
from kvboost_rag.loading import load_model

__all__ = ["known_engine", "release_engines", "share_engine", "shared_engine"]

_lock = threading.Lock()
_engines: dict[str, KVBoostEngine] = {}
_models: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}


def shared_engine(
    model: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> KVBoostEngine:
    """Return the engine of a model, made at the first call with these arguments.

    Parameters
    ----------
    model
        A model id in the local hub cache, a folder, a GGUF file, ``"smollm2"``, or a name given to `share_engine`.
    dtype
        Of the weights, as ``"float32"``; None leaves it to :func:`kvboost_rag.loading.load_model`.
    device
        Where the model goes; None means the CPU.
    options
        Of :class:`kvboost_rag.KVBoostEngine`. Engines with other options share the model's weights.

    Raises
    ------
    ValueError
        If the model can not be loaded.
    """
    key = _key(model, dtype, device, options)
    with _lock:
        if key not in _engines:
            weights = _key(model, dtype, device, None)
            if weights not in _models:
                _models[weights] = load_model(model, dtype=_dtype(dtype), device=device)
            _engines[key] = KVBoostEngine(*_models[weights], **(options or {}))
        return _engines[key]


def share_engine(name: str, engine: KVBoostEngine) -> None:
    """Let ``ChatKVBoost(model=name)`` and its kin use an engine that is there already; a name in use is replaced."""
    with _lock:
        _engines[_key(name, None, None, None)] = engine


def known_engine(
    model: str, dtype: str | None, device: str | None, options: Mapping[str, Any] | None
) -> KVBoostEngine | None:
    """Return what `shared_engine` would, if it is loaded already."""
    with _lock:
        return _engines.get(_key(model, dtype, device, options))


def release_engines() -> None:
    """Close every shared engine and drop the models; a later call loads them anew."""
    with _lock:
        for engine in _engines.values():
            engine.close()
        _engines.clear()
        _models.clear()


def _key(model: str, dtype: str | None, device: str | None, options: Mapping[str, Any] | None) -> str:
    return repr((model, dtype, device, sorted((options or {}).items())))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is no dtype of torch; pass for example 'float32' or 'bfloat16'")
    return dtype
