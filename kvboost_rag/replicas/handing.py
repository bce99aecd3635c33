"""Handing a request to a replica, and once more where the replica dies before anything was answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

from kvboost_rag.replicas.carrying import Asked, Begun
from kvboost_rag.replicas.requests import FrontRequests
from kvboost_rag.server.connections import NobodyReads, in_time
from kvboost_rag.server.errors import ApiError, api_error
from kvboost_rag.server.running import unless_gone

__all__ = ["Task", "ask_all", "asked_of", "hand_over"]

logger = logging.getLogger("kvboost_rag.replicas")

_TRIES: Final = 5
_PAUSE: Final = 1.0
"""Seconds before one more attempt at replicas that have too much to do."""
# Of a connection and not of a message; the front's own server writes them anew.
_OWN: Final = frozenset({b"content-length", b"connection", b"transfer-encoding"})


@dataclass(frozen=True)
class Task:
    """What a replica is handed.

    Parameters
    ----------
    asked
        The request.
    namespace
        Whose it is.
    known
        Known documents that it names, or brings a text of: what a replica needs that has not seen them.
    sizes
        Id of each document that it names or brings to its characters; the router goes by them.
    """

    asked: Asked
    namespace: str = ""
    known: Sequence[Mapping[str, Any]] = ()
    sizes: Mapping[str, float] | None = None


async def asked_of(request: Request) -> Asked:
    """Read a request."""
    return {
        "method": request.method, "path": request.scope["path"], "query": request.scope["query_string"],
        "headers": [(name, value) for name, value in request.headers.raw if name not in _OWN],
        "body": await request.body(),
    }  # fmt: skip


async def hand_over(
    handle: DeploymentHandle[Any], request: Request, task: Task, requests: FrontRequests
) -> Response:
    """Let a replica answer; a stream of which the client takes nothing any more is broken off.

    A replica that dies before its response began, which is its end for all but streams, costs the client nothing but
    time: another one gets the request.

    Raises
    ------
    ApiError
        429 if all replicas have more to do than they may, 503 if one replica after the other dies or the front must not
        wait any longer, and what else the replica refuses or fails at.
    ClientGone
        If nobody waits for the answer any more; the replica stops computing then.
    """
    items = _items(handle, task)
    begun = await unless_gone(request, requests.unless_over(anext(items)))
    if not isinstance(begun, dict):
        raise TypeError("a response began with bytes")
    headers = {name: value for name, value in begun["headers"] if name not in _OWN}
    is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
    response = _Followed(begun, items, requests) if is_stream else Response(begun["body"], begun["status"])
    if not is_stream:
        await items.aclose()
        headers[b"content-length"] = str(len(begun["body"])).encode()
    response.raw_headers = list(headers.items())
    return response


async def _items(handle: DeploymentHandle[Any], task: Task) -> AsyncGenerator[Begun | bytes, None]:
    for left in reversed(range(_TRIES)):
        stream: Any = handle.answer.remote(task.asked, task.namespace, task.known, sizes=task.sizes or {})
        begun = is_over = False
        try:
            async for item in stream:
                begun = True
                yield item
            is_over = True
            return
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            is_over = True
            was_taken = left < _TRIES - 1
            if begun or not left or not (isinstance(error, RayActorError) or was_taken and _is_full(error)):
                raise _told(error) from error
            if _is_full(error):
                # It had its place at the replica that was lost, and is not refused for that one's sake.
                await asyncio.sleep(_PAUSE)
            else:
                logger.warning("a replica was lost; another one gets its request")
        finally:
            # What has failed is not cancelled: Ray would raise its error again, in the place of ours.
            if not is_over:
                stream.cancel()


def _is_full(error: Exception) -> bool:
    return isinstance(error, BackPressureError)


async def ask_all(handle: DeploymentHandle[Any], method: str, *arguments: Any) -> list[Any]:
    """Call a method of every replica; one that is lost meanwhile has no result.

    Raises
    ------
    ApiError
        For what a replica refuses or fails at.
    """
    try:
        results = await handle.broadcast(method, *arguments).results_async(return_exceptions=True)
    except (RayError, DeploymentUnavailableError) as error:
        raise _told(error) from error
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RayActorError):
            raise _told(result) from result
    return [result for result in results if not isinstance(result, RayActorError)]


def _told(error: BaseException) -> ApiError:
    """Say what a client is told; nothing of Ray, and no stack trace."""
    if isinstance(error, BackPressureError):
        return ApiError(
            429, "too many requests are waiting; ask again in 1 second", "overloaded", headers={"Retry-After": "1"}
        )
    if isinstance(error, RayActorError):
        return ApiError(503, "a replica was lost; ask again", "replica_lost")
    if isinstance(error, DeploymentUnavailableError):
        return ApiError(503, "no replica is there; ask again later", "no_replica")
    cause = error.cause if isinstance(error, RayTaskError) else None
    told = api_error(cause) if isinstance(cause, Exception) else None
    if told is None:
        logger.error("a replica failed at a request", exc_info=error)
    return told or ApiError(500, "the server failed; its log says why", "server_error")


class _Followed(StreamingResponse):
    """A stream, closed at the replica when the client is gone or does not read."""

    def __init__(self, begun: Begun, items: AsyncGenerator[Begun | bytes, None], requests: FrontRequests) -> None:
        super().__init__(_bytes(begun, items, requests), begun["status"])
        self._items = items
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self._requests.send_timeout
        try:
            await super().__call__(scope, receive, in_time(send, seconds))
        except NobodyReads:
            logger.warning("a stream is broken off: %s has read nothing for %g seconds", scope["client"], seconds)
            self._requests.stuck.inc()
        finally:
            await self._items.aclose()


async def _bytes(
    begun: Begun, items: AsyncGenerator[Begun | bytes, None], requests: FrontRequests
) -> AsyncGenerator[bytes, None]:
    yield begun["body"]
    try:
        while (item := await requests.unless_over(anext(items, None))) is not None:
            if isinstance(item, bytes):
                yield item
    except ApiError as error:
        # The status was sent long ago.
        yield f"data: {json.dumps(error.body)}\n\n".encode()
