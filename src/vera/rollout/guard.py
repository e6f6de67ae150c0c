"""Whether a candidate may go on: a pure comparison of two arms.

The rules against noise:

- Nothing passes before the step's samples are there, and those of each figure that is compared.
- A breach of an ordinary limit holds the rollout. It is rolled back if the next analysis finds a breach too; samples are counted
  anew in between, so the second analysis sees other requests than the first.
- Hard limits are rolled back at once, and as soon as they are sure: values that are not finite, an error rate whose lower
  confidence bound is over its limit, a divergence or an audited error many times its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self

from vera.errors import ConfigError
from vera.rollout.stats import ArmStats

_Z = 2.576
"""Of a two-sided 99% interval."""


class Decision(StrEnum):
    """What an analysis comes to."""

    WAIT = "wait"
    """Too few samples to say anything."""
    PASS = "pass"
    HOLD = "hold"
    """A limit is breached for the first time: the weight stays until the next analysis."""
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the candidate may be. None as a limit: that figure is not compared, and needs no samples."""

    error_increase: float | None = 0.01
    """Most that its error rate may be above the stable arm's. Hard."""
    ttft_ratio: float | None = 1.25
    """Most of the stable arm's P99 of the time to the first token."""
    itl_ratio: float | None = 1.25
    """Most of the stable arm's P99 of the gaps between tokens."""
    latency_slack_seconds: float = 0.005
    """A P99 that is longer by no more than this is no breach, whatever the ratio."""
    recompute_share: float | None = 0.2
    """Most of its decode steps that may restore a cold page."""
    audit_error: float | None = 0.05
    """Most that its mean true error may be, relative to the value norms."""
    audit_ratio: float | None = 1.5
    """Most that its true errors may be by its estimated ones."""
    shadow_kl: float | None = 2e-3
    """Most nats a token that it may diverge from native."""
    shadow_agreement: float | None = 0.97
    """Least share of tokens at which native has the same most likely one."""
    hard_factor: float = 10.0
    """A divergence or audited error of this many times its limit is hard."""
    min_latencies: int = 100
    """Fewest latencies of each kind and arm: with fewer a P99 is the largest value."""
    min_decode_steps: int = 200
    """Fewest bounded decode steps of the candidate that a share is made of. An analysis does not wait for them."""
    min_audits: int = 5
    """Fewest audited layers of the candidate."""
    min_shadow_tokens: int = 200
    """Fewest tokens of shadow answers of the candidate."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            optional = entry.default is None or entry.name in _OPTIONAL
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _TOO_LARGE:
                raise ConfigError(f"{entry.name}={value!r} must be a number from 0 up{', or None' if optional else ''}")
            if entry.name.startswith("min_") and not isinstance(value, int):
                raise ConfigError(f"{entry.name}={value!r} must be a whole number")
        for name in ("ttft_ratio", "itl_ratio", "hard_factor"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value!r} is below 1: no candidate would ever pass")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Unknown names raise a ConfigError that lists the known ones."""
        known = [entry.name for entry in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"unknown limit {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


_TOO_LARGE = 1e15

_OPTIONAL = (
    "error_increase",
    "ttft_ratio",
    "itl_ratio",
    "recompute_share",
    "audit_error",
    "audit_ratio",
    "shadow_kl",
    "shadow_agreement",
)


@dataclass(frozen=True, slots=True)
class Breach:
    """A figure of the candidate beyond its limit."""

    metric: str
    stable: float | None
    """None: it has none, or it is not compared with."""
    candidate: float
    limit: float
    stable_count: int
    candidate_count: int
    """Samples that the figures are made of."""
    hard: bool

    def __str__(self) -> str:
        beside = "" if self.stable is None else f", stable {self.stable:.4g} of {self.stable_count}"
        bound = "at least" if self.metric == "shadow_agreement" else "at most"
        return (
            f"{self.metric} {self.candidate:.4g} of {self.candidate_count} samples{beside}; allowed is {bound} {self.limit:.4g}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an analysis comes to, and why."""

    decision: Decision
    reason: str
    breaches: tuple[Breach, ...] = ()
    missing: tuple[tuple[str, int], ...] = ()
    """What there is too little of, and how much is missing."""


def judge(
    stable: ArmStats,
    candidate: ArmStats,
    limits: Limits,
    *,
    min_samples: int,
    compares: bool = True,
    suspected: bool = False,
) -> Verdict:
    """The verdict on one step.

    `min_samples` are finished requests of each arm. `compares`: False where all requests are the candidate's, so that the stable
    arm gets no more samples; what it has is still compared with, if it is enough. `suspected`: the last analysis found a breach.
    """
    breaches = tuple(_breaches(stable, candidate, limits))
    if hard := tuple(breach for breach in breaches if breach.hard):
        return Verdict(Decision.ROLLBACK, f"beyond a hard limit: {'; '.join(map(str, hard))}", hard)
    missing = _missing(stable, candidate, limits, min_samples, compares=compares)
    if missing:
        reason = "too few samples: " + ", ".join(f"{count} more {what}" for what, count in missing)
        return Verdict(Decision.WAIT, reason, missing=missing)
    if not breaches:
        return Verdict(Decision.PASS, f"within all limits after {candidate.requests} requests of the candidate")
    found = "; ".join(map(str, breaches))
    if suspected:
        return Verdict(Decision.ROLLBACK, f"beyond a limit in two successive analyses: {found}", breaches)
    return Verdict(Decision.HOLD, f"beyond a limit, to be confirmed with new samples: {found}", breaches)


def wilson_lower(count: int, total: int) -> float:
    """The lower end of the 99% Wilson interval of a share: what is sure with so few samples. 0 without any."""
    if not total:
        return 0.0
    share, square = count / total, _Z * _Z
    centre = share + square / (2 * total)
    margin = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return max(0.0, (centre - margin) / (1 + square / total))


def _missing(
    stable: ArmStats, candidate: ArmStats, limits: Limits, min_samples: int, *, compares: bool
) -> tuple[tuple[str, int], ...]:
    wanted = [("requests of the candidate", min_samples, candidate.requests)]
    if compares:
        wanted.append(("requests of the stable arm", min_samples, stable.requests))
    arms = [("candidate", candidate), *([("stable arm", stable)] if compares else [])]
    for name, arm in arms:
        if limits.ttft_ratio is not None:
            wanted.append((f"first tokens of the {name}", limits.min_latencies, len(arm.ttft_seconds)))
        if limits.itl_ratio is not None:
            wanted.append((f"token gaps of the {name}", limits.min_latencies, len(arm.itl_seconds)))
    # A candidate whose requests are all native has nothing to audit.
    if (limits.audit_error is not None or limits.audit_ratio is not None) and candidate.decode_steps:
        wanted.append(("audits of the candidate", limits.min_audits, candidate.audits))
    if limits.shadow_kl is not None or limits.shadow_agreement is not None:
        wanted.append(("shadow tokens of the candidate", limits.min_shadow_tokens, candidate.shadow_tokens))
    return tuple((what, least - there) for what, least, there in wanted if there < least)


def _breaches(stable: ArmStats, candidate: ArmStats, limits: Limits) -> list[Breach]:
    """Every figure that is beyond its limit and has its samples; hard limits need fewer."""
    found = [
        _nonfinite(stable, candidate),
        _errors(stable, candidate, limits),
        _latency("ttft_p99", limits.ttft_ratio, stable, candidate, limits),
        _latency("itl_p99", limits.itl_ratio, stable, candidate, limits),
        _above("recompute_share", limits.recompute_share, stable, candidate, "decode_steps", limits.min_decode_steps),
        _above("audit_error", limits.audit_error, stable, candidate, "audits", limits.min_audits, limits.hard_factor),
        _above("audit_ratio", limits.audit_ratio, stable, candidate, "audits", limits.min_audits, limits.hard_factor),
        _above("shadow_kl", limits.shadow_kl, stable, candidate, "shadow_tokens", limits.min_shadow_tokens, limits.hard_factor),
        _agreement(stable, candidate, limits),
    ]
    return [breach for breach in found if breach is not None]


def _nonfinite(stable: ArmStats, candidate: ArmStats) -> Breach | None:
    if not candidate.nonfinite:
        return None
    return Breach("nonfinite", stable.nonfinite, candidate.nonfinite, 0, stable.requests, candidate.requests, hard=True)


def _errors(stable: ArmStats, candidate: ArmStats, limits: Limits) -> Breach | None:
    if limits.error_increase is None or candidate.error_rate is None:
        return None
    limit = (stable.error_rate or 0.0) + limits.error_increase
    if wilson_lower(candidate.errors, candidate.requests) <= limit:
        return None
    return Breach("error_rate", stable.error_rate, candidate.error_rate, limit, stable.requests, candidate.requests, hard=True)


def _latency(metric: str, ratio: float | None, stable: ArmStats, candidate: ArmStats, limits: Limits) -> Breach | None:
    window = metric.replace("p99", "seconds")
    counts = len(getattr(stable, window)), len(getattr(candidate, window))
    if ratio is None or min(counts) < max(1, limits.min_latencies):
        return None
    before, after = getattr(stable, metric), getattr(candidate, metric)
    limit = max(before * ratio, before + limits.latency_slack_seconds)
    return Breach(metric, before, after, limit, *counts, hard=False) if after > limit else None


def _above(
    metric: str,
    limit: float | None,
    stable: ArmStats,
    candidate: ArmStats,
    counter: str,
    least: int,
    hard_factor: float | None = None,
) -> Breach | None:
    """An absolute limit. What is beyond `hard_factor` times it is hard, and that needs half of the samples; NaN needs none."""
    value, count = getattr(candidate, metric), getattr(candidate, counter)
    if limit is None or value is None or value <= limit:
        return None
    hard = hard_factor is not None and not value <= limit * hard_factor and (count * 2 >= least or not math.isfinite(value))
    if not hard and count < least:
        return None
    return Breach(metric, getattr(stable, metric), value, limit, getattr(stable, counter), count, hard)


def _agreement(stable: ArmStats, candidate: ArmStats, limits: Limits) -> Breach | None:
    value, count = candidate.shadow_agreement, candidate.shadow_tokens
    if limits.shadow_agreement is None or value is None or count < limits.min_shadow_tokens or value >= limits.shadow_agreement:
        return None
    return Breach(
        "shadow_agreement", stable.shadow_agreement, value, limits.shadow_agreement, stable.shadow_tokens, count, hard=False
    )
