"""Rollouts of one profile: chooses an arm for each request, counts what comes of it, and moves on, holds or goes back."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vera.config import CacheConfig
from vera.errors import ConfigError, ParamsError
from vera.params import Event, ParameterStore, Version, needs_restart, signature
from vera.rollout.arms import Arm, arm_of
from vera.rollout.guard import Decision, Limits, Verdict, judge
from vera.rollout.plan import Plan
from vera.rollout.rollout import ABORT, HOLD, PROMOTE, RESUME, START, STEP, Cause, Rollout, replay
from vera.rollout.stats import ArmStats, Audit, Outcome, Shadow

GUARD = "guard"
"""The author of what happens by itself."""
_MAX_REASON = 2000
_BY_GUARD = frozenset({Cause.BREACH, Cause.PATIENCE})


@dataclass(frozen=True, slots=True)
class Choice:
    """How one request is served, from its first token to its last."""

    arm: Arm
    version: Version | None
    """None: natively in a rollout; else as the service was started, because no version is active."""
    rollout: int | None
    """Whose sample it is; None: of none."""


@dataclass(frozen=True, slots=True)
class _Serving:
    """What requests are served with; replaced as a whole, so that reading it needs no lock."""

    rollout: Rollout | None
    """The latest one, over or not."""
    stable: Version | None
    candidate: Version | None
    stopped: str | None = None
    """Why no request is the candidate's any more, although the rollout is not over in the store yet."""

    @property
    def current(self) -> Rollout | None:
        return None if self.rollout is None or self.rollout.is_over else self.rollout


