"""What requests may say: the fields of OpenAI's API that are served, and ours beside them.

A field that nobody knows, and one whose effect is not built, are errors: a client that sets `modalities` should not
take what it gets for its effect. Fields that ask for nothing (`user`, `metadata`, ...) are taken and ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from pagebinder.config import SamplingParams
from pagebinder.errors import RequestError
from pagebinder.guides import Choice, Grammar, JsonSchema, Regex
from pagebinder.sampling_defaults import OF_DRAWING, PENALTY

# Of one HTTP request: prompts, samples of each, samples of all, log-probabilities of a token.
MOST_PROMPTS, MOST_SAMPLES, MOST_SAMPLES_OF_ALL, MOST_LOGPROBS = 2048, 128, 4096, 20
MOST_TOOLS = 512
FUNCTION_NAME = r"^[A-Za-z0-9_.:/-]{1,256}$"
Ids = list[StrictInt]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Body(BaseModel):
    """A request's JSON object. Unknown fields are errors that name the nearest one."""

    model_config = ConfigDict(extra="allow")  # checked below, with a better message
    IGNORED: ClassVar = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    # Fields whose effect is not built, and the values with which they have none.
    WITHOUT_EFFECT: ClassVar[dict[str, tuple]] = {}

    model: StrictStr | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Body:
        known = [*type(self).model_fields, *self.WITHOUT_EFFECT, *self.IGNORED]
        for name, value in (self.model_extra or {}).items():
            if name in self.WITHOUT_EFFECT:
                if value is not None and value not in self.WITHOUT_EFFECT[name]:
                    raise RequestError(f"{name}={value!r} is not supported; leave it out.")
            elif name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise RequestError(
                    f"There is no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ".")
                )
        return self


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: StrictBool = False


class NamedSchema(BaseModel):
    model_config = ConfigDict(extra="ignore")  # its name, a description, strict: it is kept to in any case
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's: "text", "json_object", or "json_schema" with a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def guide(self) -> JsonSchema | None:
        """Raises RequestError: there is no schema, or one that is not asked for."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise RequestError(
                'response_format: json_schema goes with the type "json_schema", and only with it.'
            )
        if self.type == "text":
            return None
        return JsonSchema(None if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(BaseModel):
    """vLLM's: one of these. `json`: a schema, or its text, with `disable_any_whitespace` if wanted."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    disable_any_whitespace: StrictBool = False

    def guide(self) -> JsonSchema | Regex | Choice | Grammar:
        """Raises RequestError: it is not one of them, or a bad one."""
        makers = {"json_": JsonSchema, "regex": Regex, "choice": Choice, "grammar": Grammar}
        given = [name for name in makers if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError("structured_outputs: give one of json, regex, choice and grammar.")
        if self.disable_any_whitespace:
            if given != ["json_"]:
                raise RequestError("structured_outputs: disable_any_whitespace is for json.")
            return JsonSchema(self.json_, compact=True)
        return makers[given[0]](getattr(self, given[0]))


class Sampling(Body):
    """How tokens are chosen. Behind the blank line: ours, with the meaning of `SamplingParams`."""

    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    response_format: ResponseFormat | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt = 0
    structured_outputs: StructuredOutputs | None = None
    stop_token_ids: Ids = []
    ignore_eos: StrictBool = False
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    return_token_ids: StrictBool = False

    WITHOUT_EFFECT: ClassVar = {"logprobs": (False,)}

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """`defaults`: of the model, where a request does not say.

        Raises RequestError: a value that nothing can be sampled with.
        """
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens={max_tokens}: use at least 1.")
        n = 1 if self.n is None else self.n
        if n < 1:
            raise RequestError(f"n={n}: use 1 to {MOST_SAMPLES}.")
        if n > MOST_SAMPLES:
            raise RequestError(f"n={n}: use {MOST_SAMPLES} at most.")
        if logprobs is not None and logprobs > MOST_LOGPROBS:
            raise RequestError(f"{logprobs} log-probabilities a token: ask for {MOST_LOGPROBS} at most.")
        asked = {name: getattr(self, name) for name in (*OF_DRAWING, PENALTY)}
        asked = defaults | {name: value for name, value in asked.items() if value is not None}
        return SamplingParams(
            **asked, max_tokens=max_tokens, frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0, logit_bias=self.logit_bias, guide=self._guide(),
            min_tokens=self.min_tokens, seed=self.seed, stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos, logprobs=logprobs, n=n,
        )  # fmt: skip

    def _guide(self) -> JsonSchema | Regex | Choice | Grammar | None:
        of_format = None if self.response_format is None else self.response_format.guide()
        if of_format is not None and self.structured_outputs is not None:
            raise RequestError("Give response_format or structured_outputs, not both.")
        return of_format if self.structured_outputs is None else self.structured_outputs.guide()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Sampling):
    """POST /v1/completions. `prompt`: a text, token ids, or several of either; `encoder_prompt` the same, of an
    encoder-decoder, which needs no `prompt`."""

    prompt: StrictStr | Ids | list[StrictStr] | list[Ids] | None = None
    encoder_prompt: StrictStr | Ids | list[StrictStr] | list[Ids] | None = None
    logprobs: StrictInt | None = None

    WITHOUT_EFFECT: ClassVar = Sampling.WITHOUT_EFFECT | {"echo": (False,), "suffix": ("",), "best_of": (1,)}


class Function(BaseModel):
    """`strict`: taken, and kept to only where a call is asked for (`tool_choice`)."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[StrictStr, Field(pattern=FUNCTION_NAME)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: StrictStr


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: FunctionName


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: StrictStr
    arguments: Annotated[
        Json[dict[str, Any]] | dict[str, Any],
        BeforeValidator(lambda text: "{}" if text in ("", None) else text),
    ]


class ToolCall(BaseModel):
    """Of an assistant's message in a conversation."""

    model_config = ConfigDict(extra="ignore")
    id: StrictStr
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """Of a conversation. What else a message holds is for the chat template."""

    model_config = ConfigDict(extra="allow")
    role: StrictStr
    content: StrictStr | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions. Behind the blank line: ours; other variables of the chat template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None

    chat_template_kwargs: dict[str, Any] = {}

    WITHOUT_EFFECT: ClassVar = Sampling.WITHOUT_EFFECT | {
        "modalities": (["text"],), "reasoning_effort": ("none",),
    }  # fmt: skip

    def shown_tools(self) -> list[Function]:
        """Those that the model is told of. Raises RequestError: tools or choices among them that do not fit."""
        tools = [tool.function for tool in self.tools or []]
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise RequestError(f"tools: there are two with the name {max(names, key=names.count)!r}.")
        for number, tool in enumerate(tools):
            schema = tool.parameters or {}
            if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
                raise RequestError(
                    f'tools[{number}].function.parameters: arguments are an object: use "type": "object", and an '
                    "object of schemas as properties."
                )
        choice = self.tool_choice
        if not tools and choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call: give tools.")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(f"tool_choice: there is no tool {choice.function.name!r} among tools.")
        return [] if choice == "none" else tools


class EmbeddingBody(Body):
    """POST /v1/embeddings. `truncate`, which is ours: inputs that are too long are cut instead of refused."""

    input: StrictStr | Ids | list[StrictStr] | list[Ids]
    encoding_format: StrictStr = "float"
    truncate: StrictBool = False

    WITHOUT_EFFECT: ClassVar = {"dimensions": ()}
