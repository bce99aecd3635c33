"""The LLM."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index.llms.kvboost.base import EngineLLM, Prompt
from llama_index.llms.kvboost.responses import Part, chat_response, completion_response, parts
from llama_index.llms.kvboost.threads import in_threads
from llama_index.llms.kvboost.tools import conversation, first_call_only, offered, selections, tool_names

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

__all__ = ["KVBoostLLM"]

R = TypeVar("R", ChatResponse, CompletionResponse)


class KVBoostLLM(EngineLLM):
    """A local model that reuses the KV of every known node it finds in a prompt.

    Nodes become known through :func:`add_nodes`, :class:`KVBoostPostprocessor`, :func:`track_retrievals` or
    ``engine.add_documents``. Every method takes, as keyword arguments, the fields that may change from call to call
    (``max_tokens``, ``temperature``, ``stop``, ``seed``, ``repair``, ``template_options`` and so on); an unknown one
    raises ValueError. What the engine refuses raises :class:`RequestError`.

    The async methods compute in threads, and cancelling or closing them stops the compute. The last response of a
    stream has an empty delta and, as every whole response, ``raw`` with ``usage``, ``finish_reason`` and the engine's
    ``report``.

    Parameters
    ----------
    model
        What :meth:`kvboost_rag.KVBoostEngine.from_pretrained` loads, when it is first needed; with the layout of
        LlamaIndex's question prompts, unless ``engine_options`` name another.
    engine
        A ready engine, instead of ``model``; several LLMs may share it.
    **fields
        The fields of the class, and those of every LlamaIndex LLM, as ``system_prompt``.

    Raises
    ------
    ValueError
        If not exactly one of ``model`` and ``engine`` is given, or a field is unknown.
    """

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in serialised form."""
        return "KVBoostLLM"

    # Chat --------------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return _last(self._chats(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """Answer messages piece by piece."""
        return self._chats(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, in threads."""
        return await _alast(in_threads(self._chats(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """Answer messages piece by piece, in threads."""
        return in_threads(self._chats(messages, kwargs))

    # Completion --------------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; it goes through the chat template unless it is ``formatted`` already."""
        return _last(self._completions(prompt, formatted, kwargs))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """Answer a prompt piece by piece."""
        return self._completions(prompt, formatted, kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt, in threads."""
        return await _alast(in_threads(self._completions(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """Answer a prompt piece by piece, in threads."""
        return in_threads(self._completions(prompt, formatted, kwargs))

    # Tools -------------------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not self.metadata.is_function_calling_model:
            raise ValueError(
                "the model's chat template takes no tools; use a ReActAgent, or a model whose template does"
            )
        options = {**(kwargs.pop("template_options", None) or {}), "tools": offered(tools)}
        messages = conversation(user_msg, chat_history)
        return {"messages": messages, "template_options": options, "tool_required": tool_required, **kwargs}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        return response if allow_parallel_tool_calls else first_call_only(response)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Take the tool calls out of a response; without any, raise ValueError or return an empty list."""
        return selections(response, required=error_on_no_tool_call)

    # Both --------------------------------------------------------------------------------------------------------

    def _chats(self, messages: Sequence[ChatMessage], call: Mapping[str, Any]) -> Generator[ChatResponse, None, None]:
        required = call.get("tool_required", False)
        options = self.options({name: value for name, value in call.items() if name != "tool_required"})
        tools = tool_names(options["template_options"])

        def respond(part: Part) -> ChatResponse:
            response = chat_response(part, tools)
            selections(response, required=required and part.result is not None)
            return response

        return self._answer(lambda: self._chat_prompt(messages), options, respond)

    def _completions(
        self, prompt: str, formatted: bool, call: Mapping[str, Any]
    ) -> Generator[CompletionResponse, None, None]:
        options = self.options(call)
        return self._answer(lambda: self._completion_prompt(prompt, formatted), options, completion_response)

    def _answer(
        self, prompt: Callable[[], Prompt], options: Mapping[str, Any], respond: Callable[[Part], R]
    ) -> Generator[R, None, None]:
        """Do everything, loading and rendering too, where the generator is consumed: maybe in a thread."""
        with closing(parts(self.engine, prompt, options)) as answer:
            for part in answer:
                yield respond(part)


def _last(stream: Generator[R, None, None]) -> R:
    return _whole(deque(stream, maxlen=1)[0])


async def _alast(stream: AsyncGenerator[R, None]) -> R:
    kept: deque[R] = deque(maxlen=1)
    async for response in stream:
        kept.append(response)
    return _whole(kept[0])


def _whole(response: R) -> R:
    return response.model_copy(update={"delta": None})
