"""How requests are served while operators change things: by which version, in which arm, or natively because of the switch.

`Operations` decides when a request begins and hears what came of it; once a second it looks at the store, the rollout and the
breaker. The engine's settings follow the version that serves by default; a candidate's are given to each of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

from vera.cache.memory import available_bytes
from vera.config import LIVE_SETTINGS, STORE_SETTINGS, CacheConfig
from vera.engine.async_engine import AsyncEngine
from vera.engine.audit import AuditResult
from vera.engine.engine import Engine
from vera.engine.request import FinishReason, Update
from vera.errors import ConfigError, EngineStopped, ParamsError, RequestError
from vera.metrics.stats import RECENT, percentile
from vera.params import Event, ParameterStore, Version
from vera.rollout import (
    ArmStats,
    Audit,
    BreakerSettings,
    BreakerState,
    Choice,
    DegradeSwitch,
    Flip,
    Limits,
    Outcome,
    Override,
    Plan,
    Rollouts,
    Signals,
)
from vera.sampling_params import SamplingParams
from vera.server.metrics import Overview
from vera.server.shadow import Shadows, Witness
from vera.server.snapshot import Snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_EPHEMERAL = "service"
"""The profile of a switch whose service follows none."""
_KEPT_SERVINGS = 4096
_NUM_EVENTS = 30
_FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Oversight:
    """What a service is operated with."""

    store: ParameterStore
    profile: str | None = None
    """Whose active version it serves with, and whose rollouts it runs. None: it has the degrade switch alone."""
    keeps: bool = True
    """The store outlives the service."""
    pinned: frozenset[str] = frozenset()
    """Settings that the service was given by its own options."""
    shadow_share: float = 0.05
    """Of the candidate's requests, those whose answers are replayed natively."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    folder: TemporaryDirectory[str] | None = None
    """Where the store lies, if it goes with the service."""

    def __post_init__(self) -> None:
        if not 0 <= self.shadow_share <= 1:
            raise ConfigError(f"shadow_share={self.shadow_share!r} must be from 0 to 1")

    def close(self) -> None:
        """Closes the store. Idempotent."""
        self.store.close()
        if self.folder is not None:
            self.folder.cleanup()


@dataclass(frozen=True, slots=True)
class Serving:
    """How one request is served, from its first token to its last."""

    fidelity: str
    """What it is promised."""
    attention_tolerance: float | None
    """None: exactly."""
    asked_fidelity: str | None = None
    """What the engine is told; None: as `settings` say."""
    asked_tolerance: float | None = None
    settings: CacheConfig | None = None
    """None: the engine's."""
    version: str | None = None
    arm: str | None = None
    choice: Choice | None = None
    """Whose sample it is; None: of no arm, because it brought terms of its own or the switch is open."""
    own_terms: bool = False
    """The request says itself how exact it wants to be served."""
    moved: bool = False
    """On its way, by the switch: it shows neither what adaptive nor what native serving is like."""

    @property
    def mode(self) -> str:
        """Degraded requests are `exact` where native has no room."""
        return "native" if self.fidelity == "native" or self.arm == "degraded" else "adaptive"


def serving_of(config: CacheConfig, fidelity: str | None, tolerance: float | None, **more: Any) -> Serving:
    """With these settings, and what a request asks for instead."""
    promised = fidelity or (config.fidelity if config.mode == "adaptive" else "native")
    within = config.attention_tolerance if tolerance is None else tolerance
    return Serving(promised, within if promised == "bounded" else None, fidelity, tolerance, **more)


