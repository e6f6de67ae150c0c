"""What one request came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request, as its sender saw it. Where `error` is given the request failed, and its times say nothing.

    A content chunk is a piece of the stream that brings text.
    """

    sent_at: float
    """Seconds on `time.perf_counter`."""
    queued_seconds: float = 0.0
    """Before it was sent, it waited in the client for its turn."""
    ttft_seconds: float = 0.0
    """From sending to the first content chunk, or to the end of an answer without text."""
    gaps_seconds: tuple[float, ...] = ()
    """Between one content chunk and the next."""
    e2e_seconds: float = 0.0
    """From sending to the last chunk that belongs to the answer: its last text, or the word that it is finished."""
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counted, or else the number of content chunks."""
    cached_tokens: int = 0
    """Prompt tokens that the server says it did not compute."""
    counted: bool = True
    """The server told its token counts."""
    vera: Mapping[str, Any] = field(default_factory=dict)
    """What a Vera server adds to its counts: `usage.vera`."""
    error: str | None = None
