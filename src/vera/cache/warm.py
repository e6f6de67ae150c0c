"""Host stores: where exact pages lie that left the device but are still wanted, and checkpoints.

A store has *slots* of one size in one range of addresses that never moves, so a kernel reads pages where they lie. Copies in and
out are *transfers*: beside a GPU they take their time, on a CPU they are done at once. A store belongs to one thread.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vera.attention import copy_bytes
from vera.errors import CapacityError, ConfigError

_log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
_MIB = 2**20
_RESERVE_STEP_BYTES = 2 * _MIB  # written with zeros in one go: about 4 ms
_MOST_PIECES = 1024  # that one call writes: IOV_MAX
_SYNC_FILE_RANGE_WRITE = 2  # starts to write a file's changed pages to the disk and does not wait for it
_FILESYSTEMS_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}


class Transfer(Protocol):
    """A copy under way. Neither its source nor its target may be used for anything else until it is done."""

    @property
    def done(self) -> bool:
        """All bytes are where they belong."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True: it is done. False: it was given up, or the time is over. None waits as long as it takes."""
        ...

    def abandon(self) -> None:
        """Gives it up: from now on it moves no byte and never becomes done, whatever completes late."""
        ...


Copy = Callable[[NDArray[np.int64], NDArray[np.int64], int], Transfer]
"""Starts to copy that many bytes to each address of the first array from the one at the same place in the second."""


