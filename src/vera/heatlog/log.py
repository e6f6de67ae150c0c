"""Writing the heat log: a JSON line for each recalibration, in files of limited size.

    {"heat_log": 1, "time": 1764460800.0, "model": "...", ...}                  what follows was written with these facts
    {"time": 1764460801.2, "hot": 9, "warm": 80, "cold": 1, "histogram": [..]}  one recalibration: pages by tier and by score

Nothing of it is done within a step: the cache keeps its latest distributions anyway (`TierStats.heat`), and whoever owns the log
brings a copy of them now and then, more often than 64 recalibrations come.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vera.cache import TierStats
from vera.cache.features import HeatSummary
from vera.errors import ConfigError

_log = logging.getLogger(__name__)

FORMAT = 1
EVERY_SECONDS = 5.0
"""How often a server's statistics are brought: at most some 30 recalibrations come meanwhile, and 64 are kept."""
MIN_BYTES = 64 * 2**10
"""A file holds at least what is brought at once."""

Write = Callable[[int, bytes], int]


class HeatLog:
    """Appends to `path`, which becomes `path.1` when it is full, and so on. Any thread may call it.

    On a full disk, or whatever else writing fails with, it stops for good: it says so once in the server's log and counts what it
    drops. Serving never notices.
    """

    def __init__(
        self,
        path: Path,
        *,
        about: Mapping[str, Any],
        max_bytes: int = 16 * 2**20,
        max_files: int = 4,
        clock: Callable[[], float] = time.time,
        write: Write = os.write,
    ) -> None:
        """`about`: JSON-ready facts for the first line of each file; `vera heat` looks for `model` and `hot_score_threshold`.

        At most `max_files` files of `max_bytes` each are kept, `path` among them. `write(fd, data)` appends and returns how many
        bytes it took, or raises OSError. Raises ConfigError where no file can be written, or another process writes it.
        """
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"a heat log of {max_bytes} bytes a file is too small; give it {MIN_BYTES} or more")
        if max_files < 2:
            raise ConfigError(
                f"a heat log of {max_files} files cannot be; the least is 2, the one that is written and one before"
            )
        self.path = path
        self.num_lines = 0
        """Recalibrations written."""
        self.num_dropped = 0
        """Recalibrations not written, because writing had failed."""
        self.failure: str | None = None
        """What writing failed with; None: it goes on."""
        self._about = dict(about)
        self._max_bytes, self._max_files = max_bytes, max_files
        self._clock, self._write = clock, write
        self._lock = threading.Lock()
        self._latest: HeatSummary | None = None
        self._recalibrations = 0
        self._file = self._opened()
        self._size = os.fstat(self._file).st_size
        if not self._append(self._heading()):
            self.close()
            raise ConfigError(f"nothing can be written to the heat log {path}: {self.failure}; make room, or name another file")

    def take(self, stats: TierStats) -> int:
        """Appends the distributions in `stats` that earlier ones did not have; returns how many. Never raises.

        Bring copies of the statistics of one and the same cache, in order.
        """
        with self._lock:
            return self._take(stats)

    def describe(self, about: Mapping[str, Any]) -> None:
        """From here on other facts are true, such as another version of the parameters. Never raises."""
        with self._lock:
            self._about = dict(about)
            self._append(self._heading())

    def close(self) -> None:
        """Idempotent. What is brought afterwards is dropped."""
        with self._lock:
            self._close_file()

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _take(self, stats: TierStats) -> int:
        new, is_gap = self._new(stats.heat)
        since, self._recalibrations = stats.recalibrations - self._recalibrations, stats.recalibrations
        if not new:
            return 0
        now = round(self._clock(), 3)
        missed = max(0, since - len(new)) if is_gap else 0
        if self._append("".join([_line(new[0], now, missed=missed), *(_line(summary, now) for summary in new[1:])])):
            self.num_lines += len(new)
        else:
            self.num_dropped += len(new)
        return len(new)

    def _new(self, heat: Iterable[HeatSummary]) -> tuple[list[HeatSummary], bool]:
        """Those after the latest that was taken, by identity, since two may look alike; and whether there may be a gap before."""
        known, latest = list(heat), self._latest
        if not known:
            return [], False
        self._latest = known[-1]
        for index in range(len(known) - 1, -1, -1):
            if known[index] is latest:
                return known[index + 1 :], False
        return known, latest is not None

    def _heading(self) -> str:
        return json.dumps({"heat_log": FORMAT, "time": round(self._clock(), 3), **self._about}, allow_nan=False) + "\n"

    # -- files ---------------------------------------------------------------------------------------------------------

    def _opened(self) -> int:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the heat log {self.path} cannot be written ({error.strerror}); name a file in a folder that can be written to"
            ) from None
        try:
            self._check_file(file)
        except ConfigError:
            os.close(file)
            raise
        return file

    def _check_file(self, file: int) -> None:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"the heat log {self.path} is not a regular file; name one, since full files are renamed")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"the heat log {self.path} is being written by another server; name another file") from None
        size = os.fstat(file).st_size
        first = os.pread(file, 16, 0)
        if size and not first.startswith(b'{"heat_log"'):
            raise ConfigError(f"{self.path} is there and is no heat log; nothing is appended to it, name another file")

    def _append(self, text: str) -> bool:
        """Whole lines, or nothing. False: nothing."""
        if self.failure is not None or self._file < 0:
            return False
        try:
            if self._size + len(text) > self._max_bytes:
                self._rotate()
                text = self._heading() + text
            self._write_all(self._after_a_broken_line() + text.encode())
        except (OSError, ConfigError) as error:
            self._fail(error)
            return False
        return True

    def _after_a_broken_line(self) -> bytes:
        """A process that was killed may have left half a line."""
        return b"\n" if self._size and os.pread(self._file, 1, self._size - 1) != b"\n" else b""

    def _write_all(self, data: bytes) -> None:
        rest = data
        try:
            while rest:
                rest = rest[self._write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        for number in range(self._max_files - 1, 0, -1):
            source = self.path if number == 1 else rotated(self.path, number - 1)
            if source.exists():
                source.replace(rotated(self.path, number))
        self._close_file()
        self._file = self._opened()
        self._size = os.fstat(self._file).st_size

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _fail(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)
        self.failure = str(reason)
        _log.warning(
            "the heat log %s ends after %d recalibrations, because it cannot be written (%s); make room, then restart the server",
            self.path,
            self.num_lines,
            self.failure,
        )


async def follow(
    log: HeatLog, statistics: Callable[[], Awaitable[TierStats | None]], *, every_seconds: float = EVERY_SECONDS
) -> None:
    """Brings what `statistics` gives (a copy; None: nothing yet) to the log, again and again until it is cancelled.

    `statistics` is awaited on the event loop; the file is written on a thread, because a disk may keep it waiting. Whoever
    cancels this closes the log.
    """
    while True:
        stats = await statistics()
        if stats is not None:
            await asyncio.to_thread(log.take, stats)
        await asyncio.sleep(every_seconds)


def rotated(path: Path, number: int) -> Path:
    """The file that was full `number` files ago."""
    return path.with_name(f"{path.name}.{number}")


def _line(summary: HeatSummary, now: float, *, missed: int = 0) -> str:
    """`missed`: the most recalibrations that were forgotten before this one. (Those without tiered pages are none to miss.)"""
    record: dict[str, Any] = {
        "time": now,
        "hot": summary.num_hot,
        "warm": summary.num_warm,
        "cold": summary.num_cold,
        "histogram": summary.histogram,
    }
    if missed:
        record["missed"] = missed
    return json.dumps(record, separators=(",", ":")) + "\n"
