"""What requests may say: the fields of OpenAI's API that are served, and ours beside them.

A field that nobody knows, and one whose effect is not built, are errors: a client that sets `logit_bias` should not
take what it gets for its effect. Fields that ask for nothing (`user`, `metadata`, ...) are taken and ignored.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from pagebinder.config import SamplingParams
from pagebinder.errors import RequestError

# Of one HTTP request: prompts, samples of each, samples of all, log-probabilities of a token.
MOST_PROMPTS, MOST_SAMPLES, MOST_SAMPLES_OF_ALL, MOST_LOGPROBS = 2048, 128, 4096, 20
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


class Sampling(Body):
    """How tokens are chosen. Behind the blank line: ours, with the meaning of `SamplingParams`."""

    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    top_k: StrictInt = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    stop_token_ids: Ids = []
    ignore_eos: StrictBool = False
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    return_token_ids: StrictBool = False

    WITHOUT_EFFECT: ClassVar = {
        "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},), "logprobs": (False,),
    }  # fmt: skip

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises RequestError: a value that nothing can be sampled with."""
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens={max_tokens}: use at least 1.")
        n = 1 if self.n is None else self.n
        if n > MOST_SAMPLES:
            raise RequestError(f"n={n}: use {MOST_SAMPLES} at most.")
        if logprobs is not None and logprobs > MOST_LOGPROBS:
            raise RequestError(f"{logprobs} log-probabilities a token: ask for {MOST_LOGPROBS} at most.")
        return SamplingParams(
            max_tokens=max_tokens, temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, seed=self.seed, stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos, logprobs=logprobs, n=n,
        )  # fmt: skip

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


class Message(BaseModel):
    """Of a conversation. What else a message holds is for the chat template."""

    model_config = ConfigDict(extra="allow")
    role: StrictStr
    content: StrictStr | list[dict[str, Any]] | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions. Behind the blank line: ours; other variables of the chat template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None

    chat_template_kwargs: dict[str, Any] = {}

    WITHOUT_EFFECT: ClassVar = Sampling.WITHOUT_EFFECT | {
        "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},), "modalities": (["text"],), "reasoning_effort": ("none",),
    }  # fmt: skip


class EmbeddingBody(Body):
    """POST /v1/embeddings. `truncate`, which is ours: inputs that are too long are cut instead of refused."""

    input: StrictStr | Ids | list[StrictStr] | list[Ids]
    encoding_format: StrictStr = "float"
    truncate: StrictBool = False

    WITHOUT_EFFECT: ClassVar = {"dimensions": ()}
