"""How far a cache's answers are from the native cache's: the same text, forced token by token, through both.

The reference is the native cache with float32 pages. Controls say how much the figures mean: what users live with already (a
bfloat16 model against itself), what others offer (float8 pages), and the sketches without error control.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera import errors
from vera.bench.child import run_job
from vera.bench.machine import available_cores, describe_machine
from vera.bench.signals import ends_on_sigterm
from vera.bench.statistics import percentile
from vera.bench.texts import check_text
from vera.cache.housekeeping import TierRates
from vera.config import CacheConfig
from vera.errors import ConfigError, VeraError

CACHES = ("adaptive", "exact", "native")
"""What can be measured: within bounds, every page served exactly, the native cache with the settings' pages."""

_CHUNK = 512
_OTHER_CHUNK = 320
"""Tokens a chunk of the bfloat16 model's second run."""
_FIRST_STEPS = 40
"""Right after a prompt, heat is young and hits are most frequent."""
_ROWS = 32
"""Steps compared at a time: bounds the float64 temporaries."""

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityBench:
    """What to measure."""

    model: str = "embedded"
    """A folder, a .gguf file, or `embedded`."""
    text: str = "prose"
    """`prose`, `code`, `chat`, or a file."""
    context: int = 7700
    """Tokens that are read as the prompt."""
    tokens: int = 384
    """Decode steps, each with the text's next token."""
    cache: str = "adaptive"
    """Of CACHES."""
    settings: CacheConfig = field(default_factory=CacheConfig)
    """Of the measured cache and of the controls. Mode and fidelity are `cache`'s, and the ceiling is what the text needs."""
    controls: bool = True
    """Run the controls too; they take longer than the rest."""
    num_threads: int | None = None
    """None: one for each core that the process may use."""
    attention_backend: str = "auto"
    """As in EngineConfig."""
    timeout_seconds: float = 3600.0
    """After this long a run is stopped and counts as failed."""

    def __post_init__(self) -> None:
        check_text(self.text)
        if self.cache not in CACHES:
            raise ConfigError(f"cache={self.cache!r} is not one of {', '.join(CACHES)}")
        for name in ("context", "tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 up")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads={self.num_threads!r} must be a whole number from 1 up")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds!r} must be above 0")
        if self.cache != "native" and self.context <= self.settings.min_context:
            raise ConfigError(
                f"context={self.context} is within min_context={self.settings.min_context}, up to which the cache stays native: "
                "there would be nothing to measure; raise the context or lower min_context"
            )

    @property
    def threads(self) -> int:
        return self.num_threads or available_cores()

    @property
    def measured(self) -> CacheConfig:
        """The settings of the cache that is measured."""
        if self.cache == "native":
            return CacheConfig(page_size=self.settings.page_size, page_dtype=self.settings.page_dtype)
        return replace(self.settings, mode="adaptive", fidelity="exact" if self.cache == "exact" else "bounded")


@ends_on_sigterm()
def run_fidelity(bench: FidelityBench) -> dict[str, Any]:
    """The measured cache against the reference, and each control, JSON-ready. Says what it is doing on stderr.

    "perplexity" has that of the reference as "native" and that of the measured cache as "adaptive" (an `exact` cache is one; for
    `native` the key is "native_float16" or whatever its pages are). Figures that only an adaptive cache has are None for a native
    one. A control that failed is `{"failed": why}`; `sketch_only` is left out where the context is within `min_context`. If the
    measurement itself fails, a VeraError says why.
    """
    machine = describe_machine(bench.threads)
    prepared = _prepare(bench)
    native = CacheConfig(page_size=bench.settings.page_size, page_dtype="float32")
    with TemporaryDirectory(prefix="vera-fidelity-") as folder:
        lesson = _Lesson(bench, prepared["token_ids"], prepared["folder"], Path(folder))
        reference = lesson.run("reference", cache=native)
        measured = lesson.run(bench.cache, cache=bench.measured)
        for run in (reference, measured):
            if "failed" in run.outcome:
                raise VeraError(f"{run.name} failed: {run.outcome['failed']}")
        figures = lesson.drift(reference, measured)
        measured.logits_path.unlink()
        controls = _controls(bench, lesson, reference) if bench.controls else {}
    perplexity = {"native": figures.pop("perplexity_reference"), _name_of(bench): figures.pop("perplexity")}
    return {
        "text": bench.text,
        "context": bench.context,
        "tokens": bench.tokens,
        **figures,
        "perplexity": perplexity,
        **_cache_figures(measured.outcome),
        "controls": controls,
        "bench": "fidelity",
        "cache": bench.cache,
        "settings": bench.measured.to_dict(),
        "model": prepared["model_name"],
        "machine": machine,
    }