class Operations:
    """Of one adaptive engine. Belongs to the event loop, but for what says that it reads or writes the store."""

    def __init__(self, oversight: Oversight, started_with: CacheConfig, *, longest_native: int) -> None:
        """Reads the store. `longest_native`: most tokens of a sequence that the cache holds natively."""
        self.oversight = oversight
        self._longest_native = longest_native
        self._storing = ThreadPoolExecutor(1, "vera-params")
        """The store may be slow: only one thread ever waits for it, and nothing else waits in its queue."""
        self._started_with = started_with
        self._base = started_with
        """The engine's settings by now."""
        self._store = oversight.store
        self.rollouts: Rollouts | None = None
        if (profile := oversight.profile) is not None:
            self.rollouts = Rollouts(self._store, profile, started_with=started_with, pinned=oversight.pinned)
        self.switch = DegradeSwitch(self._store, profile or _EPHEMERAL, oversight.breaker)
        self.shadows = Shadows(oversight.shadow_share, self._observe)
        self.modes = {"native": ArmStats(), "adaptive": ArmStats()}
        """What answers were like since the start."""
        self._engine: AsyncEngine | None = None
        self._snapshot: Callable[[], Any] | None = None
        self._on_moved: Callable[[Mapping[str, str]], None] = lambda moved: None
        self._tasks: list[asyncio.Task[None]] = []
        self._settings: dict[str, CacheConfig] = {}
        """By version, on top of the present base."""
        self._servings: OrderedDict[str, Serving] = OrderedDict()
        """Of the latest answers, by the engine's id: an audit comes later than its step."""
        self._events: list[dict[str, Any]] = []
        self._since_look = _SinceLook()
        self._recent_gaps: deque[float] = deque(maxlen=RECENT)
        self._estimated: deque[tuple[float, float]] = deque(maxlen=256)
        """Mean and largest estimated error of the latest answers."""
        self._audited: deque[float] = deque(maxlen=256)
        self._seen = _Seen()
        self._left_behind = False
        """A request could not be moved when the switch opened."""
        self._trouble: str | None = None
        """What is wrong with the store or the active version, told once."""
        self._read_events()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(
        self, engine: AsyncEngine, snapshot: Callable[[], Any], on_moved: Callable[[Mapping[str, str]], None] = lambda moved: None
    ) -> None:
        """Begins to look. `snapshot` awaits a Snapshot or None; `on_moved` hears which running requests are served otherwise from
        now on: their fidelities by the engine's ids."""
        self._engine, self._snapshot, self._on_moved = engine, snapshot, on_moved
        await self._follow()
        self._tasks = [
            asyncio.create_task(self._look_on()),
            asyncio.create_task(self.shadows.run(engine.answers, self.native_fidelity)),
        ]

    async def stop(self) -> None:
        """Ends looking. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Closes the store, after what waits for it. Idempotent."""
        await self.stop()
        with contextlib.suppress(EngineStopped):
            await self.on_store(self.switch.sync)
        await asyncio.to_thread(self._storing.shutdown)
        await asyncio.to_thread(self.oversight.close)

    async def on_store(self, work: Callable[[], T]) -> T:
        """Runs what reads or changes the store on the one thread for it. Raises what `work` raises."""
        loop = asyncio.get_running_loop()
        try:
            working = loop.run_in_executor(self._storing, work)
        except RuntimeError:
            raise EngineStopped("the service is ending and changes nothing any more") from None
        return await working

    # -- for each request ----------------------------------------------------------------------------------------------

    def serve(self, key: str, num_tokens: int, fidelity: str | None, tolerance: float | None) -> Serving:
        """How a request with this key and at most so many tokens is served, with what it asks for itself. The switch stands above
        both."""
        if not self.switch.adaptive(key):
            as_native = self.native_fidelity(num_tokens)
            return Serving(as_native, None, asked_fidelity=as_native, arm="degraded")
        own = fidelity is not None or tolerance is not None
        if self.rollouts is None:
            return serving_of(self._base, fidelity, tolerance, own_terms=own)
        choice = self.rollouts.choose(key)
        in_rollout, version = choice.rollout is not None, choice.version
        more = {
            "version": None if version is None else version.ref,
            "arm": choice.arm.value if in_rollout else None,
            "choice": choice if in_rollout and not own else None,
            "own_terms": own,
        }
        if version is None:
            wanted = self.native_fidelity(num_tokens) if in_rollout and not own else fidelity
            return serving_of(self._base, wanted, tolerance, **more)
        settings = self._settings_of(version)
        return serving_of(settings, fidelity, tolerance, settings=settings, **more)

    def native_fidelity(self, num_tokens: int) -> str:
        """How a request is served natively: exact, whose answers are the same, where a native one has no room."""
        return "native" if num_tokens <= self._longest_native else "exact"

    def begun(self, engine_id: str, serving: Serving) -> None:
        """An answer's first token has come."""
        self._servings[engine_id] = serving
        if len(self._servings) > _KEPT_SERVINGS:
            self._servings.popitem(last=False)

    def watched(self, request_id: str, serving: Serving, params: SamplingParams) -> bool:
        """The answer is to be replayed natively: a candidate's, and asked for no log-probabilities of its own."""
        return (
            serving.choice is not None
            and serving.choice.version is not None
            and serving.choice.arm == "candidate"
            and serving.mode == "adaptive"
            and (params.n, params.logprobs, params.prompt_logprobs) == (1, None, None)
            and self.shadows.wants(request_id)
        )

    def ended(
        self,
        serving: Serving,
        update: Update,
        ttft_seconds: float | None,
        gaps: Sequence[float],
        witness: Witness | None,
        *,
        own_deadline: bool = False,
    ) -> None:
        """An answer has ended. What a client gave up, or wanted sooner than the server promises, says nothing."""
        if update.finish_reason is FinishReason.ABORT or (own_deadline and update.finish_reason is FinishReason.TIMEOUT):
            return
        use, failed = update.cache_use, update.finish_reason in _FAILURES
        nonfinite = int(failed and "not finite" in (update.error or ""))
        outcome = Outcome(
            failed=failed,
            ttft_seconds=ttft_seconds,
            itl_seconds=tuple(gaps),
            nonfinite=nonfinite,
            decode_steps=use.decode_steps if use is not None else 0,
            recompute_steps=use.recompute_steps if use is not None else 0,
            uncovered_hits=use.uncovered_hits if use is not None else 0,
        )
        if not serving.moved:
            self.modes[serving.mode].add(outcome)
        self._recent_gaps.extend(gaps)
        if self._concerns_breaker(serving):
            self._since_look.nonfinite += nonfinite
            self._since_look.adaptive_ended += 1
            self._since_look.decode_steps += outcome.decode_steps
            self._since_look.uncovered_hits += outcome.uncovered_hits
        if use is not None and use.error_mean is not None and math.isfinite(use.error_mean + use.error_max):
            self._estimated.append((use.error_mean, use.error_max))
        if serving.choice is not None:
            self._observe(serving.choice, outcome)
        if witness is not None and serving.choice is not None and not failed:
            self.shadows.put(witness)

    def refused(self, serving: Serving) -> None:
        """An answer that the service says it takes did not fit the way it was to be served."""
        if serving.choice is not None:
            self._observe(serving.choice, Outcome(failed=True))

    def _concerns_breaker(self, serving: Serving) -> bool:
        """What a client's own terms bring is what it asked for, and a candidate is the guard's to stop, unless it rests."""
        is_watched = self.switch.breaker.state is BreakerState.CLOSED
        guarded = is_watched and serving.choice is not None and serving.choice.arm == "candidate"
        return serving.mode == "adaptive" and not serving.own_terms and not guarded and not serving.moved

    def _observe(self, choice: Choice, sample: Any) -> None:
        if self.rollouts is not None:
            self.rollouts.observe(choice, sample)

    # -- changing ------------------------------------------------------------------------------------------------------

    async def degrade(self, override: Override, *, author: str, reason: str) -> int:
        """By hand: new requests at once, and those that run are moved too. Returns how many were moved."""
        self.switch.decide(override, author=author, reason=reason)
        moved = await self._move_running() if self.switch.breaker.state is BreakerState.OPEN else 0
        # Only now: the store may be slow, or gone. The switch's status tells what is not recorded.
        await self._take_flip(await self.on_store(self._record_switch))
        return moved

    def _record_switch(self) -> Flip | None:
        """On the store's thread; a flip of another process that came before ours could be recorded."""
        flip = self.switch.sync()
        self._try_to_read_events()
        return flip

    def _try_to_read_events(self) -> None:
        try:
            self._read_events()
        except Exception as error:  # they are for people; a flip is not lost for them
            _log.debug("the latest events cannot be read: %s", error)

    async def start_rollout(
        self, candidate: str, *, author: str, reason: str, plan: Plan | None, limits: Limits | None, native: bool
    ) -> None:
        """Raises what `Rollouts.start` raises, and ParamsError where the arms would need two caches."""

        def start() -> None:
            rollouts = self.require_rollouts()
            baseline = None if native else self._store.active(rollouts.profile)
            if baseline is not None:
                _check_shared(self._store.get(candidate), baseline)
            wanted = limits or Limits()
            if not self.shadows.share and (wanted.shadow_kl is not None or wanted.shadow_agreement is not None):
                raise ParamsError(
                    "this service computes no shadow answers (--shadow-share 0), and the limits ask for them; "
                    "start it with a share, or set shadow_kl and shadow_agreement to none"
                )
            rollouts.start(candidate, author=author, reason=reason, plan=plan, limits=limits, native=native)

        await self._change(start)

    async def change_rollout(self, action: str, *, author: str, reason: str, full: bool = True) -> None:
        """promote, abort, hold or resume; see `Rollouts`."""
        rollouts = self.require_rollouts()
        more = {"full": full} if action == "promote" else {}
        await self._change(lambda: getattr(rollouts, action)(author=author, reason=reason, **more))

    async def activate(self, ref: str, *, author: str, reason: str) -> tuple[str | None, str]:
        """The active version before and after. Raises ParamsError for what this service cannot take while it runs."""
        rollouts = self.require_rollouts()

        def change() -> tuple[str | None, str]:
            version = self._store.get(ref)
            if version.profile != rollouts.profile:
                raise ParamsError(f"{version.ref} is no version of {rollouts.profile}, which this service follows")
            if (unfit := rollouts.unfit(version)) is not None:
                raise ParamsError(f"{version.ref} cannot be served: {unfit}; restart the service with it")
            before = self._store.active(rollouts.profile)
            return before.ref if before is not None else None, self._store.activate(version, author=author, reason=reason).ref

        return await self._change(change)

    async def roll_back(self, *, author: str, reason: str) -> tuple[str | None, str]:
        """To the version before the active one; the active version before and after."""
        profile = self.require_rollouts().profile

        def change() -> tuple[str | None, str]:
            before, target = self._store.active(profile), self._store.before(profile)
            if target is not None and (unfit := self.require_rollouts().unfit(target)) is not None:
                raise ParamsError(f"{target.ref} cannot be served: {unfit}; restart the service with it, or degrade it")
            return before.ref if before is not None else None, self._store.rollback(profile, author=author, reason=reason).ref

        return await self._change(change)

    def require_rollouts(self) -> Rollouts:
        """Raises ParamsError if the service follows no profile."""
        if self.rollouts is None:
            raise ParamsError("this service follows no profile; start it with --profile NAME")
        return self.rollouts

    async def _change(self, change: Callable[[], T]) -> T:
        done = await self.on_store(change)
        # It is changed, whatever comes now: the next look follows too.
        with contextlib.suppress(ParamsError, EngineStopped):
            await self.on_store(self._refresh)
        await self._follow()
        return done

    # -- looking -------------------------------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except EngineStopped:
                return
            except Exception:
                _log.exception("operations could not look")

    async def look(self) -> None:
        """What is done once a second: judges the rollout, follows the store, feeds the breaker. Public for tests."""
        assert self._snapshot is not None
        snapshot: Snapshot | None = await self._snapshot()
        for audit in () if snapshot is None else self._new_audits(snapshot):
            self._take_audit(audit)
        # Decided in memory: a slow store keeps nobody in adaptive serving. Recorded meanwhile: a restart of an engine that hangs
        # finds the flip.
        flip = self.switch.judge(self._signals())
        looking = asyncio.create_task(self.on_store(self._look_at_store))
        await self._take_flip(flip)
        await self._take_flip(await looking)
        if self._left_behind and self.degraded:
            await self._move_running()
        await self._follow()

    async def _take_flip(self, flip: Flip | None) -> None:
        if flip is None:
            return
        _log.warning("degrade switch", extra={"fields": {"from": flip.before, "to": flip.after, "reason": flip.reason}})
        if flip.after is BreakerState.OPEN:
            moved = await self._move_running()
            _log.warning("running requests were moved to native", extra={"fields": {"moved": moved}})

    def _look_at_store(self) -> Flip | None:
        """On the store's thread: the rollout, and what other processes say. While all is native there is nothing to judge."""
        trouble: str | None = None
        try:
            if self.rollouts is not None:
                trouble = self.rollouts.refusal
                if self.switch.breaker.state is BreakerState.CLOSED:
                    self.rollouts.tick()
                else:
                    self.rollouts.rest()
        except ParamsError as error:
            trouble = str(error)
        except Exception:
            _log.exception("the rollout could not be looked at")
        if trouble != self._trouble and trouble is not None:
            _log.error("versions", extra={"fields": {"error": trouble}})
        self._trouble = trouble
        return self._record_switch()

    def _refresh(self) -> None:
        if self.rollouts is not None:
            self.rollouts.refresh()
        self._read_events()

    def _read_events(self) -> None:
        if (head := self._store.head) != self._seen.head:
            self._events = self.history(_NUM_EVENTS)
            self._seen.head = head

    def _new_audits(self, snapshot: Snapshot) -> Sequence[AuditResult]:
        new = snapshot.num_audits - self._seen.num_audits
        self._seen.num_audits = snapshot.num_audits
        return snapshot.audits[-new:] if new > 0 else ()

    def _take_audit(self, audit: AuditResult) -> None:
        sample = Audit(audit.true_error, audit.estimated_error)
        self._audited.append(audit.true_error)
        if (serving := self._servings.get(audit.request_id)) is None:
            return
        self.modes["adaptive"].add(sample)
        if serving.choice is not None:
            self._observe(serving.choice, sample)
        if self._concerns_breaker(serving):
            self._since_look.true_errors.append(audit.true_error)

    def _signals(self) -> Signals:
        """What was seen since the last look."""
        memory_share = _memory_share()
        seen, self._since_look = self._since_look, _SinceLook()
        gaps = [self._recent_gaps.popleft() for _ in range(len(self._recent_gaps))]
        return Signals(
            audit_error=sum(seen.true_errors) / len(seen.true_errors) if seen.true_errors else None,
            uncovered_per_step=seen.uncovered_hits / seen.decode_steps if seen.decode_steps else None,
            itl_p99_seconds=percentile(gaps, 0.99) if gaps else None,
            memory_share=memory_share,
            nonfinite=seen.nonfinite,
            adaptive_requests=seen.adaptive_ended,
        )

    async def _follow(self) -> None:
        """Gives the engine the settings of the version that serves by default, as far as a running cache can take them."""
        wanted = replace(self._started_with, **_live(self._wanted(), LIVE_SETTINGS))
        if wanted == self._base or self._engine is None:
            return
        before, self._base = self._base, wanted
        self._settings = {}
        try:
            await self._engine.inspect(lambda engine: engine.set_cache_settings(wanted))
        except (ConfigError, RequestError) as error:
            self._base, self._settings = before, {}
            _log.error("the engine does not take the active version", extra={"fields": {"error": str(error)}})

    def _wanted(self) -> CacheConfig:
        """What serves by default. In a rollout from native, whose requests have no use for them, the candidate's."""
        if self.rollouts is None:
            return self._started_with
        stable, candidate = self.rollouts.served
        version = stable or candidate
        return self._started_with if version is None else version.config()

    def _settings_of(self, version: Version) -> CacheConfig:
        if (settings := self._settings.get(version.ref)) is None:
            settings = replace(self._base, **_live(version.config(), LIVE_SETTINGS - STORE_SETTINGS))
            self._settings[version.ref] = settings
        return settings

    async def _move_running(self) -> int:
        assert self._engine is not None
        moved, self._left_behind = await self._engine.inspect(make_native)
        self._on_moved(moved)
        return len(moved)

    @property
    def degraded(self) -> bool:
        """All requests are served natively by the switch."""
        return self.switch.breaker.state is BreakerState.OPEN

    # -- telling -------------------------------------------------------------------------------------------------------

    @property
    def active_version(self) -> Version | None:
        return None if self.rollouts is None else self.rollouts.served[0]

    def overview(self) -> Overview:
        """For metrics."""
        active, rollout = self.active_version, None if self.rollouts is None else self.rollouts.current
        half = 1 - self.switch.settings.half_open_share
        shares = {BreakerState.OPEN: 1.0, BreakerState.HALF_OPEN: half, BreakerState.CLOSED: 0.0}
        return Overview(
            profile=self.oversight.profile,
            version=None if active is None else active.ref,
            rollout_weight=0.0 if rollout is None else rollout.weight,
            degraded_share=shares[self.switch.breaker.state],
            shadows_replayed=self.shadows.num_replayed,
            shadows_left_out=self.shadows.num_left_out,
        )

    def errors(self) -> dict[str, float | int | None]:
        """Estimated errors of the latest answers and true ones of the latest audits, JSON-ready."""
        means, largest = [mean for mean, _ in self._estimated], [most for _, most in self._estimated]
        return {
            "estimated_mean": _finite_mean(means),
            "estimated_max": max(largest, default=None),
            "true_mean": _finite_mean(self._audited),
            "true_max": max(filter(math.isfinite, self._audited), default=None),
            "audits": self._seen.num_audits,
        }

    def status(self) -> dict[str, Any]:
        """JSON-ready. Percentiles of 10,000 latencies take milliseconds: call it on a thread."""
        active = self.active_version
        return {
            "profile": self.oversight.profile,
            "store": str(self._store.path) if self.oversight.keeps else None,
            "version": None
            if active is None
            else {name: getattr(active, name) for name in ("ref", "hash", "author", "reason", "time")},
            "refusal": None if self.rollouts is None else self.rollouts.refusal,
            "degrade": self.switch.status(),
            "rollout": None if self.rollouts is None else self.rollouts.status(),
            "modes": {mode: stats.merge(ArmStats()).summary() for mode, stats in self.modes.items()},
            "shadow": {
                "share": self.shadows.share,
                "replayed": self.shadows.num_replayed,
                "waiting": self.shadows.num_waiting,
                "left_out": self.shadows.num_left_out,
            },
            "events": self._events,
        }

    def history(self, limit: int) -> list[dict[str, Any]]:
        """Reads the store: the latest events, the newest first."""
        return [_told(event) for event in reversed(self._store.history(limit=limit))]

    def versions(self) -> dict[str, Any]:
        """Reads the store: the versions of the profile, JSON-ready."""
        profile = self.require_rollouts().profile
        active = self._store.active(profile)
        return {
            "profile": profile,
            "store": str(self._store.path) if self.oversight.keeps else None,
            "active": None if active is None else active.ref,
            "versions": [version.to_dict() for version in self._store.versions(profile)],
        }


