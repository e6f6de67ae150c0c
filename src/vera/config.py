"""Settings: one frozen dataclass a stage, composed. Checked on construction; unknown names are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from vera.errors import ConfigError


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


FIDELITIES = ("native", "bounded", "exact")
"""What a request can ask of an adaptive cache: nothing of its own is demoted; within `attention_tolerance`; pages may be
demoted, but every one is served exactly."""


@dataclass(frozen=True, slots=True)
class CacheConfig(_Config):
    """The KV cache of one device. A value outside its recommended range gives a warning that states the risk (see `risks`)."""

    mode: str = "native"
    """`native`: every page exact in fast memory. `adaptive`: hot, warm and cold pages."""
    cache_max_size_ratio: float = 0.6
    """Share of the device's available memory that the cache may take; a hard ceiling. Recommended 0.45-0.70."""
    cache_max_bytes: int | None = None
    """The ceiling in bytes; given, it takes the place of `cache_max_size_ratio`."""
    page_size: int = 64
    """Tokens a block."""
    page_dtype: str = "float16"
    """How exact pages are stored: float16, bfloat16 or float32."""
    prefix_reuse: bool = True
    """Requests that begin with the same tokens share their full blocks."""
    poison: bool = False
    """Fill pages with NaN when they are handed out and when they come back. For tests: finds reads of stale bytes."""

    hot_score_threshold: float = 0.70
    """Adaptive: heat score from which a page is hot; 0.5 is an average page. Recommended 0.62-0.78."""
    cold_drop_step: int = 256
    """Adaptive: tokens between two scans that release cold pages. Recommended 128-512."""
    recompute_layer_limit: int = 16
    """Adaptive: most layers in one recompute, so the length of a window. Recommended 8-16."""
    attention_tolerance: float = 0.015
    """Adaptive: largest estimated error of an attention output, as a share of the largest value norms of its pages."""
    sketch_bits: int = 4
    """Adaptive: bits of a sketched key or value: 2, 4 or 8."""
    recalibrate_every: int = 256
    """Adaptive: generated tokens of a sequence between two rescorings of its pages."""
    min_context: int = 2048
    """Adaptive: sequences of up to this many tokens stay native."""
    fidelity: str = "bounded"
    """Adaptive: what requests get that ask for nothing else: native, bounded or exact."""
    warm_store: str = "file"
    """Adaptive: where exact copies wait outside fast memory: `file` (memory-mapped), `ram`, or `none`."""
    warm_bytes: int | None = None
    """Adaptive: most bytes of the warm store, checkpoints included; a hard limit. None: four times the ceiling of the cache."""
    warm_dir: str | None = None
    """Adaptive: the folder of the warm file. None: the folder for temporary files."""
    hot_max_share: float = 0.075
    """Adaptive: most of a sequence's sketched pages that may be hot at the same time."""
    recompute_target: tuple[float, float] = (0.08, 0.15)
    """Adaptive: band for the share of decode steps that restore a cold page, where host memory is short."""
    recompute_budget: int = 2
    """Adaptive: most blocks that are restored within one step; cold pages beyond it are served by their sketch and counted."""
    recompute_time_share: float = 0.15
    """Adaptive: most of the time of all steps together that restoring cold pages may take; 1: no such limit."""
    skip_share: float = 0.1
    """Adaptive: what negligible values that are not read may cost, as a share of the tolerance and on top of it."""

    def __post_init__(self) -> None:
        _choice("cache mode", self.mode, ("native", "adaptive"))
        _choice("page_dtype", self.page_dtype, ("float16", "bfloat16", "float32"))
        _choice("page_size", self.page_size, (16, 32, 64, 128))
        _choice("sketch_bits", self.sketch_bits, (2, 4, 8))
        for name in ("prefix_reuse", "poison"):
            _choice(name, getattr(self, name), (True, False))
        if self.warm_dir is not None and not isinstance(self.warm_dir, str):
            raise ConfigError(f"warm_dir={self.warm_dir!r} must be the path of a folder, or None")
        _choice("fidelity", self.fidelity, FIDELITIES)
        _choice("warm_store", self.warm_store, ("file", "ram", "none"))
        object.__setattr__(self, "recompute_target", tuple(self.recompute_target))  # JSON and YAML have lists
        for name, (low, high) in _HARD_RANGES.items():
            _within(name, getattr(self, name), low, high)
        for name in ("cold_drop_step", "recompute_layer_limit", "recalibrate_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("min_context", "recompute_budget"):
            _at_least(name, getattr(self, name), 0)
        if self.cache_max_bytes is not None:
            _at_least("cache_max_bytes", self.cache_max_bytes, 1)
        if self.warm_bytes is not None:
            _at_least("warm_bytes", self.warm_bytes, 0)
        band = self.recompute_target
        if not (isinstance(band, tuple) and len(band) == 2 and all(map(_is_number, band)) and 0 <= band[0] < band[1] <= 1):
            raise ConfigError(f"recompute_target={band!r} must be two shares, the lower one first, such as (0.08, 0.15)")
        if self.mode == "native" and (idle := [f.name for f in _adaptive_fields() if getattr(self, f.name) != f.default]):
            raise ConfigError(f"a native cache has no use for {', '.join(idle)}; take mode='adaptive', or leave them out")

    def risks(self) -> list[str]:
        """A line for each setting outside its recommended range: its value, the range, and what it risks."""
        lines = []
        for name, (low, high, risk_below, risk_above) in _RECOMMENDED.items():
            value = getattr(self, name)
            if (name == "cache_max_size_ratio" and self.cache_max_bytes is not None) or low <= value <= high:
                continue
            if self.mode == "native" and name != "cache_max_size_ratio":
                continue
            risk = risk_below if value < low else risk_above
            lines.append(f"{name}={value} is outside the recommended {low} to {high}: {risk}")
        return lines


LIVE_SETTINGS = frozenset(
    {
        "fidelity",
        "attention_tolerance",
        "hot_score_threshold",
        "hot_max_share",
        "recalibrate_every",
        "min_context",
        "cold_drop_step",
        "recompute_target",
        "recompute_budget",
        "recompute_time_share",
        "skip_share",
    }
)
"""Cache settings that can change while an engine runs; the others shape memory that is set aside once. `recompute_budget` may not
pass the value that the engine was made with."""

STORE_SETTINGS = frozenset({"cold_drop_step", "recompute_target", "recompute_budget", "recompute_time_share", "skip_share"})
"""Those of them that concern the cache as a whole, and not one sequence."""


def _adaptive_fields() -> list[Field[Any]]:
    """The settings of an adaptive cache alone: those from `hot_score_threshold` on."""
    settings = list(fields(CacheConfig))
    return settings[[setting.name for setting in settings].index("hot_score_threshold") :]


_HARD_RANGES: dict[str, tuple[float, float]] = {
    "cache_max_size_ratio": (0.01, 0.95),
    "hot_score_threshold": (0.0, 1.0),
    "attention_tolerance": (0.0, 1.0),
    "hot_max_share": (0.0, 1.0),
    "recompute_time_share": (0.0, 1.0),
    "skip_share": (0.0, 1.0),
}

_RECOMMENDED: dict[str, tuple[float, float, str, str]] = {
    "cache_max_size_ratio": (0.45, 0.70, "few sequences fit", "above 0.8 the process may run out of memory"),
    "hot_score_threshold": (
        0.62,
        0.78,
        "many hot pages, so more memory",
        "too few hot pages: more hits and recomputes, latency up",
    ),
    "cold_drop_step": (128, 512, "the scans themselves cost time", "cold pages are released late, so host memory fills up"),
    "recompute_layer_limit": (8, 16, "many windows, so many checkpoints in host memory", "one recompute takes long: P99 jitter"),
    "attention_tolerance": (0.005, 0.05, "nearly every page is read exactly", "answers drift"),
}
"""Recommended low and high, and the risks below and above."""


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
    "VERA_CPU_ISA": "the kernels' instruction set: avx512vnni, avx512, avx2 or portable",
    "VERA_API_KEY": "`vera serve`: the keys that open the API, with commas between",
    "VERA_ADMIN_KEY": "`vera serve`: the key that opens the admin routes",
}
"""Every environment variable that Vera reads. Settings come from arguments alone; keys do not, since arguments can be seen."""


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


def _within(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} is outside {low} to {high}{_hard_risk(name)}")


def _hard_risk(name: str) -> str:
    return f"; {_RECOMMENDED[name][3]}" if name in _RECOMMENDED else ""


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
