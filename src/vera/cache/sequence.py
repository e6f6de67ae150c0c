"""What the cache knows about one running sequence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vera.config import CacheConfig

PROBE_TOKENS = 64
"""The last tokens of a prompt whose attention to every page is recorded, as if they had been decoded: where heat comes from."""


@dataclass(slots=True)
class CacheUse:
    """What the cache did for one sequence. Counters only grow."""

    cached_tokens: dict[str, int] = field(default_factory=lambda: {"hot": 0, "warm": 0, "cold": 0})
    """Prompt tokens found at admission, by the tier of their block: exact, tiered and whole, tiered with cold pages."""
    admitted: bool = False
    """`cached_tokens` is told; blocks that the sequence finds again after a preemption do not count."""
    decode_steps: int = 0
    """Steps served within bounds."""
    hits: int = 0
    """Pages that error control asked for; read exactly in the same step, if they were warm or could be restored."""
    recompute_steps: int = 0
    """Decode steps in which at least one cold page was restored."""
    uncovered_hits: int = 0
    """Hits on cold pages that the step's budget left to their sketch."""
    error_sum: float = 0.0
    """Estimated errors, relative to the value norms, over query heads, layers and steps."""
    error_count: int = 0
    error_max: float = 0.0

    @property
    def error_mean(self) -> float | None:
        return self.error_sum / self.error_count if self.error_count else None


@dataclass(slots=True)
class Sequence:
    """The blocks of one sequence, in order; the first `sealed` of them are full and will not change."""

    number: int
    """Counts up; tells sequences apart where the name is of no use."""
    settings: CacheConfig
    """Those that the sequence was admitted with; it keeps them to its end."""
    reuse: bool
    fidelity: str = "native"
    tolerance: float = 0.0
    prompt_tokens: int = 0
    """Tokens known at admission; the rest is generated."""
    tiered: bool = False
    """Its blocks may be demoted: the cache is adaptive, it asked for no native cache and is long enough."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    hashes: list[bytes] = field(default_factory=list)
    sealed: int = 0
    num_computed: int = 0
    exact_tokens: int = 2**40
    """Keys and values of this many first tokens were computed as a native cache would have; of the others within bounds."""
    demoted: int = 1
    """Blocks before this one were demoted or passed over; the first block never is."""
    row: int | None = None
    """Of the statistics; None: none are kept."""
    rows_seen: int = 0
    """Decode rows and probes since the statistics were last read."""
    watched: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Indices of the blocks that had sketches when these statistics began, so that their pages could be hit."""
    use: CacheUse = field(default_factory=CacheUse)
    weakest: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """Hot pages, each a row (block, layer, KV head), in the order in which they give way, as of when they were last ranked."""

    @property
    def block_ids(self) -> NDArray[np.int64]:
        return np.frombuffer(self.blocks, dtype=np.int32).astype(np.int64) if self.blocks else np.zeros(0, dtype=np.int64)

    @property
    def prompt_done(self) -> bool:
        return self.num_computed >= self.prompt_tokens

    @property
    def bounded(self) -> bool:
        """Its decode steps are served within bounds."""
        return self.tiered and self.fidelity == "bounded"


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence in a step: positions `start` to `stop`."""

    sequence: str
    start: int
    stop: int
