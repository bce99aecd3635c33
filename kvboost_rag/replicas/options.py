"""What a replica is made from: plain values, which Ray carries to wherever it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
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
        Options of :class:`kvboost_rag.KVBoostEngine`; ``store`` names the tier that replicas share, and ``cache_dir``
        a folder on each machine, which the replicas on it share. Never printed, because they may hold a password.
    resources
        Of one replica, as Ray's ``ray_actor_options`` have them, as ``{"num_gpus": 1}``; one core if they say nothing.
        A replica that has a GPU computes there.
    log_level
        From which on a replica writes what it logs to its stderr, as :mod:`logging` counts.
    """

    model: str
    name: str
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    engine: Mapping[str, Any] = field(default_factory=dict, repr=False)
    resources: Mapping[str, Any] = field(default_factory=dict)
    log_level: int = logging.WARNING

    @property
    def version(self) -> str:
        """A digest of all of it; replicas with the same one need not be replaced."""
        return sha256(_written(self).encode()).hexdigest()


def _written(value: Any) -> str:
    """Write a value with every field, also those that it does not show."""
    if is_dataclass(value):
        return f"{type(value).__qualname__}{_written({f.name: getattr(value, f.name) for f in fields(value)})}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_written(value[name])}' for name in sorted(value))}}}"
    return repr(value)
