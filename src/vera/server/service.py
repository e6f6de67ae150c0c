"""The one bridge between HTTP and the engine: loading, prompts, answers, deadlines, the full queue, health and the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from vera.cache import TierStats
from vera.config import CacheConfig
from vera.engine.async_engine import Ask, AsyncEngine
from vera.engine.engine import Engine
from vera.engine.request import FinishReason, Update
from vera.errors import EngineStopped, RequestTooLong
from vera.heatlog.log import HeatLog, follow
from vera.metrics.stats import RECENT, percentile
from vera.sampling_params import SamplingParams
from vera.server.encoding import Encoder
from vera.server.errors import ApiError, bad_request, deadline_exceeded, too_busy, unavailable
from vera.server.metrics import ServerMetrics
from vera.server.operations import Operations, Oversight, Serving, serving_of
from vera.server.protocol import VeraTerms
from vera.server.settings import ServerSettings
from vera.server.shadow import Witness
from vera.server.snapshot import Snapshot, take_page_map, take_snapshot
from vera.server.usage import UsageMeter

_log = logging.getLogger(__name__)

_SNAPSHOT_SECONDS = 1.0
"""How long a scrape waits for the step that runs; then it gets what the last one got."""
_SHORTEST_SECONDS = 1e-3
"""What a request still gets whose time went with reading its prompt."""
_JOIN_SECONDS = 5.0
"""How long the end waits for an engine that does not come by."""


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    """The model could not be loaded."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is known once the model is loaded."""

    name: str
    """What clients call the model."""
    max_model_len: int
    max_in_flight: int
    """Answers that may run and wait together."""
    settings: dict[str, Any]
    """The engine's effective settings."""


