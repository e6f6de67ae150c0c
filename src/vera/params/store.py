"""The store of parameter versions: create, activate, roll back, look back, verify."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vera.config import CacheConfig, cache_home
from vera.errors import ConfigError, ParamsError, StoreError, UnknownVersion
from vera.params.journal import Journal
from vera.params.records import Event, Problem, Verification, Version
from vera.params.settings import checked, content_hash, full_settings, suggestion
from vera.params.starters import AUTHOR, STARTERS
from vera.params.state import ACTIVATING, CREATING, ProfileState, StoreState

_PROFILE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_REF = re.compile(r"([^@]+)@(\d{1,9})")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_HEAD = re.compile(r"(\d{1,18}):([0-9a-f]{64})")
_KIND = re.compile(r"[a-z]+(\.[a-z]+)*")
_MAX_AUTHOR = 200
_MAX_REASON = 2000
"""Letters."""
NATIVE = "native"
"""Not a profile: what a rollout may start from."""


def default_store_path() -> Path:
    """Where the store is unless another path is given: beside the converted models."""
    return cache_home() / "params.sqlite3"


class ParameterStore:
    """Versions of named profiles with an audit trail, in one file that several processes can share.

    Made on first use, with the profiles of `starters`. Any thread may call any method; a call reads or writes a file and may wait
    for another process, so an event loop should call from a thread. A change is on disk when its call returns; a call that
    raises has changed nothing. Raises StoreError when the file cannot be read, written or trusted, UnknownVersion for what is not
    there, ParamsError for what cannot be done as things stand, ConfigError for wrong settings, authors and reasons.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        clock: Callable[[], datetime] | None = None,
        busy_seconds: float = 5.0,
    ) -> None:
        """`clock` gives the time that events carry; `busy_seconds` is how long to wait for another process's change."""
        self._journal = Journal(
            Path(path) if path is not None else default_store_path(),
            clock=clock or (lambda: datetime.now(UTC)),
            busy_seconds=busy_seconds,
        )
        self._lock = threading.RLock()
        self._state = StoreState()
        if self._journal.writable and not self._journal.head():
            self._seed()

    def close(self) -> None:
        """Idempotent."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def path(self) -> Path:
        return self._journal.path

    @property
    def is_writable(self) -> bool:
        """False: the file or its disk is read-only, and only reading works."""
        return self._journal.writable

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """The number of the latest event of any process. One cheap query: poll it to learn of changes."""
        return self._journal.head()

    def profiles(self) -> list[str]:
        """Names, sorted."""
        with self._lock:
            return sorted(self._current().profiles)

    def versions(self, profile: str) -> list[Version]:
        """All versions of a profile, the oldest first."""
        with self._lock:
            return list(self._profile(profile).versions)

    def active(self, profile: str) -> Version | None:
        """The version that services of this profile serve with. None: none was ever activated."""
        with self._lock:
            return self._profile(profile).active

    def before(self, profile: str) -> Version | None:
        """The version that a rollback would make active."""
        with self._lock:
            return self._profile(profile).before

    def get(self, ref: str) -> Version:
        """A version by `PROFILE@NUMBER`, or by eight or more digits of its hash."""
        if match := _REF.fullmatch(ref):
            return self._by_number(match[1], int(match[2]))
        with self._lock:
            if ref not in self._current().profiles and _HASH.fullmatch(ref):
                return self._by_hash(ref)
            profile = self._profile(ref)
            raise UnknownVersion(f"{ref} is a profile; say which version, such as {profile.newest.ref}")

    def find(self, ref: str) -> Version:
        """Like `get`, but a profile alone stands for its active version, or its newest if none is active."""
        with self._lock:
            profile = self._current().profiles.get(ref)
            return (profile.active or profile.newest) if profile is not None else self.get(ref)

    def history(self, profile: str | None = None, *, kind: str | None = None, limit: int | None = None) -> list[Event]:
        """Events, the oldest first: all, or those of a profile or a kind (`rollout` finds `rollout.start` too).

        Of these the last `limit`. Not checked against the chain, so that a damaged store can be looked at.
        """
        events = [
            event
            for event in self._journal.raw_events()
            if (profile is None or event.profile == profile)
            and (kind is None or event.kind == kind or event.kind.startswith(f"{kind}."))
        ]
        return events if limit is None else events[max(0, len(events) - limit) :]

    def events(self, after: int = 0) -> list[Event]:
        """All events after number `after`, each checked against the chain: for subsystems that rebuild their state."""
        return self._journal.events(after)

    def verify(self, expected_head: str | None = None) -> Verification:
        """Walks the whole store. `expected_head` is a `head` that an earlier verification gave: it must still be on the chain."""
        if expected_head is not None and not _HEAD.fullmatch(expected_head):
            raise ConfigError(f"head {expected_head!r} is not of the form NUMBER:HASH, as an earlier `verify` printed it")
        events, problems, notes = self._journal.problems()
        state = StoreState()
        try:
            state.apply(events)
        except StoreError as error:
            problems.append(Problem(state.seq + 1, str(error)))
        if expected_head is not None:
            problems += _head_problems(expected_head, events)
        problems.sort(key=lambda problem: (problem.seq is None, problem.seq or 0))
        head = f"{events[-1].seq}:{events[-1].hash}" if events else f"0:{'0' * 64}"
        num_versions = sum(len(profile.versions) for profile in state.profiles.values())
        return Verification(len(events), num_versions, head, tuple(problems), tuple(notes))

    # -- changing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What is read and changed within it happens as one change, or not at all; no other thread or process comes between."""
        with self._lock:
            try:
                with self._journal.changing():
                    yield
            except BaseException:
                self._state = StoreState()  # it may hold events that were taken back
                raise

    def create(
        self,
        profile: str,
        settings: Mapping[str, Any] | CacheConfig,
        *,
        author: str,
        reason: str,
        parent: Version | str | None = None,
    ) -> Version:
        """A new version. `settings` is the whole set: what is missing takes its default (see `Version.with_changes`).

        `parent` is what it was derived from; by default the profile's newest version. A profile is made by its first version.
        Settings that the profile has already are refused: that version can be activated.
        """
        _check_profile(profile)
        config = checked(settings)
        with self.changing():
            known = self._current().profiles.get(profile, ProfileState())
            full = full_settings(config)
            digest = content_hash(full)
            if twin := next((version for version in known.versions if version.hash == digest), None):
                raise ParamsError(f"{twin.ref} has exactly these settings; activate it, or change one")
            if parent is None:
                source = known.newest.ref if known.versions else None
            else:
                source = (parent if isinstance(parent, Version) else self.find(parent)).ref
            payload = {"settings": full, "hash": digest, "parent": source}
            return self._add("create", profile, len(known.versions) + 1, author, reason, payload)

    def activate(self, version: Version | str, *, author: str, reason: str) -> Version:
        """Makes a version the active one of its profile. One that is active already is refused, and so is one that this release
        cannot take."""
        with self.changing():
            wanted = self.get(version if isinstance(version, str) else version.ref)
            wanted.config()
            active = self._profile(wanted.profile).active
            if active is not None and active.number == wanted.number:
                raise ParamsError(f"{wanted.ref} is active already; nothing was changed")
            self._append("activate", wanted, author, reason, {"hash": wanted.hash, "from": active.ref if active else None})
            return wanted

    def rollback(self, profile: str, *, author: str, reason: str) -> Version:
        """Makes the version active that was active before the active one. Again, and it goes back one further."""
        with self.changing():
            state = self._profile(profile)
            active, target = state.active, state.before
            if active is None or target is None:
                now = f"only {active.ref} has ever been active" if active else "no version has ever been active"
                raise ParamsError(f"{profile} has nothing to go back to: {now}; activate a version instead")
            target.config()
            self._append("rollback", target, author, reason, {"hash": target.hash, "from": active.ref})
            return target

    def record(
        self,
        kind: str,
        payload: Mapping[str, Any],
        *,
        author: str,
        reason: str,
        version: Version | None = None,
        profile: str | None = None,
    ) -> Event:
        """An event of another subsystem, such as `rollout.start` or `degrade`. `payload` is plain JSON of at most 64 KiB."""
        if kind in (*CREATING, *ACTIVATING) or not _KIND.fullmatch(kind):
            raise ConfigError(
                f"kind={kind!r} is not free for others; take small letters with dots between, such as rollout.start"
            )
        if profile is not None:
            _check_profile(profile)
        return self._append(kind, version, author, reason, payload, profile=profile)

    def add_imported(
        self, profile: str, config: CacheConfig, *, author: str, reason: str, origin: Mapping[str, Any], parent: str | None
    ) -> Version:
        """Used by `exchange`: a new version that keeps the author, reason, time and ref it had elsewhere, as `origin`."""
        _check_profile(profile)
        with self.changing():
            known = self._current().profiles.get(profile, ProfileState())
            full = full_settings(config)
            payload = {"settings": full, "hash": content_hash(full), "parent": parent, "origin": dict(origin)}
            return self._add("import", profile, len(known.versions) + 1, author, reason, payload)

    # -- details -------------------------------------------------------------------------------------------------------

    def _current(self) -> StoreState:
        """What the events add up to by now."""
        with self._lock:
            head = self._journal.head()
            if head < self._state.seq:
                raise StoreError(
                    f"events {head + 1} to {self._state.seq} have gone from the end of {self.path}; {self._journal.way_out}"
                )
            if head > self._state.seq or not head:
                self._state.apply(self._journal.events(self._state.seq, previous=self._state.hash))
            return self._state

    def _profile(self, name: str) -> ProfileState:
        profiles = self._current().profiles
        if name not in profiles:
            hint = suggestion(name, profiles) or f"; known are {', '.join(sorted(profiles))}"
            raise UnknownVersion(f"there is no profile {name!r}{hint}")
        return profiles[name]

    def _by_number(self, profile: str, number: int) -> Version:
        versions = self.versions(profile)
        if not 1 <= number <= len(versions):
            raise UnknownVersion(f"{profile}@{number} is not there; {profile} has the versions 1 to {len(versions)}")
        return versions[number - 1]

    def _by_hash(self, prefix: str) -> Version:
        found = [
            version
            for profile in self._current().profiles.values()
            for version in profile.versions
            if version.hash.startswith(prefix)
        ]
        if not found:
            raise UnknownVersion(f"no version has a hash that begins with {prefix}; `vera params list` shows all")
        if len(found) > 1:
            raise UnknownVersion(f"{prefix} means each of {', '.join(version.ref for version in found)}; take one of these")
        return found[0]

    def _add(self, kind: str, profile: str, number: int, author: str, reason: str, payload: Mapping[str, Any]) -> Version:
        event = self._checked_append(kind, profile, number, author, reason, payload)
        return self.get(f"{event.profile}@{event.number}")

    def _append(
        self,
        kind: str,
        version: Version | None,
        author: str,
        reason: str,
        payload: Mapping[str, Any],
        *,
        profile: str | None = None,
    ) -> Event:
        if version is not None:
            return self._checked_append(kind, version.profile, version.number, author, reason, payload)
        return self._checked_append(kind, profile, None, author, reason, payload)

    def _checked_append(
        self, kind: str, profile: str | None, number: int | None, author: str, reason: str, payload: Mapping[str, Any]
    ) -> Event:
        author, reason = signature(author, reason)
        with self.changing():
            return self._journal.append(kind, profile=profile, number=number, author=author, reason=reason, payload=payload)

    def _seed(self) -> None:
        with self.changing():
            if self._journal.head():
                return
            for starter in STARTERS:
                self.create(starter.profile, starter.changes, author=AUTHOR, reason=f"starting point: {starter.reason}")


