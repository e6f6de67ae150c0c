"""The bodies of requests and answers, as OpenAI has them, with Vera's extension.

Values of a wrong type are refused, not converted. Unknown fields are accepted; those that ask for something that cannot be
honoured are refused by name (`refuse_unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from vera.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams
from vera.server.errors import bad_request

_Lenient = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
_Closed = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
_Answer = ConfigDict(use_attribute_docstrings=True)

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
"""Lists in requests stop at their first fault: a body may have a million elements, and one is told about."""

_MOST_BIASES = 1024
_MOST_TERMS = 16


def _at_most(limit: int) -> BeforeValidator:
    """Refuses an object with more names before any of them is looked at: each could bring a fault of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "Object should have at most {limit} names", {"limit": limit})
        return value

    return BeforeValidator(check)


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "max_completion_tokens": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that change an answer in a way that is not served, and the values that change nothing (besides null and empty). Some are
fields of one endpoint alone: they are refused by the other."""

_RESERVED_TEMPLATE_ARGUMENTS = frozenset({"chat_template", "conversation", "documents", "messages", "tokenizer", "tools"})
"""A template of the client's own is a program that would run here; the others are said elsewhere or not served."""


# -- requests ----------------------------------------------------------------------------------------------------------


class VeraTerms(BaseModel):
    """How the adaptive cache serves a request. Unknown names are refused."""

    model_config = _Closed

    fidelity: Literal["native", "bounded", "exact"] | None = None
    """`native` and `exact` are read exactly, `bounded` within `attention_tolerance`. null: as the server is set."""
    attention_tolerance: float | None = Field(default=None, ge=0, le=1)
    """Largest estimated error of an attention output. null: as the server is set."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """When to give the request up; at most what the server allows."""


class StreamOptions(BaseModel):
    model_config = _Lenient

    include_usage: bool | None = None
    """Send a last chunk without choices that has the usage."""


class Generation(BaseModel):
    """What chats and completions share."""

    model_config = _Lenient

    model: str | None = None
    """null: the one that is served."""
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """Most tokens of each answer. null: up to the end of the context."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """0 is greedy; null: 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES), _at_most(_MOST_BIASES)]
        | None
    ) = None
    """Token ids, as strings, to what is added to their logits."""
    user: str | None = None

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0, -1 and null: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    """Lower runs first."""
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    vera: Annotated[VeraTerms, _at_most(_MOST_TERMS)] | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self, max_n: int) -> None:
        """Refuses what no field can refuse alone."""
        if (self.n or 1) > max_n:
            raise bad_request(f"n={self.n} is above the {max_n} answers that this server gives to a prompt; lower it", "n")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only taken with stream=true; leave it out", "stream_options")
        refuse_unsupported(self.model_extra or {})

    def sampling(self, **more: Any) -> SamplingParams:
        """Raises ConfigError for values that do not go together."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_token_keys(self.logit_bias or {}),
            seed=self.seed,
            n=self.n or 1,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            **more,
        )


class ContentPart(BaseModel):
    model_config = _Lenient

    type: str
    """Only `text` is served."""
    text: str | None = None


class Message(BaseModel):
    """Other fields reach the chat template unchanged."""

    model_config = _Lenient

    role: str = Field(min_length=1)
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self, max_n: int) -> None:
        super().check(max_n)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs is only taken with logprobs=true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        if self.token_limit == 0:
            raise bad_request("max_tokens=0: an answer needs at least one token", "max_tokens")
        refuse_reserved(self.chat_template_kwargs)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[dict[str, Any]]:
        return _conversation(self.messages)

    def template_arguments(self) -> dict[str, Any]:
        return _template_arguments(self)

    def sampling(self, **more: Any) -> SamplingParams:
        return super().sampling(max_tokens=self.token_limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None, **more)


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    """A text, token ids, or a list of either."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """For each token its log-probability, and those of this many most likely ones."""
    echo: bool | None = None
    """Put the prompt before the answer; with logprobs, those of the prompt too. max_tokens may then be 0."""
    add_special_tokens: bool | None = None
    """Of texts: what the tokenizer adds by itself, such as a BOS token. null: true."""

    def check(self, max_n: int) -> None:
        super().check(max_n)
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens=0 is only taken with echo=true", "max_tokens")
        if self.prompt == []:
            raise bad_request("prompt is an empty list; give at least one", "prompt")

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def sampling(self, **more: Any) -> SamplingParams:
        """`max_tokens` 0 becomes 1: the engine makes a token to know the end of the prompt; it is not shown."""
        own = {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}
        if self.max_tokens == 0:
            plain = self.model_copy(update={"stop": None, "stop_token_ids": None, "min_tokens": None, "ignore_eos": True})
            return super(CompletionRequest, plain).sampling(max_tokens=1, **own, **more)
        return super().sampling(max_tokens=self.max_tokens, **own, **more)


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a `prompt` or `messages`."""

    model_config = _Lenient

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: what the tokenizer adds by itself, such as a BOS token. null: true."""
    add_generation_prompt: bool | None = None
    """Of messages. null: true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Of messages."""

    def check(self) -> None:
        """Refuses what no field can refuse alone."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise bad_request("add_special_tokens is only taken with a prompt; templates add their own", "add_special_tokens")
        if self.prompt is not None and self.chat_template_kwargs:
            raise bad_request("chat_template_kwargs is only taken with messages", "chat_template_kwargs")
        refuse_reserved(self.chat_template_kwargs)
        refuse_unsupported(self.model_extra or {})

    def conversation(self) -> list[dict[str, Any]]:
        return _conversation(self.messages or [])

    def template_arguments(self) -> dict[str, Any]:
        return _template_arguments(self)


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model_config = _Lenient

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name in _UNSUPPORTED and value not in (None, [], {}) and value not in _UNSUPPORTED[name]:
            raise bad_request(f"{name} is not supported by this server; leave it out", name, code="unsupported_parameter")


