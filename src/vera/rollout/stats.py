"""What is known of one arm in one step of a rollout: counters that only grow, and the latest latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self

from vera.metrics.stats import percentile

WINDOW = 10_000
"""Latencies kept of each kind."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request."""

    failed: bool = False
    """The server's fault: an error, a deadline that passed in the engine. Not what a client got wrong or gave up."""
    ttft_seconds: float | None = None
    """From its arrival to its first token. None: there was none."""
    itl_seconds: tuple[float, ...] = ()
    """The gaps between its tokens."""
    nonfinite: int = 0
    """Logits or outputs of it that were not finite."""
    decode_steps: int = 0
    """Bounded decode steps."""
    recompute_steps: int = 0
    """Those of them in which a cold page was restored."""
    uncovered_hits: int = 0


@dataclass(frozen=True, slots=True)
class Audit:
    """One audited layer: true and estimated error of its output, relative to the value norms."""

    true_error: float
    estimated_error: float


@dataclass(frozen=True, slots=True)
class Shadow:
    """One answer that was also computed natively, token by token."""

    tokens: int
    kl_sum: float
    """Nats: the divergence from native, added up over the tokens."""
    agreed: int
    """Tokens at which both have the same most likely one."""


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class ArmStats:
    """Of one arm. One thread at a time may add; `merge` joins what several processes saw."""

    requests: int = 0
    errors: int = 0
    nonfinite: int = 0
    decode_steps: int = 0
    recompute_steps: int = 0
    uncovered_hits: int = 0
    audits: int = 0
    audit_true_sum: float = 0.0
    audit_estimated_sum: float = 0.0
    shadows: int = 0
    shadow_tokens: int = 0
    shadow_kl_sum: float = 0.0
    shadow_agreed: int = 0
    ttft_seconds: deque[float] = field(default_factory=_window)
    itl_seconds: deque[float] = field(default_factory=_window)

    def add(self, sample: Outcome | Audit | Shadow) -> None:
        """Counts one request, audit or shadow answer."""
        if isinstance(sample, Outcome):
            self._add_outcome(sample)
        elif isinstance(sample, Audit):
            self.audits += 1
            self.audit_true_sum += sample.true_error
            self.audit_estimated_sum += sample.estimated_error
        else:
            self.shadows += 1
            self.shadow_tokens += sample.tokens
            self.shadow_kl_sum += sample.kl_sum
            self.shadow_agreed += sample.agreed

    def merge(self, other: ArmStats) -> ArmStats:
        """Both together; of latencies `other`'s count as the later ones. Neither is changed."""
        merged = ArmStats()
        for entry in fields(ArmStats):
            mine, its = getattr(self, entry.name), getattr(other, entry.name)
            setattr(merged, entry.name, _joined(mine, its) if isinstance(mine, deque) else mine + its)
        return merged

    @property
    def error_rate(self) -> float | None:
        return _ratio(self.errors, self.requests)

    @property
    def ttft_p99(self) -> float | None:
        """Seconds."""
        return percentile(self.ttft_seconds, 0.99) if self.ttft_seconds else None

    @property
    def itl_p99(self) -> float | None:
        """Seconds."""
        return percentile(self.itl_seconds, 0.99) if self.itl_seconds else None

    @property
    def recompute_share(self) -> float | None:
        """Of bounded decode steps, those that restored a cold page."""
        return _ratio(self.recompute_steps, self.decode_steps)

    @property
    def audit_error(self) -> float | None:
        """Mean true error."""
        return _ratio(self.audit_true_sum, self.audits)

    @property
    def audit_ratio(self) -> float | None:
        """True by estimated error; above 1 the estimates, and so the tolerance, promise too much."""
        return _ratio(self.audit_true_sum, self.audit_estimated_sum)

    @property
    def shadow_kl(self) -> float | None:
        """Nats a token, from native."""
        return _ratio(self.shadow_kl_sum, self.shadow_tokens)

    @property
    def shadow_agreement(self) -> float | None:
        """Share of tokens at which native has the same most likely one."""
        return _ratio(self.shadow_agreed, self.shadow_tokens)

    def summary(self) -> dict[str, Any]:
        """Counts and figures, JSON-ready: what an event keeps of an analysis."""
        counts = {entry.name: getattr(self, entry.name) for entry in fields(self) if isinstance(getattr(self, entry.name), int)}
        figures = (
            "error_rate",
            "ttft_p99",
            "itl_p99",
            "recompute_share",
            "audit_error",
            "audit_ratio",
            "shadow_kl",
            "shadow_agreement",
        )
        return {**counts, **{name: _finite(getattr(self, name)) for name in figures}}

    @classmethod
    def of(cls, samples: Iterable[Outcome | Audit | Shadow]) -> Self:
        """Of all these."""
        stats = cls()
        for sample in samples:
            stats.add(sample)
        return stats

    def _add_outcome(self, outcome: Outcome) -> None:
        self.requests += 1
        self.errors += outcome.failed
        self.nonfinite += outcome.nonfinite
        self.decode_steps += outcome.decode_steps
        self.recompute_steps += outcome.recompute_steps
        self.uncovered_hits += outcome.uncovered_hits
        if outcome.ttft_seconds is not None:
            self.ttft_seconds.append(outcome.ttft_seconds)
        self.itl_seconds.extend(outcome.itl_seconds)


def _joined(first: deque[float], second: deque[float]) -> deque[float]:
    joined = first.copy()
    joined.extend(second)
    return joined


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinities."""
    return value if value is None or abs(value) < float("inf") else str(value)
