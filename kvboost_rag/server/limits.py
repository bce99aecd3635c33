"""How much one request and all requests together may ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Parameters
    ----------
    max_body_bytes
        Of a request.
    max_tokens
        Of an answer.
    max_prompt_tokens
        Of a prompt; None leaves it to the model's context window.
    max_documents
        That one chat request names or brings.
    max_batch_documents
        That one request adds.
    max_known_documents
        Of one namespace.
    max_concurrent
        Requests that compute at a time.
    max_queue
        Requests that wait behind them; the next one gets status 429.
    max_waiting_per_key
        Of one namespace among those that wait; None is half of ``max_queue``, and all of it where there is but one
        namespace.
    timeout
        Seconds that one answer may take once its turn has come; None for no limit.
    receive_timeout
        Seconds in which a request has to arrive.
    send_timeout
        Seconds after which a stream is broken off whose client has stopped to read.
    drain
        Seconds that running requests are given when the server stops.

    Raises
    ------
    ValueError
        If one can not be used.
    """

    max_body_bytes: int = 8 << 20
    max_tokens: int = 4096
    max_prompt_tokens: int | None = None
    max_documents: int = 64
    max_batch_documents: int = 1024
    max_known_documents: int = 100_000
    max_concurrent: int = 8
    max_queue: int = 64
    max_waiting_per_key: int | None = None
    timeout: float | None = None
    receive_timeout: float = 60.0
    send_timeout: float = 60.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        """Check every limit."""
        for name, value in vars(self).items():
            at_least = 0 if name in ("max_queue", "drain") else 1 if isinstance(value, int) else 1e-3
            if value is not None and not at_least <= value < math.inf:
                raise ValueError(f"{name} is {value}; give at least {at_least}")

    def waiting_share(self, namespaces: int) -> int:
        """How many requests of one namespace may wait."""
        if self.max_waiting_per_key is not None:
            return self.max_waiting_per_key
        return self.max_queue if namespaces == 1 else math.ceil(self.max_queue / 2)
