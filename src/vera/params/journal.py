"""The file of the store: an append-only table of events in SQLite, chained by hashes. It knows nothing of what events mean.

Every event's hash covers its contents and the hash before it, so a changed, lost or inserted row breaks the chain at that row.
Triggers refuse changes by honest tools; the chain finds those of others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from vera.errors import ConfigError, StoreError
from vera.params.ledger import Ledger
from vera.params.records import Event, Problem
from vera.params.settings import canonical

_log = logging.getLogger(__name__)

_APPLICATION_ID = 0x56455241  # "VERA"
_FORMAT = 1
_GENESIS = "0" * 64
_MAX_PAYLOAD_BYTES = 64 * 1024

_SCHEMA = (
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        profile TEXT,
        number INTEGER,
        author TEXT NOT NULL,
        reason TEXT NOT NULL,
        time TEXT NOT NULL,
        payload TEXT NOT NULL,
        hash TEXT NOT NULL
    )""",
    "CREATE UNIQUE INDEX versions ON events(profile, number) WHERE kind IN ('create', 'import')",
    # A replacing insert deletes without asking the trigger for deletions, so only the next number may be inserted.
    """CREATE TRIGGER only_append BEFORE INSERT ON events
        WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM events)
        BEGIN SELECT RAISE(ABORT, 'events are only ever appended'); END""",
    """CREATE TRIGGER no_update BEFORE UPDATE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never changed'); END""",
    """CREATE TRIGGER no_delete BEFORE DELETE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END""",
)
_COLUMNS = "seq, kind, profile, number, author, reason, time, payload, hash"
_Row = tuple[Any, ...]


_FORMAT_QUERIES = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")