@dataclass(slots=True)
class Job:
    """The answers to one HTTP request."""

    id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    """With `n` answers to each prompt."""
    usage: UsageMeter
    priority: int = 0
    timeout_seconds: float = 0.0
    """From `started` on."""
    fidelity: str | None = None
    """What it asks for itself, as `attention_tolerance`."""
    attention_tolerance: float | None = None
    key: str = ""
    """Requests with the same key stay in the same arm of a rollout."""
    started: float = 0.0
    """By time.monotonic, in seconds: when the request came."""
    first_token_seconds: float | None = None
    engine_ids: list[str] = field(default_factory=list)
    """Of its answers, in the order in which their first tokens came."""
    serving: Serving | None = None
    """None: it is not being answered yet."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    def serve(self, serving: Serving) -> None:
        """Is served this way from now on, and says so."""
        self.serving, usage = serving, self.usage
        usage.fidelity, usage.attention_tolerance = serving.fidelity, serving.attention_tolerance
        usage.params_version, usage.arm = serving.version, serving.arm

    def asks(self, params: SamplingParams) -> list[Ask]:
        """`params` with `n`. Call once it is known how the job is served."""
        assert self.serving is not None
        serving = self.serving
        left = max(_SHORTEST_SECONDS, self.timeout_seconds - (time.monotonic() - self.started))
        how = (serving.asked_fidelity, serving.asked_tolerance, serving.settings)
        return [Ask(prompt, answer, self.priority, left, *how) for prompt in self.prompts for answer in params.answers()]


@dataclass(slots=True)
class _Pace:
    """Of one answer's tokens, in seconds."""

    clock: float
    """When the last ones came, or the request."""
    first_token_seconds: float | None = None
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Latencies:
    """The latest, for exact percentiles, in seconds."""

    end_to_end: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class Service:
    """Belongs to one event loop. `load` makes the engine; it is called on a thread, while the server already answers probes."""

    def __init__(
        self,
        load: Callable[[], Engine],
        settings: ServerSettings,
        metrics: ServerMetrics,
        *,
        heat_log: HeatLog | None = None,
        oversight: Oversight | None = None,
    ) -> None:
        """`oversight`: how an adaptive engine is operated; without it, and with a native one, nothing can be changed."""
        self.settings = settings
        self.metrics = metrics
        self.state = State.LOADING
        self.failure: Exception | None = None
        """Why the model could not be loaded."""
        self.started = time.time()
        self._started_clock = time.monotonic()
        self._load = load
        self._loading: asyncio.Task[None] | None = None
        self._loader: threading.Thread | None = None
        self._engine: AsyncEngine | None = None
        self._encoder: Encoder | None = None
        self._served: Served | None = None
        self._jobs: dict[int, Job] = {}
        """Those that are being answered, by object."""
        self._num_in_flight = 0
        """Answers that run, wait, or have their prompts encoded."""
        self._snapshot: Snapshot | None = None
        self._latencies = _Latencies()
        self._heat_log = heat_log
        self._following: asyncio.Task[None] | None = None
        self._oversight = oversight
        self._operations: Operations | None = None
        self._cache_config = CacheConfig()
        """The engine's, once there is one."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load. Call once, on the event loop."""
        self._loading = asyncio.create_task(self._start())

    async def loaded(self) -> None:
        """Returns once requests are taken. Raises what went wrong with loading."""
        assert self._loading is not None, "start comes first"
        await asyncio.shield(self._loading)
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        """Takes no more requests; those that are in flight go on."""
        if self.state in (State.LOADING, State.READY):
            self.state = State.DRAINING

    @property
    def is_idle(self) -> bool:
        """No answer is in flight."""
        return not self._num_in_flight

    async def close(self) -> None:
        """Ends every answer that is in flight, with an error, and the engine. Idempotent."""
        if self.state is State.STOPPED:
            return
        self.drain()
        if self._loading is not None:
            self._loading.cancel()
        if self._following is not None and self._heat_log is not None:
            self._following.cancel()
            if (stats := await self._tier_stats()) is not None:
                await asyncio.to_thread(self._heat_log.take, stats)  # what has come since it was last brought
        if self._heat_log is not None:
            self._heat_log.close()
        if self._operations is not None:
            await self._operations.stop()
        if self._engine is not None:
            await self._engine.close(join_seconds=_JOIN_SECONDS)
        if self._operations is not None:
            await self._operations.close()
        elif self._oversight is not None:
            self._oversight.close()
        if self._encoder is not None:
            self._encoder.close()
        if self.state is not State.FAILED:
            self.state = State.STOPPED

    @property
    def leaves_threads(self) -> bool:
        """The engine's thread hangs or the model is being loaded: this process cannot end by itself."""
        loads = self._loader is not None and self._loader.is_alive()
        return loads or (self._engine is not None and self._engine.is_running)

    async def _start(self) -> None:
        try:
            await self._adopt(await self._loaded_engine())
        except Exception as error:
            self.state, self.failure = State.FAILED, error
            return
        if self.state is State.LOADING:
            self.state = State.READY
            _log.info("ready", extra={"fields": {"model": self.served.name, "engine": self.served.settings}})

    async def _loaded_engine(self) -> Engine:
        """What `load` makes or raises. Not on `asyncio.to_thread`, whose threads would keep a process from ending meanwhile."""
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[Engine] = loop.create_future()

        def settle(engine: Engine | None, error: Exception | None) -> None:
            if coming.done():
                return
            if engine is not None:
                coming.set_result(engine)
            else:
                coming.set_exception(error or RuntimeError("loading ended without an engine"))

        def run() -> None:
            engine, error = None, None
            try:
                engine = self._load()
            except Exception as failure:
                error = failure
            try:
                loop.call_soon_threadsafe(settle, engine, error)
            except RuntimeError:
                _log.debug("the event loop is closed; nobody waits for the model")

        self._loader = threading.Thread(target=run, name="vera-loader", daemon=True)
        self._loader.start()
        return await coming

    async def _adopt(self, engine: Engine) -> None:
        config = engine.config
        self._cache_config = config.cache
        self._encoder = Encoder(engine.model, engine.max_model_len)
        self._served = Served(
            name=self.settings.served_model_name or engine.model.spec.name,
            max_model_len=engine.max_model_len,
            max_in_flight=config.max_waiting,  # a burst is all waiting before a step gives the first of it seats
            settings=config.to_dict(),
        )
        self._engine = AsyncEngine(engine)
        self._engine.start()
        if self._oversight is not None and engine.cache.adaptive:
            self._operations = await asyncio.to_thread(
                Operations,
                self._oversight,
                config.cache,
                longest_native=min(engine.max_model_len, engine.cache.longest_sequence("native", config.cache)),
            )
            await self._operations.start(self._engine, self.snapshot, self._note_moved)
        if self._heat_log is not None:
            about = {"model": self._served.name, "hot_score_threshold": config.cache.hot_score_threshold}
            self._heat_log.describe(about)
            self._following = asyncio.create_task(follow(self._heat_log, self._tier_stats))

    async def _tier_stats(self) -> TierStats | None:
        taken = await self.snapshot()
        return None if taken is None else taken.tiers

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """Raises ApiError while the model is loading."""
        if self._served is None:
            raise self._away()
        return self._served

    @property
    def encoder(self) -> Encoder:
        """Raises ApiError while the model is loading."""
        if self._encoder is None:
            raise self._away()
        return self._encoder

    def check_health(self) -> None:
        """Raises ApiError if the engine cannot answer: it is not there yet, its loop died or hangs."""
        if self._engine is None or self.state is State.STOPPED:
            raise self._away()
        if not self._engine.is_alive(longest_step_seconds=self.settings.health_timeout_seconds):
            idle = self._engine.seconds_since_beat()
            message = f"the engine has not come by for {idle:.0f} s" if self._engine.is_running else "the engine's loop has ended"
            raise unavailable(message, code="engine_dead")

    def check_ready(self) -> None:
        """Raises ApiError if requests are not taken."""
        if self.state is not State.READY:
            raise self._away()
        self.check_health()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for the name of a model that is not served."""
        if name is not None and name != self.served.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {self.served.name!r}",
                param="model",
                code="model_not_found",
            )

    @property
    def operations(self) -> Operations:
        """Raises ApiError while the model is loading, and where there is nothing to operate."""
        _ = self.served  # raises while there is no engine
        if self._operations is None:
            raise ApiError(
                409,
                "this service has a native cache, and nothing to change; start it with --cache adaptive",
                code="native_cache",
            )
        return self._operations

    @property
    def operations_or_none(self) -> Operations | None:
        return self._operations

    def about(self) -> dict[str, Any]:
        """What is served, since when, and the effective settings, JSON-ready."""
        served = self._served
        return {
            "model": None if served is None else served.name,
            "time": time.time(),
            "uptime_seconds": time.monotonic() - self._started_clock,
            "settings": {"server": self.settings.to_dict(), "engine": None if served is None else served.settings},
        }

    async def page_map(self, request_id: str) -> dict[str, Any]:
        """Tiers and heat of a running answer's pages, JSON-ready. Raises ApiError if there is none, or it has no token yet."""
        job = next((job for job in self._jobs.values() if job.id == request_id), None)
        if job is not None and self._engine is not None:
            for engine_id in list(job.engine_ids):
                if (pages := await self._engine.inspect(partial(take_page_map, request_id=engine_id))) is not None:
                    return {"request_id": request_id, **pages}
        raise ApiError(404, f"no request {request_id!r} is being answered; GET /admin/stats lists those that are")

    async def snapshot(self) -> Snapshot | None:
        """The engine and its cache now, or as they were at the last call if a long step runs. None: there was none yet."""
        if self._engine is not None:
            try:
                self._snapshot = await asyncio.wait_for(self._engine.inspect(take_snapshot), _SNAPSHOT_SECONDS)
            except (TimeoutError, EngineStopped):
                _log.debug("the engine does not come by; the last snapshot has to do")
            except Exception:
                _log.exception("a snapshot of the engine could not be taken")
        return self._snapshot

    def jobs(self) -> list[dict[str, Any]]:
        """The requests in flight, JSON-ready."""
        now = time.monotonic()
        return [
            {
                "request_id": job.id,
                "answers": job.num_answers,
                "phase": "waiting" if job.first_token_seconds is None else "answering",
                "prompt_tokens": job.usage.prompt_tokens,
                "completion_tokens": job.usage.completion_tokens,
                "seconds": round(now - job.started, 3),
                "priority": job.priority,
                "fidelity": job.usage.fidelity,
                "params_version": job.usage.params_version,
                "arm": job.usage.arm,
                "mode": "native" if job.usage.fidelity == "native" else "adaptive",
            }
            for job in self._jobs.values()
        ]

    def end_to_end_percentiles(self) -> dict[str, float | None]:
        """Over the latest answers, in milliseconds."""
        latest = self._latencies.end_to_end
        shares = {"e2e_ms_p50": 0.5, "e2e_ms_p99": 0.99}
        return {name: percentile(latest, share) * 1e3 if latest else None for name, share in shares.items()}

    # -- answers -------------------------------------------------------------------------------------------------------

    def time_limit(self, terms: VeraTerms | None) -> float:
        """Seconds that a request may take from its arrival on: what it asks for, within what the server allows."""
        limit, asked = self.settings.request_timeout_seconds, None if terms is None else terms.timeout_seconds
        return limit if asked is None else min(limit, asked)

    def job(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        terms: VeraTerms | None,
        *,
        started: float,
        priority: int = 0,
        hidden_tokens: int = 0,
        key: str | None = None,
    ) -> Job:
        """`started`, by time.monotonic: when the request came. `hidden_tokens` of each answer are not shown and not counted. With
        the same `key` requests stay in the same arm of a rollout; None: each is on its own.

        Raises RequestTooLong for a prompt that leaves no room for an answer.
        """
        limit = self.time_limit(terms)
        terms, served = terms or VeraTerms(), self.served
        if (longest := max(map(len, prompts))) >= served.max_model_len:
            # The engine would say so too, but what shows a prompt along with its answer comes before that and takes its time.
            raise RequestTooLong(
                f"the prompt's {longest} tokens leave no room for an answer within the {served.max_model_len} tokens served; "
                "shorten it, or serve more (max_model_len, the cache's ceiling)"
            )
        expected = serving_of(self._cache_config, terms.fidelity, terms.attention_tolerance)
        usage = UsageMeter(
            [len(prompt) for prompt in prompts],
            params.n,
            expected.fidelity,
            expected.attention_tolerance,
            hidden_tokens=hidden_tokens,
        )
        return Job(
            request_id,
            prompts,
            params,
            usage,
            priority=priority,
            timeout_seconds=limit,
            fidelity=terms.fidelity,
            attention_tolerance=terms.attention_tolerance,
            key=request_id if key is None else key,
            started=started,
        )

    def admit(self, num_answers: int) -> Admission:
        """A place for so many answers, to be held from before their prompts are encoded until they are done.

        Raises ApiError if the server is not ready or too busy, or will never have so many places.
        """
        if self.state is not State.READY:
            raise self._away()
        if num_answers > self.served.max_in_flight:
            raise bad_request(
                f"{num_answers} answers are above the {self.served.max_in_flight} that this server takes at once; "
                "ask for fewer in a request",
                "n",
            )
        room = self.served.max_in_flight - self._num_in_flight
        if num_answers > room:
            raise too_busy(
                f"{self._num_in_flight} answers are running or waiting, and {num_answers} more would be above the "
                f"{self.served.max_in_flight} that this server takes; try again later"
            )
        return Admission(self, num_answers)

    async def answers(self, job: Job) -> AsyncGenerator[list[tuple[int, Update]], None]:
        """The updates of a job's answers, each with the place of its answer, those together that came together.

        Adds them to `job.usage`. Raises what the engine raises when it refuses or ends, and ApiError for an answer that fails or
        passes its deadline; the job's other answers are then given up. Leaving the iterator early gives up all.
        """
        if self._engine is None:
            raise self._away()
        params, witness = self._choose(job)
        pace = [_Pace(job.started) for _ in range(job.num_answers)]
        self._jobs[id(job)] = job
        try:
            async with aclosing(self._engine.answers(job.asks(params))) as batches:
                async for batch in batches:
                    now = time.monotonic()
                    for index, update in batch:
                        job.usage.add(index, update)
                        if witness is not None:
                            witness.add(update)
                        if update.new_token_ids:
                            self._count_tokens(job, pace[index], update, now)
                        if update.finished:
                            self._end(job, pace[index], update, witness)
                    if job.first_token_seconds is None:
                        job.first_token_seconds = now - job.started
                    yield batch
        except RequestTooLong:
            if self._operations is not None and job.serving is not None and self._is_served_length(job):
                self._operations.refused(job.serving)
            raise
        finally:
            del self._jobs[id(job)]

    def _is_served_length(self, job: Job) -> bool:
        wanted = job.params.max_tokens or max(1, job.params.min_tokens)
        return max(map(len, job.prompts)) + wanted <= self.served.max_model_len

    def _choose(self, job: Job) -> tuple[SamplingParams, Witness | None]:
        """How a job is served from now on. No other task runs between this and its place in the engine's inbox, so a flip of the
        degrade switch finds the request either not chosen for yet, or there to be moved."""
        if (operations := self._operations) is None:
            serving = serving_of(self._cache_config, job.fidelity, job.attention_tolerance)
        else:
            serving = operations.serve(job.key, self._most_tokens(job), job.fidelity, job.attention_tolerance)
        job.serve(serving)
        if operations is not None and job.num_answers == 1 and operations.watched(job.id, serving, job.params):
            assert serving.choice is not None
            return operations.shadows.watched(job.params), Witness(serving.choice, job.prompts[0])
        return job.params, None

    def _most_tokens(self, job: Job) -> int:
        """Of its longest answer with its prompt."""
        longest, limit = max(map(len, job.prompts)), self.served.max_model_len
        wanted = job.params.max_tokens or (limit - longest)
        return min(limit, longest + wanted)

    def _note_moved(self, moved: Mapping[str, str]) -> None:
        """The degrade switch is open. What is moved on its way is no sample of its arm any more."""
        for job in self._jobs.values():
            if job.serving is None or job.serving.moved or job.serving.mode == "native":
                continue
            found = {moved[name] for name in job.engine_ids if name in moved}
            if not job.engine_ids and self._operations is not None:
                found = {self._operations.native_fidelity(self._most_tokens(job))}
            if found:
                fidelity = "exact" if "exact" in found else "native"
                job.serve(replace(job.serving, fidelity=fidelity, attention_tolerance=None, choice=None, moved=True))

    def _count_tokens(self, job: Job, pace: _Pace, update: Update, now: float) -> None:
        seconds = now - pace.clock
        pace.clock = now
        if pace.first_token_seconds is None:
            self.metrics.observe_first(seconds)
            pace.first_token_seconds = seconds
            job.engine_ids.append(update.request_id)
            if self._operations is not None and job.serving is not None:
                self._operations.begun(update.request_id, job.serving)
        else:
            self.metrics.observe_next(seconds)
            pace.gaps.append(seconds)

    def _end(self, job: Job, pace: _Pace, update: Update, witness: Witness | None) -> None:
        """Counts an answer that has ended. Raises ApiError if it ended badly."""
        own = job.timeout_seconds < self.settings.request_timeout_seconds
        if self._operations is not None and job.serving is not None:
            self._operations.ended(job.serving, update, pace.first_token_seconds, pace.gaps, witness, own_deadline=own)
        now = time.monotonic()
        self._latencies.end_to_end.append(now - job.started)
        self.metrics.observe_end(now - job.started, update)
        match update.finish_reason:
            case FinishReason.TIMEOUT:
                raise deadline_exceeded(f"the answer was not done within {job.timeout_seconds:g} s and was given up")
            case FinishReason.ERROR:
                raise ApiError(500, f"the model failed on this request: {update.error}", code="engine_error")
            case FinishReason.ABORT:
                raise unavailable("the answer was ended by the server", code="engine_stopped")

    def _away(self) -> ApiError:
        messages = {
            State.LOADING: "the model is being loaded; try again soon",
            State.READY: "the engine is not there",
            State.DRAINING: "the server is ending and takes no new requests",
            State.STOPPED: "the server has ended",
            State.FAILED: "the model could not be loaded",
        }
        return unavailable(messages[self.state], code=f"server_{self.state.value}")


class Admission:
    """Places for some answers, taken when it is made and given back by `close` (which does nothing the second time)."""

    def __init__(self, service: Service, num_answers: int) -> None:
        self._service = service
        self._held = num_answers
        service._num_in_flight += num_answers

    def close(self) -> None:
        self._service._num_in_flight -= self._held
        self._held = 0
