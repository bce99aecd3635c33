"""Tools in prompts and in answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.structured.grammar import call_grammar

__all__ = ["CallReader", "FreeReader", "Piece", "Reader", "ToolRequest", "parsed_call"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_UNREAD = "it is no JSON of a call of a tool that was offered"
_BETWEEN = ', "arguments": '


@dataclass(frozen=True)
class Piece:
    """Something new in an answer: text, or a call.

    Parameters
    ----------
    text
        Of the answer, or all of a call's arguments.
    call
        Number of the call; None for text.
    name, id
        Of the call.
    error
        Why the call can not be made; None if it can.
    """

    text: str
    call: int | None = None
    name: str | None = None
    id: str | None = None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class ToolRequest:
    """The tools of one request.

    Parameters
    ----------
    tools
        In OpenAI's form.
    forced
        Names of those of which one must be called; empty if the model may answer instead.
    """

    tools: Sequence[dict[str, Any]]
    forced: tuple[str, ...] = ()

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]], choice: Any) -> ToolRequest:
        """Read ``tool_choice``: None, ``"auto"``, ``"none"``, ``"any"``, ``"required"``, a bool, a name or a mapping.

        Raises
        ------
        ValueError
            If the choice names no tool.
        """
        names = tuple(tool["function"]["name"] for tool in tools)
        if isinstance(choice, Mapping):
            choice = choice.get("function", choice).get("name", choice.get("type"))
        if choice in (None, False, "auto", "none"):
            return cls(() if choice == "none" else tools)
        if not names:
            raise ValueError(f"tool_choice={choice!r} without tools; pass tools as well")
        if choice not in ("any", "required", True, *names):
            raise ValueError(f"tool_choice={choice!r} is none of the tools; pass 'any' or one of {', '.join(names)}")
        return cls(tools, (choice,) if choice in names else names)

    @property
    def begun(self) -> str:
        """What a forced answer begins with; the model goes on from there."""
        (name,) = self.forced if len(self.forced) == 1 else ("",)
        return f'{_OPEN}\n{{"name":' + (f' {json.dumps(name)}, "arguments":' if name else "")

    @property
    def grammar(self) -> str:
        """What may follow."""
        schemas = {t["function"]["name"]: t["function"].get("parameters") or {"type": "object"} for t in self.tools}
        return call_grammar({name: _closed(schemas[name]) for name in self.forced})

    @property
    def description(self) -> str:
        """The tools as text, for templates that do not list any."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        form = f'{_OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{_CLOSE}'
        return f"These functions can be called:\n{listed}\n\nA call is written like this:\n{form}"

    def reader(self) -> Reader:
        """Make what reads the answer."""
        if self.forced:
            return CallReader(self.forced)
        names = [tool["function"]["name"] for tool in self.tools]
        return FreeReader(names) if names else Reader()


class Reader:
    """Reads an answer that is text."""

    def push(self, text: str) -> list[Piece]:
        """Take new text; return what is certain."""
        return [Piece(text)] if text else []

    def end(self) -> list[Piece]:
        """Return the rest."""
        return []


class CallReader(Reader):
    """Reads the one call that an answer was forced to be.

    Parameters
    ----------
    names
        Of the tools that may be called.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._name = names[0] if len(names) == 1 else None
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Take new text; a call is held back until it is whole, for what merges chunks would repair half of one."""
        self._held += text
        return []

    def end(self) -> list[Piece]:
        """Return the call."""
        name, arguments = self._name, self._held
        if name is None:
            written, between, rest = self._held.partition(_BETWEEN)
            if not between:
                return [_broken(self._held, 0, "the call ends before its arguments")]
            name, arguments = json.loads(written), rest
        arguments = arguments.strip()
        try:
            parsed_call(arguments)
        except ValueError as error:
            return [_broken(arguments, 0, str(error), name)]
        return [Piece(arguments, 0, name, _new_id())]


class FreeReader(Reader):
    """Reads text that may hold calls: tagged ones, or an answer that is nothing but a call's JSON.

    Parameters
    ----------
    names
        Of the tools that were offered; nothing else is a call.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._shown = False

    def push(self, text: str) -> list[Piece]:
        """Take new text; what may be a call is held back."""
        self._held += text
        if not self._shown and self._held.lstrip()[:1] in ("", "{"):
            return []
        at = self._held.find(_OPEN)
        certain = at if at >= 0 else len(self._held) - _open_end(self._held)
        shown, self._held = self._held[:certain], self._held[certain:]
        self._shown = self._shown or bool(shown)
        return [Piece(shown)] if shown else []

    def end(self) -> list[Piece]:
        """Return the calls, and what turned out to be text."""
        if not self._held.strip():
            return []
        if _OPEN not in self._held:
            found = _call(self._held, 0, self._names)
            return [found or Piece(self._held)]
        pieces: list[Piece] = []
        before, *tagged = self._held.split(_OPEN)
        for text in tagged:
            call, _, after = text.partition(_CLOSE)
            number = sum(piece.call is not None for piece in pieces)
            pieces.append(_call(call, number, self._names) or _broken(call.strip(), number, _UNREAD))
            pieces += [Piece(after)] if after.strip() else []
        return [Piece(before), *pieces] if before.strip() else pieces


def parsed_call(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call.

    Raises
    ------
    ValueError
        If they are no JSON object.
    """
    parsed = json.loads(arguments)
    if not isinstance(parsed, dict):
        raise ValueError("arguments are no JSON object")
    return parsed


def _call(text: str, number: int, names: Sequence[str]) -> Piece | None:
    try:
        call = parsed_call(text)
    except ValueError:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if call.get("name") not in names or not isinstance(arguments, dict):
        return None
    return Piece(json.dumps(arguments, ensure_ascii=False), number, call["name"], _new_id())


def _broken(text: str, number: int, error: str, name: str = "") -> Piece:
    return Piece(text, number, name, _new_id(), error)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Allow no other properties than those named, or a small model invents some."""
    return {"additionalProperties": False, **schema}


def _open_end(text: str) -> int:
    """Length of the end of the text that a tag may begin with."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