def _check_profile(name: str) -> None:
    if not isinstance(name, str) or not _PROFILE.fullmatch(name) or name == NATIVE:
        raise ConfigError(
            f"profile {name!r} must be small letters, digits and hyphens, at most 63, and not {NATIVE}; such as long-document"
        )


def signature(author: str, reason: str) -> tuple[str, str]:
    """Author and reason as they are kept: without blanks around them. Raises ConfigError, as every change would."""
    return _text("author", author, _MAX_AUTHOR), _text("reason", reason, _MAX_REASON)


def _text(what: str, value: str, most: int) -> str:
    """Without blanks around it. Refuses nothing said, too much, and what a terminal would act on."""
    if not isinstance(value, str) or not (text := value.strip()):
        raise ConfigError(f"{what} is empty; every change has an author and a reason")
    if len(text) > most:
        raise ConfigError(f"{what} has {len(text)} characters; at most {most} are kept")
    if bad := [letter for letter in text if not letter.isprintable() and letter != "\n"]:
        raise ConfigError(f"{what} has a character that cannot be shown ({bad[0]!r}); leave it out")
    return text


def _head_problems(expected: str, events: list[Event]) -> list[Problem]:
    match = _HEAD.fullmatch(expected)
    assert match is not None
    seq, digest = int(match[1]), match[2]
    if not seq:
        return []
    if seq > len(events):
        return [Problem(len(events) + 1, f"event {seq}, which was noted down, is missing")]
    if events[seq - 1].hash != digest:
        return [Problem(seq, f"event {seq} is not the one that was noted down: it or one before it was changed")]
    return []