class Rollouts:
    """At most one rollout runs at a time. Any thread may call.

    It also follows the profile's active version, whoever activates it. `choose`, `observe` and `status` look at memory alone. All
    others read or change the store: see `ParameterStore` for what they raise and how long they take. Where the store fails,
    requests are served as before. What the arms have shown is not stored: after a restart a step counts, and waits, from its
    beginning.
    """

    def __init__(
        self,
        store: ParameterStore,
        profile: str,
        *,
        started_with: CacheConfig | None = None,
        pinned: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started_with`: what the service runs with; a candidate that needs a restart is refused. `pinned` are settings that the
        service was given by its own options, whatever a version says of them. `clock` gives seconds.
        """
        self.profile = profile
        self._store = store
        self._started_with = started_with
        self._pinned = frozenset(pinned)
        self._clock = clock
        self._lock = threading.RLock()
        """Held while the store is read or changed, which may take seconds."""
        self._counting = threading.Lock()
        """Held for moments: of the statistics, the verdict and the step's beginning."""
        self._seq = -1
        self._active: Version | None = None
        """The latest active version that this service can serve with."""
        self._refusal: str | None = None
        self._serving = _Serving(None, None, None)
        self._stopped: tuple[int, str] | None = None
        """A rollout that has to end, and why: it serves nobody even where the store cannot be told."""
        self._stats = {arm: ArmStats() for arm in Arm}
        self._since = clock()
        self._verdict: Verdict | None = None
        self.refresh()

    # -- for each request ----------------------------------------------------------------------------------------------

    def choose(self, key: str) -> Choice:
        """The arm of a request key. The same key stays in its arm, and once it is the candidate's it remains there."""
        serving = self._serving
        if (rollout := serving.current) is None:
            return Choice(Arm.STABLE, serving.stable, None)
        arm = Arm.STABLE if serving.stopped is not None else arm_of(rollout.salt, key, rollout.weight)
        return Choice(arm, serving.candidate if arm is Arm.CANDIDATE else serving.stable, rollout.id)

    def observe(self, choice: Choice, sample: Outcome | Audit | Shadow) -> None:
        """Counts what came of a request. Samples of a rollout that is over are left out."""
        with self._counting:
            if (rollout := self._serving.current) is not None and choice.rollout == rollout.id:
                self._stats[choice.arm].add(sample)

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Rollout | None:
        """The latest rollout, over or not, as of the last look at the store."""
        return self._serving.rollout

    @property
    def current(self) -> Rollout | None:
        """The one that is not over."""
        return self._serving.current

    @property
    def served(self) -> tuple[Version | None, Version | None]:
        """What the stable arm, or everybody, is served with, and the candidate of the rollout that runs."""
        serving = self._serving
        return serving.stable, serving.candidate

    @property
    def refusal(self) -> str | None:
        """Why requests are not served with the active version, if they are not: this service cannot take it as it runs."""
        return self._refusal

    def refresh(self) -> None:
        """Takes over what other processes did, such as an activation or an abort from the command line."""
        with self._lock:
            if self._store.head == self._seq:
                return
            events = self._store.events(max(0, self._seq))
            before = self._serving.rollout
            after = replay(events, self.profile, before)
            self._follow(self._store.active(self.profile))
            serving = self._served(after)
            with self._counting:
                self._serving = serving
                self._count_anew(before, after)
            self._seq = events[-1].seq if events else max(0, self._seq)

    def status(self) -> dict[str, Any]:
        """The latest rollout with what its arms have shown in this step and the last verdict, JSON-ready."""
        with self._counting:
            rollout, verdict, seconds = self._serving.rollout, self._verdict, self._elapsed()
        if rollout is None:
            return {"rollout": None}
        runs = not rollout.is_over
        return {
            "rollout": rollout.to_dict(),
            "step_seconds": seconds if runs else None,
            "verdict": _told(verdict) if runs and verdict is not None else None,
            "arms": _summaries(self._copies()),
        }

    # -- changing ------------------------------------------------------------------------------------------------------

    def start(
        self,
        candidate: Version | str,
        *,
        author: str,
        reason: str,
        plan: Plan | None = None,
        limits: Limits | None = None,
        native: bool = False,
        salt: str | None = None,
    ) -> Rollout:
        """Begins with the plan's first weight. The stable arm is the active version; with `native`, or if there is none, a native
        cache.

        Raises ParamsError if a rollout is not over yet, if the candidate is what is served already, or if it needs a restart.
        """
        with self._changing():
            if (running := self.current) is not None:
                raise ParamsError(
                    f"the rollout of {running.candidate} is {running.state.value} at {running.weight:g}%: promote or abort it"
                )
            if self._refusal is not None and not native:
                raise ParamsError(
                    f"{self._refusal}; restart the service, or activate a version that it can serve, and start then"
                )
            version = self._store.get(candidate if isinstance(candidate, str) else candidate.ref)
            baseline = None if native else self._store.active(self.profile)
            self._check_candidate(version, baseline)
            payload = {
                "baseline": baseline.ref if baseline is not None else None,
                "candidate": version.ref,
                "hash": version.hash,
                "plan": (plan or Plan()).to_dict(),
                "limits": (limits or Limits()).to_dict(),
                "salt": salt if salt is not None else secrets.token_hex(8),
            }
            self._store.record(START, payload, author=author, reason=reason, version=version)
        return self._latest()

    def promote(self, *, author: str, reason: str, full: bool = True) -> Rollout:
        """By hand: the candidate becomes the active version now; without `full` the next step begins."""
        with self._changing():
            rollout = self._require()
            if full or rollout.is_last_step:
                self._promote(rollout, author, reason)
            else:
                self._advance(rollout, author, reason)
        return self._latest()

    def abort(self, *, author: str, reason: str) -> Rollout:
        """All requests are served as before, at once; those of the candidate that are running end as they began.

        Where the store fails, this raises and is so all the same; `tick` records it later.
        """
        author, reason = signature(author, reason)
        if (running := self.current) is not None:
            self._stop(running, f"aborted by {author}: {reason}")
        with self._changing():
            self._record(ABORT, self._require(), author, reason, self._shown())
        return self._latest()

    def hold(self, *, author: str, reason: str) -> Rollout:
        """The weight stays until `resume`. The guard goes on watching and may still go back."""
        with self._changing():
            rollout = self._require()
            if Cause.OPERATOR in rollout.held:
                raise ParamsError(f"the rollout of {rollout.candidate} is held already; resume, promote or abort it")
            self._hold(rollout, Cause.OPERATOR, author, reason)
        return self._latest()

    def resume(self, *, author: str, reason: str) -> Rollout:
        """Ends every hold, the guard's too: its next breach counts as the first."""
        with self._changing():
            rollout = self._require()
            if not rollout.held:
                raise ParamsError(f"the rollout of {rollout.candidate} is not held; it is at {rollout.weight:g}%")
            self._resume(rollout, rollout.held, author, reason)
        return self._latest()

    def tick(self) -> Verdict | None:
        """Looks at the arms and moves on, holds or goes back. None: nothing runs.

        Call it every second or so, from a thread of the one service that serves this profile: it judges by what it has seen.
        """
        with self._lock:
            try:
                self.refresh()
            except ParamsError:
                self._stop_at_once()
                raise
            if (rollout := self.current) is None:
                return None
            verdict = self._judge(rollout, self._copies())
            with self._counting:
                self._verdict = verdict
            if verdict.decision is Decision.ROLLBACK:
                self._stop(rollout, verdict.reason)
            if self._calls_for_action(rollout, verdict):
                with self._changing():
                    if self.current == rollout:  # else somebody else was faster
                        self._act(rollout, verdict)
                self.refresh()
            return verdict

    def rest(self) -> None:
        """In place of `tick` while all is served natively: follows the store, judges nothing, and the step's time begins anew."""
        with self._lock:
            with self._counting:
                self._since = self._clock()
            self.refresh()

    # -- what the guard does -------------------------------------------------------------------------------------------

    def _judge(self, rollout: Rollout, stats: Mapping[Arm, ArmStats]) -> Verdict:
        if (stopped := self._serving.stopped) is not None:
            return Verdict(Decision.ROLLBACK, stopped)
        verdict = judge(
            stats[Arm.STABLE],
            stats[Arm.CANDIDATE],
            rollout.limits,
            min_samples=rollout.current_step.min_samples,
            compares=rollout.compares,
            suspected=Cause.BREACH in rollout.held,
        )
        left = rollout.current_step.pause_seconds - self._elapsed()
        if left > 0 and not any(breach.hard for breach in verdict.breaches):
            return Verdict(Decision.WAIT, f"{left:.0f} s of the pause are left")
        return verdict

    def _stop_at_once(self) -> None:
        """The store cannot be read: what is bad enough stops all the same, and is recorded later."""
        if (rollout := self.current) is not None:
            verdict = self._judge(rollout, self._copies())
            if verdict.decision is Decision.ROLLBACK:
                self._stop(rollout, verdict.reason)

    def _stop(self, rollout: Rollout, reason: str) -> None:
        with self._counting:
            self._stopped = (rollout.id, reason)
            if self._serving.rollout is not None and self._serving.rollout.id == rollout.id:
                self._serving = replace(self._serving, stopped=reason)

    def _calls_for_action(self, rollout: Rollout, verdict: Verdict) -> bool:
        if verdict.decision is Decision.PASS:
            return Cause.OPERATOR not in rollout.held or bool(rollout.held & _BY_GUARD)
        return verdict.decision is not Decision.WAIT or self._is_out_of_patience(rollout)

    def _act(self, rollout: Rollout, verdict: Verdict) -> None:
        if verdict.decision is Decision.ROLLBACK:
            self._record(ABORT, rollout, GUARD, verdict.reason, self._shown())
        elif verdict.decision is Decision.HOLD:
            self._hold(rollout, Cause.BREACH, GUARD, verdict.reason)
        elif verdict.decision is Decision.PASS:
            self._pass(rollout, verdict.reason)
        else:
            self._hold(rollout, Cause.PATIENCE, GUARD, f"after {self._elapsed():.0f} s: {verdict.reason}")

    def _pass(self, rollout: Rollout, reason: str) -> None:
        if mine := rollout.held & _BY_GUARD:
            self._resume(rollout, mine, GUARD, reason)
        if Cause.OPERATOR in rollout.held:
            return
        if rollout.is_last_step:
            self._promote(rollout, GUARD, reason)
        else:
            self._advance(rollout, GUARD, reason)

    def _is_out_of_patience(self, rollout: Rollout) -> bool:
        return not rollout.held and self._elapsed() > rollout.current_step.pause_seconds + rollout.plan.patience_seconds

    # -- events --------------------------------------------------------------------------------------------------------

    def _promote(self, rollout: Rollout, author: str, reason: str) -> None:
        """The event of the rollout comes first: it is over when the activation follows."""
        self._record(PROMOTE, rollout, author, reason, self._shown())
        candidate, active = self._store.get(rollout.candidate), self._store.active(self.profile)
        if active is None or active.number != candidate.number:
            self._store.activate(candidate, author=author, reason=f"rollout {rollout.id} promoted: {reason}"[:_MAX_REASON])

    def _advance(self, rollout: Rollout, author: str, reason: str) -> None:
        step = rollout.step + 1
        self._record(STEP, rollout, author, reason, {"step": step, "weight": rollout.plan.steps[step].weight, **self._shown()})

    def _hold(self, rollout: Rollout, cause: Cause, author: str, reason: str) -> None:
        self._record(HOLD, rollout, author, reason, {"causes": [cause.value], **self._shown()})

    def _resume(self, rollout: Rollout, causes: Iterable[Cause], author: str, reason: str) -> None:
        self._record(RESUME, rollout, author, reason, {"causes": sorted(causes)})

    def _record(self, kind: str, rollout: Rollout, author: str, reason: str, payload: Mapping[str, Any]) -> Event:
        version = self._store.get(rollout.candidate)
        return self._store.record(
            kind, {"rollout": rollout.id, **payload}, author=author, reason=reason[:_MAX_REASON], version=version
        )

    def _shown(self) -> dict[str, Any]:
        """What the arms have shown, where they were watched: a command in a process of its own has seen nothing."""
        stats = self._copies()
        return {"arms": _summaries(stats)} if any(arm.requests for arm in stats.values()) else {}

    def _copies(self) -> dict[Arm, ArmStats]:
        """Percentiles take milliseconds: nobody should wait for them who counts."""
        with self._counting:
            return {arm: stats.merge(ArmStats()) for arm, stats in self._stats.items()}

    # -- details -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One change of the store, made of what is there by now."""
        with self._lock, self._store.changing():
            self.refresh()
            yield

    def _require(self) -> Rollout:
        if (rollout := self.current) is None:
            raise ParamsError(f"no rollout of {self.profile} is running; start one")
        return rollout

    def _latest(self) -> Rollout:
        self.refresh()
        rollout = self.latest
        assert rollout is not None, "an event of it was just recorded"
        return rollout

    def _check_candidate(self, candidate: Version, baseline: Version | None) -> None:
        candidate.config()
        if candidate.profile != self.profile:
            raise ParamsError(f"{candidate.ref} is no version of {self.profile}; create one in it with --from {candidate.ref}")
        if baseline is not None and baseline.number == candidate.number:
            raise ParamsError(f"{candidate.ref} is active already; there is nothing to roll out")
        if stuck := self._restarts(candidate, baseline):
            raise ParamsError(f"{candidate.ref} cannot be rolled out while the service runs: {stuck}")

    def _restarts(self, wanted: Version, baseline: Version | None) -> str | None:
        """What of a version changes only at a restart; None: nothing, or nobody here knows what the service runs with."""
        if self._started_with is not None:
            before: Mapping[str, Any] = self._started_with.to_dict()
        elif baseline is not None:
            before = baseline.settings
        else:
            return None
        stuck = [change for change in needs_restart(before, wanted.settings) if change.name not in self._pinned]
        listed = ", ".join(f"{change.name} ({change.before} to {change.after})" for change in stuck)
        return f"{listed} changes only at a restart" if stuck else None

    def _follow(self, active: Version | None) -> None:
        """An active version that this service cannot take leaves it with the one before."""
        unfit = None if active is None else self.unfit(active)
        if active is None or unfit is None:
            self._active, self._refusal = active, None
            return
        now = self._active.ref if self._active is not None else "what the service was started with"
        self._refusal = f"{active.ref} is active, but requests are served with {now}: {unfit}"

    def _served(self, rollout: Rollout | None) -> _Serving:
        if rollout is None or rollout.is_over:
            return _Serving(rollout, self._active, None)
        stable = None if rollout.baseline is None else self._store.get(rollout.baseline)
        if stable is not None and self.unfit(stable) is not None:
            stable = self._active
        candidate = self._store.get(rollout.candidate)
        if (unfit := self.unfit(candidate)) is not None:
            self._stopped = (rollout.id, f"{candidate.ref} cannot be served: {unfit}")
        stopped = self._stopped[1] if self._stopped is not None and self._stopped[0] == rollout.id else None
        return _Serving(rollout, stable, candidate, stopped)

    def unfit(self, version: Version) -> str | None:
        """Why this service cannot serve with a version while it runs; None: it can."""
        try:
            version.config()
        except ConfigError as error:
            return str(error)
        return self._restarts(version, None)

    def _count_anew(self, before: Rollout | None, after: Rollout | None) -> None:
        """A new step, and an analysis that has to be confirmed, see new samples and take their time."""
        if after is None or (before is not None and not _begins_anew(before, after)):
            return
        self._since = self._clock()
        self._verdict = None
        if after.is_over:
            return
        self._stats[Arm.CANDIDATE] = ArmStats()
        # At 100% the stable arm gets nothing new: what it has shown stays.
        if after.compares or before is None or before.id != after.id:
            self._stats[Arm.STABLE] = ArmStats()

    def _elapsed(self) -> float:
        return max(0.0, self._clock() - self._since)


def _begins_anew(before: Rollout, after: Rollout) -> bool:
    return before.id != after.id or before.step != after.step or (Cause.BREACH in after.held and Cause.BREACH not in before.held)


def _summaries(stats: Mapping[Arm, ArmStats]) -> dict[str, Any]:
    return {arm.value: of_arm.summary() for arm, of_arm in stats.items()}


def _told(verdict: Verdict) -> dict[str, Any]:
    return {
        "decision": verdict.decision.value,
        "reason": verdict.reason,
        "missing": dict(verdict.missing),
        "breaches": [str(breach) for breach in verdict.breaches],
    }