@dataclass(slots=True)
class _Seen:
    """Where the last look left off."""

    head: int = -1
    num_audits: int = 0


@dataclass(slots=True)
class _SinceLook:
    """What concerns the breaker; answers count when they end."""

    decode_steps: int = 0
    uncovered_hits: int = 0
    nonfinite: int = 0
    adaptive_ended: int = 0
    true_errors: list[float] = field(default_factory=list)


def make_native(engine: Engine) -> tuple[dict[str, str], bool]:
    """Every request, native where it fits so and exact where not: both go on as a native cache would have. Their fidelities by
    id, and whether one had to stay as it is."""
    moved = {}
    for request_id in (asked := engine.request_ids):
        for fidelity in ("native", "exact"):
            try:
                engine.set_fidelity(request_id, fidelity)
            except RequestError as error:
                _log.info("a request does not fit so", extra={"fields": {"fidelity": fidelity, "error": str(error)}})
            except Exception:
                _log.exception("a request could not be moved")  # and the others are, whatever this one has
            else:
                moved[request_id] = fidelity
                break
    return moved, len(moved) < len(asked)


def _check_shared(candidate: Version, baseline: Version) -> None:
    """Two arms share one cache: what concerns it as a whole cannot differ between them."""
    apart = [name for name in sorted(STORE_SETTINGS) if candidate.settings.get(name) != baseline.settings.get(name)]
    if apart:
        raise ParamsError(
            f"{candidate.ref} and {baseline.ref} differ in {', '.join(apart)}, which concern the cache as a whole and cannot "
            "differ between arms; activate the candidate, or roll it out from native"
        )


def _live(config: CacheConfig, names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _memory_share() -> float:
    """Of what this process may have, what it has: its own bytes and those that are left."""
    own = psutil.Process().memory_info().rss
    return float(own / (own + available_bytes()))


def _finite_mean(values: Iterable[float]) -> float | None:
    kept = list(filter(math.isfinite, values))
    return sum(kept) / len(kept) if kept else None


def _told(event: Event) -> dict[str, Any]:
    shown = {name: getattr(event, name) for name in ("seq", "time", "kind", "profile", "author", "reason")}
    return shown | {"ref": event.ref}
