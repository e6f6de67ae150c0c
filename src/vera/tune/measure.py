"""One candidate, measured: drift by teacher forcing, speed and memory beside a native cache, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np

from vera import errors
from vera.bench import DecodeBench, run_decode
from vera.bench.child import run_job
from vera.bench.fidelity import drift
from vera.bench.statistics import is_absent
from vera.bench.subjects import WARMUP_STEPS
from vera.config import CacheConfig
from vera.errors import ConfigError, VeraError
from vera.tune.space import Facts
from vera.tune.trial import Failed, Figures, Point
from vera.tune.workloads import Workload

_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What every candidate has to do."""

    model: str
    """A folder, a .gguf file, or `embedded`."""
    workload: Workload
    settings: Mapping[str, Any]
    """Cache settings that all candidates share, by name; a candidate's own take their place."""
    threads: int
    memory_bytes: int | None = None
    """What `cache_max_size_ratio` is a share of. None: what is available when the search begins."""
    repeats: int = 1
    """Runs of each cache in a trial, in turns; figures are then medians."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a candidate would stay native, or two settings size the same store."""
        config, workload = self.config({}), self.workload
        if workload.context <= config.min_context:
            raise ConfigError(
                f"context={workload.context} is within min_context={config.min_context}, up to which the cache stays native: "
                "there would be nothing to tune; raise the context, or lower it with --set min_context"
            )
        if workload.cold_share is not None and config.warm_bytes is not None:
            raise ConfigError(
                f"warm_bytes={config.warm_bytes} and cold_share={workload.cold_share} both size the warm store; leave one out "
                "(--cold-share 0 leaves out the latter)"
            )

    def config(self, point: Point) -> CacheConfig:
        """A candidate's settings, all of them."""
        return CacheConfig.from_dict({**self.settings, **point, "mode": "adaptive"})


class Bench:
    """Measures candidates. A context manager: the logits of the reference lie in a folder that goes with it."""

    def __init__(self, work: Work) -> None:
        """Looks at the model. Raises a VeraError if it cannot be had."""
        workload, config = work.workload, work.config({})
        self._work = work
        _say(f"looking at {work.model}")
        found = run_job(
            "vera.tune.job:look",
            {
                "model": work.model,
                "batch": workload.batch,
                "tokens": workload.context + 1 + WARMUP_STEPS + workload.new_tokens,
                "page_dtype": config.page_dtype,
                "page_size": config.page_size,
            },
            timeout_seconds=_TIMEOUT_SECONDS,
        )
        _raise_failure(found)
        self.model_name: str = found["model_name"]
        self.facts = Facts(
            num_layers=found["num_layers"],
            native_bytes=found["native_bytes"],
            memory_bytes=work.memory_bytes or found["available_bytes"],
            has_cold=bool(workload.cold_share) or config.warm_bytes is not None or config.warm_store == "none",
        )
        self.machine: dict[str, Any] | None = None
        """As the benchmarks tell it, from the first trial on."""
        self._folder = TemporaryDirectory(prefix="vera-tune-")
        self._token_ids: list[int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._folder.cleanup()

    def measure(self, point: Point) -> Figures | Failed:
        """Raises a VeraError where not the candidate is at fault: the text is too short, or the native cache fails too."""
        config = self._work.config(point)
        drifted = self._drift(config)
        if isinstance(drifted, Failed):
            return drifted
        runs = self._runs(config)
        native, adaptive = runs["native"], runs["adaptive"]
        if is_absent(native):
            raise VeraError(f"the native cache failed, so nothing can be compared with it: {native.get('failed')}")
        if is_absent(adaptive):
            return Failed(str(adaptive.get("failed")))
        return Figures(
            latency=native["decode_tokens_per_s"] / adaptive["decode_tokens_per_s"],  # of the same batch
            p99=adaptive["step_ms_p99"] / native["step_ms_p99"],
            memory=adaptive["cache_bytes"] / native["cache_bytes"],
            process=adaptive["process_bytes"] / native["process_bytes"],
            kl_mean=drifted["kl_mean"],
            top1_agreement=drifted["top1_agreement"],
            recompute_share=adaptive["recompute_share"] or 0.0,
        )

    # -- speed and memory ----------------------------------------------------------------------------------------------

    def _runs(self, config: CacheConfig) -> dict[str, Any]:
        work, workload = self._work, self._work.workload
        result = run_decode(
            DecodeBench(
                model=work.model,
                batch=workload.batch,
                context=workload.context,
                new_tokens=workload.new_tokens,
                caches=("native", "adaptive"),
                page_dtype=config.page_dtype,
                repeats=work.repeats,
                num_threads=work.threads,
                cold_share=workload.cold_share,
                adaptive=self._adaptive(config),
            )
        )
        self.machine = self.machine or result["machine"]
        return dict(result["runs"])

    def _adaptive(self, config: CacheConfig) -> dict[str, Any]:
        """The settings as the benchmark takes them: what differs from the defaults, and the ceiling in bytes."""
        default = CacheConfig()
        settings = {name: value for name, value in config.to_dict().items() if value != getattr(default, name)}
        for name in ("mode", "page_dtype", "prefix_reuse", "cache_max_size_ratio"):
            settings.pop(name, None)
        if config.cache_max_bytes is None and config.cache_max_size_ratio * self.facts.memory_bytes < self.facts.native_bytes:
            settings["cache_max_bytes"] = int(config.cache_max_size_ratio * self.facts.memory_bytes)
        return settings

    # -- drift ---------------------------------------------------------------------------------------------------------

    def _drift(self, config: CacheConfig) -> dict[str, Any] | Failed:
        reference = Path(self._folder.name) / "reference.npy"
        token_ids = self._prepared()
        if not reference.exists():
            native = CacheConfig(page_size=config.page_size, page_dtype="float32")
            _raise_failure(self._force(token_ids, native, reference))
        measured = reference.with_name("measured.npy")
        outcome = self._force(token_ids, config, measured)
        if "failed" in outcome:
            return Failed(str(outcome["failed"]))
        following = np.asarray(token_ids[self._work.workload.context + 1 :])
        figures = drift(np.load(reference, mmap_mode="r"), np.load(measured, mmap_mode="r"), following)
        measured.unlink()
        return figures

    def _prepared(self) -> list[int]:
        """The text, read once."""
        if self._token_ids is None:
            workload = self._work.workload
            arguments = {
                "model": self._work.model,
                "text": workload.text,
                "context": workload.context,
                "tokens": workload.new_tokens,
            }
            prepared = run_job("vera.bench.teacher:prepare", arguments, timeout_seconds=_TIMEOUT_SECONDS)
            _raise_failure(prepared)
            self._token_ids = prepared["token_ids"]
        return self._token_ids

    def _force(self, token_ids: list[int], config: CacheConfig, path: Path) -> dict[str, Any]:
        _say(f"drift: {path.stem}")
        arguments = {
            "model": self._work.model,
            "token_ids": token_ids,
            "context": self._work.workload.context,
            "cache": config.to_dict(),
            "logits_path": str(path),
            "num_threads": self._work.threads,
        }
        return run_job("vera.bench.teacher:force", arguments, num_threads=self._work.threads, timeout_seconds=_TIMEOUT_SECONDS)


def _raise_failure(outcome: Mapping[str, Any]) -> None:
    """A job's failure as the error that it was there."""
    if "failed" in outcome:
        error = getattr(errors, outcome.get("error", "VeraError"))
        raise error(outcome["failed"])


def _say(what: str) -> None:
    print(f"vera tune: {what}", file=sys.stderr, flush=True)
