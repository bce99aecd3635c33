"""Making the server of a service, and serving."""

from __future__ import annotations

from collections.abc import Callable

import uvicorn

from kvboost_rag.server.app import create_app
from kvboost_rag.server.auth import Keys, is_loopback
from kvboost_rag.server.draining import LAST_SECONDS, DrainingServer
from kvboost_rag.server.place import Place
from kvboost_rag.server.service import Service

__all__ = ["allowed_hosts", "make_server", "serve"]

_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


def make_server(
    service: Service, host: str = "127.0.0.1", port: int = 8000, *, log_level: str = "warning"
) -> DrainingServer:
    """Make a server for a host and port; 0 takes a free one."""
    config = uvicorn.Config(
        create_app(service, hosts=allowed_hosts(host, service.keys)), host=host, port=port, log_level=log_level,
        server_header=False, log_config=None, timeout_graceful_shutdown=LAST_SECONDS,
        # h11 limits the headers' size, and there are no websockets.
        http="h11", ws="none",
    )  # fmt: skip
    return DrainingServer(config, service.admission, service.limits)


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
