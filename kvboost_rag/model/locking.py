"""One forward at a time per model: hooks and the attention function belong to the model, not to an engine."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

__all__ = ["model_lock"]

_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_GUARD = threading.Lock()


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """Return the lock that every engine over this model takes for a forward."""
    with _GUARD:
        return _LOCKS.setdefault(model, threading.RLock())
