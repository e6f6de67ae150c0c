"""What a request took, and what the cache did for it: OpenAI's usage, and Vera's extension of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vera.cache import CacheUse
from vera.engine.request import Update


@dataclass(slots=True)
class UsageMeter:
    """Adds up the updates of a request's answers: `answers_per_prompt` for each prompt, in order."""

    prompt_lengths: Sequence[int]
    answers_per_prompt: int
    fidelity: str
    """What the request is promised; it may be served better."""
    attention_tolerance: float | None
    """None: exactly."""
    params_version: str | None = None
    arm: str | None = None
    hidden_tokens: int = 0
    """Tokens of each answer that were made and are not shown."""
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    """Prompt tokens found in the cache, by prompt: those of its first answer."""
    _cached_by_tier: dict[int, dict[str, int]] = field(default_factory=dict)
    _uses: list[CacheUse] = field(default_factory=list)

    def add(self, index: int, update: Update) -> None:
        """`index` counts the answers of all prompts."""
        self.completion_tokens += len(update.new_token_ids)
        prompt, answer = divmod(index, self.answers_per_prompt)
        if answer == 0:
            self._cached[prompt] = update.num_cached_tokens
        if update.cache_use is not None:
            self._uses.append(update.cache_use)
            if answer == 0:
                self._cached_by_tier[prompt] = update.cache_use.cached_tokens
        if update.finished:
            self.completion_tokens -= self.hidden_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def to_dict(self) -> dict[str, Any]:
        """See `protocol.Usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "vera": self._extension(),
        }

    def _extension(self) -> dict[str, Any]:
        """See `protocol.VeraUsage`."""
        errors = sum(use.error_count for use in self._uses)
        return {
            "fidelity": self.fidelity,
            "attention_tolerance": self.attention_tolerance,
            "cached_tokens": self._by_tier(),
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "decode_steps": sum(use.decode_steps for use in self._uses),
            "hits": sum(use.hits for use in self._uses),
            "recompute_steps": sum(use.recompute_steps for use in self._uses),
            "uncovered_hits": sum(use.uncovered_hits for use in self._uses),
            "error_mean": sum(use.error_sum for use in self._uses) / errors if errors else None,
            "error_max": max(use.error_max for use in self._uses) if errors else None,
            "params_version": self.params_version,
            "arm": self.arm,
        }

    def _by_tier(self) -> dict[str, int]:
        """A native cache has one tier."""
        tiers = {"hot": 0, "warm": 0, "cold": 0}
        for prompt, cached in self._cached.items():
            for tier, tokens in self._cached_by_tier.get(prompt, {"hot": cached}).items():
                tiers[tier] += tokens
        return tiers
