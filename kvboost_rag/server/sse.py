"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvboost_rag.server.connections import NobodyReads, in_time
from kvboost_rag.server.errors import ApiError, api_error
from kvboost_rag.server.service import Service

__all__ = ["EventStream"]

logger = logging.getLogger("kvboost_rag.server")

_DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A response of events, and ``[DONE]`` at the end; an error in between is an event too.

    A client that stops to read breaks it off, so that it keeps no place for ever.

    Parameters
    ----------
    service
        Says how long a client may not read, and counts those that do not.
    events
        What each event holds.
    source
        What the events come from; closed when the response is over, whatever ended it.
    """

    def __init__(
        self, service: Service, events: AsyncIterator[Mapping[str, Any]], source: AsyncGenerator[Any, None]
    ) -> None:
        # A proxy that collects a response before it hands it on would hold the first token back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encoded(events), media_type="text/event-stream", headers=headers)
        self._service = service
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        seconds = self._service.limits.send_timeout
        try:
            await super().__call__(scope, receive, in_time(send, seconds))
        except NobodyReads:
            logger.warning("a stream is broken off: %s has read nothing for %g seconds", scope["client"], seconds)
            self._service.metrics.stuck.inc()
        finally:
            await self._source.aclose()


async def _encoded(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield _event(event)
    except Exception as error:
        told = api_error(error)
        if told is None:
            logger.exception("a stream broke off")
            told = ApiError(500, "the server failed; its log says why", "server_error")
        yield _event(told.body)
        return
    yield _DONE


def _event(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
