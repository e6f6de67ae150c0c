"""The work that settings are tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vera.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of the work, and the text on which drift is measured. Raises ConfigError for what cannot be."""

    name: str
    """One of WORKLOADS, or `custom`."""
    batch: int
    """Sequences that are decoded together."""
    context: int
    """Tokens of each one's prompt."""
    new_tokens: int
    """Tokens of each one's answer: the steps that are timed, and those that drift is taken over."""
    text: str
    """`prose`, `code`, `chat`, or a file."""
    cold_share: float | None
    """The warm store is so small that this share of its units is cold. None: it has room for all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Cache settings that this work starts from, besides those of its profile."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 up")
        if self.cold_share is not None and not 0 <= self.cold_share <= 1:
            raise ConfigError(f"cold_share={self.cold_share!r} is outside 0 to 1")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the settings: those are part of the result."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}


WORKLOADS = {
    "long-document": Workload("long-document", batch=4, context=7600, new_tokens=128, text="prose", cold_share=0.1),
    "multi-turn": Workload("multi-turn", batch=8, context=4000, new_tokens=96, text="chat", cold_share=0.1),
    "short-text": Workload(
        "short-text", batch=16, context=1000, new_tokens=64, text="prose", cold_share=None, settings={"min_context": 256}
    ),
}
"""The shapes that the profiles of a new parameter store are named for. Short texts would stay native with their profile's
`min_context`, so theirs is lowered: the search then says whether that pays."""


def workload(name: str | None, **changes: Any) -> Workload:
    """A named workload with what was given changed; values that are None were not. None: long-document, as `custom` if changed.
    A cold share of 0 is none.

    Raises ConfigError for a name that is not known.
    """
    known = WORKLOADS.get(name or "long-document")
    if known is None:
        raise ConfigError(f"workload={name!r} is not one of {', '.join(WORKLOADS)}")
    given = {key: value for key, value in changes.items() if value is not None}
    if given.get("cold_share") == 0:
        given["cold_share"] = None
    return replace(known, name="custom" if given and name is None else known.name, **given)
