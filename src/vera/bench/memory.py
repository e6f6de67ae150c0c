"""How much memory this process takes, seen from inside. Linux only: it reads `/proc/self/status`."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Self

_STATUS = "/proc/self/status"
_STATUS_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One look at `/proc/self/status`, in bytes."""

    private_bytes: int
    """Anonymous and shared-anonymous memory that is resident: what the process allocated itself. Mapped files are not in it."""
    rss_peak_bytes: int
    """The most that was ever resident, mapped files included (VmHWM)."""


def parse_status(status: str) -> ProcessMemory:
    """Reads the text of `/proc/<pid>/status`."""
    kib: dict[str, int] = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            kib[name] = int(value.split()[0])
    return ProcessMemory(1024 * (kib["RssAnon"] + kib["RssShmem"]), 1024 * kib["VmHWM"])


def process_memory() -> ProcessMemory:
    """This process, now."""
    descriptor = os.open(_STATUS, os.O_RDONLY)
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> ProcessMemory:
    return parse_status(os.pread(descriptor, _STATUS_BYTES, 0).decode("ascii", errors="replace"))


class MemoryMeter:
    """The peak of this process's private memory while the context is open, sampled by a thread of its own.

    A sample costs a few tens of microseconds, so that measurements in the same process are not disturbed. A peak shorter
    than the interval can be missed; `rss_peak_bytes` of `process_memory`, kept by the kernel, misses none.
    """

    def __init__(self, interval_seconds: float = 0.02) -> None:
        self.peak_private_bytes = 0
        self._interval_seconds = interval_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vera-memory-meter", daemon=True)

    def __enter__(self) -> Self:
        self._descriptor = os.open(_STATUS, os.O_RDONLY)
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._sample()
        os.close(self._descriptor)

    def _watch(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            self._sample()

    def _sample(self) -> None:
        self.peak_private_bytes = max(self.peak_private_bytes, _read(self._descriptor).private_bytes)
