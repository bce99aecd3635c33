"""What an answer's pieces are in LangChain: messages and chunks of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from langchain_kvboost.tools import Piece, parsed_call

__all__ = ["chunk_of", "message_of"]

logger = logging.getLogger("kvboost_rag")


def chunk_of(piece: Piece) -> AIMessageChunk:
    """Turn a piece into a chunk of a message."""
    if piece.call is None:
        return AIMessageChunk(content=piece.text)
    chunk = tool_call_chunk(name=piece.name, args=piece.text, id=piece.id, index=piece.call)
    return AIMessageChunk(content="", tool_call_chunks=[chunk])


def message_of(pieces: Sequence[Piece], finish_reason: str, metadata: dict[str, Any]) -> AIMessage:
    """Put the pieces of a whole answer together; a call whose arguments are no JSON object is an invalid one."""
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for number in sorted({piece.call for piece in pieces if piece.call is not None}):
        parts = [piece for piece in pieces if piece.call == number]
        name, call_id = parts[0].name, parts[0].id
        arguments = "".join(piece.text for piece in parts)
        try:
            calls.append(tool_call(name=name or "", args=parsed_call(arguments), id=call_id))
        except ValueError as error:
            reason = "cut at max_tokens; pass a larger one" if finish_reason == "length" else str(error)
            logger.warning("a tool call can not be read: %s", reason)
            invalid.append(invalid_tool_call(name=name, args=arguments, id=call_id, error=reason))
    text = "".join(piece.text for piece in pieces if piece.call is None)
    return AIMessage(content=text, tool_calls=calls, invalid_tool_calls=invalid, **metadata)
