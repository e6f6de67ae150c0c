"""The nouns of the store: events, versions, and what a verification found. All are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.params.settings import checked


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the audit trail. `seq` orders events; `time` is only what the clock said."""

    seq: int
    """From 1, without gaps."""
    kind: str
    """`create`, `import`, `activate`, `rollback`, or another subsystem's, such as `rollout.start` or `degrade`."""
    profile: str | None
    number: int | None
    """The version that it concerns, with `profile`."""
    author: str
    reason: str
    time: str
    """UTC, ISO 8601."""
    payload: Mapping[str, Any]
    hash: str
    """SHA-256 over the previous event's hash and this one's contents, in hexadecimal."""

    @property
    def ref(self) -> str | None:
        """`PROFILE@NUMBER`, or the profile alone."""
        return self.profile if self.number is None else f"{self.profile}@{self.number}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Version:
    """A full set of cache settings under a name. It never changes."""

    profile: str
    number: int
    """From 1 within its profile."""
    hash: str
    """Of the settings: see `settings.content_hash`."""
    settings: Mapping[str, Any]
    author: str
    reason: str
    time: str
    """When it was made, UTC, ISO 8601. Of an imported one: where it came from."""
    parent: str | None
    """What it was derived from, as `PROFILE@NUMBER`."""
    event: int
    """The event that brought it into this store."""

    @property
    def ref(self) -> str:
        """`PROFILE@NUMBER`: how people, requests and logs name it."""
        return f"{self.profile}@{self.number}"

    def config(self) -> CacheConfig:
        """Checked again: a ConfigError names the version if this release no longer takes its settings."""
        try:
            return checked(self.settings)
        except ConfigError as error:
            raise ConfigError(f"{self.ref} does not suit this release of Vera: {error}") from None

    def with_changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Its settings with some changed, for `ParameterStore.create`."""
        return {**self.settings, **changes}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that `verify` found."""

    seq: int | None
    """The event that is bad; None where no single one is."""
    message: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a walk over the whole store found."""

    num_events: int
    num_versions: int
    head: str
    """`SEQ:HASH` of the last event. Noted down elsewhere, it lets a later `verify` find what nothing here can show."""
    problems: tuple[Problem, ...]
    """The first bad event comes first. Empty: the store is as it was written, as far as can be known."""
    notes: tuple[str, ...]
    """What is odd and proves nothing."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"ok": self.ok, **asdict(self)}
