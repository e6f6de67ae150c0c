"""What the machine is: CPU, kernels, memory, torch and devices. Nothing is timed here."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from vera.attention import make_backend
from vera.bench.machine import describe_machine
from vera.cache.memory import available_bytes
from vera.config import environment_warnings

_FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "asimd",
    "asimddp", "i8mm", "sve",
)  # fmt: skip
_LOOK_SECONDS = 0.2
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors can lie."""

    name: str
    """As torch calls it: `cpu`, `cuda:0`."""
    model: str
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything as this process finds it: in a container, what is left to it."""

    cpu: str
    features: tuple[str, ...]
    """Of the CPU, those that matter here, as the kernel names them."""
    cores: int
    """Cores that this process may run on."""
    core_quota: float | None
    """Cores' worth of time that its control groups allow; None: no limit."""
    threads: int
    """Threads that torch and the native kernel compute with."""
    busy_share: float
    """Of all cores, the share that was busy just before anything was measured."""
    isa: str | None
    """The native kernel's instruction set in use; None: there is none, attention runs in plain torch."""
    isas: tuple[str, ...]
    """Those that this CPU runs, best first."""
    no_kernel: str | None
    """Why there is no native kernel."""
    memory_bytes: int
    available_bytes: int
    """What this process may still take: the machine's, or less where a container has a limit."""
    is_limited: bool
    """A container's limit leaves less than the machine has."""
    python: str
    torch: str
    torch_build: str
    """`cpu`, or what it is built for, such as `CUDA 12.8`."""
    transformers: str
    devices: tuple[Device, ...]
    warnings: tuple[str, ...]
    """Of the environment."""


def look_at_machine() -> Machine:
    """Takes a fifth of a second, to see how busy the machine is. Raises ConfigError for a VERA_CPU_ISA that cannot be."""
    busy = psutil.cpu_percent(interval=_LOOK_SECONDS) / 100
    threads = torch.get_num_threads()
    described = describe_machine(threads)
    isa, isas, no_kernel = _kernel()
    available, machines = available_bytes(), psutil.virtual_memory().available
    return Machine(
        cpu=described["cpu"],
        features=_features(),
        cores=described["cores"],
        core_quota=core_quota(),
        threads=threads,
        busy_share=busy,
        isa=isa,
        isas=isas,
        no_kernel=no_kernel,
        memory_bytes=described["memory_bytes"],
        available_bytes=available,
        is_limited=available < 0.95 * machines,
        python=platform.python_version(),
        torch=described["torch"],
        torch_build=_torch_build(),
        transformers=described["transformers"],
        devices=_devices(available),
        warnings=tuple(environment_warnings()),
    )


def core_quota(*, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """The least that any control group around us allows, in cores (cgroup v2). None: no limit, or it cannot be told."""
    try:
        paths = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return None
    inner = [cgroups / path.lstrip("/") for path in paths]
    quotas = [_quota(group) for start in inner for group in (start, *start.parents) if group.is_relative_to(cgroups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _kernel() -> tuple[str | None, tuple[str, ...], str | None]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        backend = make_backend("auto")
    if backend.name != "cpu":
        return None, (), "; ".join(str(warning.message) for warning in told)
    from vera.attention.cpu import CpuAttention, available_isas

    assert isinstance(backend, CpuAttention)
    return backend.isa, tuple(available_isas()), None


def _features() -> tuple[str, ...]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(feature for feature in _FEATURES if feature in flags)


def _torch_build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip is not None else "cpu"


def _devices(available: int) -> tuple[Device, ...]:
    found = [Device("cpu", platform.machine(), psutil.virtual_memory().total, available)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found.append(Device(f"cuda:{index}", torch.cuda.get_device_name(index), total, free))
    return tuple(found)
