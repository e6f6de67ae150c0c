"""What to measure: one frozen dataclass a benchmark, checked on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vera.bench.machine import available_cores
from vera.config import CacheConfig
from vera.errors import ConfigError

CACHES = ("native", "adaptive")
"""Caches of Vera that can be measured."""
BASELINES = ("transformers", "llama.cpp", "vllm")
"""What they can be compared with, in the same run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every benchmark has to be told."""

    model: str = "embedded"
    """A folder, a .gguf file, or `embedded`."""
    context: int = 8000
    """Tokens of the prompt."""
    caches: Sequence[str] = ("native",)
    """Of CACHES."""
    baselines: Sequence[str] = ()
    """Of BASELINES."""
    page_dtype: str = "float16"
    """How Vera's pages are stored."""
    max_batch_tokens: int = 512
    """Most tokens Vera computes in a step: the chunk of its prefill."""
    repeats: int = 1
    """Runs of each subject, in turns; from 2 up the figures are medians and their spread is given."""
    seed: int = 0
    """Which part of the document is the prompt."""
    num_threads: int | None = None
    """Threads for every subject. None: one for each core that the process may use."""
    timeout_seconds: float = 3600.0
    """After this long a run is stopped and counts as failed."""

    def __post_init__(self) -> None:
        _known("cache", self.caches, CACHES)
        _known("baseline", self.baselines, BASELINES)
        if not self.caches and not self.baselines:
            raise ConfigError(f"nothing to measure; name a cache ({', '.join(CACHES)}) or a baseline ({', '.join(BASELINES)})")
        CacheConfig(page_dtype=self.page_dtype)
        for name in ("context", "max_batch_tokens", "repeats"):
            _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds!r} must be above 0")

    @property
    def threads(self) -> int:
        return self.num_threads or available_cores()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench(Bench):
    """Many sequences, each with a long context of its own, one token for each a step."""

    batch: int = 16
    """Sequences decoded together."""
    new_tokens: int = 32
    """Steps that are timed."""
    baseline_seconds: float = 60.0
    """The transformers baseline stops after about this much decoding, if that is before `new_tokens` steps."""
    cold_share: float | None = None
    """The adaptive cache's warm store is so small that this share of its units is cold. None: it has room for all."""
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the adaptive cache that differ from the defaults: fields of CacheConfig."""

    def __post_init__(self) -> None:
        Bench.__post_init__(self)  # slots make a new class, which the short form of super does not know
        _at_least("batch", self.batch, 1)
        _at_least("new_tokens", self.new_tokens, 1)
        if not self.baseline_seconds > 0:
            raise ConfigError(f"baseline_seconds={self.baseline_seconds!r} must be above 0")
        if self.cold_share is not None and not 0 <= self.cold_share <= 1:
            raise ConfigError(f"cold_share={self.cold_share!r} is outside 0 to 1")
        CacheConfig.from_dict({"mode": "adaptive", **self.adaptive})
        if "adaptive" not in self.caches and (self.cold_share is not None or self.adaptive):
            raise ConfigError(
                f"cold_share and adaptive settings need the adaptive cache, and caches are {', '.join(self.caches)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBench(Bench):
    """One long prompt on an idle engine: how soon comes its first token?"""


def _known(what: str, names: Sequence[str], known: tuple[str, ...]) -> None:
    if isinstance(names, str):
        raise ConfigError(f"{what}s={names!r} must be a list of names, such as [{names!r}]")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown {what} {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{what}s={', '.join(names)} names one twice; name each once")


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
