"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch

from vera.attention import make_backend
from vera.cache import AdaptiveCache, CacheShape
from vera.config import FIDELITIES, CacheConfig, EngineConfig, environment_warnings
from vera.engine.audit import Auditor
from vera.engine.request import FinishReason, Request, Status, Update
from vera.engine.restore import Restorer
from vera.engine.runner import Runner, StepLogits, prompt_rows
from vera.engine.sampler import Sampled, Sampler, SamplingRow, TokenLogprob, prompt_logprobs
from vera.engine.scheduler import Chunk, Scheduler
from vera.engine.text import AnswerText
from vera.errors import CapacityError, EngineStopped, RequestError, RequestTooLong
from vera.metrics.stats import EngineStats
from vera.models import LoadedModel
from vera.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_NOT_FINITE = (
    "the model gave logits that are not finite numbers; if its keys or values can pass 65504, take page_dtype bfloat16 or float32"
)


@dataclass(slots=True)
class StepTimes:
    """Where the last step's seconds went."""

    schedule: float = 0.0
    prepare: float = 0.0
    model: float = 0.0
    """The forward pass, attention included."""
    attention: float = 0.0
    sample: float = 0.0
    commit: float = 0.0
    policy: float = 0.0
    """Taking in what the step showed about pages, and moving them."""
    restore: float = 0.0
    """Recomputing cold pages; part of `model`, or of `prepare` for what the last step left over."""

    @property
    def total(self) -> float:
        return self.schedule + self.prepare + self.model + self.sample + self.commit + self.policy

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the field of that name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


