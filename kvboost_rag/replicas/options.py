"""What a replica is made from: plain values, which Ray carries to wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.server import Keys, Limits

__all__ = ["ReplicaOptions"]


@dataclass(frozen=True)
class ReplicaOptions:
    """What all replicas have in common.

    Parameters
    ----------
    model
        Folder, GGUF file or model id, as :func:`kvboost_rag.loading.load_model` takes it; each replica loads it, so a
        path must be there on every machine.
    name
        Of the model, as requests name it.
    keys
        Who may ask.
    limits
        Of each replica. ``max_known_documents`` is that of all together.
    engine
        Options of :class:`kvboost_rag.KVBoostEngine`; ``store`` names the tier that replicas share.
    resources
        Of one replica, as Ray's ``ray_actor_options`` have them, as ``{"num_gpus": 1}``.

    Raises
    ------
    ValueError
        For a ``cache_dir``, which belongs to one process at a time.
    """

    model: str
    name: str
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    engine: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what replicas can not share."""
        if self.engine.get("cache_dir") is not None:
            raise ValueError("replicas do not share a cache_dir; give store='redis://HOST'")
