"""What the events add up to: the versions of each profile, and which of them is active. A pure replay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType

from vera.errors import StoreError
from vera.params.records import Event, Version
from vera.params.settings import content_hash

CREATING = ("create", "import")
ACTIVATING = ("activate", "rollback")


@dataclass(slots=True)
class ProfileState:
    """One profile."""

    versions: list[Version] = field(default_factory=list)
    """Number 1 first."""
    stack: list[int] = field(default_factory=list)
    """Numbers of versions: the active one last, before it what a rollback goes back to."""

    @property
    def active(self) -> Version | None:
        return self.versions[self.stack[-1] - 1] if self.stack else None

    @property
    def before(self) -> Version | None:
        """What a rollback makes active."""
        return self.versions[self.stack[-2] - 1] if len(self.stack) > 1 else None

    @property
    def newest(self) -> Version:
        return self.versions[-1]


@dataclass(slots=True)
class StoreState:
    """All profiles, after some event."""

    profiles: dict[str, ProfileState] = field(default_factory=dict)
    seq: int = 0
    hash: str | None = None
    """Of event `seq`."""

    def apply(self, events: Iterable[Event]) -> None:
        """Takes events over in their order. A StoreError names the first that does not follow from what was before it."""
        for event in events:
            if event.kind in CREATING:
                self._add(event)
            elif event.kind in ACTIVATING:
                self._activate(event)
            self.seq, self.hash = event.seq, event.hash

    def _add(self, event: Event) -> None:
        profile = self.profiles.setdefault(str(event.profile), ProfileState())
        version = version_of(event)
        if version.number != len(profile.versions) + 1:
            raise StoreError(
                f"event {event.seq} adds {version.ref} after {len(profile.versions)} versions; the store is not consistent"
            )
        if content_hash(version.settings) != version.hash:
            raise StoreError(f"the settings of {version.ref} (event {event.seq}) do not match their hash {version.hash[:12]}")
        profile.versions.append(version)

    def _activate(self, event: Event) -> None:
        profile = self.profiles.get(str(event.profile))
        if profile is None or event.number is None or not 1 <= event.number <= len(profile.versions):
            raise StoreError(f"event {event.seq} activates {event.ref}, which is not there; the store is not consistent")
        if event.kind == "rollback":
            if profile.before is None or profile.before.number != event.number:
                raise StoreError(f"event {event.seq} goes back to {event.ref}, which was not active before")
            profile.stack.pop()
        else:
            profile.stack.append(event.number)


def version_of(event: Event) -> Version:
    """The version that a `create` or `import` event brought. What was imported keeps its author, reason and time."""
    payload = event.payload
    origin = payload.get("origin") or {}
    try:
        return Version(
            profile=str(event.profile),
            number=int(event.number or 0),
            hash=payload["hash"],
            settings=MappingProxyType(payload["settings"]),
            author=origin.get("author", event.author),
            reason=origin.get("reason", event.reason),
            time=origin.get("time", event.time),
            parent=payload.get("parent"),
            event=event.seq,
        )
    except KeyError as error:
        raise StoreError(f"event {event.seq} brings a version without {error}; the store is not consistent") from None