class Journal:
    """One open file. Any thread may call; each call is done when it returns. Every failure is a StoreError."""

    def __init__(self, path: Path, *, clock: Callable[[], datetime], busy_seconds: float) -> None:
        self.path = path
        self.ledger = Ledger(path.with_name(path.name + ".heads"))
        self._clock = clock
        self._busy_seconds = busy_seconds
        self._lock = threading.RLock()
        self._depth = 0
        self._fresh: list[tuple[int, str]] = []
        """Events of the running transaction, for the ledger."""
        self._connection, self.writable = self._open()
        self._inode = self._file_inode()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._connection.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def head(self) -> int:
        """The number of the last event; 0 if there is none. Cheap enough to ask several times a second."""
        with self._lock, self._refusals():
            self._check_file()
            return int(self._connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])

    def events(self, after: int = 0, *, previous: str | None = None) -> list[Event]:
        """The events after number `after`, whose hash is `previous` (None: it is looked up). A broken chain raises StoreError."""
        with self._lock, self._refusals():
            self._check_file()
            hash_before = self._hash_of(after) if previous is None else previous
            events: list[Event] = []
            for row in self._rows(after):
                if problem := _problem(row, after + len(events) + 1, hash_before):
                    raise StoreError(f"{self.path} cannot be trusted: {problem.message}; {self.way_out}")
                events.append(_event(row))
                hash_before = row[-1]
            return events

    def raw_events(self) -> list[Event]:
        """All events that can be read at all, trusted or not: for looking at a store that fails its verification."""
        with self._lock, self._refusals():
            return [_event(row) for row in self._rows(0) if _is_readable(row)]

    def problems(self) -> tuple[list[Event], list[Problem], list[str]]:
        """Walks everything: the events up to the first bad one, what is wrong, and what is merely odd."""
        problems: list[Problem] = []
        notes: list[str] = []
        with self._lock, self._refusals():
            lines = self._read_ledger(problems)
            events, hashes = self._walk(problems)
            problems += self._schema_problems()
        if lines is not None:
            problems += _ledger_problems(self.ledger.path, lines.hashes, lines.contradictions, hashes)
            if lines.unreadable:
                notes.append(f"{self.ledger.path} has {lines.unreadable} lines that are no entries")
            if missing := len(hashes) - len(lines.hashes.keys() & hashes.keys()):
                notes.append(
                    f"{self.ledger.path} does not name {missing} events; that of a killed process is added by the next change"
                )
        notes += _clock_notes(events)
        return events, problems, notes

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Reads and appends within it are one change that no other process comes between: all of it happens, or nothing.

        May be nested. A StoreError says why the file cannot be changed.
        """
        with self._lock:
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            with self._refusals():
                self._begin()
            self._depth = 1
            try:
                yield
                with self._refusals():
                    self._connection.execute("COMMIT")
            except BaseException:
                self._give_up()
                raise
            finally:
                self._depth = 0
                fresh, self._fresh = self._fresh, []
            self._note(fresh)

    def append(
        self,
        kind: str,
        *,
        profile: str | None,
        number: int | None,
        author: str,
        reason: str,
        payload: Mapping[str, Any],
    ) -> Event:
        """One more event, on disk when the outermost `changing` ends."""
        text = _payload_text(payload)
        with self.changing(), self._refusals():
            last = self._connection.execute("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1").fetchone() or (0, _GENESIS)
            seq = last[0] + 1
            contents = (seq, kind, profile, number, author, reason, _timestamp(self._clock()), text)
            row = (*contents, _digest(last[1], contents))
            self._connection.execute(f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._fresh.append((seq, row[-1]))
            return _event(row)

    @property
    def way_out(self) -> str:
        """What to do about a file that is not to be trusted."""
        return (
            f"`vera params verify --store {self.path}` says more; "
            f"put a copy back, or move the file and {self.ledger.path.name} away and import an export"
        )

    # -- details -------------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        with self._refusals():
            is_new = not self.path.exists()
            if not is_new and not self.path.is_file():
                raise StoreError(f"{self.path} is not a file; name the store's file")
            if not is_new and not _can_write(self.path):
                return self._open_read_only(), False
            if is_new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._connect(f"{self.path.absolute().as_uri()}?mode=rwc")
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            return connection, True

    def _open_read_only(self) -> sqlite3.Connection:
        """Without a log of changes that still has to be taken in, a file on a read-only disk can be read as it lies."""
        log = self.path.with_name(self.path.name + "-wal")
        immutable = not log.exists() or not log.stat().st_size
        connection = self._connect(f"{self.path.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}")
        try:
            self._check_format(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, uri: str) -> sqlite3.Connection:
        # The lock makes sharing between threads safe; transactions are begun and ended by hand.
        return sqlite3.connect(uri, uri=True, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Tries again while another process makes the file: SQLite does not wait where the way of journalling changes."""
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                self._make(connection)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def _make(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA trusted_schema = OFF")
        if self._check_format(connection):
            return
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if not self._check_format(connection):  # another process may have been faster
                self.ledger.create()
                for statement in _SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {_FORMAT}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _check_format(self, connection: sqlite3.Connection) -> bool:
        """False: the file is empty."""
        application = version = 0
        # Twice: between the queries of the first time another process may have made it, all at once.
        for _ in range(2):
            application, version, tables = (connection.execute(query).fetchone()[0] for query in _FORMAT_QUERIES)
            if application == _APPLICATION_ID and version == _FORMAT:
                return True
            if not (application or version or tables):
                return False
        if application == _APPLICATION_ID:
            raise StoreError(
                f"{self.path} has format {version}, and this release of Vera reads {_FORMAT}; use the release that wrote it"
            )
        raise StoreError(f"{self.path} is a database, but no store of parameter versions; name another file")

    def _begin(self) -> None:
        if not self.writable:
            raise StoreError(
                f"{self.path} cannot be changed: the file or its disk is read-only; name a store that can be written"
            )
        self._check_file()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._check_tail()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """SQLite has rolled back by itself after some errors."""
        self._fresh = []
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            _log.warning("a change of %s could not be taken back; it ends with this process", self.path, exc_info=True)

    def _check_tail(self) -> None:
        """Refuses to go on from an end that is not the one that was written: that would bury what is missing."""
        named = self.ledger.last()
        if named is None:
            return
        seq, digest = named
        head = self._connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]
        if seq > head:
            raise StoreError(f"events {head + 1} to {seq} are missing from the end of {self.path}; {self.way_out}")
        if self._hash_of(seq) != digest:
            raise StoreError(f"event {seq} of {self.path} is not the one that was written; {self.way_out}")

    def _note(self, fresh: list[tuple[int, str]]) -> None:
        """Into the ledger, with what a killed process left out. The change itself is done: a failure here is only told."""
        if not fresh:
            return
        try:
            named = self.ledger.last()
            after = named[0] if named is not None else 0
            rows = self._connection.execute("SELECT seq, hash FROM events WHERE seq > ? ORDER BY seq", (after,)).fetchall()
            self.ledger.append(rows)
        except (OSError, sqlite3.Error) as error:
            _log.warning("%s could not be written, so a cut-off end may go unseen: %s", self.ledger.path, error)

    def _hash_of(self, seq: int) -> str:
        if not seq:
            return _GENESIS
        row = self._connection.execute("SELECT hash FROM events WHERE seq = ?", (seq,)).fetchone()
        if row is None:
            raise StoreError(f"event {seq} is missing from {self.path}; {self.way_out}")
        return str(row[0])

    def _rows(self, after: int) -> list[_Row]:
        return self._connection.execute(f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq", (after,)).fetchall()

    def _walk(self, problems: list[Problem]) -> tuple[list[Event], dict[int, str]]:
        """The events before the first bad row, and the hashes of all rows."""
        events: list[Event] = []
        rows, previous = self._rows(0), _GENESIS
        for row in rows:
            if problem := _problem(row, len(events) + 1, previous):
                problems.append(problem)
                break
            events.append(_event(row))
            previous = row[-1]
        return events, {row[0]: str(row[-1]) for row in rows}

    def _read_ledger(self, problems: list[Problem]) -> Any:
        # Read before the events: it never runs ahead of them.
        try:
            return self.ledger.read()
        except FileNotFoundError:
            problems.append(
                Problem(None, f"{self.ledger.path} is missing, so a cut-off end would go unseen; the next change writes it")
            )
        except OSError as error:
            problems.append(Problem(None, f"{self.ledger.path} cannot be read: {error.strerror}"))
        return None

    def _schema_problems(self) -> list[Problem]:
        problems = []
        found = {row[0] for row in self._connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if found != set(_SCHEMA):
            problems.append(Problem(None, "the table, its index or its triggers are not those that Vera made"))
        for (line,) in self._connection.execute("PRAGMA integrity_check(5)"):
            if line != "ok":
                problems.append(Problem(None, f"SQLite finds damage: {line}"))
        return problems

    def _file_inode(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def _check_file(self) -> None:
        try:
            same = self._file_inode() == self._inode
        except FileNotFoundError:
            same = False
        if not same:
            raise StoreError(f"{self.path} was moved or replaced while it was open; put it back, or open the store again")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Errors of SQLite and of the system as StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(self._explain(error)) from error
        except OSError as error:
            raise StoreError(f"{self.path} cannot be used: {error.strerror or error}; free it, or name another store") from error

    def _explain(self, error: sqlite3.Error) -> str:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return f"{self.path} has been locked by another process for {self._busy_seconds:g} s; nothing was changed; try again"
        if name.startswith("SQLITE_READONLY"):
            return f"{self.path} cannot be changed: the file or its disk is read-only; name a store that can be written"
        if name == "SQLITE_FULL":
            return f"{self.path} cannot be changed: the disk is full; nothing was changed; make room and try again"
        if name.startswith("SQLITE_IOERR"):
            return f"{self.path} cannot be read or written ({error}); nothing was changed; check the disk, its room and limits"
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return f"{self.path} cannot be opened ({error}); check the folder and its permissions, or name another store"
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return f"{self.path} is damaged or no store ({error}); put a copy back, or move it away and import an export"
        if name.startswith("SQLITE_CONSTRAINT"):
            return f"{self.path} refuses this change: {error}; nothing was changed"
        return f"{self.path} cannot be used: {error}; {self.way_out}"


def _can_write(path: Path) -> bool:
    """SQLite writes beside the file too. Asking the system covers permissions and read-only disks, also for root."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _payload_text(payload: Mapping[str, Any]) -> str:
    try:
        text = canonical(dict(payload))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the payload of an event must be plain JSON with finite numbers: {error}") from None
    if len(text) > _MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"the payload of an event has {len(text)} bytes; at most {_MAX_PAYLOAD_BYTES} are kept: leave details out"
        )
    return text


def _digest(previous: str, contents: _Row) -> str:
    """`default`: a tool may have written what JSON cannot say; then the hash simply differs."""
    text = json.dumps([previous, *contents], separators=(",", ":"), ensure_ascii=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _event(row: _Row) -> Event:
    seq, kind, profile, number, author, reason, time, payload, digest = row
    return Event(seq, kind, profile, number, author, reason, time, json.loads(payload), digest)


def _is_readable(row: _Row) -> bool:
    try:
        return isinstance(_event(row).payload, dict)
    except (TypeError, ValueError):
        return False


def _problem(row: _Row, expected: int, previous: str) -> Problem | None:
    """What is wrong with a row that should be number `expected` and follow an event with the hash `previous`."""
    if row[0] != expected:
        return Problem(expected, f"event {expected} is missing")
    if row[-1] != _digest(previous, row[:-1]):
        return Problem(expected, f"event {expected} was changed after it was written")
    if not _is_readable(row):
        return Problem(expected, f"the payload of event {expected} cannot be read")
    return None


def _ledger_problems(
    path: Path, named: Mapping[int, str], contradictions: tuple[int, ...], hashes: Mapping[int, str]
) -> list[Problem]:
    problems = [Problem(seq, f"{path} names event {seq} twice, with different hashes") for seq in contradictions[:1]]
    head = max(hashes, default=0)
    if (last := max(named, default=0)) > head:
        problems.append(Problem(head + 1, f"events {head + 1} to {last} are missing from the end"))
    for seq in sorted(named):
        if seq in hashes and hashes[seq] != named[seq]:
            problems.append(Problem(seq, f"event {seq} is not the one that {path} names"))
            break
    return problems


def _clock_notes(events: list[Event]) -> list[str]:
    """Numbers order events, so a clock that went back does no harm; it is only told."""
    back = [after.seq for before, after in pairwise(events) if after.time < before.time]
    if not back:
        return []
    return [f"the clock had gone back at {len(back)} events, first at {back[0]}; their numbers are right, their times may not be"]
