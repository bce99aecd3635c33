"""What chat model and LLM share: which engine, how to decode, how to report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvboost_rag import KVBoostEngine, Result, SpanKind
from kvboost_rag.sampling import as_stops
from langchain_kvboost.engines import known_engine, shared_engine

__all__ = ["Settings", "describe", "usage"]

_DECODING = ("temperature", "top_p", "max_tokens", "seed", "timeout", "repair", "quality", "reuse")
_GENERATION = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


class Settings(BaseModel):
    """Fields of :class:`langchain_kvboost.ChatKVBoost` and :class:`langchain_kvboost.KVBoostLLM`.

    Parameters
    ----------
    model
        Model id in the local hub cache, folder, GGUF file, ``"smollm2"``, or a name given to ``share_engine``. It is
        loaded when it is first asked, once for all objects that name it. With ``engine`` only a label.
    engine
        A ready engine, instead of a model.
    dtype, device, engine_options
        See :func:`langchain_kvboost.shared_engine`; only without ``engine``.
    temperature, top_p, max_tokens, stop, seed
        See :class:`kvboost_rag.sampling.Sampling`.
    timeout
        Seconds that one answer may take.
    repair, quality
        Instead of the engine's; see :class:`kvboost_rag.KVBoostEngine`.
    reuse
        False computes every prompt whole, as a reference.
    register_documents
        Whether documents that are handed over, or come beside a tool's answer, are added to the engine.
    chat_template_kwargs
        Further arguments of the chat template, such as ``enable_thinking``.
    generation_kwargs
        ``top_k``, ``min_p``, ``repetition_penalty`` and ``ignore_eos``.
    streaming
        Whether ``invoke`` streams to callbacks.
    max_retries, api_key
        Taken so that the settings of a hosted model can stay; there is no server to try again or to log in to.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = ""
    engine: KVBoostEngine | None = Field(default=None, exclude=True, repr=False)
    dtype: str | None = None
    device: str | None = None
    engine_options: dict[str, Any] = Field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int = 256
    stop: list[str] | str | None = None
    seed: int | None = None
    timeout: float | None = None
    repair: str | None = None
    quality: str | float | None = None
    reuse: bool = True
    register_documents: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _check_settings(self) -> Settings:
        if not self.model and self.engine is None:
            raise ValueError("there is nothing to answer with; pass model='...' or engine=...")
        if self.engine is not None and (self.dtype or self.device or self.engine_options):
            raise ValueError("dtype, device and engine_options are settled with engine=...; leave them out")
        unknown = sorted(set(self.generation_kwargs) - set(_GENERATION))
        if unknown:
            raise ValueError(
                f"generation_kwargs can not hold {', '.join(unknown)}; it takes {', '.join(_GENERATION)}, and "
                f"{', '.join(_DECODING[:5])} and stop are arguments of their own"
            )
        return self

    @property
    def model_label(self) -> str:
        """Name of the model in reports."""
        if self.model or self.engine is None:
            return self.model
        return Path(str(self.engine.model.name_or_path)).name or type(self.engine.model).__name__

    def get_engine(self) -> KVBoostEngine:
        """Return the engine; the first call may load the model."""
        return self.engine or self._shared(self.model)

    def _shared(self, model: str) -> KVBoostEngine:
        return shared_engine(model, dtype=self.dtype, device=self.device, options=self.engine_options)

    def _loaded_engine(self) -> KVBoostEngine | None:
        return self.engine or known_engine(self.model, self.dtype, self.device, self.engine_options)

    def _taken(self, call: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Check the keyword arguments of a call: none is dropped."""
        known = {*names, *_DECODING, *_GENERATION, "chat_template_kwargs", "model"}
        unknown = sorted(set(call) - known)
        if unknown:
            raise ValueError(f"a call can not take {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
        return call

    def _engine_of(self, call: Mapping[str, Any]) -> tuple[KVBoostEngine, str]:
        """Return the engine of a call and the model's name; ``model`` in the call takes another model."""
        other = call.get("model")
        if other is None or other == self.model:
            return self.get_engine(), self.model_label
        return self._shared(other), other

    def _options_of(self, call: Mapping[str, Any], stop: Sequence[str] | str | None) -> dict[str, Any]:
        """Put together the arguments of the engine: the call's win over the object's."""
        own = {name: getattr(self, name) for name in _DECODING}
        asked = {name: call[name] for name in (*_DECODING, *_GENERATION) if name in call}
        if "repair" in call or "quality" in call:
            # One stands for the other: what the call names must not meet what the object names.
            own |= {"repair": None, "quality": None}
        stops = as_stops(self.stop if stop is None else stop)
        return {**own, **self.generation_kwargs, **asked, "stop": stops}

    def _identity(self) -> dict[str, Any]:
        """All that decides an answer, for traces and for the key of LangChain's response cache."""
        names = ("dtype", "device", "engine_options", *_DECODING, "stop", "chat_template_kwargs", "generation_kwargs")
        identity = {"model": self.model_label, **{name: getattr(self, name) for name in names}}
        if self.engine is not None:
            # Two engines may bear one name; the fingerprint covers weights, dtype, tokenizer and template.
            identity["engine"] = (getattr(self.engine, "fingerprint", "reuse off"), self.engine.repair)
        return identity


def usage(result: Result) -> dict[str, Any]:
    """Count the tokens of an answer, as LangChain's ``usage_metadata``; ``cache_read`` are those of stored KV."""
    report = result.report
    reused = report.tokens(SpanKind.EXACT) + report.tokens(SpanKind.APPROXIMATE)
    return {
        "input_tokens": result.prompt_tokens,
        "output_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "input_token_details": {"cache_read": reused},
    }


def describe(result: Result, model: str, notes: Sequence[str]) -> dict[str, Any]:
    """Say in plain values how an answer came about, as ``response_metadata``."""
    report = result.report
    return {
        "model_name": model,
        "finish_reason": result.finish_reason,
        "kvboost": {
            "tokens": {kind.value: report.tokens(kind) for kind in SpanKind},
            "reused_share": report.reused_share,
            "documents": report.documents,
            "repair": report.repair,
            "fallback": report.fallback,
            "ttft": report.ttft,
            "total": report.total,
            "notes": list(notes),
        },
    }
