"""A server that stops without breaking off what runs, for as long as it may wait."""

from __future__ import annotations

import logging
import time
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi.responses import JSONResponse

from kvboost_rag.server.connections import IdleConnections
from kvboost_rag.server.errors import ApiError
from kvboost_rag.server.limits import Limits

__all__ = ["LAST_SECONDS", "DrainingServer", "Requests", "broken_off", "health_of", "refused"]

logger = logging.getLogger("kvboost_rag.server")

# For a last forward, and to write what is left to those who were broken off.
LAST_SECONDS = 5


class Requests(Protocol):
    """What knows a server's requests."""

    is_draining: bool
    """Whether new ones are refused, because the server is about to stop."""
    is_over: bool
    """Whether those that run are broken off, because it must not wait any longer."""

    @property
    def busy(self) -> int:
        """How many have been let in and are not done."""


def refused() -> ApiError:
    """Make the error of a request that comes while the server drains."""
    return ApiError(
        503, "the server is about to stop; ask another one, or again later", "stopping",
        headers={"Retry-After": "5", "Connection": "close"},
    )  # fmt: skip


def broken_off() -> ApiError:
    """Make the error of a request that has not ended when the server's time is over."""
    return ApiError(503, "the server stops, and the answer was broken off; ask again later", "stopping")


def health_of(requests: Requests) -> JSONResponse:
    """Say whether requests are taken."""
    return JSONResponse({"status": "stopping"}, 503) if requests.is_draining else JSONResponse({"status": "ok"})


class DrainingServer(uvicorn.Server):
    """A server that at the first signal refuses new requests by status 503 and lets running ones end.

    A second signal ends it at once.

    Parameters
    ----------
    config
        Of uvicorn.
    requests
        Those of its application.
    limits
        Say how long running requests may take then, and how long a connection may be idle.
    """

    def __init__(self, config: uvicorn.Config, requests: Requests, limits: Limits) -> None:
        super().__init__(config)
        self._requests = requests
        self._seconds = limits.drain
        self._deadline: float | None = None
        self._idle = IdleConnections(limits.receive_timeout)

    @property
    def port(self) -> int:
        """The port that it listens on, once it has started."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def drain(self) -> None:
        """Refuse new requests from now on, and stop when those that run have ended or their time is over."""
        self._requests.is_draining = True
        self._deadline = time.monotonic() + self._seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._deadline is None:
            self.drain()
        else:
            self._end(sig, frame)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether it is time to stop, and for whom."""
        self._idle.end(self.server_state.connections)
        if self._deadline is not None:
            late = time.monotonic() - self._deadline
            busy = self._requests.busy
            if late >= 0 and busy and not self._requests.is_over:
                logger.warning("%d requests are broken off", busy)
                self._requests.is_over = True
            self.should_exit = self.should_exit or not busy or late >= LAST_SECONDS
        return await super().on_tick(counter)
