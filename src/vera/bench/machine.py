"""What a measurement must say about the machine it was taken on."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

# The widest vectors first; a CPU is named for the first of these it has.
_ISA = {"avx512f": "avx512", "avx2": "avx2", "asimd": "neon"}


def describe_machine(num_threads: int) -> dict[str, Any]:
    """JSON-ready; the load average is the one before the runs that follow."""
    cpuinfo = _cpuinfo()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    return {
        "cpu": cpuinfo.get("model name", "unknown"),
        "cores": available_cores(),
        "isa": next((name for flag, name in _ISA.items() if flag in flags), "portable"),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": psutil.virtual_memory().available,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "threads": num_threads,
        "load_average": round(os.getloadavg()[0], 2),
    }


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _cpuinfo() -> dict[str, str]:
    """The first core's entries."""
    first_core = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first_core.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