def _prepare(bench: FidelityBench) -> dict[str, Any]:
    """The text as token ids, and the model's name."""
    _say(f"preparing {bench.model} and {bench.text}")
    arguments = {"model": bench.model, "text": bench.text, "context": bench.context, "tokens": bench.tokens}
    prepared = run_job("vera.bench.teacher:prepare", arguments, timeout_seconds=bench.timeout_seconds)
    if "failed" in prepared:
        error = getattr(errors, prepared.get("error", "VeraError"))
        raise error(prepared["failed"])
    return prepared


def _controls(bench: FidelityBench, lesson: _Lesson, reference: _Run) -> dict[str, dict[str, Any]]:
    sketches = replace(
        bench.settings,
        mode="adaptive",
        fidelity="bounded",
        attention_tolerance=1.0,
        hot_score_threshold=1.0,
        hot_max_share=0.0,
        skip_share=0.0,
    )
    controls = {"bf16_self": _control(lesson, lesson.run_bf16(_CHUNK), lesson.run_bf16(_OTHER_CHUNK))}
    fp8 = lesson.run("fp8", cache=CacheConfig(page_size=bench.settings.page_size), fp8_pages=True)
    controls["fp8"] = _control(lesson, reference, fp8)
    if bench.context > bench.settings.min_context:
        controls["sketch_only"] = _control(lesson, reference, lesson.run("sketch_only", cache=sketches))
    return controls


def _control(lesson: _Lesson, reference: _Run, other: _Run) -> dict[str, Any]:
    """Deletes the logits of `other`."""
    for run in (reference, other):
        if "failed" in run.outcome:
            return {"failed": run.outcome["failed"]}
    figures = lesson.drift(reference, other)
    other.logits_path.unlink()
    return figures


@dataclass(frozen=True, slots=True)
class _Run:
    """One configuration, done. `logits_path` has a row for each decode step, unless it failed."""

    name: str
    outcome: dict[str, Any]
    logits_path: Path


@dataclass(frozen=True, slots=True)
class _Lesson:
    """The same text for every configuration, and a folder for the logits, which are too many for a pipe."""

    bench: FidelityBench
    token_ids: Sequence[int]
    model_folder: str
    folder: Path

    def run(self, name: str, *, cache: CacheConfig, fp8_pages: bool = False) -> _Run:
        """Vera with that cache."""
        arguments = {
            "model": self.bench.model,
            "cache": cache.to_dict(),
            "fp8_pages": fp8_pages,
            "max_batch_tokens": _CHUNK,
            "attention_backend": self.bench.attention_backend,
        }
        return self._run(name, "vera.bench.teacher:force", arguments)

    def run_bf16(self, chunk: int) -> _Run:
        """The model in bfloat16 by transformers."""
        return self._run(f"bf16 in chunks of {chunk}", "vera.bench.bf16:force", {"folder": self.model_folder, "chunk": chunk})

    def drift(self, reference: _Run, other: _Run) -> dict[str, Any]:
        following = np.asarray(self.token_ids[self.bench.context + 1 :])
        return drift(np.load(reference.logits_path, mmap_mode="r"), np.load(other.logits_path, mmap_mode="r"), following)

    def _run(self, name: str, call: str, arguments: Mapping[str, Any]) -> _Run:
        _say(name)
        path = self.folder / f"{name}.npy"
        common: dict[str, Any] = {
            "token_ids": self.token_ids,
            "context": self.bench.context,
            "logits_path": str(path),
            "num_threads": self.bench.threads,
        }
        outcome = run_job(
            call, common | dict(arguments), num_threads=self.bench.threads, timeout_seconds=self.bench.timeout_seconds
        )
        _say(f"{name}: {outcome['failed']}" if "failed" in outcome else f"{name}: {outcome['seconds']:.0f} s")
        return _Run(name, outcome, path)


