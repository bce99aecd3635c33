"""Work for a Redis server, each piece within its time: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

from kvboost_rag.store.redis_tier import RedisTier

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["RedisClient", "RedisFault", "check_server", "require_redis"]

_CONNECTIONS = 8
_CHECK_SECONDS = 5.0
_CLOSE_SECONDS = 5.0

_Result = TypeVar("_Result")


class RedisFault(Exception):
    """Why a piece of work came to nothing; the text never shows what the server or the client said.

    Parameters
    ----------
    kind
        ``"slow"``, ``"unreachable"`` or ``"refused"``.
    what
        For the log.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class RedisClient:
    """Runs coroutines over a pool of connections, from any thread, and ends each when its time is over.

    A coroutine can be ended wherever it waits, so that a server which answers byte by byte takes no longer than one
    that is silent. Thread and connections are made by the first piece of work; a forked process makes its own.

    Parameters
    ----------
    tier
        Where the server is.

    Raises
    ------
    ImportError
        If the package ``redis`` is missing.
    """

    def __init__(self, tier: RedisTier) -> None:
        self._tier = tier
        self._guard = threading.Lock()
        self._running: _Running | None = None
        self._closed = False
        require_redis()

    def run(self, work: Callable[[Redis], Awaitable[_Result]], seconds: float) -> _Result:
        """Return what a coroutine over the server returns.

        Raises
        ------
        RedisFault
            If it did not within its time, or the server can not be reached or refuses.
        """
        from redis.exceptions import RedisError

        running = self._started()
        try:
            return running.run(work, seconds)
        except (asyncio.TimeoutError, futures.TimeoutError):
            raise RedisFault("slow", f"{self._tier} did not answer within {seconds:.2g} s") from None
        except (RedisError, OSError, futures.CancelledError) as error:
            raise _fault(error, self._tier) from None

    def _started(self) -> _Running:
        with self._guard:
            if self._closed:
                raise RedisFault("unreachable", f"the connection to {self._tier} is closed")
            if self._running is None or self._running.pid != os.getpid():
                self._running = _Running(self._tier)
            return self._running

    def close(self) -> None:
        """Close the connections and end the thread."""
        with self._guard:
            self._closed, running, self._running = True, self._running, None
        if running is not None and running.pid == os.getpid():
            running.close()


class _Running:
    """An event loop at work in a thread, and the connections that belong to it."""

    def __init__(self, tier: RedisTier) -> None:
        self.pid = os.getpid()
        self._redis = _connected(tier)
        self._loop = asyncio.new_event_loop()
        # Worker threads that still write when the interpreter exits are waited for; this one must not be.
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvboost-redis", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[Redis], Awaitable[_Result]], seconds: float) -> _Result:
        async def limited() -> _Result:
            return await asyncio.wait_for(work(self._redis), seconds)

        # The second limit is for a loop that was closed just now.
        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result(seconds + _CLOSE_SECONDS)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._released(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _released(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_CLOSE_SECONDS)
        await self._redis.aclose()


def require_redis() -> None:
    """See that the client is there.

    Raises
    ------
    ImportError
        Naming the command that installs it.
    """
    try:
        import redis.asyncio  # noqa: F401
    except ImportError as error:
        raise ImportError("store='redis://...' needs the package redis: pip install 'kvboost-rag[redis]'") from error


def check_server(tier: RedisTier) -> str:
    """Try a server once, with user, password, certificate and database.

    Returns
    -------
    str
        Why it can not be reached now; empty if it can.

    Raises
    ------
    ImportError
        If the package ``redis`` is missing.
    ValueError
        If it answers that it does not let us in, or its certificate is not trusted: waiting would not help.
    """
    client = RedisClient(tier)
    try:
        client.run(lambda redis: redis.ping(), _CHECK_SECONDS)
    except RedisFault as fault:
        if fault.kind == "refused":
            raise ValueError(f"{fault}; see the URL's user, password, database and ssl_ca_certs") from None
        return str(fault)
    finally:
        client.close()
    return ""


def _connected(tier: RedisTier) -> Redis:
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options: dict[str, Any] = {"max_connections": _CONNECTIONS, "socket_connect_timeout": _CHECK_SECONDS}
    if tier.url.startswith("rediss://"):
        options["ssl_check_hostname"] = True
    pool = BlockingConnectionPool.from_url(
        # One retry, for a connection that a restarted server has closed. Each piece of work has its own time limit.
        tier.url, timeout=None, retry=Retry(NoBackoff(), 1), protocol=2, **options,
    )  # fmt: skip
    return Redis.from_pool(pool)


def _fault(error: BaseException, tier: RedisTier) -> RedisFault:
    """Say what happened without a word of the server's or the client's, which may hold a name or a password."""
    from redis.exceptions import AuthenticationError, AuthorizationError, ResponseError

    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RedisFault("refused", f"the certificate of {tier} is not trusted: {cause.verify_message}")
        if isinstance(cause, (AuthenticationError, AuthorizationError, ResponseError)):
            return RedisFault("refused", f"{tier} refuses ({type(cause).__name__})")
    return RedisFault("unreachable", f"{tier} can not be reached ({type(error).__name__})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
