"""How fast the machine moves bytes and multiplies: short measurements, each the median of a few."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

from vera.attention import copy_bytes
from vera.check.machine import Machine
from vera.errors import ConfigError

_MIB = 2**20
_READ_BYTES = 192 * _MIB
"""More than most last-level caches."""
_COPY_BYTES = 64 * _MIB
_PIECE_BYTES = 16 * 2**10
"""About a page of keys and values."""
_DISK_BYTES = 48 * _MIB
_DISK_STEP_BYTES = 4 * _MIB
_DISK_SECONDS = 0.5
"""No longer than this a slow disk is written, or read."""
_GEMM_SIZE = 1024
_SPREAD = 0.5
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "rootfs"}

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timing:
    """Several runs of the same, in seconds."""

    seconds: float
    """The median."""
    least: float
    most: float

    @property
    def is_unsteady(self) -> bool:
        """The slowest run took half as long again as the median: something else was running."""
        return self.most > (1 + _SPREAD) * self.seconds


@dataclass(frozen=True, slots=True)
class Rate:
    """Work by time."""

    per_second: float
    """At the median time; bytes, or floating-point operations."""
    is_unsteady: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """The folder of the warm file."""

    folder: str
    filesystem: str
    in_memory: bool
    free_bytes: int
    write: Rate
    """To the disk itself, not to memory."""
    read: Rate
    """Not from memory, where the system lets go of it; warm pages that were used lately are in memory."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured of the machine."""

    memory_read: Rate
    """Bytes read by all threads, one after another."""
    copies: dict[str, Rate]
    """Copies between fast memory and host memory, by way: on a CPU both are the same, `cpu <-> host`."""
    disk: Disk
    gemm_prompt: Rate
    """float32 products of 512 rows, as prompts make them."""
    gemm_decode: Rate
    """Of 16 rows, as decode steps make them."""

    @property
    def is_unsteady(self) -> bool:
        rates = (self.memory_read, *self.copies.values(), self.gemm_prompt, self.gemm_decode)
        return any(rate.is_unsteady for rate in rates)


def measure_rates(machine: Machine, folder: Path) -> Rates:
    """About two seconds. Raises ConfigError if no file can be made in `folder`."""
    return Rates(
        memory_read=_memory_read(min(_READ_BYTES, machine.available_bytes // 16)),
        copies={"cpu <-> host": _page_copies(min(_COPY_BYTES, machine.available_bytes // 32))}
        | {way: rate for device in machine.devices[1:] for way, rate in device_copies(device.name).items()},
        disk=measure_disk(folder),
        gemm_prompt=_gemm(512),
        gemm_decode=_gemm(16),
    )


def timed(work: Callable[[], object], *, repeats: int = 7, seconds: float = 0.4, clock: Clock = time.perf_counter) -> Timing:
    """Runs `work` once to warm up, then `repeats` times, or until `seconds` have passed, whichever is first; at least once."""
    work()
    samples: list[float] = []
    began = clock()
    while not samples or (len(samples) < repeats and clock() - began < seconds):
        start = clock()
        work()
        samples.append(clock() - start)
    return Timing(median(samples), min(samples), max(samples))


def _rate(amount: float, timing: Timing) -> Rate:
    return Rate(amount / timing.seconds, timing.is_unsteady)


def _memory_read(num_bytes: int) -> Rate:
    buffer = torch.ones(max(1, num_bytes // 8), dtype=torch.int64)
    try:
        from vera.attention.cpu import plain_sum
    except ImportError:
        return _rate(buffer.nbytes, timed(buffer.sum))
    return _rate(buffer.nbytes, timed(lambda: plain_sum(buffer)))


def _page_copies(num_bytes: int) -> Rate:
    """Pages to other places, as promotions, demotions and restores copy them."""
    count = max(1, num_bytes // _PIECE_BYTES)
    source, target = (torch.ones(count * _PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    offsets = np.arange(count, dtype=np.int64) * _PIECE_BYTES
    sources, targets = source.data_ptr() + offsets, target.data_ptr() + offsets
    return _rate(source.nbytes, timed(lambda: copy_bytes(sources, targets, _PIECE_BYTES)))


def device_copies(device: str, num_bytes: int = _COPY_BYTES) -> dict[str, Rate]:
    """Both ways between pinned host memory and a device."""
    is_cuda = device.startswith("cuda")
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize(device)

    return {
        f"host -> {device}": _rate(num_bytes, timed(lambda: copy(there, host))),
        f"{device} -> host": _rate(num_bytes, timed(lambda: copy(host, there))),
    }


def _gemm(rows: int) -> Rate:
    left, right = torch.ones(rows, _GEMM_SIZE), torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    output = torch.empty(rows, _GEMM_SIZE)
    operations = 2 * rows * _GEMM_SIZE * _GEMM_SIZE
    return _rate(operations, timed(lambda: torch.mm(left, right, out=output), repeats=15))


def measure_disk(folder: Path, *, clock: Clock = time.perf_counter) -> Disk:
    """Writes and reads a file without a name, at most half a second each. Raises ConfigError if none can be made there."""
    try:
        free = psutil.disk_usage(str(folder)).free
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            descriptor = file.fileno()
            written, write_seconds = _write(descriptor, min(_DISK_BYTES, free // 4), clock)
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read_bytes, read_seconds = _read(descriptor, written, clock)
    except OSError as error:
        raise ConfigError(
            f"no file can be made in {folder} ({error.strerror}); name a folder on a disk that can be written (--warm-dir)"
        ) from None
    filesystem = _filesystem(folder)
    return Disk(
        folder=str(folder),
        filesystem=filesystem,
        in_memory=filesystem in _IN_MEMORY,
        free_bytes=free,
        write=Rate(written / write_seconds, is_unsteady=False),
        read=Rate(read_bytes / read_seconds, is_unsteady=False),
    )


def _write(descriptor: int, num_bytes: int, clock: Clock) -> tuple[int, float]:
    data = os.urandom(_DISK_STEP_BYTES)  # a file system that compresses gains nothing
    done, start = 0, clock()
    while done == 0 or (done < num_bytes and clock() - start < _DISK_SECONDS):
        done += os.write(descriptor, data)
        os.fdatasync(descriptor)
    return done, clock() - start


def _read(descriptor: int, num_bytes: int, clock: Clock) -> tuple[int, float]:
    done, start = 0, clock()
    while done == 0 or (done < num_bytes and clock() - start < _DISK_SECONDS):
        done += len(os.pread(descriptor, _DISK_STEP_BYTES, done))
    return done, clock() - start


def _filesystem(folder: Path) -> str:
    """Of the innermost mount point that holds the folder; `unknown` if that cannot be told."""
    real = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"
