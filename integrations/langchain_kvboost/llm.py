"""The model as a completion of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from threading import Event
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables.config import run_in_executor

from kvboost_rag import KVBoostEngine, Result
from langchain_kvboost.asking import chosen_documents
from langchain_kvboost.documents import restore_reprs
from langchain_kvboost.settings import Settings, describe, usage
from langchain_kvboost.waiting import finished

__all__ = ["KVBoostLLM"]

_CALL_ARGUMENTS = ("documents",)
_OF_EVERY_CALL = frozenset({"prompts", "stop", "callbacks", "tags", "metadata", "run_name", "run_id"})


class KVBoostLLM(BaseLLM, Settings):
    """A local model that continues text and reuses the KV of documents it has seen, wherever they stand in it.

    The fields are those of :class:`langchain_kvboost.settings.Settings`, and one more. Documents can also be handed
    over apart, to all prompts of a call: ``llm.invoke(question, documents=[...])``.

    Parameters
    ----------
    use_chat_template
        Whether a prompt is put into a user's message, as models that follow instructions want it.
    """

    use_chat_template: bool = False

    @property
    def _llm_type(self) -> str:
        return "kvboost"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._identity(), "use_chat_template": self.use_chat_template}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by itself, without beginning or end of sequence."""
        ids: list[int] = self.get_engine().tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompts; see :meth:`langchain_core.language_models.BaseLLM.generate`.

        LangChain's response cache knows the fields alone, so a call with arguments of its own goes past it.
        """
        return super(KVBoostLLM, self._cached_for(kwargs)).generate(*args, **kwargs)

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompts in a thread; see `generate`."""
        return await super(KVBoostLLM, self._cached_for(kwargs)).agenerate(*args, **kwargs)

    def _cached_for(self, kwargs: Mapping[str, Any]) -> KVBoostLLM:
        return self.model_copy(update={"cache": False}) if set(kwargs) - _OF_EVERY_CALL else self

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "kvboost"
        params["ls_model_name"] = kwargs.get("model") or self.model_label
        return params

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._answers(prompts, stop, kwargs, Event())

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        given_up = Event()
        try:
            return await run_in_executor(None, self._answers, prompts, stop, kwargs, given_up)
        finally:
            given_up.set()

    def _answers(
        self, prompts: list[str], stop: list[str] | None, kwargs: dict[str, Any], given_up: Event
    ) -> LLMResult:
        generations: list[list[Generation]] = []
        counts = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for text in prompts:
            engine, asked, model, notes = self._asked(text, stop, kwargs)
            result = finished(engine.stream(**asked), given_up)
            counts = {
                "prompt_tokens": counts["prompt_tokens"] + result.prompt_tokens,
                "completion_tokens": counts["completion_tokens"] + result.completion_tokens,
                "total_tokens": counts["total_tokens"] + result.prompt_tokens + result.completion_tokens,
            }
            generations.append([Generation(text=result.text, generation_info=_info(result, model, notes))])
        return LLMResult(generations=generations, llm_output={"token_usage": counts, "model_name": self.model_label})

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        engine, asked, model, notes = self._asked(prompt, stop, kwargs)
        with closing(engine.stream(**asked)) as stream:
            while True:
                try:
                    chunk = GenerationChunk(text=next(stream).text)
                except StopIteration as end:
                    chunk = GenerationChunk(text="", generation_info=_info(end.value, model, notes))
                if chunk.text and run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                if chunk.text or chunk.generation_info:
                    yield chunk
                if chunk.generation_info:
                    return

    def _asked(
        self, text: str, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[KVBoostEngine, dict[str, Any], str, list[str]]:
        """Return the engine, its arguments, the model's name, and what the caller should know about the prompt."""
        self._taken(kwargs, _CALL_ARGUMENTS)
        engine, model = self._engine_of(kwargs)
        options = self._options_of(kwargs, stop)
        if kwargs.get("documents"):
            register = self.register_documents and not engine.trusted_only
            options["documents"] = chosen_documents(engine, kwargs["documents"], add=register)
        template_options = {**self.chat_template_kwargs, **kwargs.get("chat_template_kwargs", {})}
        restored, notes = restore_reprs(text, engine)
        prompt = [{"role": "user", "content": restored}] if self.use_chat_template else restored
        return engine, {**options, "prompt": prompt, "template_options": template_options}, model, notes


def _info(result: Result, model: str, notes: list[str]) -> dict[str, Any]:
    return {**describe(result, model, notes), "usage_metadata": usage(result)}
