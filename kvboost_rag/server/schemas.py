"""What requests may hold; anything else is an error, never passed over."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "AddDocuments", "AskedFields", "ChatMessage", "ChatRequest", "CompletionRequest", "NewDocument",
    "PostedDocuments", "ResponseFormat", "Tool", "ToolCall",
]  # fmt: skip

# What changes no answer: notes of the caller, and hints where and how fast to compute.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction",
    }
)  # fmt: skip

# Control characters would forge lines of logs, and no path can name them.
DocumentId = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """An object of a request, in which every field counts."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewDocument(Body):
    """A document with its text."""

    id: DocumentId
    text: Annotated[str, Field(min_length=1, pattern=r"\S")]
    version: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("version", "metadata")
    @classmethod
    def _can_be_told(cls, value: Any) -> Any:
        """Refuse what no answer could hold, such as NaN and halves of characters: lists would break on it for ever."""
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("invalid_value", "it can not be written as JSON in UTF-8") from error
        return value


class AddDocuments(Body):
    """Documents to add; ``stream`` asks for their progress as events."""

    documents: Annotated[list[NewDocument], Field(min_length=1)]
    stream: bool = False


def _is_batch(given: Any) -> str:
    return "batch" if isinstance(given, dict) and "documents" in given else "one"


PostedDocuments = Annotated[
    Annotated[AddDocuments, Tag("batch")] | Annotated[NewDocument, Tag("one")], Discriminator(_is_batch)
]


def _is_same(value: Any, idle: Any) -> bool:
    """Compare, without taking true for 1."""
    return bool(value == idle) and isinstance(value, bool) == isinstance(idle, bool)


class StreamOptions(Body):
    """What a stream also holds."""

    include_usage: bool = False
    # Padding of events against eavesdroppers, who hear nothing on a loopback.
    include_obfuscation: bool | None = None


class AskedFields(Body):
    """What chats and completions have in common."""

    # Values of fields that can not do more here than not to be there, and what to do instead.
    only: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "n": ((1,), "ask as often as you want answers"),
        "frequency_penalty": ((0,), "use repetition_penalty"),
        "presence_penalty": ((0,), "use repetition_penalty"),
        "logit_bias": (({},), "leave it out"),
    }

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: list[DocumentId | NewDocument] | None = None
    register_documents: bool = True
    repair: str | None = None
    quality: str | float | None = None
    reuse: bool = True

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, (values, remedy) in cls.only.items():
            value = given.get(name)
            if value is not None and not any(_is_same(value, idle) for idle in values):
                raise PydanticCustomError(
                    "unsupported_value", "{param}={value} is not supported; {remedy}",
                    {"param": name, "value": repr(value)[:80], "remedy": remedy},
                )  # fmt: skip
        return {name: value for name, value in given.items() if name not in HARMLESS and name not in cls.only}

    @model_validator(mode="after")
    def _check_stream_options(self) -> AskedFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported_value", "stream_options needs stream=true", {"param": "stream_options"}
            )
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None leaves it to the server."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Part(Body):
    """A part of a message: text."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """Name and arguments of a call."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    # The place in a stream, which clients keep that put its pieces together; here the order of the list counts.
    index: int | None = None


class ChatMessage(Body):
    """A message; the last fields are those that OpenAI's own answers hold empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Body):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # A forced call follows its schema in any case.
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A schema that the answer follows in any case, strict or not."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    name: str | None = None
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("unsupported_value", "json_schema goes with type 'json_schema', and only with it")
        return self


class ChatRequest(AskedFields):
    """A request to ``/v1/chat/completions``."""

    only: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **AskedFields.only,
        "logprobs": ((False,), "leave it out"),
        "top_logprobs": ((0,), "leave it out"),
        "modalities": ((["text"],), "the model writes text alone"),
        "functions": ((), "use tools"),
        "function_call": ((), "use tool_choice"),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] = Field(default_factory=dict)

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _check_options(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            if isinstance(value, (dict, list)):
                raise PydanticCustomError(
                    "invalid_value", "{param} is no switch of a template; pass a number, text, true, false or null",
                    {"param": f"chat_template_kwargs.{name}"[:200]},
                )  # fmt: skip
        return given

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "unsupported_value", "max_tokens and max_completion_tokens differ; pass one", {"param": "max_tokens"}
            )
        if self.is_formatted and self.tools and self.tool_choice != "none":
            raise PydanticCustomError(
                "unsupported_value", "response_format and tools do not go together; pass one, or tool_choice='none'",
                {"param": "response_format"},
            )  # fmt: skip
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("unsupported_value", "two tools have one name", {"param": "tools"})
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None leaves it to the server."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def is_formatted(self) -> bool:
        """Whether the answer has to be JSON."""
        return self.response_format is not None and self.response_format.type != "text"


class CompletionRequest(AskedFields):
    """A request to ``/v1/completions``."""

    only: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **AskedFields.only,
        "logprobs": ((), "leave it out"),
        "best_of": ((1,), "leave it out"),
        "echo": ((False,), "the caller has the prompt"),
        "suffix": (("",), "leave it out"),
    }

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]
