"""Exceptions a user can meet; every message names the remedy."""

from __future__ import annotations

__all__ = [
    "ContextWindowError",
    "EngineClosedError",
    "KVBoostError",
    "ModelChangedError",
    "ModelOutputError",
    "ReplicasError",
    "UnsupportedModelError",
    "UntrustedDocumentError",
]


class KVBoostError(Exception):
    """Base of every exception that kvboost_rag raises on purpose."""


class UnsupportedModelError(KVBoostError, ValueError):
    """The model's positions are not a rotation of the keys, so its KV can not be moved."""


class UntrustedDocumentError(KVBoostError, ValueError):
    """A request brought a document that was not added beforehand, and the engine is ``trusted_only``."""


class ContextWindowError(KVBoostError, ValueError):
    """Prompt and answer together do not fit the model's context window."""


class ModelChangedError(KVBoostError, RuntimeError):
    """The model's weights or adapters were changed in the middle of an answer or of adding documents."""


class ModelOutputError(KVBoostError, RuntimeError):
    """The model produced logits that are not numbers."""


class EngineClosedError(KVBoostError, RuntimeError):
    """The engine was used after ``close()``."""


class ReplicasError(KVBoostError, RuntimeError):
    """Ray, or a replica on it, could not be started."""
