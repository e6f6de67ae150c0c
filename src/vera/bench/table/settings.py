"""What `vera bench table` measures: one frozen dataclass, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vera.bench.machine import available_cores
from vera.bench.texts import check_text
from vera.config import CacheConfig
from vera.errors import ConfigError

PARTS = ("headline", "drift", "equal memory", "controls", "sweep", "tolerance", "ceiling", "long")
"""What the table is made of, the most valuable part first."""

CONTROLS = ("exact", "sketches only", "fp8 pages")
"""Every page read exactly, none, and what is lost by pages of 8 bits, as others have them."""

CONTEXTS = (512, 1_980, 4_000, 7_600)
"""The embedded model's 8,192 tokens, a half, a quarter and a sixteenth of them, each with room for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBench:
    """What to measure, and within which time."""

    model: str = "embedded"
    """A folder, a .gguf file, or `embedded`."""
    batches: Sequence[int] = (1, 4, 16)
    """Sequences decoded together: the largest in the headline, all of them in the sweep."""
    contexts: Sequence[int] = CONTEXTS
    """Tokens of a prompt: the largest in the headline, all of them in the sweep."""
    new_tokens: int = 512
    """Tokens of a headline answer: the prompt gives the first, and each later one takes a step that is timed."""
    sweep_tokens: int = 64
    """Tokens of an answer in all other rows; never more than `new_tokens`."""
    repeats: int = 3
    """Rounds of the headline: native, adaptive, native, adaptive and so on."""
    budget_minutes: float = 60.0
    """The run ends within this; what did not fit is named."""
    parts: Sequence[str] = PARTS
    """Of PARTS; headline is always measured."""
    tolerances: Sequence[float] = (0.005, 0.03, 0.05)
    """Of `attention_tolerance`, beside its default."""
    ceilings: Sequence[float] = (0.4, 0.6, 0.8)
    """Ceilings of the adaptive cache, by what the native one takes for the same sequences."""
    controls: Sequence[str] = CONTROLS
    """Of CONTROLS."""
    cold_shares: Sequence[float] = (0.1, 0.2)
    """Warm stores so small that this share of the units is cold."""
    drift_tokens: int = 256
    """Decode steps, each with the text's next token."""
    drift_texts: Sequence[str] = ("prose", "code", "chat")
    """`prose`, `code`, `chat`, or files. Rows get the drift of the first; of the others it is told beside them."""
    equal_memory_sequences: int | None = None
    """The equal ceiling is what the native cache takes for so many sequences. None: the headline's batch, at most 8."""
    long_context: int = 16_000
    """A prompt that may be longer than the model's context: then only the times mean something, and the rows say so."""
    slo_itl_ms: float = 100.0
    """A request is good if its mean inter-token latency is at most this, and its first token came within `slo_ttft_ms`."""
    slo_ttft_ms: float = 30_000.0
    page_dtype: str = "float16"
    """How exact pages are stored, in every row."""
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every adaptive cache that differ from the defaults: fields of CacheConfig."""
    seed: int = 0
    """Which part of the document is the prompt."""
    max_batch_tokens: int = 512
    """Most tokens a step computes: the chunk in which prompts are read."""
    num_threads: int | None = None
    """None: one for each core that the process may use."""

    def __post_init__(self) -> None:
        for name in ("batches", "contexts"):
            _whole_numbers(name, getattr(self, name))
        for name, low in _LOWEST.items():
            _at_least(name, getattr(self, name), low)
        for name in ("num_threads", "equal_memory_sequences"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("budget_minutes", "slo_itl_ms", "slo_ttft_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0 and finite")
        for name in ("ceilings", "cold_shares"):
            for share in getattr(self, name):
                if not 0 < share <= 1:
                    raise ConfigError(f"{name}: {share!r} is not above 0 and at most 1")
        _known("part", self.parts, PARTS)
        _known("control", self.controls, CONTROLS)
        if not self.drift_texts:
            raise ConfigError("drift_texts is empty; name prose, code, chat or a file, or leave `drift` out of the parts")
        for text in self.drift_texts:
            check_text(text)
        for tolerance in (None, *self.tolerances):
            own = {} if tolerance is None else {"attention_tolerance": tolerance}
            CacheConfig.from_dict({"mode": "adaptive", "page_dtype": self.page_dtype, **self.adaptive, **own})

    @property
    def threads(self) -> int:
        return self.num_threads or available_cores()

    @property
    def batch(self) -> int:
        """Of the headline."""
        return max(self.batches)

    @property
    def context(self) -> int:
        """Of the headline."""
        return max(self.contexts)

    @property
    def short_tokens(self) -> int:
        """Tokens of an answer outside the headline."""
        return min(self.sweep_tokens, self.new_tokens)

    @property
    def equal_sequences(self) -> int:
        return self.equal_memory_sequences or min(self.batch, 8)

    @property
    def min_context(self) -> int:
        """Up to this many tokens, adaptive caches are native ones."""
        return CacheConfig.from_dict({"mode": "adaptive", **self.adaptive}).min_context

    def has(self, part: str) -> bool:
        return part == "headline" or part in self.parts


_LOWEST = {
    "new_tokens": 2,
    "sweep_tokens": 2,
    "repeats": 1,
    "drift_tokens": 1,
    "long_context": 1,
    "seed": 0,
    "max_batch_tokens": 1,
}


def quick(**settings: Any) -> dict[str, Any]:
    """The settings of a run of ten minutes on two cores; those given win."""
    usual: dict[str, Any] = {
        "batches": (4,),
        "contexts": (512, 4_000, 7_600),
        "new_tokens": 64,
        "repeats": 2,
        "budget_minutes": 10.0,
        "drift_tokens": 128,
        "drift_texts": ("prose",),
        "controls": (),
        "cold_shares": (0.1,),
        "parts": ("headline", "drift", "equal memory", "controls", "sweep"),
    }
    return usual | settings


def _known(what: str, names: Sequence[str], known: tuple[str, ...]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown {what} {', '.join(map(repr, unknown))}; known are {', '.join(known)}")


def _whole_numbers(name: str, values: Sequence[int] | str) -> None:
    if isinstance(values, str) or not values:
        raise ConfigError(f"{name}={values!r} must be a list of whole numbers, such as 1,4,16")
    for value in values:
        _at_least(name, value, 1)
    if len(set(values)) < len(values):
        raise ConfigError(f"{name}={', '.join(map(str, values))} names one twice; name each once")


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
