"""Settings: one frozen dataclass a stage, composed. Checked on construction; unknown names are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from vera.errors import ConfigError

_RATIO_RISK = "above 0.8 the process may run out of memory"


class _Config:
    """What every stage's settings share: building from a dict and printing the effective values."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Unknown names raise a ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The effective settings, JSON-ready."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class CacheConfig(_Config):
    """The KV cache of one device."""

    mode: str = "native"
    """`native`: every page exact in fast memory."""
    cache_max_size_ratio: float = 0.6
    """Share of the device's available memory that the cache may take; a hard ceiling. Recommended 0.45-0.70."""
    cache_max_bytes: int | None = None
    """The ceiling in bytes; given, it takes the place of `cache_max_size_ratio`."""
    page_size: int = 64
    """Tokens a block."""
    page_dtype: str = "float16"
    """How pages are stored: float16, bfloat16 or float32."""
    prefix_reuse: bool = True
    """Requests that begin with the same tokens share their full blocks."""
    poison: bool = False
    """Fill pages with NaN when they are handed out and when they come back. For tests: finds reads of stale bytes."""

    def __post_init__(self) -> None:
        _choice("cache mode", self.mode, ("native",))
        _choice("page_dtype", self.page_dtype, ("float16", "bfloat16", "float32"))
        _choice("page_size", self.page_size, (16, 32, 64, 128))
        if not _is_number(self.cache_max_size_ratio) or not 0 < self.cache_max_size_ratio <= 0.95:
            raise ConfigError(f"cache_max_size_ratio={self.cache_max_size_ratio!r} is outside (0, 0.95]; {_RATIO_RISK}")
        if self.cache_max_bytes is not None:
            _at_least("cache_max_bytes", self.cache_max_bytes, 1)


@dataclass(frozen=True, slots=True)
class EngineConfig(_Config):
    """The engine around the cache."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """Settings of the KV cache."""
    max_num_seqs: int = 16
    """Most sequences that run at the same time."""
    max_batch_tokens: int = 512
    """Most new tokens a step computes; longer prompts are prefilled in chunks of what is left of this."""
    max_waiting: int = 10_000
    """Most requests that may wait; more are refused."""
    max_model_len: int | None = None
    """Longest sequence (prompt and answer) in tokens. None: what the model and the cache allow."""
    attention_backend: str = "auto"
    """`cpu` (the native kernel), `reference` (plain torch), or `auto`: the first that is there."""
    num_threads: int | None = None
    """Threads for torch and the kernel. None: torch's own choice."""
    seed: int = 0
    """Where seeds of requests that bring none are drawn from."""

    def __post_init__(self) -> None:
        if not isinstance(self.cache, CacheConfig):
            raise ConfigError(f"cache={self.cache!r} is not a CacheConfig")
        _choice("attention_backend", self.attention_backend, ("auto", "cpu", "reference"))
        for name in ("max_num_seqs", "max_batch_tokens", "max_waiting"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "each running sequence needs one token a step; raise the first or lower the second"
            )


ENVIRONMENT = {
    "VERA_HOME": "where converted models are kept",
    "VERA_CPU_ISA": "the kernels' instruction set: avx512, avx2 or portable",
}
"""Every environment variable that Vera reads. Settings come from arguments alone."""


def environment_warnings() -> list[str]:
    """A line for each variable that looks like one of ours and is none."""
    unknown = sorted(name for name in os.environ if name.startswith("VERA_") and name not in ENVIRONMENT)
    return [
        f"the environment variable {name} is unknown and has no effect; known are {', '.join(ENVIRONMENT)}" for name in unknown
    ]


def cache_home() -> Path:
    """Where converted models are kept: `$VERA_HOME`, else `$XDG_CACHE_HOME/vera`, else `~/.cache/vera`."""
    if home := os.environ.get("VERA_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vera"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(str, choices))}")


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
