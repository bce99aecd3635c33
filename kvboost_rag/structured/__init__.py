"""Answers that are JSON or calls of tools, whatever framework or server asks for them."""

from kvboost_rag.structured.grammar import Grammar, call_grammar, json_grammar
from kvboost_rag.structured.shaping import Shaped, shaped
from kvboost_rag.structured.templates import (
    Abilities,
    MadeCall,
    Messages,
    extend_system,
    with_calls,
    with_result,
    written_call,
)
from kvboost_rag.structured.tools import CallReader, FreeReader, Piece, Reader, ToolRequest, parsed_call

__all__ = [
    "Abilities", "CallReader", "FreeReader", "Grammar", "MadeCall", "Messages", "Piece", "Reader", "Shaped",
    "ToolRequest", "call_grammar", "extend_system", "json_grammar", "parsed_call", "shaped", "with_calls",
    "with_result", "written_call",
]  # fmt: skip
