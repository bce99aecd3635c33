"""Where a server listens: a port is taken first, and listened at when there is somebody to answer."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Place", "taken_place"]

_HIGHEST_PORT = 65535
# Connections that come before the server's loop runs wait.
_BACKLOG = 128


@dataclass(frozen=True, eq=False)
class Place:
    """A host and port that are taken; until :meth:`listen` a connection is refused.

    Parameters
    ----------
    host
        As it was asked for.
    socket
        Bound to it.
    """

    host: str
    socket: socket.socket

    @property
    def port(self) -> int:
        """The port, also where any free one was asked for."""
        port: int = self.socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address as ``http://``."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}"

    def listen(self) -> None:
        """Let connections come.

        Raises
        ------
        OSError
            If another process, which took the port as well, was faster.
        """
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise _told(error, self.host, self.port) from error


@contextmanager
def taken_place(host: str, port: int) -> Iterator[Place]:
    """Take a port, without listening at it.

    Parameters
    ----------
    host
        Name or address of this machine.
    port
        0 takes a free one.

    Raises
    ------
    ValueError
        If there is no such port.
    OSError
        If it can not be had, with the remedy.
    """
    if not 0 <= port <= _HIGHEST_PORT:
        raise ValueError(f"there is no port {port}; give a --port from 1 to {_HIGHEST_PORT}, or 0 for a free one")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, port))
        except OSError as error:
            raise _told(error, host, port) from error
        yield Place(host, taken)


def _told(error: OSError, host: str, port: int) -> OSError:
    if isinstance(error, socket.gaierror):
        return OSError(f"the host {host!r} is not known ({error.strerror}); give a --host of this machine")
    if error.errno == errno.EADDRINUSE:
        return OSError(f"port {port} of {host} is in use; give another --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return OSError(f"{host} is no address of this machine; give another --host")
    if error.errno == errno.EACCES:
        return OSError(f"port {port} of {host} is not for this user; give a --port above 1023")
    return OSError(f"port {port} of {host} can not be had ({error.strerror}); give another --port or --host")
