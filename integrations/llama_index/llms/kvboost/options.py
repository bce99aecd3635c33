"""What may be set for a model and overridden for one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.function_calling import FunctionCallingLLM

__all__ = ["Configurable"]


class Configurable(FunctionCallingLLM):
    """Holds the arguments of :meth:`kvboost_rag.KVBoostEngine.stream`, which also says what each of them does."""

    max_tokens: int = Field(default=DEFAULT_NUM_OUTPUTS, description="Most tokens of an answer.")
    temperature: float | None = Field(default=None, description="0 is greedy; None takes the model's own setting.")
    top_p: float | None = Field(default=None, description="Keep the likeliest tokens up to this probability.")
    top_k: int | None = Field(default=None, description="Keep this many of the likeliest tokens.")
    min_p: float | None = Field(default=None, description="Keep tokens of this share of the likeliest's probability.")
    repetition_penalty: float | None = Field(default=None, description="Above 1 avoids repetition.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    stop: str | Sequence[str] | None = Field(default=None, description="Strings that end an answer and are cut off.")
    repair: str | None = Field(default=None, description="Which reused tokens are computed again; None: the engine's.")
    quality: str | float | None = Field(default=None, description="For the repair 'auto'; None: the engine's.")
    timeout: float | None = Field(default=None, description="Most seconds of an answer; then TimeoutError is raised.")
    reuse: bool = Field(default=True, description="False computes whole prompts, as a reference.")
    template_options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the chat template.")

    def options(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Put a call's arguments over the model's.

        Parameters
        ----------
        call
            Keyword arguments of one call. ``template_options`` are added to the model's, not put in their place.

        Raises
        ------
        ValueError
            For an argument that has no meaning here; nothing is dropped silently.
        """
        unknown = set(call) - _NAMES
        if unknown:
            raise ValueError(f"unknown arguments {', '.join(sorted(unknown))}; known are {', '.join(sorted(_NAMES))}")
        options = {name: call.get(name, getattr(self, name)) for name in _NAMES}
        if "repair" in call or "quality" in call:
            # One stands for the other: what the call names must not meet what the model names.
            options |= {"repair": call.get("repair"), "quality": call.get("quality")}
        options["template_options"] = {**self.template_options, **(call.get("template_options") or {})}
        return options


_NAMES = frozenset(Configurable.__annotations__)