class HostStore(Protocol):
    """Slots of host memory.

    `save` and `load` copy whole slots. Of the transfers of one slot, only loads may be under way together; anything else must
    have been waited for. A slot may be freed at any time: while a transfer uses it, it stays taken.
    """

    @property
    def kind(self) -> str:
        """`ram` or `file`."""
        ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def num_slots(self) -> int:
        """How many slots there can be. Falls where a disk turns out to be full."""
        ...

    @property
    def num_used(self) -> int:
        """Slots that cannot be handed out: those allocated, and those freed that a transfer still uses."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the used slots."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory or disk that the store has taken so far, at most its limit; kept for slots to come."""
        ...

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, the lowest that are free; their content is undefined. None: no room, nothing changed."""
        ...

    def add(self, sources: NDArray[np.int64], num_bytes: int) -> int | None:
        """A slot with the `num_bytes` from each of these addresses, one after the other; what is behind them is undefined.

        None: no room, nothing changed.
        """
        ...

    def reserve(self, count: int, limit: int) -> None:
        """Takes memory or disk for `count` slots to come, as long as no more than `limit` wait; they are handed out fast."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Gives slots back, each once. What they hold is void."""
        ...

    def address(self, slot: int) -> int:
        """Where the slot begins: a multiple of 64, the same for as long as the store is open."""
        ...

    def addresses(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """`[slots]`: where each of them begins."""
        ...

    def view(self, slot: int) -> Tensor:
        """`[slot_bytes]` uint8: the slot's own memory. Must be dropped before the slot is freed or the store closed."""
        ...

    def filled(self, slots: Sequence[int]) -> None:
        """Tells that what was written to these slots, by address or through a view, is whole; a file brings it to its disk."""
        ...

    def save(self, slots: Sequence[int], sources: NDArray[np.int64]) -> Transfer:
        """Copies to each slot from the address at the same place in `sources`, which must stay as it is until that is done."""
        ...

    def load(self, slots: Sequence[int], targets: NDArray[np.int64]) -> Transfer:
        """Copies from each slot to the address at the same place in `targets`, not to be read or reused until that is done."""
        ...

    def close(self) -> None:
        """Ends transfers and gives all memory back; a second call does nothing. No slot may be read or written afterwards."""
        ...


class _Finished:
    """A transfer that was done as soon as it was started."""

    done = True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return True

    def abandon(self) -> None:
        pass


def copy_now(targets: NDArray[np.int64], sources: NDArray[np.int64], num_bytes: int) -> Transfer:
    """Copies before it returns."""
    copy_bytes(sources, targets, num_bytes)
    return _Finished()


def open_store(
    kind: str, slot_bytes: int, max_bytes: int, directory: Path | None = None, *, copy: Copy = copy_now
) -> HostStore | None:
    """A store of `kind` (`ram`, `file` or `none`) that never takes more than `max_bytes`. None: `none`, or 0 bytes.

    `file` needs a `directory`. Raises ConfigError for settings that cannot be meant and CapacityError for memory that cannot
    be had.
    """
    if kind not in ("ram", "file", "none"):
        raise ConfigError(f"host store {kind!r} is not one of ram, file, none")
    if max_bytes < 0:
        raise ConfigError(f"a host store of {max_bytes} bytes cannot be; the least is 0, for none")
    if kind == "none" or max_bytes == 0:
        return None
    if kind == "ram":
        return RamStore(slot_bytes, max_bytes, copy=copy)
    if directory is None:
        raise ConfigError("a host store of kind file needs a directory on a disk; name one, or take kind ram")
    return FileStore(slot_bytes, max_bytes, directory, copy=copy)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer that was not done when last looked at."""

    transfer: Transfer
    slots: frozenset[int]
    saves: bool


class _MappedStore:
    """A HostStore in one mapping. Its kinds say where the mapping comes from and how slots become usable."""

    kind: str

    def __init__(
        self,
        mapping: mmap.mmap,
        slot_bytes: int,
        num_slots: int,
        *,
        copy: Copy,
        transfer_timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._stride = _stride(slot_bytes)
        self._mapping: mmap.mmap | None = mapping
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        self._base = self._bytes.ctypes.data
        self._copy = copy
        self._timeout_seconds = transfer_timeout_seconds
        self._clock = clock
        # Slots from `_untouched` up were never handed out; below it each is in `_free` (a heap), in `_owned` or in `_held`.
        self._untouched = 0
        self._free: list[int] = []
        self._owned: set[int] = set()
        self._held: dict[int, float] = {}
        """Freed slots that a transfer still uses, and when it is given up."""
        self._flights: list[_Flight] = []

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def num_used(self) -> int:
        self._settle()
        return len(self._owned) + len(self._held)

    @property
    def used_bytes(self) -> int:
        return self.num_used * self._stride

    @property
    def reserved_bytes(self) -> int:
        return self._untouched * self._stride

    # -- slots come and go ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        assert self._mapping is not None and count >= 0
        self._settle()
        num_touched = self._untouched + max(0, count - len(self._free))
        if num_touched > self.num_slots or not self._provide(num_touched):
            return None
        recycled = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        slots = [*recycled, *range(self._untouched, num_touched)]
        self._untouched = num_touched
        self._owned.update(slots)
        return slots

    def add(self, sources: NDArray[np.int64], num_bytes: int) -> int | None:
        assert len(sources) * num_bytes <= self.slot_bytes
        slots = self.allocate(1)
        if slots is None:
            return None
        copy_bytes(sources, self.address(slots[0]) + num_bytes * np.arange(len(sources), dtype=np.int64), num_bytes)
        return slots[0]

    def reserve(self, count: int, limit: int) -> None:
        """Nothing to be done where memory comes when it is touched."""

    def free(self, slots: Sequence[int]) -> None:
        assert len(set(slots)) == len(slots) and self._owned.issuperset(slots), "a slot is freed that is not owned"
        self._settle()
        busy = {slot for flight in self._flights for slot in flight.slots}
        self._owned.difference_update(slots)
        for slot in slots:
            if slot in busy:
                self._held[slot] = self._clock() + self._timeout_seconds
            else:
                heapq.heappush(self._free, slot)

    # -- the bytes -----------------------------------------------------------------------------------------------------

    def address(self, slot: int) -> int:
        assert self._mapping is not None and slot in self._owned
        return self._base + slot * self._stride

    def addresses(self, slots: Sequence[int]) -> NDArray[np.int64]:
        assert self._mapping is not None and self._owned.issuperset(slots)
        return self._base + np.asarray(slots, dtype=np.int64) * self._stride

    def view(self, slot: int) -> Tensor:
        begin = self.address(slot) - self._base
        return torch.from_numpy(self._bytes[begin : begin + self.slot_bytes])

    def filled(self, slots: Sequence[int]) -> None:
        """Nothing to be done in memory."""

    def save(self, slots: Sequence[int], sources: NDArray[np.int64]) -> Transfer:
        assert len(slots) == len(sources)
        self._settle()
        assert not any(flight.slots & set(slots) for flight in self._flights), "a slot is saved to that a transfer uses"
        return self._started(self._copy(self.addresses(slots), sources, self.slot_bytes), slots, saves=True)

    def load(self, slots: Sequence[int], targets: NDArray[np.int64]) -> Transfer:
        assert len(slots) == len(targets)
        self._settle()
        in_the_making = {slot for flight in self._flights if flight.saves for slot in flight.slots}
        assert not in_the_making & set(slots), "a slot is loaded whose save is not done"
        return self._started(self._copy(targets, self.addresses(slots), self.slot_bytes), slots, saves=False)

    def close(self) -> None:
        if self._mapping is None:
            return
        deadline = self._clock() + self._timeout_seconds
        for flight in self._flights:
            if not flight.transfer.wait(max(0.0, deadline - self._clock())):
                self._give_up(flight)
        self._forget_everything()

    def check_invariants(self) -> None:
        """Raises AssertionError if a slot is lost or in two states."""
        free, held = set(self._free), set(self._held)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not (free & held or free & self._owned or held & self._owned), "a slot is in two states"
        assert free | held | self._owned == set(range(self._untouched)), "a slot is lost"
        assert self._untouched <= self.num_slots, "more slots than the limit"
        assert held <= {slot for flight in self._flights for slot in flight.slots}, "a slot is held for no transfer"

    # -- details -------------------------------------------------------------------------------------------------------

    def _provide(self, num_slots: int) -> bool:
        """Makes the first `num_slots` slots usable. False: cannot."""
        return True

    def _started(self, transfer: Transfer, slots: Sequence[int], *, saves: bool) -> Transfer:
        if not transfer.done:
            self._flights.append(_Flight(transfer, frozenset(slots), saves))
        return transfer

    def _settle(self) -> None:
        """Frees held slots whose transfers are done, or have had their time and are given up."""
        if not self._flights:
            return
        now = self._clock()
        overdue = {slot for slot, deadline in self._held.items() if now >= deadline}
        under_way = [flight for flight in self._flights if not flight.transfer.done]
        for flight in under_way:
            if flight.slots & overdue:
                self._give_up(flight)
        self._flights = [flight for flight in under_way if not flight.slots & overdue]
        busy = {slot for flight in self._flights for slot in flight.slots}
        for slot in self._held.keys() - busy:
            del self._held[slot]
            heapq.heappush(self._free, slot)

    def _give_up(self, flight: _Flight) -> None:
        flight.transfer.abandon()
        _log.warning("a copy of %d warm slots was not done after %g s and is given up", len(flight.slots), self._timeout_seconds)

    def _forget_everything(self) -> None:
        mapping, self._mapping = self._mapping, None
        self._bytes = np.empty(0, dtype=np.uint8)
        self._untouched, self._free, self._owned, self._held, self._flights = 0, [], set(), {}, []
        try:
            if mapping is not None:
                mapping.close()
        except BufferError:
            pass  # views are alive: the memory goes with the last of them


class RamStore(_MappedStore):
    """Slots in memory of this process; memory that no slot has needed yet is not touched."""

    kind = "ram"

    def __init__(
        self,
        slot_bytes: int,
        max_bytes: int,
        *,
        copy: Copy = copy_now,
        transfer_timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A freed slot waits at most `transfer_timeout_seconds` for a transfer that uses it; so does `close`.

        Raises CapacityError if `max_bytes` is below a slot or cannot be had.
        """
        num_slots = _slots_within(slot_bytes, max_bytes)
        try:
            mapping = mmap.mmap(-1, num_slots * _stride(slot_bytes), flags=mmap.MAP_PRIVATE)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"{max_bytes / _MIB:.0f} MiB of memory for warm pages cannot be had ({error}); ask for less"
            ) from error
        super().__init__(
            mapping, slot_bytes, num_slots, copy=copy, transfer_timeout_seconds=transfer_timeout_seconds, clock=clock
        )


