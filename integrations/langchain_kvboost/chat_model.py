"""The chat model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import run_in_executor
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from kvboost_rag import Document as EngineDocument
from kvboost_rag import KVBoostEngine, Result
from kvboost_rag.structured import Piece, Reader
from langchain_kvboost.answers import chunk_of, message_of
from langchain_kvboost.asking import CALL_ARGUMENTS, compose
from langchain_kvboost.placing import BEFORE
from langchain_kvboost.schemas import structured_chain
from langchain_kvboost.settings import Settings, describe, usage
from langchain_kvboost.waiting import finished

__all__ = ["ChatKVBoost"]


@dataclass(frozen=True, eq=False)
class _Call:
    engine: KVBoostEngine
    model: str
    prompt: list[dict[str, Any]]
    options: dict[str, Any]
    reader: Reader
    notes: list[str]

    def metadata(self, result: Result) -> dict[str, Any]:
        return {"usage_metadata": usage(result), "response_metadata": describe(result, self.model, self.notes)}


class ChatKVBoost(BaseChatModel, Settings):
    """A local chat model that reuses the KV of documents it has seen, wherever they stand in the messages.

    The fields are those of :class:`langchain_kvboost.settings.Settings`. Documents are recognised in every message
    once the engine knows them: added by hand, by :class:`KVBoostVectorStore` or :class:`KVBoostRetriever`, handed over
    with :meth:`with_documents`, or as the artifact of a tool.

    Examples
    --------
    >>> chat = ChatKVBoost(model="smollm2", temperature=0, max_tokens=32)
    >>> chat.invoke("Who wrote Faust?").usage_metadata  # doctest: +SKIP
    """

    @property
    def _llm_type(self) -> str:
        return "chat-kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity()

    def with_documents(
        self,
        documents: Sequence[Document | EngineDocument | str],
        *,
        documents_at: str = BEFORE,
        most_used_first: bool = False,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind documents that the model puts into the prompt itself, with exact boundaries.

        The same arguments can be given to a single call: ``chat.invoke(messages, documents=[...])``.

        Parameters
        ----------
        documents
            Of LangChain or of the engine, or ids that the engine knows.
        documents_at
            ``"before"`` the text of the last human message, as the engine's layout wants it; ``"after"`` it; at the end
            of the ``"system"`` message; or any other text, which has to stand once in the messages and is replaced, as
            ``"{documents}"``.
        most_used_first
            Put first what prompts used most often: prompts that begin alike reuse even more.
        """
        return self.bind(
            documents=list(documents), documents_at=documents_at, most_used_first=most_used_first
        )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools.

        Parameters
        ----------
        tools
            In any form that LangChain knows.
        tool_choice
            ``"any"`` or a name keeps the answer to a call that follows the schema; None or ``"auto"`` lets the model
            choose; ``"none"`` hides the tools.
        strict
            Handed on to the schema; a forced call always follows it.
        **kwargs
            Of the call.
        """
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        return self.bind(tools=formatted, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """Keep answers to a schema; see :meth:`langchain_core.language_models.BaseChatModel.with_structured_output`.

        Parameters
        ----------
        schema
            A pydantic class, a TypedDict, a JSON schema or a tool.
        include_raw
            Whether the message is returned too.
        **kwargs
            ``method``: ``"function_calling"`` (the default), ``"json_schema"``, which shows the model the schema, or
            ``"json_mode"``, which leaves that to the prompt. Each keeps to the schema. ``strict``: changes nothing.

        Raises
        ------
        langchain_core.exceptions.OutputParserException
            When it is asked, if the answer was cut: at ``max_tokens`` or by a stop string.
        """
        method = kwargs.pop("method", None) or "function_calling"
        kwargs.pop("strict", None)
        if kwargs:
            raise ValueError(f"with_structured_output can not take {', '.join(kwargs)}; leave it out")
        return structured_chain(self, schema, method, include_raw)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by itself, without beginning or end of sequence."""
        ids: list[int] = self.get_engine().tokenizer.encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Count the tokens of the prompt that these messages and tools become."""
        formatted = [convert_to_openai_tool(tool) for tool in tools or ()]
        # Counting is no reason to compute KV.
        call = self._call(messages, None, {"tools": formatted} if formatted else {}, register_documents=False)
        options = call.options["template_options"]
        return len(call.engine.tokenize(call.prompt, template_options=options))

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True, text_outputs=True, image_inputs=False, audio_inputs=False, video_inputs=False,
            pdf_inputs=False, tool_calling=True, tool_choice=True, tool_call_streaming=True, temperature=True,
        )  # fmt: skip
        engine = self._loaded_engine()
        window = getattr(engine.model.config, "max_position_embeddings", None) if engine else None
        if window is not None:
            profile["max_input_tokens"] = window
        return profile

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or list(self._options_of({}, None)["stop"]) or None, **kwargs)
        params["ls_provider"] = "kvboost"
        params["ls_model_name"] = kwargs.get("model") or self.model_label
        return params

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        *,
        register_documents: bool = True,
    ) -> _Call:
        self._taken(kwargs, CALL_ARGUMENTS)
        engine, model = self._engine_of(kwargs)
        options = self._options_of(kwargs, stop)
        template_options = {**self.chat_template_kwargs, **kwargs.get("chat_template_kwargs", {})}
        register = register_documents and self.register_documents and not engine.trusted_only
        composed = compose(engine, messages, kwargs, template_options, register_documents=register)
        return _Call(engine, model, composed.prompt, {**options, **composed.options}, composed.reader, composed.notes)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._answer(messages, stop, kwargs, Event())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        given_up = Event()
        try:
            return await run_in_executor(None, self._answer, messages, stop, kwargs, given_up)
        finally:
            given_up.set()

    def _answer(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], given_up: Event
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs)
        result = finished(call.engine.stream(call.prompt, **call.options), given_up)
        pieces = [*call.reader.push(result.text), *call.reader.end()]
        message = message_of(pieces, result.finish_reason, call.metadata(result))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs)
        result = yield from _chunks(call)
        last = AIMessageChunk(content="", chunk_position="last", **call.metadata(result))
        yield ChatGenerationChunk(message=last)


def _chunks(call: _Call) -> Generator[ChatGenerationChunk, None, Result]:
    """Yield an answer as it grows; return its result. Closing stops the compute."""
    with closing(call.engine.stream(call.prompt, **call.options)) as stream:
        while True:
            try:
                text = next(stream).text
            except StopIteration as end:
                yield from map(_chunk, call.reader.end())
                result: Result = end.value
                return result
            yield from map(_chunk, call.reader.push(text))


def _chunk(piece: Piece) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=chunk_of(piece))
