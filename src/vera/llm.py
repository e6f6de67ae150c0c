"""LLM: the Python SDK. A model, a cache and an engine in one object."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vera.cache import CacheUse
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.engine.request import FinishReason, Update
from vera.engine.sampler import TokenLogprob
from vera.engine.text import encode_chat, encode_prompt
from vera.errors import ConfigError, EngineStopped
from vera.models import AUTO, LoadedModel, adopt_model, load_model
from vera.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
CacheSettings = str | CacheConfig | Mapping[str, Any]

_DEVICES = ("cpu",)
"""The devices that there are to cache on."""


@dataclass(slots=True)
class Completion:
    """One answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or token that ended it."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    """What went wrong, if `finish_reason` is `error`."""
    cache_use: CacheUse | None = None
    """What an adaptive cache did for it: hits, recomputes, estimated errors. None: it is running, or the cache is native."""

    def add(self, update: Update) -> None:
        self.text += update.delta
        self.token_ids += update.new_token_ids
        self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason, self.error = update.finish_reason, update.stop_reason, update.error
        self.cache_use = update.cache_use


@dataclass(slots=True)
class Output:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    """Prompt tokens that the first answer found in the cache."""
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def num_cached_tokens_by_tier(self) -> dict[str, int] | None:
        """`num_cached_tokens` by where they waited: hot, warm or cold. None: the cache is native."""
        use = self.completions[0].cache_use
        return None if use is None else dict(use.cached_tokens)

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's tokens."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason


class LLM:
    """Answers prompts with a local model.

        with LLM() as llm:
            print(llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0].text)

    `model`: a Hugging Face folder, a `.gguf` file, `"embedded"`, or a transformers model that is loaded already (with its
    `tokenizer`). `dtype`: what a model that is loaded here computes in and is held in; if not given, it computes in float32 and
    is held in the narrowest form that is exact. `cache`: `"native"`, `"adaptive"`, a CacheConfig or a dict of its fields; or one
    of these for each device, as in `{"cpu": {"mode": "adaptive"}}`, because budgets are per device. Further settings are those of
    EngineConfig.
    Not thread-safe.

    In an adaptive cache each request may say how it is served, in place of the cache's settings: `fidelity` is `"native"` (every
    page exact in fast memory), `"bounded"` (errors within `attention_tolerance`, from 0 to 1) or `"exact"` (pages may wait
    elsewhere, but each is read exactly). A native cache takes no other fidelity than its own.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | LoadedModel = "embedded",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: CacheSettings = "native",
        dtype: str | None = None,
        **engine: Any,
    ) -> None:
        config = EngineConfig.from_dict({"cache": _cache_config(cache), **engine})
        self._engine: Engine | None = Engine(_loaded(model, tokenizer, dtype), config)
        self._inboxes: dict[str, deque[Update]] = {}
        """Updates that a step brought and the request's reader has not taken yet."""
        self._abandoned: deque[str] = deque()
        """Requests whose streams were dropped without being closed."""

    @property
    def engine(self) -> Engine:
        """The engine behind it, for what the SDK does not wrap. Raises EngineStopped after `close`."""
        if self._engine is None:
            raise EngineStopped("this LLM was closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answers each prompt (a text or a list of token ids; a single one may come without a list around it), in order.

        `params` is for all of them, or one for each; `fidelity` and `attention_tolerance` are for all. Everything is checked
        before anything runs: one bad prompt raises and none is answered. `progress` draws a bar on stderr.
        """
        encoded = [encode_prompt(self._tokenizer, prompt) for prompt in _several(prompts)]
        return self._complete(encoded, params, _Service(fidelity, attention_tolerance), progress=progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
        progress: bool = False,
        **template: Any,
    ) -> list[Output]:
        """The same for conversations, each a list of `{"role": ..., "content": ...}`. `template` goes to the chat template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [encode_chat(self._tokenizer, conversation, **template) for conversation in conversations]  # type: ignore[arg-type]
        return self._complete(prompts, params, _Service(fidelity, attention_tolerance), progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> AnswerStream:
        """The updates of one answer as they come. Several streams may be read in turn; closing one early aborts its request.

        `cancelled` is asked before each step; once it is true the answer ends, and its last update says `abort`.
        """
        encoded = encode_prompt(self._tokenizer, prompt)
        return AnswerStream(self, encoded, params or SamplingParams(), _Service(fidelity, attention_tolerance), cancelled)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        **template: Any,
    ) -> AnswerStream:
        """The same for a conversation."""
        encoded = encode_chat(self._tokenizer, messages, **template)
        return AnswerStream(self, encoded, params or SamplingParams(), _Service(fidelity, attention_tolerance), cancelled)

    def close(self) -> None:
        """Ends all requests and frees the cache and, unless the caller holds it too, the model. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._inboxes.clear()
            gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- details -------------------------------------------------------------------------------------------------------

    @property
    def _tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    def _complete(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        service: _Service,
        *,
        progress: bool,
    ) -> list[Output]:
        outputs = [Output(prompt, []) for prompt in prompts]
        answers: deque[tuple[Output, Completion, SamplingParams]] = deque()
        for output, wanted in zip(outputs, _one_each(params, len(prompts)), strict=True):
            several = wanted.answers()
            self.engine.check_request(output.prompt_token_ids, several[0])  # they differ in their seeds alone
            for index, answer in enumerate(several):
                output.completions.append(Completion(index))
                answers.append((output, output.completions[-1], answer))
        homes: dict[str, tuple[Output, Completion]] = {}
        try:
            with _bar(len(answers), visible=progress) as advance:
                while answers or homes:
                    # More than may wait is handed in as room appears.
                    while answers and self.engine.num_waiting < self.engine.config.max_waiting:
                        output, completion, answer = answers.popleft()
                        homes[self._submit(output.prompt_token_ids, answer, service)] = output, completion
                    self._step()
                    for update in [update for request_id in homes for update in self._take(request_id)]:
                        _enter(update, *homes[update.request_id])
                        if update.finished:
                            del homes[update.request_id]
                            advance()
        finally:
            for request_id in homes:
                self._drop(request_id)
        return outputs

    def _submit(self, prompt: list[int], params: SamplingParams, service: _Service) -> str:
        request_id = self.engine.add_request(
            prompt, params, fidelity=service.fidelity, attention_tolerance=service.attention_tolerance
        )
        self._inboxes[request_id] = deque()
        return request_id

    def _take(self, request_id: str) -> list[Update]:
        """What has come for this request and was not taken yet."""
        inbox = self._inboxes.get(request_id)
        taken = [inbox.popleft() for _ in range(len(inbox))] if inbox else []
        if taken and taken[-1].finished:
            del self._inboxes[request_id]
        return taken

    def _step(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.popleft())
        for update in self.engine.step():
            if (inbox := self._inboxes.get(update.request_id)) is not None:
                inbox.append(update)

    def _drop(self, request_id: str) -> None:
        if self._inboxes.pop(request_id, None) is not None and self._engine is not None:
            self._engine.abort(request_id)


@dataclass(frozen=True, slots=True)
class _Service:
    """What a request asks of the cache; None: what the cache's settings say."""

    fidelity: str | None
    attention_tolerance: float | None


class AnswerStream(Iterator[Update]):
    """The updates of one answer. Steps the engine when none is waiting to be read. The last one has `cache_use`."""

    def __init__(
        self,
        llm: LLM,
        prompt: list[int],
        params: SamplingParams,
        service: _Service,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._llm = llm
        self._cancelled = cancelled
        self._ready: deque[Update] = deque()
        self._ended = True
        self.request_id = llm._submit(prompt, params, service)
        self._ended = False

    def __next__(self) -> Update:
        while not self._ready:
            if self._ended:
                raise StopIteration
            engine = self._llm.engine
            self._ready.extend(self._llm._take(self.request_id))
            if not self._ready:
                if self._cancelled is not None and self._cancelled():
                    engine.abort(self.request_id)
                self._llm._step()
        update = self._ready.popleft()
        self._ended = update.finished
        return update

    def set_fidelity(self, fidelity: str) -> None:
        """How an adaptive cache serves the answer from its next token on: native, bounded or exact. No token is lost.

        Raises RequestError for an unknown fidelity, one that the cache cannot give, or an answer that has ended.
        """
        self._llm.engine.set_fidelity(self.request_id, fidelity)

    def close(self) -> None:
        """Ends the answer if it is still running."""
        self._ended = True
        self._ready.clear()
        self._llm._drop(self.request_id)

    def __del__(self) -> None:
        # The collector may come by in the middle of a step, so the request is only marked; the next step ends it.
        if not self._ended:
            self._llm._abandoned.append(self.request_id)


def _enter(update: Update, output: Output, completion: Completion) -> None:
    completion.add(update)
    output.prompt_logprobs = output.prompt_logprobs or update.prompt_logprobs
    if completion.index == 0:
        output.num_cached_tokens = update.num_cached_tokens


def _loaded(
    model: str | Path | PreTrainedModel | LoadedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: str | None
) -> LoadedModel:
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError("tokenizer is only taken with a transformers model; a folder or .gguf file brings its own")
        return load_model(model, dtype=dtype or AUTO)
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} is only taken with a folder or .gguf file; a loaded model has its own")
    if isinstance(model, PreTrainedModel):
        return adopt_model(model, tokenizer)
    if tokenizer is not None:
        raise ConfigError("tokenizer is only taken with a transformers model; this one was loaded with its own")
    return model


def _cache_config(cache: CacheSettings) -> CacheConfig:
    if isinstance(cache, CacheConfig):
        return cache
    if isinstance(cache, str):
        return CacheConfig(mode=cache)
    return _of_this_device(cache) if _is_by_device(cache) else CacheConfig.from_dict(cache)


def _is_by_device(cache: Mapping[str, Any]) -> bool:
    """No field of CacheConfig is itself a collection of settings, or has the name of a device."""
    return any(_is_device(name) or isinstance(value, CacheConfig | Mapping) for name, value in cache.items())


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except (RuntimeError, TypeError):
        return False
    return True


def _of_this_device(cache: Mapping[str, Any]) -> CacheConfig:
    if unknown := [name for name in cache if name not in _DEVICES]:
        raise ConfigError(
            f"cache has settings for {', '.join(map(repr, unknown))}, which is no device here; there is {', '.join(_DEVICES)}"
        )
    return _cache_config(cache[_DEVICES[0]])


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} sampling parameters for {count} prompts; give one for all, or one for each")
    return params


@contextmanager
def _bar(total: int, *, visible: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; the callable moves it by one."""
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as progress:
        task = progress.add_task("answers", total=total)
        yield lambda: progress.advance(task)