def drift(reference: _Floats, other: _Floats, following: NDArray[np.int64]) -> dict[str, Any]:
    """Figures of two arrays of logits, `[steps, vocab]`, and the tokens that really followed, `[steps]`.

    KL is KL(reference || other) in nats, worked out in float64.
    """
    divergences, agree, losses = [], [], []
    for start in range(0, len(following), _ROWS):
        rows = slice(start, start + _ROWS)
        theirs, ours = _log_softmax(reference[rows]), _log_softmax(other[rows])
        divergences.append((np.exp(theirs) * (theirs - ours)).sum(-1))
        agree.append(theirs.argmax(-1) == ours.argmax(-1))
        index = np.arange(len(theirs)), following[rows]
        losses.append((-theirs[index], -ours[index]))
    kl = np.maximum(np.concatenate(divergences), 0.0)  # rounding can make nothing a little less
    theirs, ours = (np.concatenate(side) for side in zip(*losses, strict=True))
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "kl_p99": percentile(kl.tolist(), 0.99),
        "top1_agreement": float(np.concatenate(agree).mean()),
        "perplexity_reference": float(np.exp(theirs.mean())),
        "perplexity": float(np.exp(ours.mean())),
    }


def _log_softmax(logits: _Floats) -> _Doubles:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def _cache_figures(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What the measured cache did; None for what a native one does not have."""
    ratios = [ratio for ratio in outcome.get("error_ratios", ()) if math.isfinite(ratio)]
    first = outcome.get("hits_by_step", ())[:_FIRST_STEPS]
    return {
        "error_true_over_estimated_p50": percentile(ratios, 0.50) if ratios else None,
        "error_true_over_estimated_p99": percentile(ratios, 0.99) if ratios else None,
        "error_estimated_mean": outcome.get("error_estimated_mean"),
        "error_estimated_max": outcome.get("error_estimated_max"),
        "audits": len(outcome.get("error_ratios", ())),
        "cache_bytes_ratio": outcome["cache_bytes"] / outcome["native_cache_bytes"],
        **{rate.name: outcome.get(rate.name) for rate in fields(TierRates)},
        "hits_per_step_first": fmean(first) if first else None,
        "uncovered_hits": outcome.get("uncovered_hits"),
        **{name: outcome[name] for name in ("cache_bytes", "warm_bytes", "process_bytes", "kernel", "seconds")},
    }


def _name_of(bench: FidelityBench) -> str:
    return f"native_{bench.settings.page_dtype}" if bench.cache == "native" else "adaptive"


def _say(what: str) -> None:
    print(f"vera fidelity: {what}", file=sys.stderr, flush=True)


# -- for people --------------------------------------------------------------------------------------------------------


def render_fidelity(result: Mapping[str, Any]) -> RenderableType:
    """A table of what `run_fidelity` returned, a line for the measured cache and each control, and its other figures under it."""
    table = Table(
        title=f"{result['cache']} against native, {result['text']}: {result['tokens']} tokens after {result['context']} "
        f"({result['model']})",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("KL mean", "KL max", "top-1 agreement", "perplexity"):
        table.add_column(heading, justify="right")
    native, *others = result["perplexity"].items()
    table.add_row("native, float32 pages", "", "", "", f"{native[1]:.4f}")
    table.add_row(result["cache"], *_drift_cells({**result, "perplexity": others[0][1]}))
    for name, control in result["controls"].items():
        table.add_row(name, *(["failed", "", "", ""] if "failed" in control else _drift_cells(control)))
    return Group(table, *(Text(note) for note in _notes(result)))


def _drift_cells(drift: Mapping[str, Any]) -> list[str]:
    return [
        f"{drift['kl_mean']:.2e}",
        f"{drift['kl_max']:.2e}",
        f"{drift['top1_agreement']:.2%}",
        f"{drift['perplexity']:.4f}",
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = [f"cache bytes: {result['cache_bytes_ratio']:.1%} of native with float16 pages"]
    if result["exact_read_share"] is not None and result["hits_per_step"] is not None:
        notes += [
            f"pages read exactly: {result['exact_read_share']:.1%}; values left out: {result['values_skipped_share']:.1%}",
            f"hits a step: {result['hits_per_step']:.2f}, in the first {_FIRST_STEPS} steps {result['hits_per_step_first']:.2f}; "
            f"steps that recomputed: {result['recompute_share']:.1%}; uncovered hits: {result['uncovered_hits']}",
        ]
    if result["error_true_over_estimated_p50"] is not None:
        notes.append(
            f"true error by estimated: P50 {result['error_true_over_estimated_p50']:.2f}, "
            f"P99 {result['error_true_over_estimated_p99']:.2f} of {result['audits']} audits"
        )
    notes += [f"{name}: {control['failed']}" for name, control in result["controls"].items() if "failed" in control]
    if "bf16_self" in result["controls"]:
        notes.append(
            f"bf16_self: the bfloat16 model as transformers runs it, its prompt read in chunks of {_CHUNK} and of {_OTHER_CHUNK}"
        )
    return notes
