"""What is asked of which server, and what is reported: frozen dataclasses, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vera.errors import ConfigError

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""The protocols that are spoken, each with its usual endpoint."""
DATASETS = ("random", "prefix_repetition", "multi-turn", "custom", "text")
MADE_UP = ("random", "prefix_repetition", "multi-turn")
"""Datasets of random words. Where an answer to them ends says nothing, so by default it is as long as was asked for."""
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
"""What can be reported as mean, median, deviation and percentiles."""
_GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what every request to it carries."""

    base_url: str = "http://127.0.0.1:8000"
    """With or without the `/v1` at its end."""
    endpoint: str | None = None
    """None: the usual one of the backend."""
    backend: str = "openai"
    """Of BACKENDS."""
    model: str | None = None
    """None: the first that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with each request; they win over the key."""
    temperature: float | None = None
    """None: the server's default."""
    ignore_eos: bool = False
    """Ask for answers that go on to their full length. Servers that do not know the field may refuse it."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the body of each request; it wins over all else."""
    timeout_seconds: float = 1800.0
    """A request that takes longer, waiting on the server included, is given up and counted as failed."""

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, tuple(BACKENDS))
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r} must begin with http:// or https://")
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint={self.endpoint!r} must begin with a slash, such as {BACKENDS[self.backend]}")
        if not 0 < self.timeout_seconds < math.inf:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds!r} must be above 0 and finite, so that every run ends")
        if self.temperature is not None and not self.temperature >= 0:
            raise ConfigError(f"temperature={self.temperature!r} must be 0 or above")

    @property
    def url(self) -> str:
        return self._root + (self.endpoint or BACKENDS[self.backend])

    @property
    def models_url(self) -> str:
        return self._root + "/v1/models"

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked, and when. The same settings give the same prompts at the same times."""

    dataset: str = "random"
    """Of DATASETS."""
    num_prompts: int = 1000
    """Requests; with `multi-turn`, conversations of `num_turns` requests each."""
    input_len: int = 1024
    """Tokens of a prompt without its shared prefix; with `multi-turn`, of what the user says in each turn."""
    output_len: int = 128
    """Most tokens of an answer."""
    range_ratio: float = 0.0
    """Lengths are drawn from `[len * (1 - ratio), len * (1 + ratio)]`."""
    prefix_len: int = 0
    """Tokens that prompts begin with alike."""
    num_prefixes: int = 1
    """How many different shared prefixes there are; prompts take them in turns."""
    num_turns: int = 4
    """`multi-turn`: requests of a conversation. Each repeats all before it, with the answers that came."""
    think_seconds: float = 0.0
    """`multi-turn`: how long a conversation is idle between an answer and the next request."""
    path: Path | None = None
    """`custom`: a JSON Lines file. A line has `prompt` or `messages`, and may have `output_tokens`."""
    request_rate: float = math.inf
    """Arrivals a second. Infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals. 1: a Poisson process; lower: bursts; infinite: a beat."""
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("dataset", self.dataset, DATASETS)
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "num_turns"):
            _at_least(name, getattr(self, name), 1)
        for name in ("prefix_len", "seed"):
            _at_least(name, getattr(self, name), 0)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio={self.range_ratio!r} is outside 0 to below 1")
        if not 0 <= self.think_seconds < math.inf:
            raise ConfigError(f"think_seconds={self.think_seconds!r} must be 0 or above and finite")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0; inf is allowed")
        if self.prefix_len and self.dataset not in MADE_UP:
            raise ConfigError(f"prefix_len={self.prefix_len} needs a dataset of random words: {', '.join(MADE_UP)}")
        if (self.dataset == "custom") != (self.path is not None):
            raise ConfigError(f"dataset={self.dataset!r} with path={self.path}: `custom` needs a file, and no other takes one")

    @property
    def num_requests(self) -> int:
        return self.num_prompts * (self.num_turns if self.dataset == "multi-turn" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """One run of load against one server."""

    target: Target = field(default_factory=Target)
    workload: Workload = field(default_factory=Workload)
    max_concurrency: int | None = None
    """Most requests under way at a time; what arrives beyond that waits in the client. None: no limit."""
    num_warmups: int = 1
    """Requests before the clock starts, with a prompt of their own."""
    ready_check_timeout_sec: float = 0.0
    """How long to wait for the server to answer the warm-up requests (or, with none, anything at all). 0: warm-ups are
    tried once, and may take as long as any request."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds on `ttft`, `tpot` and `e2el`; a request that keeps them all is good. Empty: no goodput."""
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    """Of METRICS."""
    metric_percentiles: tuple[float, ...] = (99.0,)

    def __post_init__(self) -> None:
        if self.max_concurrency is not None:
            _at_least("max_concurrency", self.max_concurrency, 1)
        _at_least("num_warmups", self.num_warmups, 0)
        if not 0 <= self.ready_check_timeout_sec < math.inf:
            raise ConfigError(f"ready_check_timeout_sec={self.ready_check_timeout_sec!r} must be 0 or above and finite")
        for name, limit in self.goodput.items():
            _one_of("goodput", name, _GOODPUT_METRICS)
            if not limit >= 0:
                raise ConfigError(f"goodput {name}:{limit} must be 0 ms or above")
        for name in self.percentile_metrics:
            _one_of("percentile metric", name, METRICS)
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"percentile {percentile} is outside 0 to 100")


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """Limits in milliseconds by metric, from texts such as `ttft:500` or `ttft:500 tpot:50`."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).split():
        name, _, limit = pair.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            raise ConfigError(f"goodput {pair!r} is not of the form metric:milliseconds, such as ttft:500") from None
    return limits


def _one_of(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name}={value!r} must be a whole number from {low} up")