def take_disk_space(descriptor: int, offset: int, length: int) -> None:
    """Makes a range of a file safe to write through a mapping, and zero. Raises OSError if the disk is full.

    Space that is reserved but was never written is not enough: ext4 has to split an extent when such a range is first written,
    finds no block for that on a full disk, and the process gets SIGBUS.
    """
    os.posix_fallocate(descriptor, offset, length)
    zeros = memoryview(bytes(min(length, _MIB)))
    while length > 0:
        written = os.pwrite(descriptor, zeros[:length], offset)
        offset, length = offset + written, length - written


def write_pieces(descriptor: int, offset: int, pieces: NDArray[np.int64]) -> None:
    """Writes memory to a file from `offset` on: `pieces`, `[n, 2]`, are address and length of each part, in order.

    Raises OSError if the disk is full; a part may have been written then. Unlike a write through a mapping, which a full disk
    answers with SIGBUS, it needs no space that was written before.
    """
    left = np.array(pieces[pieces[:, 1] > 0], dtype=np.int64, order="C")
    while len(left):
        some = left[:_MOST_PIECES]
        written = _pwritev(descriptor, some.ctypes.data, len(some), offset)
        if written <= 0:
            code = ctypes.get_errno() if written < 0 else errno.EIO
            if code == errno.EINTR:
                continue
            assert code != errno.EFAULT, "memory is written to a file that is not there"
            raise OSError(code, os.strerror(code))
        ends = np.cumsum(some[:, 1])
        whole = int(np.searchsorted(ends, written, side="right"))
        left, offset = left[whole:], offset + written
        begun = written - (int(ends[whole - 1]) if whole else 0)
        if begun:
            left[0] += begun, -begun


