"""`vera bench workloads` as a function: for each workload a ceiling, then native and adaptive services in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vera import errors
from vera.bench.child import run_job
from vera.bench.machine import describe_machine
from vera.bench.serve import ServeBench, Target, Workload, run_serve
from vera.bench.signals import ends_on_sigterm
from vera.bench.statistics import is_absent, merge_repeats
from vera.bench.workloads.budget import ceiling_for, default_ceiling
from vera.bench.workloads.facts import Facts
from vera.bench.workloads.figures import ratio_spread, ratios, run_figures, verdict
from vera.bench.workloads.report import markdown
from vera.bench.workloads.scenarios import SCENARIOS, Scenario
from vera.bench.workloads.service import WatchedService
from vera.bench.workloads.settings import CACHES, WorkloadsBench, check_client
from vera.errors import VeraError

Outcome = dict[str, Any]

_WATCHED = ("cpu_seconds", "peak_cache_bytes", "peak_warm_bytes", "peak_process_bytes")
"""What is watched of a service while it works."""
_WARM_UP = Workload(dataset="random", num_prompts=1, input_len=64, output_len=8, seed=1)


@ends_on_sigterm()
def run_workloads(bench: WorkloadsBench) -> Outcome:
    """Each workload with both caches, JSON-ready. Says what it is doing on stderr.

    Each run has a service of its own, so none finds what another left in its cache. A run whose service did not start, died or
    left a request unanswered is `{"failed": why}`. Raises ConfigError for what the model cannot serve, and KeyboardInterrupt
    after Ctrl-C.
    """
    check_client()
    machine = describe_machine(bench.threads)
    loads = {
        name: replace(SCENARIOS[name].load(quick=bench.quick, requests=bench.requests), seed=bench.seed)
        for name in bench.workloads
    }
    model_name, facts = _facts(bench, loads)
    return {
        "bench": "workloads",
        "machine": machine,
        "commit": commit(),
        "model": model_name,
        "quick": bench.quick,
        "repeats": bench.repeats,
        "page_dtype": bench.page_dtype,
        "max_num_seqs": bench.max_num_seqs,
        "seed": bench.seed,
        "workloads": [_compare(bench, SCENARIOS[name], loads[name], facts[name]) for name in bench.workloads],
    }


def save_workloads(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes `workloads.json` and `workloads.md` into a folder, which is made if need be, and returns where they lie."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        folder / "workloads.json": json.dumps(result, allow_nan=False, indent=1) + "\n",
        folder / "workloads.md": markdown(result),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


def commit() -> str | None:
    """Of the checkout that this package lies in, with a plus sign where files were changed. None: it lies in none."""
    folder = Path(__file__).parent
    asked = [["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    try:
        head, changed = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
            ).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+" if changed else head


def _facts(bench: WorkloadsBench, loads: Mapping[str, Workload]) -> tuple[str, dict[str, Facts]]:
    _say(f"preparing {bench.model}, and counting the tokens of {', '.join(loads)}")
    arguments = {
        "model": bench.model,
        "workloads": {name: _plain(load) for name, load in loads.items()},
        "page_dtype": bench.page_dtype,
    }
    found = run_job("vera.bench.workloads.facts:measure_facts", arguments, num_threads=bench.threads)
    if "failed" in found:
        error = getattr(errors, found.get("error", "VeraError"))
        raise error(found["failed"])
    facts = {
        name: Facts(**(fields | {"sequence_tokens": tuple(fields["sequence_tokens"])})) for name, fields in found["facts"].items()
    }
    return found["model_name"], facts


def _plain(load: Workload) -> dict[str, Any]:
    """The fields of a workload that JSON knows; infinite ones are the defaults."""
    return {name: value for name, value in asdict(load).items() if value != float("inf") and value is not None}


def _compare(bench: WorkloadsBench, scenario: Scenario, load: Workload, facts: Facts) -> Outcome:
    concurrency = scenario.concurrency(quick=bench.quick)
    ceiling = _ceiling(bench, scenario, facts, concurrency)
    runs: dict[str, list[Outcome]] = {cache: [] for cache in CACHES}
    for repeat in range(bench.repeats):
        for cache in CACHES if repeat % 2 == 0 else reversed(CACHES):
            _say(f"{scenario.name}: {cache}, run {repeat + 1} of {bench.repeats}")
            runs[cache].append(_run(bench, scenario, load, concurrency, cache, ceiling))
            _say(_told(runs[cache][-1]))
    native, adaptive = merge_repeats(runs["native"]), merge_repeats(runs["adaptive"])
    ratio = ratios(native, adaptive)
    spread = ratio_spread(runs["native"], runs["adaptive"]) if bench.repeats > 1 else {}
    return {
        "name": scenario.name,
        "about": scenario.about,
        "load": _plain(load),
        "max_concurrency": concurrency,
        "goodput": dict(scenario.goodput),
        "cache_bytes": ceiling,
        "longest_sequence_tokens": max(facts.sequence_tokens),
        "adaptive_settings": bench.adaptive_settings(scenario.name),
        "native": native,
        "adaptive": adaptive,
        "ratios": ratio,
        "ratio_spread": spread,
        "verdict": verdict(native, adaptive, ratio, spread, ceiling=ceiling),
    }


def _ceiling(bench: WorkloadsBench, scenario: Scenario, facts: Facts, concurrency: int | None) -> int:
    if bench.cache_bytes is not None:
        return bench.cache_bytes
    if bench.budget_sequences is not None:
        return ceiling_for(facts, bench.budget_sequences)
    return default_ceiling(facts, concurrency=concurrency, share=scenario.budget_share)


def _run(bench: WorkloadsBench, scenario: Scenario, load: Workload, concurrency: int | None, cache: str, ceiling: int) -> Outcome:
    """One service, from its start to its end, under the whole load once."""
    try:
        with WatchedService(_flags(bench, scenario.name, cache, ceiling), threads=bench.threads) as service:
            loaded = _bench_serve(bench, scenario, load, concurrency, service.base_url)
            for each in (replace(loaded, workload=_WARM_UP), loaded):
                result = run_serve(each)
                if result["interrupted"]:
                    raise KeyboardInterrupt
                if lost := result["failed"] + result["unfinished"]:
                    return {"failed": _lost(lost, result)}
            service.look()
            engine = service.stats()["engine"] or {}
    except VeraError as error:
        return {"failed": str(error)}
    told = {"preemptions": engine.get("preemptions")} | {name: getattr(service, name) for name in _WATCHED}
    return run_figures(result, told=told)


def _lost(count: int, result: Mapping[str, Any]) -> str:
    return f"{count} of {result['num_requests']} requests were not answered; the first: {result['first_error']}"


def _flags(bench: WorkloadsBench, workload: str, cache: str, ceiling: int) -> list[str]:
    flags = [bench.model, "--cache", cache, "--cache-max-bytes", str(ceiling), "--page-dtype", bench.page_dtype]
    flags += ["--max-num-seqs", str(bench.max_num_seqs), "--request-timeout", str(bench.timeout_seconds)]
    if cache == "adaptive":
        for name, value in bench.adaptive_settings(workload).items():
            if name != "mode":
                flags += ["--set", f"{name}={json.dumps(value)}"]
    return flags


def _bench_serve(bench: WorkloadsBench, scenario: Scenario, load: Workload, concurrency: int | None, base_url: str) -> ServeBench:
    return ServeBench(
        target=Target(
            base_url=base_url,
            temperature=0.0,
            ignore_eos=True,  # both caches have the same tokens to write
            timeout_seconds=bench.timeout_seconds,
        ),
        workload=load,
        max_concurrency=concurrency,
        num_warmups=0,  # theirs are as long as the load's requests, which is long
        goodput=scenario.goodput,
        percentile_metrics=("ttft", "itl", "e2el"),
        metric_percentiles=(50.0, 99.0),
    )


def _told(run: Outcome) -> str:
    if is_absent(run):
        return f"failed: {run['failed']}"
    return f"{run['completed']} requests in {run['seconds']:.0f} s, {run['qps']:.2f} a second"


def _say(line: str) -> None:
    print(f"vera bench: {line}", file=sys.stderr, flush=True)
