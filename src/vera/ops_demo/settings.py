"""What the demonstration is made of."""

from __future__ import annotations

from dataclasses import dataclass

PROFILE = "long-document"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that is made and rolled out."""

    changes: tuple[str, ...]
    """Settings, as NAME=VALUE."""
    reason: str
    plan: str
    """Steps, as WEIGHT:PAUSE:SAMPLES."""
    limits: tuple[str, ...]
    """The guard's, as NAME=VALUE."""


_SHORT = ("ttft_ratio=none", "itl_ratio=none", "audit_ratio=none", "shadow_agreement=0.9", "min_audits=1")
"""Latencies are not compared, since two busy cores make noise of them, and a few samples have to do. Divergence from native and
audited errors keep the limits that a real rollout has."""


@dataclass(frozen=True, slots=True)
class OpsDemo:
    """The defaults take a few minutes on two cores with the embedded model."""

    model: str = "embedded"
    serve_options: tuple[str, ...] = ("--cache-max-bytes", "800000000")
    """Of `vera serve`, besides those that the demonstration needs."""
    shadow_share: float = 0.5
    num_documents: int = 3
    document_characters: int = 10000
    """About 2,400 tokens of English: more than `min_context`, below which requests are native whatever the version says."""
    answer_tokens: int = 24
    num_clients: int = 4
    """Most requests in flight."""
    think_seconds: float = 0.0
    """Between an answer and the client's next question."""
    baseline_requests: int = 12
    degraded_requests: int = 4
    patience_seconds: float = 1200.0
    """How long one part may take before the demonstration gives up."""
    good: Candidate = Candidate(
        ("attention_tolerance=0.01",),
        "a tighter tolerance than the default",
        "5:3:1,25:3:2,50:3:3,100:3:4",
        (*_SHORT, "min_shadow_tokens=20"),
    )
    bad: Candidate = Candidate(
        ("attention_tolerance=1", "hot_max_share=0"),
        "far too large a tolerance, to see what the guard does",
        "25:3:2,100:3:2",
        (*_SHORT, "min_shadow_tokens=40"),
    )
