"""Host stores: limits that are hard, bytes that stay, disks that are full, copies that are late."""

import ctypes
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vera.cache.warm import FileStore, RamStore, open_store, take_disk_space, write_pieces
from vera.errors import CapacityError, ConfigError

SLOT = 1000  # not a multiple of 64: slots lie 1024 bytes apart
STRIDE = 1024
TIMEOUT = 5.0


class Gate:
    """A copy stream whose transfers finish only when the test says so."""

    def __init__(self):
        self.pending = []

    def __call__(self, targets, sources, num_bytes):
        self.pending.append(GatedTransfer(targets, sources, num_bytes))
        return self.pending[-1]

    def open(self):
        for transfer in self.pending:
            transfer.complete()
        self.pending = []


class GatedTransfer:
    def __init__(self, targets, sources, num_bytes):
        self.copy = targets, sources, num_bytes
        self.done = self.abandoned = False

    def complete(self):
        if not self.abandoned:
            targets, sources, num_bytes = self.copy
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, num_bytes)
            self.done = True

    def wait(self, timeout_seconds=None):
        return self.done

    def abandon(self):
        self.abandoned = True


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Disk:
    """Gives space until `room` bytes are gone; keeps the calls."""

    def __init__(self, room):
        self.room = room
        self.calls = []

    def __call__(self, descriptor, offset, length):
        self.calls.append((offset, length))
        if length > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        take_disk_space(descriptor, offset, length)
        self.room -= length

    def write(self, descriptor, offset, pieces):
        length = int(pieces[:, 1].sum())
        new = max(0, offset + length - os.fstat(descriptor).st_blocks * 512)
        if new > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_pieces(descriptor, offset, pieces)
        self.room -= new