def refuse_reserved(template_arguments: dict[str, Any] | None) -> None:
    if reserved := sorted(_RESERVED_TEMPLATE_ARGUMENTS & (template_arguments or {}).keys()):
        raise bad_request(f"chat_template_kwargs must not have {', '.join(reserved)}", "chat_template_kwargs")


def _conversation(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in messages]


def _template_arguments(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    return {"add_generation_prompt": body.add_generation_prompt is not False, **(body.chat_template_kwargs or {})}


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise bad_request('logit_bias: its keys must be token ids, such as "42"', "logit_bias") from None


# -- answers -----------------------------------------------------------------------------------------------------------


class _Body(BaseModel):
    model_config = _Answer


class ErrorDetail(_Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Body):
    error: ErrorDetail


class CachedByTier(_Body):
    hot: int
    warm: int
    cold: int


class VeraUsage(_Body):
    """What the cache did for a request, over all its answers."""

    fidelity: str
    """What the request was promised: by its own terms, or as the server is set."""
    attention_tolerance: float | None
    """The same. null: exactly."""
    cached_tokens: CachedByTier
    """Prompt tokens that were found, by where they waited."""
    computed_tokens: int
    """Prompt tokens that were not found."""
    decode_steps: int
    """Steps served within bounds. 0: all was read exactly, whatever was promised."""
    hits: int
    """Pages that error control asked for."""
    recompute_steps: int
    """Decode steps in which a cold page was restored."""
    uncovered_hits: int
    """Hits on cold pages that were left to their sketch."""
    error_mean: float | None
    """Mean estimated error, relative to the value norms. null: nothing was estimated."""
    error_max: float | None
    params_version: str | None
    """The version of the cache's parameters that served the request; null: none, but as the server was started, or natively."""
    arm: str | None
    """`stable` or `candidate` of a rollout; `degraded`: natively, as the degrade switch is not closed; null: none of these."""


class PromptTokensDetails(_Body):
    cached_tokens: int


class Usage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    vera: VeraUsage


class TopLogprob(_Body):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Body):
    content: list[ChatTokenLogprob]


class ChatMessage(_Body):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Body):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or token that ended the answer."""


class ChatCompletion(_Body):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None


class ChatDelta(_Body):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Body):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """null until the answer's last chunk."""
    stop_reason: str | int | None = None


class ChatCompletionChunk(_Body):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    """Empty in the chunk that has the usage."""
    usage: Usage | None = None
    system_fingerprint: str | None


class CompletionLogprobs(_Body):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class Completion(_Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None


class CompletionChunkChoice(_Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """null until the answer's last chunk."""
    stop_reason: str | int | None = None


class CompletionChunk(_Body):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    """Empty in the chunk that has the usage."""
    usage: Usage | None = None
    system_fingerprint: str | None


class ModelCard(_Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """The longest sequence that is served, in tokens."""


class ModelList(_Body):
    object: Literal["list"]
    data: list[ModelCard]


class Health(_Body):
    status: Literal["ok"]


class Version(_Body):
    version: str


class Tokens(_Body):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(_Body):
    prompt: str


# -- in the OpenAPI document --------------------------------------------------------------------------------------------

_MEANINGS = {
    400: "The request cannot be honoured; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The key does not open this route, or a server without keys was asked by a name that is not its own.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    409: "It cannot be done as things stand; the message says why.",
    413: "The body is too large.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "The server failed on this request.",
    503: "The server is loading, ending or dead; try again after `Retry-After` seconds.",
    504: "The answer was not done before its deadline.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These, and 403, which every route can give."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in sorted({403, *statuses})}
