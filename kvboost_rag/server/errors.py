"""What can go wrong, in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.errors import (
    ContextWindowError,
    EngineClosedError,
    KVBoostError,
    ModelChangedError,
    UntrustedDocumentError,
)

__all__ = ["ApiError", "api_error"]


# Not frozen: Python itself writes an exception's traceback.
@dataclass(eq=False)
class ApiError(Exception):
    """An error that the client is told.

    Parameters
    ----------
    status
        Of HTTP.
    message
        With the remedy.
    code
        For programs.
    param
        Field of the request that is the cause; None where there is none.
    headers
        Further ones of the response.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """What the response holds."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# The first class that fits counts.
_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (ContextWindowError, 400, "context_length_exceeded"),
    (UntrustedDocumentError, 403, "untrusted_document"),
    (EngineClosedError, 503, "stopping"),
    (ModelChangedError, 503, "model_changed"),
    (TimeoutError, 504, "timeout"),
    (ValueError, 400, "invalid_value"),
    (KVBoostError, 500, "model_error"),
)


def api_error(error: Exception) -> ApiError | None:
    """Translate what the engine raises for a request; None for what is nobody's fault but the server's."""
    if isinstance(error, ApiError):
        return error
    found = next(((status, code) for kind, status, code in _KINDS if isinstance(error, kind)), None)
    return None if found is None else ApiError(found[0], str(error), found[1])
