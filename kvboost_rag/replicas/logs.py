"""What replicas log, where whoever started them sees it."""

from __future__ import annotations

import logging
import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["TellFailures", "log_to_stderr", "logging_failures"]

logger = logging.getLogger("kvboost_rag.replicas")


def log_to_stderr(name: str, level: int) -> None:
    """Let a replica's process write what this package logs to stderr, which Ray brings to where the front runs.

    Parameters
    ----------
    name
        Of the replica, which begins each line.
    level
        Of :mod:`logging`.
    """
    # Ray Serve may have put a logger of its own in the place of sys.stderr.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(f"{name} %(name)s: %(message)s"))
    package = logging.getLogger("kvboost_rag")
    package.addHandler(handler)
    package.setLevel(level)


def logging_failures(app: ASGIApp) -> ASGIApp:
    """Wrap a replica's application: no server is around it that would log what it fails at."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            logger.exception("a request has failed: %s %s", scope["method"], scope["path"])
            raise

    return wrapped


class TellFailures:
    """In front of the replicas: logs which one answered by a status of 500, for that one's log alone says why.

    Parameters
    ----------
    app
        Hands requests on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""

        async def looked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 500:
                replica = dict(message["headers"]).get(b"x-kvboost-replica")
                if replica is not None:
                    logger.error("replica %s failed at %s %s", replica.decode(), scope["method"], scope["path"])
            await send(message)

        await self._app(scope, receive, looked)
