"""What an answer's pieces are in LangChain: messages and chunks of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from kvboost_rag.structured import Piece, parsed_call

__all__ = ["chunk_of", "message_of"]

logger = logging.getLogger("kvboost_rag")


def chunk_of(piece: Piece) -> AIMessageChunk:
    """Turn a piece into a chunk of a message.

    LangChain makes a valid call of a chunk whose arguments it can repair. Those of a call that can not be made are
    therefore written as a JSON string, which leaves it an invalid one.
    """
    if piece.call is None:
        return AIMessageChunk(content=piece.text)
    if piece.error is not None:
        logger.warning("a tool call can not be read: %s", piece.error)
    arguments = piece.text if piece.error is None else json.dumps(piece.text, ensure_ascii=False)
    chunk = tool_call_chunk(name=piece.name, args=arguments, id=piece.id, index=piece.call)
    return AIMessageChunk(content="", tool_call_chunks=[chunk])


def message_of(pieces: Sequence[Piece], finish_reason: str, metadata: dict[str, Any]) -> AIMessage:
    """Put the pieces of a whole answer together; a call that can not be made is an invalid one."""
    calls, invalid = [], []
    for piece in pieces:
        if piece.call is None:
            continue
        if piece.error is None:
            calls.append(tool_call(name=piece.name or "", args=parsed_call(piece.text), id=piece.id))
            continue
        reason = "cut at max_tokens; pass a larger one" if finish_reason == "length" else piece.error
        logger.warning("a tool call can not be read: %s", reason)
        invalid.append(invalid_tool_call(name=piece.name, args=piece.text, id=piece.id, error=reason))
    text = "".join(piece.text for piece in pieces if piece.call is None)
    return AIMessage(content=text, tool_calls=calls, invalid_tool_calls=invalid, **metadata)
