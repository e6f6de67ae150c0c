"""Which arm a request belongs to: a fixed place for each key, so that a growing weight only ever moves keys to the candidate."""

from __future__ import annotations

import hashlib
from enum import StrEnum


class Arm(StrEnum):
    """The two sides that a rollout compares."""

    STABLE = "stable"
    """What was served before: a version, or a native cache."""
    CANDIDATE = "candidate"


def position(salt: str, key: str) -> float:
    """Where a key lies in [0, 1): always the same for a salt, and evenly spread over keys. Another salt deals anew."""
    digest = hashlib.sha256(f"{salt}\x1f{key}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def arm_of(salt: str, key: str, weight: float) -> Arm:
    """`weight` is the candidate's share of keys in percent."""
    return Arm.CANDIDATE if position(salt, key) < weight / 100 else Arm.STABLE
