"""The profiles that a new store begins with. They differ in live settings alone, so a running service can take any of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Starter:
    """A starting point: what it is for, and what it changes of the defaults."""

    profile: str
    reason: str
    changes: dict[str, Any] = field(default_factory=dict)


AUTHOR = "vera"

STARTERS = (
    Starter(
        "long-document",
        "long documents, long answers: the defaults of an adaptive cache",
        {"mode": "adaptive"},
    ),
    Starter(
        "multi-turn",
        "conversations: answers are short, so pages are rescored twice as often",
        {"mode": "adaptive", "recalibrate_every": 128},
    ),
    Starter(
        "short-text",
        "short prompts: native up to 4096 tokens",
        {"mode": "adaptive", "min_context": 4096},
    ),
)