class Engine:
    """Continuous batching over one model and one cache. Not thread-safe: one thread calls it (see `AsyncEngine`).

    The model's module and torch's thread count are shared with the process; everything else belongs to the engine.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config or EngineConfig()
        for warning in (*environment_warnings(), *self.config.cache.risks()):
            _log.warning(warning)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        self.model = model
        spec = model.spec
        self.backend = make_backend(self.config.attention_backend, group=spec.num_query_heads // spec.num_kv_heads)
        shape = CacheShape(
            layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.hidden_size,
            windowed_layers=tuple(layer for layer, window in enumerate(spec.windows) if window is not None),
        )
        self.cache = AdaptiveCache(
            shape,
            self.config.cache,
            identity=spec.weights_revision,
            max_sequences=self.config.max_num_seqs,
            max_tokens=spec.max_context,
            max_chunk=self.config.max_batch_tokens,
            can_recompute=model.has_windows,
        )
        self._revision = spec.weights_revision
        self.max_model_len = self._served_length()
        self.stats = EngineStats()
        self.step_times = StepTimes()
        self.clock = clock
        self._restorer = Restorer(model, self.backend, self.cache, lambda request_id: self._requests[request_id].token_ids)
        self.auditor = Auditor(self.cache, spec.num_layers, seed=self.config.seed)
        self._runner = Runner(model, self.backend, self.cache, self._restorer, self.auditor)
        self._sampler = Sampler()
        self._scheduler = Scheduler(
            self.cache, max_num_seqs=self.config.max_num_seqs, max_batch_tokens=self.config.max_batch_tokens
        )
        self._requests: dict[str, Request] = {}
        self._updates: list[Update] = []
        """What has happened since the last step returned."""
        self._arrivals = count()
        self._seeds = np.random.default_rng(self.config.seed)
        self._closed = False

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
        arrived_at: float | None = None,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
        cache_settings: CacheConfig | None = None,
    ) -> str:
        """Queues one answer (`params.n` must be 1; see `SamplingParams.answers`) and returns its id.

        Lower `priority` runs first. `arrived_at`, by `clock`, is when the caller got the request, if that is not now. `fidelity`
        (native, bounded or exact) and `attention_tolerance` take the place of the cache's settings, and so do `cache_settings`,
        which the request keeps to its end; they may differ from the cache's in what concerns one sequence alone. Raises
        ConfigError where they differ in more, RequestError for what cannot be honoured, RequestTooLong for what can never fit,
        CapacityError when too many wait; none of them disturbs the other requests.
        """
        params = params or SamplingParams()
        prompt = self.check_request(prompt_token_ids, params)
        arrival = next(self._arrivals)
        request_id = request_id if request_id is not None else f"request-{arrival}"
        self._check_terms(request_id, priority, timeout_seconds)
        self._check_fidelity(fidelity, attention_tolerance)
        wanted = params.max_tokens or max(1, params.min_tokens)
        settings = cache_settings or self.cache.config
        if cache_settings is not None:
            self.cache.check_settings(cache_settings, of_one_request=True)
        longest = self._check_room(len(prompt) + wanted, fidelity, settings)
        if self.num_waiting >= self.config.max_waiting:
            raise CapacityError(f"{self.config.max_waiting} requests are waiting already; try later or raise max_waiting")
        request = self._new_request(request_id, arrival, prompt, params)
        request.max_tokens = min(request.max_tokens, longest - len(prompt))
        request.priority = priority
        request.fidelity, request.attention_tolerance, request.cache_settings = fidelity, attention_tolerance, settings
        request.arrived_at = request.arrived_at if arrived_at is None else arrived_at
        if timeout_seconds is not None:
            request.deadline = request.arrived_at + timeout_seconds
        self._scheduler.add(request)
        self._requests[request_id] = request
        return request_id

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """What `add_request` would refuse of a prompt and its parameters at any time, refused now. Returns the checked prompt."""
        if self._closed:
            raise EngineStopped("the engine was closed; make a new one")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a request is one answer here; add one for each of SamplingParams.answers()")
        prompt = _whole_numbers(prompt_token_ids)
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        vocab = self.model.spec.vocab_size
        for name, ids in (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if not all(0 <= token < vocab for token in ids):
                wrong = next(token for token in ids if not 0 <= token < vocab)
                raise RequestError(f"{name} has token id {wrong}, outside the vocabulary 0 to {vocab - 1}")
        wanted = params.max_tokens or max(1, params.min_tokens)
        if len(prompt) + wanted > self.max_model_len:
            raise RequestTooLong(
                f"the prompt's {len(prompt)} tokens plus {wanted} to generate are above the {self.max_model_len} tokens served; "
                "shorten the prompt, lower max_tokens, or serve more (max_model_len, the cache's ceiling)"
            )
        return prompt

    def abort(self, request_id: str) -> bool:
        """Ends a request now; the next step returns its last update. False: there is no such request (any more)."""
        if (request := self._requests.get(request_id)) is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that run or wait, in the order in which they came."""
        return list(self._requests)

    @property
    def running_ids(self) -> list[str]:
        """Of the requests that have pages."""
        return [] if self._closed else [request.id for request in self._scheduler.running]

    def has_unfinished(self) -> bool:
        """A call of `step` would do or return something."""
        return bool(self._requests or self._updates)

    @property
    def num_running(self) -> int:
        return 0 if self._closed else len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return 0 if self._closed else len(self._scheduler.waiting)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Computes the next tokens of the running requests; returns what each request that moved has gained.

        A model failure ends the requests of that step with an error and leaves the engine serving.
        """
        if not self._closed:
            self._step()
        updates, self._updates = self._updates, []
        return updates

    def _step(self) -> None:
        self._follow_weights()
        self._expire()
        times = StepTimes()
        with times.lap("schedule"):
            chunks = self._scheduler.schedule()
        if chunks:
            try:
                with times.lap("prepare"):
                    self._restorer.begin_step()
                    batch = self.cache.batch([chunk.span for chunk in chunks])
                with times.lap("model"):
                    logits = self._runner.run(chunks, batch)
                with times.lap("sample"):
                    sampled = self._sample(chunks, logits)
                with times.lap("policy"):
                    times.restore = self._restorer.end_step()
                    self.cache.observe()
                with times.lap("commit"):
                    self._commit(chunks, logits, sampled)
            except Exception as error:
                _log.exception("a step over %d requests failed", len(chunks))
                self._fail(chunks, error)
            with times.lap("policy"):  # a fault of our own books must not pass for that of a request
                self.cache.settle()
            times.attention = self._runner.attention_seconds
            self._count_step(chunks, times)
        self.step_times = times

    # -- beside the loop -----------------------------------------------------------------------------------------------

    def duplicate(self, request_id: str) -> str:
        """A running request once more, with pages of its own: how a benchmark fills a batch from one prefill.

        Raises CapacityError if there is no seat or no room.
        """
        source = self._requests[request_id]
        if self.num_running >= self.config.max_num_seqs:
            raise CapacityError(f"all {self.config.max_num_seqs} seats are taken; raise max_num_seqs")
        arrival = next(self._arrivals)
        copy_id = f"{request_id}-copy-{arrival}"
        copy = self._new_request(copy_id, arrival, source.prompt_token_ids, replace(source.params, seed=source.row.seed))
        copy.fidelity, copy.attention_tolerance = source.fidelity, source.attention_tolerance
        copy.cache_settings = source.cache_settings
        if source.status is not Status.RUNNING or not self.cache.duplicate(request_id, copy_id, use=copy.cache_use):
            raise CapacityError(f"{request_id} is not running, or {len(source.token_ids)} tokens more do not fit the cache")
        copy.token_ids += source.output_token_ids
        copy.output_token_ids += source.output_token_ids
        copy.prompt_logprobs = list(source.prompt_logprobs)
        copy.num_computed = source.num_computed
        copy.num_cached = 0
        copy.priority, copy.deadline = source.priority, source.deadline
        self._requests[copy_id] = copy
        self._scheduler.start(copy)
        return copy_id

    def set_fidelity(self, request_id: str, fidelity: str) -> None:
        """How an adaptive cache serves a request from its next step on; it loses no token. The degrade switch is made of this.

        For `exact` and `native`, keys and values that were computed within bounds are computed again, so that the answer goes on
        as a native one would. Cold pages are restored; where there is no room for that, the request starts over from its tokens,
        as after a preemption. Raises RequestError for an unknown request or fidelity, RequestTooLong where the request could
        outgrow what the cache holds at that fidelity; nothing has changed then.
        """
        self._check_fidelity(fidelity, None)
        if (request := self._requests.get(request_id)) is None:
            raise RequestError(f"there is no request {request_id!r} running or waiting")
        self._check_room(len(request.prompt_token_ids) + request.max_tokens, fidelity, request.cache_settings)
        request.fidelity = fidelity
        if request.status is not Status.RUNNING:
            return
        exact = self.cache.num_exact_tokens(request_id)
        if fidelity != "bounded" and exact < request.num_computed:
            request.num_computed = self.cache.truncate(request_id, exact)
        if self.cache.set_fidelity(request_id, fidelity):
            return
        if not (self._restorer.restore_all(request_id) and self.cache.set_fidelity(request_id, fidelity)):
            self._scheduler.preempt(request)

    def set_cache_settings(self, settings: CacheConfig) -> None:
        """Serves requests that come from now on with other settings; those that came before keep theirs, and lose nothing.

        What concerns the cache as a whole (`vera.config.STORE_SETTINGS`) changes at once. Raises ConfigError, with nothing
        changed, for what a running cache cannot change.
        """
        self.cache.change_settings(settings)

    def replace_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Puts other weights under the same architecture. What the cache holds belongs to the old ones and is dropped.

        Raises RequestError while requests run or wait: an answer never mixes two sets of weights.
        """
        if self._requests:
            raise RequestError(f"{len(self._requests)} requests are unfinished; finish or abort them before the weights change")
        self.model.replace_weights(state_dict)
        self._follow_weights()

    def close(self) -> None:
        """Ends all requests and gives model and cache memory back (once the caller drops its own references). Idempotent."""
        if self._closed:
            return
        self._closed = True
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ABORT)
        self.cache.close()
        del self.model, self.cache, self._runner, self._restorer, self.auditor, self._scheduler, self.backend

    def check_invariants(self) -> None:
        """Raises AssertionError if requests, queues and cache disagree."""
        self._scheduler.check_invariants()
        live = {request.id for request in (*self._scheduler.running, *self._scheduler.waiting)}
        assert live == set(self._requests), "a request is lost"

    # -- details, in the order of the step -----------------------------------------------------------------------------

    def _served_length(self) -> int:
        """The longest sequence served: the one source of this limit."""
        limits = {"the model's context": self.model.spec.max_context, "the cache": self.cache.longest_sequence()}
        asked = self.config.max_model_len
        for name, limit in limits.items():
            if asked is not None and asked > limit:
                raise CapacityError(
                    f"max_model_len={asked} tokens is above {name} of {limit} tokens; lower it"
                    + (" or raise the cache's ceiling" if name == "the cache" else "")
                )
        served = asked or min(limits.values())
        if asked is None and served < self.model.spec.max_context:
            _log.warning(
                "the cache holds %d tokens, so sequences are limited to that instead of the model's %d; "
                "raise cache_max_size_ratio or cache_max_bytes for longer ones",
                served,
                self.model.spec.max_context,
            )
        return served

    def _check_terms(self, request_id: str, priority: int, timeout: float | None) -> None:
        if request_id in self._requests or any(update.request_id == request_id for update in self._updates):
            raise RequestError(f"a request {request_id!r} is running or waiting already; choose another id")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority={priority!r} must be a whole number; lower runs first")
        if timeout is not None and not 0 < timeout < math.inf:
            raise RequestError(f"timeout_seconds={timeout} must be above 0 and finite; leave it out for no deadline")

    def _check_fidelity(self, fidelity: str | None, tolerance: float | None) -> None:
        if fidelity is not None and fidelity not in FIDELITIES:
            raise RequestError(f"fidelity={fidelity!r} is not one of {', '.join(FIDELITIES)}")
        if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance <= 1):
            raise RequestError(f"attention_tolerance={tolerance!r} is outside 0 to 1")
        if not self.cache.adaptive and (fidelity not in (None, "native") or tolerance is not None):
            asked = f"fidelity={fidelity!r}" if fidelity not in (None, "native") else f"attention_tolerance={tolerance}"
            raise RequestError(f"{asked} needs an adaptive cache, and this engine's is native; make it with cache='adaptive'")

    def _check_room(self, num_tokens: int, fidelity: str | None, settings: CacheConfig | None) -> int:
        """The longest sequence at this fidelity: one that asks for more exactness may need more room than there will ever be."""
        longest = min(self.max_model_len, self.cache.longest_sequence(fidelity, settings))
        if num_tokens > longest:
            raise RequestTooLong(
                f"{num_tokens} tokens at fidelity {fidelity!r} are above the {longest} that the cache holds so; "
                "shorten the prompt, ask for fidelity 'bounded', or raise the cache's ceiling"
            )
        return longest

    def _new_request(self, request_id: str, arrival: int, prompt: Sequence[int], params: SamplingParams) -> Request:
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        outputs: list[int] = []
        room = self.max_model_len - len(prompt)
        return Request(
            id=request_id,
            prompt_token_ids=list(prompt),
            params=params,
            row=SamplingRow(params, seed, list(prompt), outputs, self.model.spec.eos_token_ids),
            text=AnswerText(self.model.tokenizer, params),
            max_tokens=min(params.max_tokens or room, room),
            arrival=arrival,
            arrived_at=self.clock(),
            token_ids=list(prompt),
            output_token_ids=outputs,
            prompt_logprobs=[None] * min(params.prompt_logprobs_from, len(prompt)) if params.prompt_logprobs is not None else [],
        )

    def _follow_weights(self) -> None:
        """Weights may have been replaced through another engine over the same model: nothing of the old ones is used again."""
        revision = self.model.spec.weights_revision
        if revision != self._revision:
            for request in list(self._requests.values()):
                self._end(request, FinishReason.ERROR, error="the model's weights were replaced while this request ran")
            self.cache.forget(revision)
            self._revision = revision

    def _expire(self) -> None:
        now = self.clock()
        for request in list(self._requests.values()):
            if request.deadline is not None and now >= request.deadline:
                self._end(request, FinishReason.TIMEOUT)

    def _sample(self, chunks: Sequence[Chunk], logits: StepLogits) -> list[Sampled | None]:
        """A token for each chunk that reaches the end of its request; None for the others."""
        rows = [chunk.request.row for chunk in chunks if chunk.reaches_end]
        sampled = iter(self._sampler.sample(logits.next_token, rows) if rows else [])
        return [next(sampled) if chunk.reaches_end else None for chunk in chunks]

    def _commit(self, chunks: Sequence[Chunk], logits: StepLogits, sampled: Sequence[Sampled | None]) -> None:
        """Makes the step's results final: from here on they are history."""
        now = self.clock()
        for chunk, prompt_logits, token in zip(chunks, logits.prompt, sampled, strict=True):
            try:
                self._commit_chunk(chunk, prompt_logits, token, now)
            except Exception as error:
                _log.exception("request %s failed", chunk.request.id)
                self._fail([chunk], error)

    def _commit_chunk(self, chunk: Chunk, prompt_logits: torch.Tensor, token: Sampled | None, now: float) -> None:
        request = chunk.request
        if token is not None and not token.finite:
            self._end(request, FinishReason.ERROR, error=_NOT_FINITE)
            return
        self._keep_prompt_logprobs(chunk, prompt_logits)
        request.num_computed = chunk.stop
        self.cache.commit(request.id, request.token_ids, chunk.stop)
        if token is not None:
            self._append(request, token, now)

    def _keep_prompt_logprobs(self, chunk: Chunk, logits: torch.Tensor) -> None:
        request, rows = chunk.request, prompt_rows(chunk)
        if request.params.prompt_logprobs is None or not request.wants_prompt_logprobs:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        following = [request.prompt_token_ids[position + 1] for position in rows]
        request.prompt_logprobs += prompt_logprobs(logits, following, request.params.prompt_logprobs)

    def _append(self, request: Request, token: Sampled, now: float) -> None:
        """The request's next token, and the end of the request if this is it."""
        request.token_ids.append(token.token_id)
        request.output_token_ids.append(token.token_id)
        self._count_token(request, now)
        first = len(request.output_token_ids) == 1
        finish, stop_reason, delta = self._advance(request, token.token_id)
        update = Update(
            request_id=request.id,
            new_token_ids=[token.token_id],
            delta=delta,
            logprobs=_logprobs(token),
            prompt_logprobs=request.prompt_logprobs if first and request.prompt_logprobs else None,
            num_cached_tokens=request.num_cached or 0,
        )
        if finish is None:
            self._updates.append(update)
        else:
            self._end(request, finish, update=update, stop_reason=stop_reason)

    def _advance(self, request: Request, token_id: int) -> tuple[FinishReason | None, str | int | None, str]:
        """Why the request ends with this token (None: it does not), what stopped it, and the text that became final."""
        params = request.params
        if token_id in params.stop_token_ids:
            delta = request.text.push(token_id).delta if params.include_stop else ""
            return FinishReason.STOP, token_id, delta
        if token_id in self.model.spec.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None, ""
        text = request.text.push(token_id)
        if text.stop is not None:
            return FinishReason.STOP, text.stop, text.delta
        if len(request.output_token_ids) >= request.max_tokens:
            return FinishReason.LENGTH, None, text.delta
        return None, None, text.delta

    def _count_step(self, chunks: Sequence[Chunk], times: StepTimes) -> None:
        stats, sizes = self.stats, [chunk.stop - chunk.start for chunk in chunks]
        stats.steps += 1
        stats.preemptions = self._scheduler.num_preemptions
        stats.prompt_tokens, stats.cached_tokens = self._scheduler.num_prompt_tokens, self._scheduler.num_cached_tokens
        if max(sizes) > 1:
            stats.prefill_tokens += sum(sizes)
            stats.prefill_seconds += times.total
        else:
            stats.decode_tokens += sum(sizes)
            stats.decode_seconds += times.total

    def _count_token(self, request: Request, now: float) -> None:
        stats = self.stats
        stats.generated_tokens += 1
        if request.last_token_at is None:
            stats.time_to_first_token_seconds.append(now - request.arrived_at)
        else:
            stats.inter_token_seconds.append(now - request.last_token_at)
        request.last_token_at = now

    def _fail(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """Ends the requests of a failed step; those that the step had ended already stay as they are."""
        for chunk in chunks:
            if chunk.request.id in self._requests:
                self._end(chunk.request, FinishReason.ERROR, error=f"{type(error).__name__}: {error}")

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        update: Update | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """The last update of a request; its blocks go back to the cache."""
        self._scheduler.remove(request, discard=reason is FinishReason.ERROR)
        del self._requests[request.id]
        self.stats.finished[reason.value] += 1
        update = update or Update(request.id, num_cached_tokens=request.num_cached or 0)
        delta = update.delta + _rest_of_text(request)
        use = request.cache_use if self.config.cache.mode == "adaptive" else None
        self._updates.append(
            replace(update, delta=delta, finish_reason=reason, stop_reason=stop_reason, error=error, cache_use=use)
        )


def _logprobs(token: Sampled) -> list[TokenLogprob]:
    if token.logprob is None or token.rank is None:
        return []
    return [TokenLogprob(token.token_id, token.logprob, token.rank, token.top_logprobs)]


def _rest_of_text(request: Request) -> str:
    """What was held back; nothing if the tokenizer breaks on it, because a request must be able to end."""
    try:
        return request.text.finish()
    except Exception:
        _log.exception("the end of request %s could not be decoded", request.id)
        return ""


def _whole_numbers(token_ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError:
        raise RequestError("a token id in the prompt is not a whole number") from None
