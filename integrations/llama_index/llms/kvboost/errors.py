"""What the LLM raises."""

from __future__ import annotations

from kvboost_rag import KVBoostError

__all__ = ["RequestError"]


class RequestError(KVBoostError):
    """The engine refuses a request: too long for the model's window, refused by its chat template, out of range.

    The engine's own error, a ValueError, is its cause. LlamaIndex's Refine, behind ``compact`` and ``refine``, takes
    every ValueError for a malformed structured answer and goes on to "Empty Response"; this one reaches the caller.
    """
