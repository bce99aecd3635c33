"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvboost_rag.report import Result
from kvboost_rag.server.asking import answer_chat
from kvboost_rag.server.reports import report_of, usage_of
from kvboost_rag.server.responding import respond
from kvboost_rag.server.running import working
from kvboost_rag.server.schemas import ChatRequest
from kvboost_rag.server.service import Caller, Served, new_id
from kvboost_rag.structured import Piece

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request, service: Served, caller: Caller) -> Response:
    """Answer a chat, whole or as a stream."""
    service.check_model(body.model)
    since = caller.writes.since()
    items = working(service, caller, lambda: answer_chat(caller, body, service.limits, since))
    return await respond(service, request, items, ChatWire(body), streamed=bool(body.stream))


class ChatWire:
    """Writes one answer to a chat.

    Parameters
    ----------
    body
        The request.
    """

    def __init__(self, body: ChatRequest) -> None:
        self._includes_usage = body.includes_usage
        self._one_call = body.parallel_tool_calls is False
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": body.model}
        self._notes: list[str] = []
        self._calls = 0

    def whole(self, pieces: list[Piece], result: Result) -> dict[str, Any]:
        """Write all of it as ``chat.completion``."""
        fields = [self._fields(piece) for piece in pieces]
        text = "".join(field.get("content", "") for field in fields)
        calls = [call for field in fields for call in field.get("tool_calls", ())]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(result)}
        return {
            **self._head, "object": "chat.completion", "choices": [choice], "usage": usage_of(result),
            "kvboost": report_of(result, self._notes),
        }  # fmt: skip

    def begin(self) -> Iterator[dict[str, Any]]:
        """Write who speaks."""
        yield self._chunk({"role": "assistant", "content": ""})

    def step(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Write new pieces as ``chat.completion.chunk``."""
        for piece in pieces:
            if fields := self._fields(piece):
                yield self._chunk(fields)

    def end(self, result: Result) -> Iterator[dict[str, Any]]:
        """Write how it ended, and the usage if it is asked for."""
        yield self._chunk({}, self._reason(result)) | {"kvboost": report_of(result, self._notes)}
        if self._includes_usage:
            yield self._chunk({}) | {"choices": [], "usage": usage_of(result)}

    def _fields(self, piece: Piece) -> dict[str, Any]:
        """Return what a piece adds to the message."""
        if piece.call is None:
            return {"content": piece.text}
        if piece.error is not None:
            self._notes.append(f"a tool call can not be made: {piece.error}")
        if not piece.name:
            return {"content": piece.text}
        if self._one_call and self._calls:
            self._notes.append("a further tool call was left out, as parallel_tool_calls=false asks")
            return {}
        self._calls += 1
        function = {"name": piece.name, "arguments": piece.text}
        call = {"index": self._calls - 1, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _reason(self, result: Result) -> str:
        return "tool_calls" if self._calls and result.finish_reason == "stop" else result.finish_reason

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}