_pwritev = ctypes.CDLL(None, use_errno=True).pwritev
_pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_pwritev.restype = ctypes.c_ssize_t


class _WriteBehind:
    """Has the system write ranges of a file to its disk at once, from a thread of its own, since a slow disk makes that wait.

    Left alone the system writes them when they are half a minute old, all together: what a prompt put there costs processor time
    in the midst of the answers. And only what is on the disk can make room when memory is short.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ranges: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._can = hasattr(ctypes.CDLL(None), "sync_file_range")

    def write(self, offset: int, length: int) -> None:
        if self._thread is None and self._can:
            self._start()
        if self._can:
            self._ranges.put((offset, length))

    def end(self) -> None:
        """Ranges that are still to come are left to the system. Does not wait: the collector may call it, in any thread."""
        self._ended.set()
        self._ranges.put(None)

    def close(self) -> None:
        """Returns when the thread has ended."""
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        descriptor = os.dup(self._descriptor)  # the thread's own: the file may be closed before it has ended
        thread = threading.Thread(
            target=_write_ranges, args=(descriptor, self._ranges, self._ended), name="vera-write-behind", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads may be had, and the system writes in its own time
            os.close(descriptor)
            self._can = False
        else:
            self._thread = thread


def _write_ranges(descriptor: int, ranges: SimpleQueue[tuple[int, int] | None], ended: threading.Event) -> None:
    sync_file_range = ctypes.CDLL(None).sync_file_range
    try:
        while (one := ranges.get()) is not None and not ended.is_set():
            offset, length = (ctypes.c_int64(number) for number in one)
            sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
    finally:
        os.close(descriptor)


class FileStore(_MappedStore):
    """Slots in a mapped file without a name: whatever ends the process, nothing is left on the disk.

    A full disk is no room, never a fault in the middle of a write: `add` writes through the file and not through the mapping, and
    for other slots disk space is taken before they are handed out. From then on the store makes do with the slots it has. That
    asks for a disk of this machine: a file system that never writes in place, such as ZFS, cannot promise it for other slots,
    and one over a network may take what it is given and find later that there is no room.
    """

    kind = "file"

    def __init__(
        self,
        slot_bytes: int,
        max_bytes: int,
        directory: Path,
        *,
        reserve: Callable[[int, int, int], None] = take_disk_space,
        write: Callable[[int, int, NDArray[np.int64]], None] = write_pieces,
        copy: Copy = copy_now,
        transfer_timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As for RamStore; `reserve(fd, offset, length)` takes disk space, `write` is `write_pieces`; either may raise OSError.

        Raises ConfigError if no file can be made in `directory`, CapacityError if `max_bytes` is below a slot or more than a
        file there can hold.
        """
        num_slots = _slots_within(slot_bytes, max_bytes)
        self._directory = directory
        self._reserve = reserve
        self._write = write
        self._zeros = np.zeros(_stride(slot_bytes), dtype=np.uint8)
        self._num_reserved = 0
        self._disk_is_full = False
        self._step_slots = max(1, _RESERVE_STEP_BYTES // _stride(slot_bytes))
        self._file = _nameless_file(directory)
        try:
            self._file.truncate(num_slots * _stride(slot_bytes))
            mapping = mmap.mmap(self._file.fileno(), num_slots * _stride(slot_bytes))
        except (OSError, OverflowError) as error:
            self._file.close()
            raise CapacityError(
                f"a file of {max_bytes / _MIB:.0f} MiB for warm pages cannot be made in {directory} ({error}); ask for less, "
                "or name a directory on another disk"
            ) from error
        self._write_behind = _WriteBehind(self._file.fileno())
        weakref.finalize(self, self._file.close)  # a store that nobody closed is no leak
        weakref.finalize(self, self._write_behind.end)
        self._has_told = False
        super().__init__(
            mapping, slot_bytes, num_slots, copy=copy, transfer_timeout_seconds=transfer_timeout_seconds, clock=clock
        )

    @property
    def reserved_bytes(self) -> int:
        return self._num_reserved * self._stride

    def reserve(self, count: int, limit: int) -> None:
        waiting = len(self._free) + self._num_reserved - self._untouched
        wanted = min(self.num_slots, self._num_reserved + min(count, limit - waiting))
        if wanted > self._num_reserved and not self._disk_is_full:
            # What is missing shows when the slots are needed; others need the rest of the disk until then.
            self._disk_is_full = self._try_to_reserve(wanted) is not None

    def add(self, sources: NDArray[np.int64], num_bytes: int) -> int | None:
        assert self._mapping is not None and len(sources) * num_bytes <= self.slot_bytes
        self._settle()
        if not self._free and self._untouched == self.num_slots:
            return None
        slot = heapq.heappop(self._free) if self._free else self._untouched
        grows = slot == self._num_reserved
        pieces = np.column_stack([sources, np.full_like(sources, num_bytes)])
        if grows:  # all of a slot must be on the disk before others may write to it through the mapping
            rest = self._stride - len(sources) * num_bytes
            pieces = np.vstack([pieces, [self._zeros.ctypes.data, rest]])
        try:
            self._write(self._file.fileno(), slot * self._stride, pieces)
        except OSError as error:
            if slot < self._untouched:
                heapq.heappush(self._free, slot)
            if grows:
                self._let_go_of_the_rest()
                self.num_slots = self._num_reserved
            self._tell(error)
            return None
        self._num_reserved = max(self._num_reserved, slot + 1)
        self._untouched = max(self._untouched, slot + 1)
        self._owned.add(slot)
        self.filled([slot])
        return slot

    def filled(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._write_behind.write(slot * self._stride, self._stride)

    def _provide(self, num_slots: int) -> bool:
        if num_slots <= self._num_reserved:
            return True
        with_reserve = min(self.num_slots, max(num_slots, self._num_reserved + self._step_slots))
        error = self._try_to_reserve(with_reserve)
        if error is not None and num_slots < with_reserve:
            self._step_slots = 1  # little is left: from now on only what is needed
            error = self._try_to_reserve(num_slots)
        if error is None:
            return True
        self.num_slots = self._num_reserved
        self._tell(error)
        return False

    def _tell(self, error: OSError) -> None:
        if self._has_told:
            return
        self._has_told = True
        _log.warning(
            "the warm pages in %s stay at %.1f MiB, because the disk gives no more (%s); make room there or name a directory on "
            "another disk, then restart",
            self._directory,
            self.reserved_bytes / _MIB,
            error,
        )

    def _try_to_reserve(self, num_slots: int) -> OSError | None:
        """Reserves disk space up to this slot. What it failed with: nothing more is reserved than before."""
        before = self.reserved_bytes
        try:
            self._reserve(self._file.fileno(), before, num_slots * self._stride - before)
        except OSError as error:
            self._let_go_of_the_rest()
            return error
        self._num_reserved = num_slots
        return None

    def _let_go_of_the_rest(self) -> None:
        """A file system may have taken a part of what it then refused; others need the disk too."""
        self._file.truncate(self.reserved_bytes)  # it grows again with what is written

    def _forget_everything(self) -> None:
        super()._forget_everything()
        self._num_reserved = 0
        self._write_behind.close()
        self._file.close()


def _stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT


def _slots_within(slot_bytes: int, max_bytes: int) -> int:
    assert slot_bytes > 0
    if max_bytes < _stride(slot_bytes):
        raise CapacityError(
            f"a host store of {max_bytes} bytes is below one slot, which takes {_stride(slot_bytes)} bytes; "
            "give it more, or 0 for none"
        )
    return max_bytes // _stride(slot_bytes)


def _nameless_file(directory: Path) -> IO[bytes]:
    try:
        # O_TMPFILE where the file system has it, else unlinked at once.
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - the store closes it
    except OSError as error:
        raise ConfigError(
            f"no file for warm pages can be made in {directory} ({error.strerror}); create that directory with the right to "
            "write to it, name another one, or take kind ram"
        ) from error
    if (filesystem := _filesystem(file.fileno())) in _FILESYSTEMS_IN_MEMORY:
        _log.warning(
            "%s lies in memory (%s), so warm pages in it take as much memory as those of kind ram; name a directory on a disk",
            directory,
            filesystem,
        )
    return file


def _filesystem(descriptor: int) -> str:
    """The type of the file system that an open file lies in, as the kernel names it; `unknown` if that cannot be told."""
    device = os.fstat(descriptor).st_dev
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return "unknown"
    types = {fields[2]: fields[fields.index("-") + 1] for fields in mounts}
    return types.get(f"{os.major(device)}:{os.minor(device)}", "unknown")
