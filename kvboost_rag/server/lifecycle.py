"""Starting, and stopping without breaking off what runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from kvboost_rag.server.app import create_app
from kvboost_rag.server.auth import Keys, is_loopback
from kvboost_rag.server.connections import IdleConnections
from kvboost_rag.server.place import Place
from kvboost_rag.server.service import Service

__all__ = ["DrainingServer", "allowed_hosts", "make_server", "serve"]

logger = logging.getLogger("kvboost_rag.server")

_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")
# For a last forward, and to write what is left to those who were broken off.
_LAST_SECONDS = 5


class DrainingServer(uvicorn.Server):
    """A server that at the first signal refuses new requests by status 503 and lets running ones end.

    A second signal ends it at once.

    Parameters
    ----------
    config
        Of uvicorn.
    service
        Knows what runs.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._deadline: float | None = None
        self._idle = IdleConnections(service.limits.receive_timeout)

    @property
    def port(self) -> int:
        """The port that it listens on, once it has started."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def drain(self) -> None:
        """Refuse new requests from now on, and stop when those that run have ended or their time is over."""
        self._service.admission.is_draining = True
        self._deadline = time.monotonic() + self._service.limits.drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._deadline is None:
            self.drain()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Look, ten times a second, whether it is time to stop, and for whom."""
        self._idle.end(self.server_state.connections)
        if self._deadline is not None:
            late = time.monotonic() - self._deadline
            busy = self._service.admission.busy
            if late >= 0 and busy and not self._service.admission.is_over:
                logger.warning("%d requests are broken off", busy)
                self._service.admission.is_over = True
            self.should_exit = self.should_exit or not busy or late >= _LAST_SECONDS
        return await super().on_tick(counter)


def make_server(
    service: Service, host: str = "127.0.0.1", port: int = 8000, *, log_level: str = "warning"
) -> DrainingServer:
    """Make a server for a host and port; 0 takes a free one."""
    config = uvicorn.Config(
        create_app(service, hosts=allowed_hosts(host, service.keys)), host=host, port=port, log_level=log_level,
        server_header=False, log_config=None, timeout_graceful_shutdown=_LAST_SECONDS,
        # h11 limits the headers' size, and there are no websockets.
        http="h11", ws="none",
    )  # fmt: skip
    return DrainingServer(config, service)


def allowed_hosts(host: str, keys: Keys) -> tuple[str, ...]:
    """Return what the ``Host`` header may name: where only this machine is served, without keys, its own names."""
    return ("*",) if keys.digests or not is_loopback(host) else (*_LOCAL, host)


def serve(service: Service, place: Place, *, announce: Callable[[str], object], log_level: str) -> None:
    """Serve until a signal comes.

    Parameters
    ----------
    service
        Engines, keys and limits.
    place
        Where to listen; nothing came in there before.
    announce
        Told, once the server listens, its address.
    log_level
        Of uvicorn.

    Raises
    ------
    OSError
        If another process listens there by now.
    """
    server = make_server(service, place.host, place.port, log_level=log_level)
    place.listen()
    announce(place.url)
    server.run(sockets=[place.socket])
