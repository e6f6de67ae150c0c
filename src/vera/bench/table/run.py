"""`vera bench table` as a function: prepare, run the plan within its time, and put everything into one document."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vera import errors
from vera.bench.child import run_job
from vera.bench.machine import describe_machine
from vera.bench.signals import ends_on_sigterm
from vera.bench.statistics import is_absent
from vera.bench.table.drift import DriftRuns, RunJob, cache_settings
from vera.bench.table.figures import (
    Done,
    drifts_of,
    growth_of,
    policy_cost_of,
    ratio_spread_of,
    ratios_of,
    rows_of,
    without_gain,
)
from vera.bench.table.plan import Step, plan, seconds_of
from vera.bench.table.settings import TableBench
from vera.cache import CacheShape

_KEPT_SHARE = 0.04
"""Of the budget: for what comes after the last run, and for ending a run that takes too long."""
_JOBS = {"decode": "vera.bench.table.subject:decode", "capacity": "vera.bench.table.subject:capacity"}
_NO_TIME = "no time was left"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is."""

    what: str
    """What runs now."""
    seconds: float
    """Since the beginning."""
    seconds_left: float
    """Until the end, as far as can be said now; never beyond the budget."""


@ends_on_sigterm()
def run_table(
    bench: TableBench,
    *,
    command: str = "",
    tell: Callable[[Progress], None] = lambda _: None,
    run_job: RunJob = run_job,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The whole table as one JSON-ready document. `command` is what it says that it was made by.

    Runs that do not fit the budget are under "left_out" with the reason; a row whose runs failed has `failed` and no figures.
    Raises a VeraError if the model cannot be had. An interruption ends the run that is under way, and with it the table.
    """
    watch = _Watch(bench, clock)
    machine = describe_machine(bench.threads)
    tell(Progress("preparing", 0.0, 60 * bench.budget_minutes))
    prepared = _prepare(bench, run_job, watch.left)
    steps = plan(bench, max_context=prepared["max_context"], has_chat=prepared["has_chat"])
    with TemporaryDirectory(prefix="vera-table-") as folder:
        drift = DriftRuns(bench, CacheShape(**prepared["shape"]), Path(folder), run_job)
        done, left_out = _run_all(bench, steps, prepared["token_ids"], drift, watch, tell, run_job)
    rows = rows_of(bench, done, max_context=prepared["max_context"])
    return {
        "bench": "table",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "version": version("vera-engine"),
        "commit": commit(),
        "machine": machine,
        "model": prepared["model_name"],
        "max_context": prepared["max_context"],
        "settings": asdict(bench) | {"adaptive": dict(bench.adaptive), "min_context": bench.min_context},
        "rows": rows,
        "ratios": ratios_of(rows),
        "ratio_spread": ratio_spread_of(done),
        "drift": drifts_of(done),
        "growth": growth_of(rows),
        "policy_cost": policy_cost_of(rows),
        "without_gain": without_gain(rows),
        "left_out": left_out,
        "seconds": round(watch.seconds, 1),
    }


def commit() -> str | None:
    """The commit of the sources, `-dirty` where they differ from it. None: they are not in a git repository."""
    here = Path(__file__).parent
    try:
        # Not of whatever repository a virtual environment may lie in: the sources themselves have to be tracked.
        subprocess.run(["git", "-C", here, "ls-files", "--error-unmatch", ".."], check=True, capture_output=True, timeout=30)
        told = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None


class _Watch:
    """How much of the budget is left, and how long runs take here by what was guessed."""

    def __init__(self, bench: TableBench, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self._budget = 60 * bench.budget_minutes * (1 - _KEPT_SHARE)
        self._guessed = self._took = 0.0

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float:
        return self._budget - self.seconds

    def learn(self, step: Step, seconds: float) -> None:
        self._guessed += seconds_of(step)
        self._took += seconds

    def guess(self, step: Step) -> float:
        slower = self._took / self._guessed if self._guessed else 1.0
        return slower * seconds_of(step)


def _prepare(bench: TableBench, run_job: RunJob, timeout_seconds: float) -> dict[str, Any]:
    longest = max(bench.context, bench.long_context if bench.has("long") else 0)
    arguments = {"model": bench.model, "num_tokens": longest, "seed": bench.seed}
    prepared = run_job("vera.bench.table.subject:prepare", arguments, timeout_seconds=timeout_seconds)
    if "failed" in prepared:
        error = getattr(errors, prepared.get("error", "VeraError"))
        raise error(prepared["failed"])
    return prepared


def _run_all(
    bench: TableBench,
    steps: list[Step],
    token_ids: list[int],
    drift: DriftRuns,
    watch: _Watch,
    tell: Callable[[Progress], None],
    run_job: RunJob,
) -> tuple[list[Done], list[dict[str, str]]]:
    """What was run, and what was left out and why. The first of each is always tried: without it there is no table."""
    done: list[Done] = []
    left_out = []
    for place, step in enumerate(steps):
        if step.kind == "drift" and drift.lacks_reference(step):
            left_out.append({"what": step.label, "why": "its reference was not measured"})
            continue
        if (place > 1 and watch.guess(step) > watch.left) or watch.left <= 0:
            left_out.append({"what": step.label, "why": _NO_TIME})
            continue
        tell(Progress(step.label, watch.seconds, min(watch.left, sum(map(watch.guess, steps[place:])))))
        start = watch.seconds
        if step.kind == "drift":
            outcome = drift.run(step, timeout_seconds=watch.left)
        else:
            outcome = run_job(
                _JOBS[step.kind],
                _arguments(bench, step, token_ids),
                num_threads=bench.threads,
                timeout_seconds=watch.left,
            )
        if not is_absent(outcome):
            watch.learn(step, watch.seconds - start)
        done.append(Done(step, outcome))
    return done, left_out


def _arguments(bench: TableBench, step: Step, token_ids: list[int]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": bench.model,
        "cache": cache_settings(bench, step.variant),
        "token_ids": token_ids[: step.context],
        "new_tokens": step.new_tokens,
        "max_batch_tokens": bench.max_batch_tokens,
        "num_threads": bench.threads,
        "seed": bench.seed,
    }
    if step.kind == "capacity":
        return arguments | {"native_sequences": step.batch}
    shares = {"cold_share": step.variant.cold_share, "ceiling_share": step.variant.ceiling_share}
    return arguments | shares | {"batch": step.batch}
