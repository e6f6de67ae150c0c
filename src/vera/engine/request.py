"""One answer on its way: from the queue to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vera.cache import CacheUse
from vera.config import CacheConfig
from vera.engine.sampler import SamplingRow, TokenLogprob
from vera.engine.text import AnswerText
from vera.sampling_params import SamplingParams


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of what can be served."""
    ABORT = "abort"
    """The caller gave up."""
    TIMEOUT = "timeout"
    """The deadline passed."""
    ERROR = "error"
    """The model failed on this request; the update says how."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one step brought one request."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    delta: str = ""
    """Text that became final; a character split over tokens and a possible stop string are held back."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each new token, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """For all of the prompt (the first is None), on the first update of a request that asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended the answer."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache when the request was first admitted."""
    cache_use: CacheUse | None = None
    """What an adaptive cache did for the request, on its last update; None: nothing, or the cache is native."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class Request:
    """The state of one request. `token_ids` grows; `num_computed` chases it, and falls to what is cached on a preemption."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    row: SamplingRow
    text: AnswerText
    max_tokens: int
    """Resolved: at least 1, and prompt plus answer fit what is served."""
    arrival: int
    """Order of arrival, for first come, first served."""
    arrived_at: float
    """By the engine's clock, in seconds, as all times here."""
    token_ids: list[int]
    """Prompt and answer."""
    output_token_ids: list[int]
    priority: int = 0
    """Lower runs first."""
    fidelity: str | None = None
    """How an adaptive cache serves it: native, bounded or exact. None: as the cache's settings say."""
    attention_tolerance: float | None = None
    cache_settings: CacheConfig | None = None
    """Those that serve it, to its end. None: the cache's own, as they are when it is admitted."""
    """None: that of the cache's settings."""
    cache_use: CacheUse = field(default_factory=CacheUse)
    """What the cache did for it so far; the cache writes it, over preemptions too."""
    deadline: float | None = None
    """When the request is given up; None: never."""
    last_token_at: float | None = None
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_cached: int | None = None
    """Prompt tokens found in the cache at first admission; None before that. Own blocks found after a preemption do not count."""
    num_preemptions: int = 0
    status: Status = Status.WAITING
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Filled chunk by chunk; never twice for one position."""

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the sooner."""
        return self.priority, self.arrival

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids)
