"""How the next token of one request is chosen, and when the request ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vera.errors import ConfigError

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_N = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated on construction; frozen afterwards. Order: bias and penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 is greedy; at most 10."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides (multiplies, where negative) the logits of tokens in prompt and output (CTRL, eq. in section 4.1); 0.01 to 100."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logits of tokens in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit, in [-100, 100]."""
    seed: int | None = None
    """Same seed, prompt and parameters: same tokens, whatever else is in the batch. None: the engine draws one."""
    n: int = 1
    """Answers to one prompt; answer i uses `seed + i`."""
    max_tokens: int | None = None
    """Most tokens to generate. None: up to the end of what can be served."""
    min_tokens: int = 0
    """No end-of-sequence and no stop before this many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it unless `include_stop`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the model's own end-of-sequence."""
    include_stop: bool = False
    """Leave the stop string in the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """For each generated token, its log-probability and that of this many most likely ones (before temperature). At most 20."""
    prompt_logprobs: int | None = None
    """The same for each prompt token; the first has none."""
    prompt_logprobs_from: int = 0
    """Index of the first prompt token that is reported: those before it have none, and need no logits."""

    def __post_init__(self) -> None:
        # Lists are what people and JSON give; the frozen object holds tuples.
        given: dict[str, Any] = {name: getattr(self, name) for name in ("stop", "stop_token_ids", "logit_bias")}
        object.__setattr__(self, "stop", (given["stop"],) if isinstance(given["stop"], str) else _tuple("stop", given["stop"]))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", given["stop_token_ids"]))
        if not isinstance(given["logit_bias"], Mapping):
            raise ConfigError(f"logit_bias={given['logit_bias']!r} must map token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(given["logit_bias"]))
        _number("temperature", self.temperature, 0, 10)
        _integer("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _integer("n", self.n, 1, MAX_N)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _integer(name, count, 0, MAX_LOGPROBS)
        _integer("prompt_logprobs_from", self.prompt_logprobs_from, 0, None)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not true or false")
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop={self.stop!r}: give at most {MAX_STOP_STRINGS} texts, none of them empty")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token", token, 0, None)
            _number("logit_bias", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def answers(self) -> list[SamplingParams]:
        """The parameters of each of the `n` answers: single ones, seeded `seed`, `seed + 1`, ..."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else self.seed + i for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The same as the constructor, but an unknown name is a ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(known)}")
        return cls(**values)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ConfigError(f"{name}={value!r} must be a list")
    return tuple(value)


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (low < value if above else low <= value)
        and value <= high
    )
    if not fits:
        raise ConfigError(f"{name}={value!r} is outside {'(' if above else '['}{low}, {high}]")


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value!r} must be a whole number from {low}" + (f" to {high}" if high is not None else " up"))
