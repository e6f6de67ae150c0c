"""The degrade switch of a service: a breaker whose every flip is an event of the store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vera.errors import ParamsError
from vera.params import Event, ParameterStore, signature
from vera.rollout.arms import position
from vera.rollout.breaker import Breaker, BreakerSettings, BreakerState, Override, Signals, look, overridden

BREAKER = "breaker"
"""The author of flips that happen by themselves."""
_KIND = "degrade"
_LATE = "degrade.late"
_SALT = "half-open"
_MAX_REASON = 2000
_KEPT = 100
"""Flips that wait for a store that fails; beyond that the oldest are lost."""


@dataclass(frozen=True, slots=True)
class Flip:
    """The switch has changed."""

    before: BreakerState
    after: BreakerState
    author: str
    reason: str


class DegradeSwitch:
    """Says of each request whether it may be served adaptively. Any thread may call.

    `adaptive` looks at memory alone. A flip counts from the moment it is decided; where the store fails, it is recorded later and
    `failure` says why. A restart finds the switch as it was, with its waiting times begun anew.
    """

    def __init__(
        self,
        store: ParameterStore,
        profile: str,
        settings: BreakerSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile = profile
        self.settings = settings or BreakerSettings()
        self.failure: ParamsError | None = None
        """Why the store could not be read or a flip not be recorded at the last try."""
        self._store = store
        self._clock = clock
        self._storing = threading.Lock()
        """Held while the store is read or changed, which may take seconds."""
        self._deciding = threading.Lock()
        """Held for moments: of the breaker and of what waits to be recorded. Taken last."""
        self._now = clock()
        self._seq = 0
        self._waiting: deque[tuple[Breaker, str, str]] = deque(maxlen=_KEPT)
        self._breaker = Breaker(since=self._now, well_since=self._now)
        self._adopted_from: BreakerState | None = None
        """The state before what another process said was taken over."""
        self._adopt()
        self._adopted_from = None

    @property
    def breaker(self) -> Breaker:
        return self._breaker

    @property
    def num_unrecorded(self) -> int:
        """Flips that the store does not have yet."""
        return len(self._waiting)

    def adaptive(self, key: str) -> bool:
        """A request with this key may be adaptive. Half-open, that is so for a fixed share of keys."""
        state = self._breaker.state
        if state is BreakerState.HALF_OPEN:
            return position(_SALT, key) < self.settings.half_open_share
        return state is BreakerState.CLOSED

    def look(self, signals: Signals) -> Flip | None:
        """`sync` and `judge` in one. Call it every second or so, from a thread."""
        taken_over = self.sync()
        flip = None if taken_over is not None else self.judge(signals)
        late = self.sync()
        return late or flip or taken_over

    def judge(self, signals: Signals) -> Flip | None:
        """What the breaker makes of what was seen. In memory, at once; `sync` records it."""
        with self._deciding:
            before = self._breaker
            after = look(before, signals, self._time(), self.settings)
            flip = self._set(after, BREAKER) if after.state is not before.state else None
            self._breaker = after
            return flip

    def sync(self) -> Flip | None:
        """Takes over a flip by another process, such as a command, and records what waits. From a thread: it reads the store."""
        with self._storing:
            self.failure = None
            self._try(self._adopt)
            before = self._adopted_from
            self._try(self._record_waiting)
            before, self._adopted_from = before or self._adopted_from, None
            if before is None or before is self._breaker.state:
                return None
            return Flip(before, self._breaker.state, "another process", self._breaker.reason)

    def override(self, override: Override, *, author: str, reason: str) -> Flip | None:
        """`decide` and `sync` in one, also where the store fails. None: the state is as before. Raises ConfigError for author and
        reason."""
        flip = self.decide(override, author=author, reason=reason)
        self.sync()
        return flip

    def decide(self, override: Override, *, author: str, reason: str) -> Flip | None:
        """By hand. In memory, at once; `sync` records it. Raises ConfigError for author and reason."""
        author, reason = signature(author, reason)
        with self._deciding:
            return self._set(overridden(self._breaker, override, reason, self._time()), author)

    def status(self) -> dict[str, Any]:
        """JSON-ready."""
        breaker = self._breaker
        return {
            **breaker.to_dict(),
            "reason": breaker.reason,
            "seconds": max(0.0, self._now - breaker.since),
            "unrecorded": self.num_unrecorded,
            "failure": str(self.failure) if self.failure is not None else None,
        }

    def _set(self, after: Breaker, author: str) -> Flip | None:
        before, self._breaker = self._breaker, after
        self._waiting.append((after, author, after.reason))
        return Flip(before.state, after.state, author, after.reason) if after.state is not before.state else None

    def _adopt(self) -> None:
        """What the store says since the last look, unless something of ours has yet to be said."""
        if self._waiting or self._store.head == self._seq:
            return
        events = self._store.events(self._seq)
        with self._deciding:
            if self._waiting:
                return
            if flips := [event for event in events if self._concerns(event)]:
                self._adopted_from = self._breaker.state
                self._breaker = Breaker.from_dict(flips[-1].payload, reason=flips[-1].reason, now=self._time())
            self._seq = events[-1].seq if events else self._seq

    def _record_waiting(self) -> None:
        """Where another process has flipped meanwhile, its word is the latest: ours is kept as history only."""
        if not (waiting := list(self._waiting)):
            return
        with self._store.changing():
            others = [event for event in self._store.events(self._seq) if self._concerns(event)]
            for breaker, author, reason in waiting:
                kept, kind, why = breaker.to_dict(), _LATE if others else _KIND, reason[:_MAX_REASON]
                event = self._store.record(kind, kept, author=author, reason=why, profile=self.profile)
        with self._deciding:
            left = [flip for flip in self._waiting if not any(flip is done for done in waiting)]
            self._waiting = deque(left, maxlen=_KEPT)
        if others:
            self._adopt()
        else:
            self._seq = event.seq

    def _concerns(self, event: Event) -> bool:
        return event.kind == _KIND and event.profile == self.profile

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ParamsError as error:
            self.failure = error

    def _time(self) -> float:
        """Never goes back, whatever the clock does."""
        self._now = max(self._now, self._clock())
        return self._now
