"""What is measured, and how: checked on construction."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vera.bench.machine import available_cores
from vera.bench.workloads.scenarios import SCENARIOS
from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.params.starters import STARTERS

CACHES = ("native", "adaptive")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadsBench:
    """Workloads of one model through `vera serve`, native and adaptive in turns."""

    model: str = "embedded"
    """A folder, a .gguf file, or `embedded`."""
    workloads: Sequence[str] = tuple(SCENARIOS)
    """Of SCENARIOS."""
    cache_bytes: int | None = None
    """The ceiling of either cache. None: see `budget_sequences`."""
    budget_sequences: float | None = None
    """The ceiling, as what a native cache needs for so many of the workload's longest sequences. None, and no `cache_bytes`: what
    it needs for the scenario's share of the tokens that are of use at the same time."""
    requests: int | None = None
    """Requests, or conversations, of each workload. None: the scenario's own number."""
    quick: bool = False
    """Less of everything: whether it works, not how well."""
    repeats: int = 1
    """Runs of each cache, in turns; from 2 up the figures are medians and their spread is given."""
    page_dtype: str = "float16"
    """How exact pages are stored."""
    max_num_seqs: int = 16
    """Most answers that run at the same time, in either service."""
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    """Cache settings of the adaptive service beside those of the profile; they win over it."""
    seed: int = 0
    """Asks something else."""
    num_threads: int | None = None
    """Threads of the service. None: one for each core that the process may use."""
    timeout_seconds: float = 1800.0
    """After this long a request counts as failed."""

    def __post_init__(self) -> None:
        if not self.workloads:
            raise ConfigError(f"nothing to measure; name a workload ({', '.join(SCENARIOS)})")
        for name in self.workloads:
            if name not in SCENARIOS:
                raise ConfigError(f"unknown workload {name!r}; known are {', '.join(SCENARIOS)}")
        if len(set(self.workloads)) < len(self.workloads):
            raise ConfigError(f"a workload is named twice in {', '.join(self.workloads)}; name each once")
        if self.cache_bytes is not None and self.budget_sequences is not None:
            raise ConfigError("cache_bytes and budget_sequences both set the ceiling; give one of them")
        for name in ("repeats", "max_num_seqs"):
            _at_least(name, getattr(self, name), 1)
        for name in ("cache_bytes", "requests", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        if self.budget_sequences is not None and not self.budget_sequences >= 1:
            raise ConfigError(f"budget_sequences={self.budget_sequences!r} must be 1 or above: below, no longest sequence fits")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ConfigError(f"timeout_seconds={self.timeout_seconds!r} must be above 0 and finite")
        for name in self.workloads:
            CacheConfig.from_dict(self.adaptive_settings(name) | {"page_dtype": self.page_dtype})

    @property
    def threads(self) -> int:
        return self.num_threads or available_cores()

    def adaptive_settings(self, workload: str) -> dict[str, Any]:
        """The settings of the profile that is named like the workload, and what was given besides."""
        profile = next(starter.changes for starter in STARTERS if starter.profile == workload)
        return profile | dict(self.adaptive) | {"mode": "adaptive"}


def check_client() -> None:
    """Raises ConfigError where the load cannot be made, or nothing can be served."""
    for module, extra in (("aiohttp", "load"), ("uvicorn", "server")):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"`vera bench workloads` needs {module}, which is not installed: pip install 'vera-engine[{extra}]'"
            )


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
