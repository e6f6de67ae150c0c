"""Drift from native, once for each cache: the same text, forced token by token, against one reference a text and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vera.bench.fidelity import drift
from vera.bench.statistics import is_absent
from vera.bench.table.plan import REFERENCE, Step, Variant
from vera.bench.table.settings import TableBench
from vera.cache import CacheShape, warm_bytes_per_block
from vera.config import CacheConfig

RunJob = Callable[..., dict[str, Any]]
"""`run_job` of vera.bench.child, or what takes its place."""


@dataclass(slots=True)
class DriftRuns:
    """Runs the drift steps of a plan; keeps the references' logits in `folder`, which is the caller's to remove."""

    bench: TableBench
    shape: CacheShape
    folder: Path
    run_job: RunJob
    _texts: dict[tuple[str, int], list[int]] = field(default_factory=dict, init=False)
    _references: dict[tuple[str, int], Path] = field(default_factory=dict, init=False)

    def lacks_reference(self, step: Step) -> bool:
        """There is nothing that this step could be compared with: its reference was left out, or failed."""
        return step.variant != REFERENCE and (step.text, step.context) not in self._references

    def run(self, step: Step, *, timeout_seconds: float) -> dict[str, Any]:
        """The figures of `fidelity.drift`; for a reference none of them. `{"failed": why}` where a process failed."""
        place = step.text, step.context
        if place not in self._texts:
            read = self._read(step, timeout_seconds)
            if is_absent(read):
                return read
            self._texts[place] = read["token_ids"]
        token_ids = self._texts[place]
        path = self.folder / f"{len(self._references)}-{step.variant.name.replace(' ', '-')}.npy"
        outcome = self.run_job(
            "vera.bench.teacher:force",
            {
                "model": self.bench.model,
                "token_ids": token_ids,
                "context": step.context,
                "cache": self._cache(step.variant, len(token_ids)).to_dict(),
                "logits_path": str(path),
                "fp8_pages": step.variant.fp8_pages,
                "max_batch_tokens": self.bench.max_batch_tokens,
                "num_threads": self.bench.threads,
            },
            num_threads=self.bench.threads,
            timeout_seconds=timeout_seconds,
        )
        if is_absent(outcome):
            return outcome
        if step.variant == REFERENCE:
            self._references[place] = path
            return {}
        following = np.asarray(token_ids[step.context + 1 :])
        figures = drift(np.load(self._references[place], mmap_mode="r"), np.load(path, mmap_mode="r"), following)
        path.unlink()
        return figures

    def _read(self, step: Step, timeout_seconds: float) -> dict[str, Any]:
        arguments = {"model": self.bench.model, "text": step.text, "context": step.context, "tokens": step.new_tokens}
        return self.run_job("vera.bench.teacher:prepare", arguments, timeout_seconds=timeout_seconds)

    def _cache(self, variant: Variant, num_tokens: int) -> CacheConfig:
        settings = cache_settings(self.bench, variant)
        if variant.cold_share is not None:
            config = CacheConfig.from_dict(settings)
            blocks = -(-num_tokens // config.page_size)
            settings["warm_bytes"] = int((1 - variant.cold_share) * blocks * warm_bytes_per_block(self.shape, config))
        return CacheConfig.from_dict(settings)


def cache_settings(bench: TableBench, variant: Variant) -> dict[str, Any]:
    """What a variant's CacheConfig is made of, but for what its process works out: ceiling and warm store."""
    own: Mapping[str, Any] = bench.adaptive if variant.mode == "adaptive" else {}
    shared = {name: bench.adaptive[name] for name in ("page_size",) if name in bench.adaptive}
    return {"mode": variant.mode, "page_dtype": bench.page_dtype, **shared, **own, **variant.settings}
