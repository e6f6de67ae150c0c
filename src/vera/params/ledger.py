"""A second place for the hashes of events: a text file beside the store, one line an event. What was cut off the store's end is
still named here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"([1-9][0-9]{0,17}) ([0-9a-f]{64})")
_TAIL_BYTES = 512
"""Enough for several lines."""


@dataclass(frozen=True, slots=True)
class LedgerLines:
    """What a ledger says."""

    hashes: dict[int, str]
    """By event. Of an event that is named twice, the first."""
    unreadable: int
    """Lines that are no entries: torn by a crash, or changed."""
    contradictions: tuple[int, ...]
    """Events that are named twice with different hashes."""


class Ledger:
    """Written only after the store has committed, so it never runs ahead of it. It may lag: the next entry catches up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return self.path.exists()

    def create(self) -> None:
        """An empty one, unless it is there. Raises OSError."""
        self.path.touch(exist_ok=True)

    def append(self, entries: list[tuple[int, str]]) -> None:
        """Adds events with their hashes and waits until they are on disk. Raises OSError."""
        text = "".join(f"{seq} {digest}\n" for seq, digest in entries)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if not self._ends_with_newline(descriptor):
                text = "\n" + text
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def last(self) -> tuple[int, str] | None:
        """The latest event that it names, with its hash; None if it names none or is missing. Raises OSError."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                tail = file.read().decode("ascii", "replace")
        except FileNotFoundError:
            return None
        entries = [(int(match[1]), match[2]) for line in tail.split("\n") if (match := _LINE.fullmatch(line))]
        return max(entries, default=None)

    def read(self) -> LedgerLines:
        """All of it. Raises OSError."""
        hashes: dict[int, str] = {}
        unreadable, contradictions = 0, []
        for line in self.path.read_text("ascii", "replace").splitlines():
            if not (match := _LINE.fullmatch(line)):
                unreadable += 1
            elif hashes.setdefault(int(match[1]), match[2]) != match[2]:
                contradictions.append(int(match[1]))
        return LedgerLines(hashes, unreadable, tuple(contradictions))

    @staticmethod
    def _ends_with_newline(descriptor: int) -> bool:
        size = os.fstat(descriptor).st_size
        return not size or os.pread(descriptor, 1, size - 1) == b"\n"
