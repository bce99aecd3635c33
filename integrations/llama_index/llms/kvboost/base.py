"""An LLM's engine, what is known of its model, and how prompts reach it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.llms.kvboost.layout import question_layout
from llama_index.llms.kvboost.messages import to_template_messages
from llama_index.llms.kvboost.options import Configurable
from llama_index.llms.kvboost.tools import takes_tools

from kvboost_rag import KVBoostEngine

__all__ = ["EngineLLM", "Prompt"]

Prompt = str | list[dict[str, Any]]

# Loading is rare, and two threads must not load the same model twice.
_LOADING = threading.Lock()


class EngineLLM(Configurable):
    """The half of :class:`llama_index.llms.kvboost.KVBoostLLM` that knows its engine.

    Parameters
    ----------
    model
        What :meth:`kvboost_rag.KVBoostEngine.from_pretrained` loads, when it is first needed; with the layout of
        LlamaIndex's question prompts, unless ``engine_options`` name another.
    engine
        A ready engine, instead of ``model``.
    **fields
        Of the class.

    Raises
    ------
    ValueError
        If not exactly one of ``model`` and ``engine`` is given, or a field is unknown.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = Field(description="Id or folder of the model.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Of the engine that is loaded.")
    _engine: KVBoostEngine | None = PrivateAttr(default=None)
    _takes_tools: bool | None = PrivateAttr(default=None)

    def __init__(self, model: str | None = None, *, engine: KVBoostEngine | None = None, **fields: Any) -> None:
        if (model is None) == (engine is None):
            raise ValueError("give either a model to load or a ready engine")
        if engine is not None:
            if fields.get("engine_options"):
                raise ValueError("engine_options are for a model that is loaded; set them where the engine is made")
            model = engine.model.config.name_or_path or engine.model.config.model_type
        values: dict[str, Any] = {**fields, "model": model}
        super().__init__(**values)
        self._engine = engine

    @property
    def engine(self) -> KVBoostEngine:
        """The engine, loaded if it is not there yet."""
        with _LOADING:
            if self._engine is None:
                options = {"layout": question_layout(), **self.engine_options}
                self._engine = KVBoostEngine.from_pretrained(self.model, **options)
            return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        """Window, and from the chat template whether this is a chat model and whether it can be offered tools."""
        engine = self.engine
        if self._takes_tools is None:
            self._takes_tools = takes_tools(engine)
        return LLMMetadata(
            context_window=getattr(engine.model.config, "max_position_embeddings", None) or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=bool(engine.tokenizer.chat_template),
            is_function_calling_model=self._takes_tools,
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe the LLM for callbacks, without loading the model."""
        return {"class_name": self.class_name(), "model_name": self.model, "num_output": self.max_tokens}

    def token_ids(self, text: str) -> list[int]:
        """Tokenise a text, without special tokens around it; for ``Settings.tokenizer`` and text splitters."""
        ids: list[int] = self.engine.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def prompt_helper(self) -> PromptHelper:
        """Make a prompt helper that counts with the model's tokenizer and leaves room for chat template and answer."""
        turns = [ChatMessage(role=role, content="x") for role in ("user", "assistant", "user")]
        template = len(self.engine.tokenize(self._chat_prompt(turns))) - len(turns) * len(self.token_ids("x"))
        metadata = self.metadata.model_copy(update={"num_output": self.max_tokens + template})
        return PromptHelper.from_llm_metadata(metadata, tokenizer=self.token_ids)

    def _chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Leave messages to the chat template, unless there is none or the caller has a translation of their own."""
        to_prompt = self.messages_to_prompt or default_messages_to_prompt
        if to_prompt is not default_messages_to_prompt or not self.engine.tokenizer.chat_template:
            return to_prompt(messages)
        return to_template_messages(messages)

    def _completion_prompt(self, prompt: str, formatted: bool) -> Prompt:
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        if formatted:
            return prompt
        if to_prompt is not default_completion_to_prompt or not self.engine.tokenizer.chat_template:
            return to_prompt(prompt)
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]