@pytest.fixture(params=["ram", "file"])
def make(request, tmp_path):
    """Opens stores of one kind; they are closed after the test."""
    stores = []

    def opened(num_slots, **options):
        if request.param == "ram":
            stores.append(RamStore(SLOT, num_slots * STRIDE, **options))
        else:
            stores.append(FileStore(SLOT, num_slots * STRIDE, tmp_path, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def pages(count, seed=0):
    """`[count, SLOT]` random bytes on the device, and the address of each row."""
    rows = torch.randint(0, 256, (count, SLOT), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return rows, addresses_of(rows)


def addresses_of(rows):
    return rows.data_ptr() + np.arange(len(rows), dtype=np.int64) * SLOT


def messages_with(text, caplog):
    return [message for record in caplog.records if text in (message := record.getMessage())]


# -- slots -------------------------------------------------------------------------------------------------------------


def test_limit_is_hard_and_no_room_changes_nothing(make):
    store = make(4)
    assert store.num_slots == 4
    slots = store.allocate(3)
    assert store.allocate(2) is None
    assert store.num_used == 3
    assert store.allocate(1) is not None
    assert store.used_bytes == 4 * STRIDE
    assert not set(store.allocate(0)) & set(slots)


def test_bytes_beyond_whole_slots_are_left_alone(tmp_path):
    for store in (RamStore(SLOT, 3 * STRIDE - 1), FileStore(SLOT, 3 * STRIDE - 1, tmp_path)):
        assert store.num_slots == 2
        store.close()


def test_lowest_free_slots_are_handed_out_first(make):
    store = make(6)
    slots = store.allocate(5)
    assert slots == [0, 1, 2, 3, 4]
    store.free([3, 1])
    assert store.allocate(3) == [1, 3, 5]


def test_sizes_are_reported(make):
    store = make(4)
    assert (store.slot_bytes, store.num_used, store.used_bytes, store.reserved_bytes) == (SLOT, 0, 0, 0)
    slots = store.allocate(3)
    store.free(slots[:1])
    assert (store.num_used, store.used_bytes) == (2, 2 * STRIDE)
    assert 3 * STRIDE <= store.reserved_bytes <= 4 * STRIDE


@pytest.mark.parametrize("slots", [[0, 0], [1]], ids=["twice", "never allocated"])
def test_freeing_what_is_not_owned_is_refused(make, slots):
    store = make(4)
    store.allocate(1)
    with pytest.raises(AssertionError, match="not owned"):
        store.free(slots)
    store.check_invariants()


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_addresses_are_aligned_apart_and_stable(make):
    store = make(64)
    first = store.allocate(2)
    before = [store.address(slot) for slot in first]
    everything = first + store.allocate(62)
    addresses = store.addresses(everything)
    assert addresses.dtype == np.int64
    assert addresses[:2].tolist() == before
    assert not (addresses % 64).any()
    assert np.diff(np.sort(addresses)).min() >= SLOT
    assert addresses.tolist() == [store.view(slot).data_ptr() for slot in everything]


def test_page_loaded_has_the_bytes_it_was_saved_with(make):
    store = make(8)
    rows, sources = pages(8)
    saved = rows.clone()
    slots = store.allocate(8)
    assert store.save(slots, sources).wait()
    rows.fill_(0)
    order = [5, 0, 7, 2]
    targets, target_addresses = pages(4, seed=1)
    assert store.load([slots[i] for i in order], target_addresses).done
    assert torch.equal(targets, saved[order])
    assert all(torch.equal(store.view(slot), row) for slot, row in zip(slots, saved, strict=True))


def test_added_pieces_lie_one_after_the_other(make):
    store = make(8)
    rows, sources = pages(8)
    order = [6, 1, 3]
    store.free([store.add(sources, 100), store.add(sources, 100)][:1])
    slots = [store.add(sources[order] + 10, 300), store.add(sources[:1], 1000)]
    assert slots == [0, 2]
    assert torch.equal(store.view(0)[:900], rows[order, 10:310].reshape(-1))
    assert torch.equal(store.view(2), rows[0])
    assert torch.equal(store.view(1)[:800], rows[:, :100].reshape(-1))


def test_what_is_added_finds_no_room_beyond_the_last_slot(make):
    store = make(2)
    sources = pages(1)[1]
    assert [store.add(sources, SLOT) for _ in range(3)] == [0, 1, None]
    store.free([0])
    assert store.add(sources, SLOT) == 0


def test_slots_keep_their_content_while_others_come_and_go(make):
    store = make(16)
    rows, sources = pages(8)
    kept = store.allocate(8)
    store.save(kept, sources)
    for seed in range(5):
        others = store.allocate(8)
        store.save(others, pages(8, seed=seed + 1)[1])
        store.free(others)
    assert all(torch.equal(store.view(slot), row) for slot, row in zip(kept, rows, strict=True))


def test_two_stores_do_not_mix(make):
    one, other = make(4), make(4)
    for store, value in ((one, 1), (other, 2)):
        for slot in store.allocate(4):
            store.view(slot).fill_(value)
    assert all((one.view(slot) == 1).all() and (other.view(slot) == 2).all() for slot in range(4))
    one.close()
    assert all((other.view(slot) == 2).all() for slot in range(4))


def test_memory_that_no_slot_needed_is_not_touched():
    megabyte = 2**20
    before = resident_bytes()
    store = RamStore(megabyte, 1024 * megabyte)
    for slot in store.allocate(8):
        store.view(slot).fill_(1)
    assert resident_bytes() - before < 64 * megabyte
    store.close()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- closing -----------------------------------------------------------------------------------------------------------


def test_closing_twice_is_as_good_as_once(make):
    store = make(4)
    store.allocate(2)
    store.close()
    store.close()
    assert (store.num_used, store.reserved_bytes) == (0, 0)


def test_closed_store_hands_out_and_shows_nothing(make):
    store = make(4)
    [slot] = store.allocate(1)
    store.close()
    for use in (lambda: store.allocate(1), lambda: store.address(slot), lambda: store.view(slot)):
        with pytest.raises(AssertionError):
            use()


def test_view_that_outlives_the_store_still_points_to_memory(make):
    store = make(4)
    [slot] = store.allocate(1)
    view = store.view(slot)
    view.fill_(7)
    store.close()
    assert (view == 7).all()


# -- copies that take their time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["save", "load"])
def test_slot_freed_during_a_transfer_is_not_handed_out_before_it_is_done(make, direction):
    gate = Gate()
    store = make(4, copy=gate, clock=Clock(), transfer_timeout_seconds=TIMEOUT)
    slots = store.allocate(4)
    rows, addresses = pages(2)
    getattr(store, direction)(slots[:2], addresses)
    store.free(slots)
    assert store.num_used == 2
    assert store.allocate(3) is None
    assert store.allocate(2) == slots[2:]
    gate.open()
    assert store.num_used == 2
    assert store.allocate(2) == slots[:2]
    assert len(rows) == 2


def test_transfer_that_never_ends_gives_its_slots_back_after_the_timeout(make, caplog):
    clock = Clock()
    store = make(2, copy=Gate(), clock=clock, transfer_timeout_seconds=TIMEOUT)
    slots = store.allocate(2)
    _rows, sources = pages(2)
    transfer = store.save(slots, sources)
    store.free(slots)
    clock.now = TIMEOUT - 0.1
    assert store.allocate(1) is None
    clock.now = TIMEOUT
    assert store.allocate(2) == slots
    assert not transfer.done
    assert len(messages_with("a copy of 2 warm slots was not done after 5 s and is given up", caplog)) == 1


def test_late_completion_neither_writes_nor_frees(make):
    gate, clock = Gate(), Clock()
    store = make(2, copy=gate, clock=clock, transfer_timeout_seconds=TIMEOUT)
    [slot] = store.allocate(1)
    _rows, sources = pages(1)
    store.save([slot], sources)
    store.free([slot])
    clock.now = TIMEOUT
    assert store.allocate(1) == [slot]
    store.view(slot).fill_(9)
    gate.open()
    assert (store.view(slot) == 9).all()
    assert store.num_used == 1
    assert store.allocate(2) is None
    store.check_invariants()


def test_transfer_in_time_is_not_given_up_however_long_it_took_before_the_slot_was_freed(make):
    gate, clock = Gate(), Clock()
    store = make(1, copy=gate, clock=clock, transfer_timeout_seconds=TIMEOUT)
    slots = store.allocate(1)
    rows, sources = pages(1)
    transfer = store.save(slots, sources)
    clock.now = 10 * TIMEOUT
    assert store.num_used == 1
    gate.open()
    assert transfer.done
    assert torch.equal(store.view(slots[0]), rows[0])


def test_page_is_not_loaded_before_its_save_is_done(make):
    gate = Gate()
    store = make(1, copy=gate)
    slots = store.allocate(1)
    rows, sources = pages(1)
    targets, target_addresses = pages(1, seed=1)
    store.save(slots, sources)
    with pytest.raises(AssertionError, match="save is not done"):
        store.load(slots, target_addresses)
    gate.open()
    store.load(slots, target_addresses)
    gate.open()
    assert torch.equal(targets, rows)


def test_page_is_not_overwritten_while_it_is_loaded(make):
    gate = Gate()
    store = make(1, copy=gate)
    slots = store.allocate(1)
    _rows, addresses = pages(1)
    store.load(slots, addresses)
    store.load(slots, addresses)  # two readers do no harm
    with pytest.raises(AssertionError, match="a transfer uses"):
        store.save(slots, addresses)
    gate.open()
    store.save(slots, addresses)
    gate.open()


def test_closing_gives_transfers_up_before_the_memory_goes(make):
    gate = Gate()
    store = make(2, copy=gate, clock=Clock(), transfer_timeout_seconds=TIMEOUT)
    _rows, sources = pages(2)
    store.save(store.allocate(2), sources)
    [transfer] = gate.pending
    store.close()
    assert transfer.abandoned
    gate.open()


class SlotLife(RuleBasedStateMachine):
    """Slots are allocated, copied to and from late or never, and freed at any time."""

    NUM_SLOTS = 8

    @initialize()
    def begin(self):
        self.gate, self.clock = Gate(), Clock()
        self.store = self.opened(copy=self.gate, clock=self.clock, transfer_timeout_seconds=TIMEOUT)
        self.device = np.zeros((self.NUM_SLOTS, 64), dtype=np.uint8)
        self.owned: set[int] = set()
        self.flights: list[tuple[GatedTransfer, set[int]]] = []

    def opened(self, **options):
        return RamStore(64, self.NUM_SLOTS * 64, **options)

    def in_flight(self):
        return {slot for transfer, slots in self.flights if not transfer.done and not transfer.abandoned for slot in slots}

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        slots = self.store.allocate(count)
        blocked = self.owned | self.in_flight()
        if slots is None:
            assert count > self.NUM_SLOTS - len(blocked)
            return
        assert len(slots) == count and not blocked & set(slots)
        self.owned.update(slots)

    @rule()
    def add(self):
        slot = self.store.add(np.array([self.device.ctypes.data]), 64)
        blocked = self.owned | self.in_flight()
        if slot is None:
            assert len(blocked) == self.NUM_SLOTS
            return
        assert slot not in blocked
        self.owned.add(slot)

    @precondition(lambda self: self.owned - self.in_flight())
    @rule(data=st.data(), direction=st.sampled_from(["save", "load"]))
    def copy(self, data, direction):
        slots = sorted(data.draw(st.sets(st.sampled_from(sorted(self.owned - self.in_flight())), min_size=1)))
        addresses = self.device.ctypes.data + 64 * np.arange(len(slots), dtype=np.int64)
        transfer = getattr(self.store, direction)(slots, addresses)
        self.flights.append((transfer, set(slots)))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        slots = data.draw(st.sets(st.sampled_from(sorted(self.owned))))
        self.store.free(sorted(slots))
        self.owned -= slots

    @precondition(lambda self: self.gate.pending)
    @rule(data=st.data())
    def complete(self, data):
        self.gate.pending.pop(data.draw(st.integers(0, len(self.gate.pending) - 1))).complete()

    @precondition(lambda self: self.gate.pending)
    @rule()
    def lose(self):
        self.gate.pending.pop()

    @rule(seconds=st.sampled_from([1.0, TIMEOUT]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @invariant()
    def books_balance(self):
        num_used = self.store.num_used
        self.store.check_invariants()
        assert num_used == len(self.owned | self.in_flight())

    def teardown(self):
        self.store.free(sorted(self.owned))
        self.gate.open()
        self.clock.now += TIMEOUT
        assert self.store.num_used == 0
        assert self.store.allocate(self.NUM_SLOTS) == list(range(self.NUM_SLOTS))
        self.store.close()


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class FileSlotLife(SlotLife):
    """The same in a file, whose disk may say no to what is added."""

    def opened(self, **options):
        self.refusing = False
        return FileStore(64, self.NUM_SLOTS * 64, Path(tempfile.gettempdir()), write=self.write, **options)

    def write(self, descriptor, offset, pieces):
        if self.refusing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_pieces(descriptor, offset, pieces)

    @precondition(lambda self: self.owned)
    @rule()
    def fail_to_add_to_a_used_slot(self):
        free = sorted(set(range(max(self.owned) + 1)) - self.owned - self.in_flight())
        if free:
            self.refusing = True
            assert self.store.add(np.array([self.device.ctypes.data]), 64) is None
            self.refusing = False


TestFileSlotLife = FileSlotLife.TestCase
TestFileSlotLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -- files -------------------------------------------------------------------------------------------------------------


def test_file_is_never_larger_than_the_limit(tmp_path):
    disk = Disk(room=2**30)
    limit = 100 * STRIDE + 500
    store = FileStore(SLOT, limit, tmp_path, reserve=disk)
    store.allocate(100)
    assert max(offset + length for offset, length in disk.calls) <= limit
    assert store.reserved_bytes == 100 * STRIDE
    store.close()


def test_disk_space_is_reserved_in_steps_before_use(tmp_path):
    disk = Disk(room=2**40)
    slot_bytes = 2**20
    store = FileStore(slot_bytes, 1000 * slot_bytes, tmp_path, reserve=disk)
    assert disk.calls == []
    for _ in range(3):
        store.allocate(1)
    assert disk.calls == [(0, 2 * slot_bytes), (2 * slot_bytes, 2 * slot_bytes)]
    assert store.reserved_bytes == 4 * slot_bytes
    store.close()


def test_space_reserved_ahead_is_handed_out_without_asking_the_disk(tmp_path):
    disk = Disk(room=2**40)
    store = FileStore(2**20, 100 * 2**20, tmp_path, reserve=disk)
    store.allocate(2)
    store.reserve(6, 8)
    calls = list(disk.calls)
    assert store.reserved_bytes == 8 * 2**20
    store.allocate(6)
    assert disk.calls == calls and store.reserved_bytes == 8 * 2**20
    store.close()


def test_no_more_space_waits_than_the_limit_freed_slots_included(tmp_path):
    store = FileStore(2**20, 20 * 2**20, tmp_path)
    slots = store.allocate(4)
    store.free(slots[:3])
    store.reserve(10, 5)
    assert store.reserved_bytes == 6 * 2**20
    store.reserve(10, 5)
    assert store.reserved_bytes == 6 * 2**20
    store.reserve(100, 100)
    assert store.reserved_bytes == 20 * 2**20
    store.close()


def test_full_disk_shows_when_slots_are_needed_and_not_when_they_are_reserved(tmp_path, caplog):
    store = FileStore(SLOT, 100 * STRIDE, tmp_path, reserve=Disk(room=0))
    store.reserve(4, 4)
    asked = len(store._reserve.calls)
    store.reserve(4, 4)
    assert len(store._reserve.calls) == asked, "others need what is left of the disk"
    assert not caplog.records and store.reserved_bytes == 0
    assert store.allocate(1) is None
    assert caplog.records
    store.close()


def test_full_disk_is_no_room_and_one_warning(tmp_path, caplog):
    store = FileStore(SLOT, 100 * STRIDE, tmp_path, reserve=Disk(room=10 * STRIDE))
    slots = store.allocate(8)
    assert store.allocate(5) is None
    assert store.allocate(5) is None
    assert store.num_used == 8
    [warning] = messages_with("the disk gives no more", caplog)
    assert str(tmp_path) in warning
    assert "No space left on device" in warning
    assert "make room there or name a directory on another disk" in warning
    store.free(slots)
    assert store.num_slots == 8
    assert store.allocate(8) == slots
    store.close()


def test_last_space_of_a_disk_is_used_slot_by_slot(tmp_path):
    disk = Disk(room=10 * STRIDE)
    store = FileStore(SLOT, 100 * STRIDE, tmp_path, reserve=disk)
    slots = [store.allocate(1) for _ in range(12)]
    assert slots == [[slot] for slot in range(10)] + [None, None]
    assert disk.room == 0
    assert len(disk.calls) == 12  # one step that was too long, then slot by slot
    for slot in range(10):
        store.view(slot).fill_(slot)
    assert all((store.view(slot) == slot).all() for slot in range(10))
    store.close()


def test_adding_to_a_full_disk_is_no_room_and_one_warning(tmp_path, caplog):
    megabyte = 2**20
    disk = Disk(room=3 * megabyte + 4096)
    store = FileStore(megabyte, 100 * megabyte, tmp_path, reserve=disk, write=disk.write)
    memory = np.arange(megabyte, dtype=np.uint8)
    source = np.array([memory.ctypes.data])
    assert [store.add(source, megabyte) for _ in range(5)] == [0, 1, 2, None, None]
    assert (store.num_slots, store.num_used) == (3, 3)
    [warning] = messages_with("the disk gives no more", caplog)
    assert "No space left on device" in warning
    store.free([1])
    assert store.add(source, megabyte) == 1
    assert all((store.view(slot).numpy() == memory).all() for slot in range(3))
    store.close()


def test_failed_write_to_a_used_slot_leaves_all_others(tmp_path, caplog):
    """As where a file system never writes in place."""
    refusing = False

    def write(descriptor, offset, pieces):
        if refusing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_pieces(descriptor, offset, pieces)

    store = FileStore(SLOT, 4 * STRIDE, tmp_path, write=write)
    rows, sources = pages(4)
    assert [store.add(sources[i : i + 1], SLOT) for i in range(3)] == [0, 1, 2]
    store.free([0])
    refusing = True
    assert store.add(sources[3:], SLOT) is store.add(sources[3:], SLOT) is None
    assert all(torch.equal(store.view(slot), rows[slot]) for slot in (1, 2))
    assert store.num_used == 2
    assert len(messages_with("the disk gives no more", caplog)) == 1
    store.check_invariants()
    refusing = False
    assert [store.add(sources[3:], SLOT) for _ in range(3)] == [0, 3, None]
    store.close()


def test_units_of_as_many_pages_as_one_call_takes_leave_nothing_to_write(tmp_path):
    store = FileStore(1024 * 64, 4 * 1024 * 64, tmp_path)
    rows = np.random.default_rng(0).integers(0, 256, size=(1024, 64), dtype=np.uint8)
    slot = store.add(rows.ctypes.data + 64 * np.arange(1024), 64)
    assert np.array_equal(store.view(slot).numpy(), rows.reshape(-1))
    store.close()


def test_added_units_are_sent_to_the_disk(tmp_path, monkeypatch):
    ranges = []
    monkeypatch.setattr("vera.cache.warm._WriteBehind.write", lambda _, offset, length: ranges.append((offset, length)))
    store = FileStore(SLOT, 4 * STRIDE, tmp_path)
    for _ in range(3):
        store.add(pages(1)[1], SLOT)
    assert ranges == [(0, STRIDE), (STRIDE, STRIDE), (2 * STRIDE, STRIDE)]
    store.close()


def test_without_another_thread_the_system_writes_in_its_own_time(tmp_path, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    before = num_descriptors()
    store = FileStore(SLOT, 4 * STRIDE, tmp_path)
    rows, sources = pages(1)
    assert torch.equal(store.view(store.add(sources, SLOT)), rows[0])
    store.close()
    assert num_descriptors() == before


def test_added_slots_that_are_freed_can_be_written_through_the_mapping_on_a_full_disk(tmp_path):
    store = FileStore(2**20, 4 * 2**20, tmp_path, reserve=Disk(room=0))
    memory = np.ones(2**18, dtype=np.uint8)
    store.free([store.add(np.array([memory.ctypes.data]), len(memory))])
    assert os.fstat(store._file.fileno()).st_blocks * 512 >= 2**20, "a part of the slot has no space on the disk"
    assert store.allocate(1) == [0]
    store.close()


def test_file_that_may_not_grow_keeps_what_it_has(tmp_path):
    """The system itself says no, in the middle of a slot."""
    code = f"""
import os, resource, signal
from pathlib import Path
import numpy as np
from vera.cache.warm import FileStore
store = FileStore(2**20, 8 * 2**20, Path({str(tmp_path)!r}))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 2**19, 8 * 2**20))
rows = np.arange(2**20, dtype=np.uint8).reshape(16, -1)
sources = rows.ctypes.data + rows.strides[0] * np.arange(16)
slots = [store.add(sources, rows.strides[0]) for _ in range(3)]
assert slots == [0, 1, None], slots
assert all((store.view(slot).numpy() == rows.reshape(-1)).all() for slot in (0, 1))
assert store.num_slots == 2
assert os.fstat(store._file.fileno()).st_size == 2 * 2**20, "others need the rest of the disk"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_writes_that_end_early_go_on_where_they_ended(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, size=(3000, 7), dtype=np.uint8)
    pieces = np.column_stack([rows.ctypes.data + 7 * np.arange(3000), np.full(3000, 7)])
    counts = []

    def writes_some(descriptor, address, count, offset):
        counts.append(count)
        parts = np.frombuffer((ctypes.c_int64 * (2 * count)).from_address(address), dtype=np.int64).reshape(-1, 2)
        memory = b"".join(ctypes.string_at(int(start), int(length)) for start, length in parts[:300])
        return os.pwrite(descriptor, memory[:1000], offset)

    monkeypatch.setattr("vera.cache.warm._pwritev", writes_some)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        write_pieces(file.fileno(), 5, pieces)
        assert file.seek(5) == 5
        assert file.read() == rows.tobytes()
    assert max(counts) <= 1024, "the system refuses more pieces"


def test_more_pieces_than_one_call_takes_are_written(tmp_path):
    rows = np.random.default_rng(0).integers(0, 256, size=(3000, 7), dtype=np.uint8)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        write_pieces(file.fileno(), 0, np.column_stack([rows.ctypes.data + 7 * np.arange(3000), np.full(3000, 7)]))
        assert file.read() == rows.tobytes()


def test_space_that_a_failed_step_took_is_given_back_to_the_disk(tmp_path):
    descriptors = []

    def reserve(descriptor, offset, length):
        descriptors.append(descriptor)
        if offset == 0:
            take_disk_space(descriptor, offset, length)
        else:
            take_disk_space(descriptor, offset, length // 2)
            raise OSError(errno.ENOSPC, "No space left on device")

    megabyte = 2**20
    store = FileStore(megabyte, 200 * megabyte, tmp_path, reserve=reserve)
    kept = store.allocate(16)
    for slot in kept:
        store.view(slot).fill_(slot)
    assert store.allocate(1) is None
    assert os.fstat(descriptors[0]).st_blocks * 512 < 18 * megabyte
    assert all((store.view(slot) == slot).all() for slot in kept)
    store.close()


def test_reserved_space_is_written_space(tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"kept")
        file.flush()
        take_disk_space(file.fileno(), 4, 3 * 2**20)
        assert file.seek(0, os.SEEK_HOLE) == file.seek(0, os.SEEK_END) == 4 + 3 * 2**20
        assert file.seek(0) == 0
        assert file.read() == b"kept" + bytes(3 * 2**20)


@pytest.mark.parametrize("with_o_tmpfile", [True, False])
def test_file_has_no_name_from_the_start(tmp_path, monkeypatch, with_o_tmpfile):
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", with_o_tmpfile)
    store = FileStore(SLOT, 4 * STRIDE, tmp_path)
    store.view(store.allocate(1)[0]).fill_(1)
    assert list(tmp_path.iterdir()) == []
    store.close()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sync_file_range"), reason="the system cannot be asked to write")
def test_filled_slots_are_on_the_disk_long_before_the_system_would_write_them(tmp_path):
    store = FileStore(SLOT, 512 * STRIDE, tmp_path)
    if in_memory(tmp_path):
        pytest.skip("the folder for temporary files lies in memory")
    slots = store.allocate(512)
    os.sync()  # the zeros that took the space
    for slot in slots:
        store.view(slot).fill_(1)
    assert dirty_bytes(store.address(slots[0])) > 0
    store.filled(slots)
    deadline = time.monotonic() + 10
    while dirty_bytes(store.address(slots[0])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert dirty_bytes(store.address(slots[0])) == 0
    store.close()


def in_memory(directory):
    found = subprocess.run(["stat", "-f", "-c", "%T", directory], capture_output=True, text=True, check=True)
    return found.stdout.strip() == "tmpfs"


def dirty_bytes(address):
    """Of the mapping that holds an address: what its file has not got yet."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if holds(line, address))
    fields = dict(line.split(":", 1) for line in lines[at + 1 : at + 20])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Shared_Dirty", "Private_Dirty"))


def holds(line, address):
    span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
    return span is not None and int(span[1], 16) <= address < int(span[2], 16)


def test_killed_process_leaves_no_litter(tmp_path):
    code = f"""
from pathlib import Path
from vera.cache.warm import FileStore
store = FileStore(4096, 2**20, Path({str(tmp_path)!r}))
for slot in store.allocate(16):
    store.view(slot).fill_(1)
print("ready", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_closed_file_frees_its_descriptors(tmp_path):
    before = num_descriptors()
    store = FileStore(SLOT, 4 * STRIDE, tmp_path)
    store.allocate(3)
    store.add(pages(1)[1], SLOT)
    store.close()
    assert num_descriptors() == before


def test_file_that_nobody_closed_frees_its_descriptors(tmp_path):
    before = num_descriptors()
    store = FileStore(SLOT, 4 * STRIDE, tmp_path)
    store.add(pages(1)[1], SLOT)
    del store
    deadline = time.monotonic() + 10
    while num_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_descriptors() == before


def num_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# -- settings ----------------------------------------------------------------------------------------------------------


def test_kinds_open_what_they_name(tmp_path):
    assert open_store("none", SLOT, 10 * STRIDE) is None
    assert open_store("ram", SLOT, 0) is None
    assert open_store("file", SLOT, 0, tmp_path) is None
    for kind in ("ram", "file"):
        store = open_store(kind, SLOT, 10 * STRIDE, tmp_path)
        assert store.kind == kind
        assert store.num_slots == 10
        store.close()


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_limit_below_one_slot_names_both_numbers(kind, tmp_path):
    with pytest.raises(CapacityError, match=r"of 1023 bytes is below one slot, which takes 1024 bytes; give it more"):
        open_store(kind, SLOT, 1023, tmp_path)


def test_settings_that_cannot_be_meant_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'disk' is not one of ram, file, none"):
        open_store("disk", SLOT, 10 * STRIDE, tmp_path)
    with pytest.raises(ConfigError, match="-1 bytes"):
        open_store("ram", SLOT, -1)
    with pytest.raises(ConfigError, match="needs a directory"):
        open_store("file", SLOT, 10 * STRIDE)


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_more_than_can_be_addressed_is_refused(kind, tmp_path):
    with pytest.raises(CapacityError, match="ask for less"):
        open_store(kind, SLOT, 2**62, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_does_not_exist_is_named_with_the_way_out(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=rf"{missing} \(No such file or directory\); create that directory"):
        FileStore(SLOT, 4 * STRIDE, missing)


def test_file_in_the_place_of_a_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        FileStore(SLOT, 4 * STRIDE, file)


def test_directory_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")  # the tests may run as root, whom no directory refuses

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=rf"{tmp_path} \(Permission denied\); .* the right to write"):
        FileStore(SLOT, 4 * STRIDE, tmp_path)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_directory_in_memory_is_warned_of(caplog):
    FileStore(SLOT, 4 * STRIDE, Path("/dev/shm")).close()
    [warning] = messages_with("/dev/shm lies in memory (tmpfs)", caplog)
    assert "name a directory on a disk" in warning


def test_directory_on_a_disk_is_taken_without_a_word(tmp_path, caplog):
    command = ["stat", "--file-system", "--format=%T", str(tmp_path)]
    if subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() in ("tmpfs", "ramfs"):
        pytest.skip("the temporary directory lies in memory")
    FileStore(SLOT, 4 * STRIDE, tmp_path).close()
    assert caplog.records == []
