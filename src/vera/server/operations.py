"""How requests are served while operators change things: by which version, in which arm, or natively because of the switch.

`Operations` decides when a request begins and hears what came of it; once a second it looks at the store, the rollout and the
breaker. The engine's settings follow the version that serves by default; a candidate's are given to each of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

from vera.cache import TierStats
from vera.cache.memory import available_bytes
from vera.config import LIVE_SETTINGS, STORE_SETTINGS, CacheConfig
from vera.engine.async_engine import AsyncEngine
from vera.engine.audit import AuditResult
from vera.engine.engine import Engine
from vera.engine.request import FinishReason, Update
from vera.errors import ConfigError, EngineStopped, ParamsError, RequestError, VeraError
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
_KEPT_CHOICES = 4096
_NUM_EVENTS = 30
_CLOSED_FAILURES = (FinishReason.ERROR, FinishReason.TIMEOUT)


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
    moved: bool = False
    """On its way, by the switch: it shows neither what adaptive nor what native serving is like."""

    @property
    def mode(self) -> str:
        return "native" if self.fidelity == "native" else "adaptive"


def serving_of(config: CacheConfig, fidelity: str | None, tolerance: float | None, **more: Any) -> Serving:
    """With these settings, and what a request asks for instead."""
    promised = fidelity or (config.fidelity if config.mode == "adaptive" else "native")
    within = config.attention_tolerance if tolerance is None else tolerance
    return Serving(promised, within if promised == "bounded" else None, fidelity, tolerance, **more)


class Operations:
    """Of one adaptive engine. Belongs to the event loop, but for what says that it reads or writes the store."""

    def __init__(self, oversight: Oversight, started_with: CacheConfig) -> None:
        """Reads the store."""
        self.oversight = oversight
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
        self._choices: OrderedDict[str, Choice] = OrderedDict()
        """Of the latest answers, by the engine's id: an audit comes later than its step."""
        self._events: list[dict[str, Any]] = []
        self._nonfinite = 0
        self._adaptive_ended = 0
        self._recent_gaps: deque[float] = deque(maxlen=RECENT)
        self._estimated: deque[tuple[float, float]] = deque(maxlen=256)
        """Mean and largest estimated error of the latest answers."""
        self._audited: deque[float] = deque(maxlen=256)
        self._seen = _Seen()
        self._read_events()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(
        self, engine: AsyncEngine, snapshot: Callable[[], Any], on_moved: Callable[[Mapping[str, str]], None] = lambda moved: None
    ) -> None:
        """Begins to look. `snapshot` awaits a Snapshot or None; `on_moved` hears which running requests are served otherwise from
        now on: their fidelities by the engine's ids."""
        self._engine, self._snapshot, self._on_moved = engine, snapshot, on_moved
        await self._follow()
        self._tasks = [asyncio.create_task(self._look_on()), asyncio.create_task(self.shadows.run(engine.answers))]

    async def close(self) -> None:
        """Ends looking, and closes the store. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.oversight.close)

    # -- for each request ----------------------------------------------------------------------------------------------

    def serve(self, key: str, fidelity: str | None, tolerance: float | None) -> Serving:
        """How a request with this key is served, with what it asks for itself. The switch stands above both."""
        if not self.switch.adaptive(key):
            return Serving("native", None, asked_fidelity="native", arm="degraded")
        if self.rollouts is None:
            return serving_of(self._base, fidelity, tolerance)
        choice = self.rollouts.choose(key)
        in_rollout, version = choice.rollout is not None, choice.version
        own = fidelity is not None or tolerance is not None
        more = {
            "version": None if version is None else version.ref,
            "arm": choice.arm.value if in_rollout else None,
            "choice": choice if in_rollout and not own else None,
        }
        if version is None:
            native = "native" if in_rollout and not own else fidelity
            return serving_of(self._base, native, tolerance, **more)
        settings = self._settings_of(version)
        return serving_of(settings, fidelity, tolerance, settings=settings, **more)

    def begun(self, engine_id: str, serving: Serving) -> None:
        """An answer's first token has come."""
        if serving.choice is not None:
            self._choices[engine_id] = serving.choice
            if len(self._choices) > _KEPT_CHOICES:
                self._choices.popitem(last=False)

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
        self, serving: Serving, update: Update, ttft_seconds: float | None, gaps: Sequence[float], witness: Witness | None
    ) -> None:
        """An answer has ended; what a client gave up says nothing."""
        if update.finish_reason is FinishReason.ABORT:
            return
        use, failed = update.cache_use, update.finish_reason in _CLOSED_FAILURES
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
        self._nonfinite += nonfinite
        self._adaptive_ended += serving.mode == "adaptive"
        if use is not None and use.error_mean is not None:
            self._estimated.append((use.error_mean, use.error_max))
        if serving.choice is not None:
            self._observe(serving.choice, outcome)
        if witness is not None and not failed:
            self.shadows.put(witness)

    def _observe(self, choice: Choice, sample: Any) -> None:
        if self.rollouts is not None:
            self.rollouts.observe(choice, sample)

    # -- changing ------------------------------------------------------------------------------------------------------

    async def degrade(self, override: Override, *, author: str, reason: str) -> int:
        """By hand: new requests at once, and those that run are moved too. Returns how many were moved."""
        # The flip counts from here on; what another thread does is to write it down.
        await asyncio.to_thread(self.switch.override, override, author=author, reason=reason)
        moved = await self._move_running() if self.switch.breaker.state is BreakerState.OPEN else 0
        await asyncio.to_thread(self._read_events)
        return moved

    async def start_rollout(
        self, candidate: str, *, author: str, reason: str, plan: Plan | None, limits: Limits | None, native: bool
    ) -> None:
        """Raises what `Rollouts.start` raises, and ParamsError where the arms would need two caches."""

        def start() -> None:
            rollouts = self.require_rollouts()
            baseline = None if native else self._store.active(rollouts.profile)
            if baseline is not None:
                _check_shared(self._store.get(candidate), baseline)
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
            before = self._store.active(profile)
            return before.ref if before is not None else None, self._store.rollback(profile, author=author, reason=reason).ref

        return await self._change(change)

    def require_rollouts(self) -> Rollouts:
        """Raises ParamsError if the service follows no profile."""
        if self.rollouts is None:
            raise ParamsError("this service follows no profile; start it with --profile NAME")
        return self.rollouts

    async def _change(self, change: Callable[[], T]) -> T:
        done = await asyncio.to_thread(change)
        await asyncio.to_thread(self._refresh)
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
        audits = [] if snapshot is None else self._new_audits(snapshot)
        for audit in audits:
            self._take_audit(audit)
        signals = self._signals(None if snapshot is None else snapshot.tiers, audits)
        flip = await asyncio.to_thread(self._look_at_store, signals)
        if flip is not None:
            _log.warning("degrade switch", extra={"fields": {"from": flip.before, "to": flip.after, "reason": flip.reason}})
            if flip.after is BreakerState.OPEN:
                moved = await self._move_running()
                _log.warning("running requests were moved to native", extra={"fields": {"moved": moved}})
        await self._follow()

    def _look_at_store(self, signals: Signals) -> Flip | None:
        """On a thread. The rollout first: its trouble must not keep the switch from being looked at."""
        try:
            if self.rollouts is not None:
                self.rollouts.tick()
        except ParamsError as error:
            _log.error("the store of versions cannot be used", extra={"fields": {"error": str(error)}})
        flip = self.switch.look(signals)
        with contextlib.suppress(ParamsError):
            self._read_events()
        return flip

    def _refresh(self) -> None:
        if self.rollouts is not None:
            self.rollouts.refresh()
        self._read_events()

    def _read_events(self) -> None:
        if self._store.head != self._seen.head:
            self._events = self.history(_NUM_EVENTS)
            self._seen.head = self._store.head

    def _new_audits(self, snapshot: Snapshot) -> Sequence[AuditResult]:
        new = snapshot.num_audits - self._seen.num_audits
        self._seen.num_audits = snapshot.num_audits
        return snapshot.audits[-new:] if new > 0 else ()

    def _take_audit(self, audit: AuditResult) -> None:
        sample = Audit(audit.true_error, audit.estimated_error)
        self._audited.append(audit.true_error)
        self.modes["adaptive"].add(sample)
        if (choice := self._choices.get(audit.request_id)) is not None:
            self._observe(choice, sample)

    def _signals(self, tiers: TierStats | None, audits: Sequence[AuditResult]) -> Signals:
        """What was seen since the last look."""
        steps, uncovered = (0, 0) if tiers is None else (tiers.decode_steps, tiers.uncovered_hits)
        new_steps, new_uncovered = steps - self._seen.decode_steps, uncovered - self._seen.uncovered_hits
        nonfinite, ended = self._nonfinite - self._seen.nonfinite, self._adaptive_ended - self._seen.adaptive_ended
        self._seen.decode_steps, self._seen.uncovered_hits = steps, uncovered
        self._seen.nonfinite, self._seen.adaptive_ended = self._nonfinite, self._adaptive_ended
        gaps = [self._recent_gaps.popleft() for _ in range(len(self._recent_gaps))]
        return Signals(
            audit_error=sum(audit.true_error for audit in audits) / len(audits) if audits else None,
            uncovered_per_step=new_uncovered / new_steps if new_steps > 0 else None,
            itl_p99_seconds=percentile(gaps, 0.99) if gaps else None,
            memory_share=_memory_share(),
            nonfinite=nonfinite,
            adaptive_requests=ended,
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
        moved: dict[str, str] = await self._engine.inspect(make_native)
        self._on_moved(moved)
        return len(moved)

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
            "true_max": max((error for error in self._audited if error != float("inf")), default=None),
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
    decode_steps: int = 0
    uncovered_hits: int = 0
    nonfinite: int = 0
    adaptive_ended: int = 0


def make_native(engine: Engine) -> dict[str, str]:
    """Every request, native where it fits so and exact where not: both go on as a native cache would have. Fidelities by id."""
    moved = {}
    for request_id in engine.request_ids:
        for fidelity in ("native", "exact"):
            try:
                engine.set_fidelity(request_id, fidelity)
            except VeraError as error:
                _log.warning("a request stays as it is", extra={"fields": {"fidelity": fidelity, "error": str(error)}})
                continue
            moved[request_id] = fidelity
            break
    return moved


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
    kept = [value for value in values if value != float("inf")]
    return sum(kept) / len(kept) if kept else None


def _told(event: Event) -> dict[str, Any]:
    shown = {name: getattr(event, name) for name in ("seq", "time", "kind", "profile", "author", "reason")}
    return shown | {"ref": event.ref}
