"""The benchmarks: prepare, run every subject in turns in processes of their own, compare."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vera import errors
from vera.bench.child import run_job
from vera.bench.machine import describe_machine
from vera.bench.settings import Bench, DecodeBench, PrefillBench
from vera.bench.signals import ends_on_sigterm
from vera.bench.statistics import agreeing, is_absent, merge_repeats
from vera.bench.subjects import WARMUP_STEPS

_MODULES = {
    "native": "vera.bench.subjects.engine_cache",
    "adaptive": "vera.bench.subjects.engine_cache",
    "transformers": "vera.bench.subjects.transformers_sdpa",
    "llama.cpp": "vera.bench.subjects.llama_cpp_f16",
    "vllm": "vera.bench.subjects.vllm_cpu",
}
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "llama.cpp": [{"flash_attention": True}, {"flash_attention": False}],
    "vllm": [{"dtype": "float32"}, {"dtype": "bfloat16"}],
}
"""Subjects whose best setting depends on the machine: all of these are run, and the fastest one counts."""
_FIGURE = {"decode": "decode_tokens_per_s", "prefill": "prefill_tokens_per_s"}
"""What is compared: the higher the better."""

Outcome = dict[str, Any]


@ends_on_sigterm()
def run_decode(bench: DecodeBench) -> Outcome:
    """Decode throughput at a full batch, JSON-ready.

    Says what it is doing on stderr. In "runs", a subject that is not installed or cannot run the model has
    `{"missing": why}`, one that broke has `{"failed": why}`. Raises a VeraError if the model cannot be had or the context is
    longer than the model's.
    """
    machine = describe_machine(bench.threads)
    prepared = _prepare(bench, new_tokens=1 + WARMUP_STEPS + bench.new_tokens)
    arguments = _arguments(bench, prepared)
    for name in arguments:
        arguments[name] |= {"batch": bench.batch, "new_tokens": bench.new_tokens}
    if "adaptive" in arguments:
        arguments["adaptive"] |= {"cold_share": bench.cold_share, "adaptive": dict(bench.adaptive)}
    if "transformers" in arguments:
        arguments["transformers"]["step_budget_seconds"] = bench.baseline_seconds
    runs = _run_in_turns(bench, "decode", arguments)
    settings = {"bench": "decode", "batch": bench.batch, "context": bench.context, "new_tokens": bench.new_tokens}
    return settings | _conclusion(bench, "decode", prepared, runs, machine)


@ends_on_sigterm()
def run_prefill(bench: PrefillBench) -> Outcome:
    """Time to the first token of one long prompt, JSON-ready; otherwise as `run_decode`."""
    machine = describe_machine(bench.threads)
    prepared = _prepare(bench, new_tokens=1)
    runs = _run_in_turns(bench, "prefill", _arguments(bench, prepared))
    settings = {"bench": "prefill", "context": bench.context}
    return settings | _conclusion(bench, "prefill", prepared, runs, machine)


def _prepare(bench: Bench, *, new_tokens: int) -> Outcome:
    """The prompt, and what else the subjects share."""
    _say(f"preparing {bench.model} and a prompt of {bench.context} tokens")
    arguments = {
        "model": bench.model,
        "num_tokens": bench.context,
        "new_tokens": new_tokens,
        "seed": bench.seed,
        "f16": "llama.cpp" in bench.baselines,
    }
    prepared = run_job("vera.bench.prepare:prepare", arguments, timeout_seconds=bench.timeout_seconds)
    if "failed" in prepared:
        error = getattr(errors, prepared.get("error", "VeraError"))
        raise error(prepared["failed"])
    return prepared


def _arguments(bench: Bench, prepared: Mapping[str, Any]) -> dict[str, Outcome]:
    """What each subject is called with, in the order in which they run."""
    common = {"token_ids": prepared["token_ids"], "num_threads": bench.threads}
    own = {
        "model": bench.model,
        "page_dtype": bench.page_dtype,
        "max_batch_tokens": bench.max_batch_tokens,
        "seed": bench.seed,
    }
    baselines = {
        "transformers": {"folder": prepared["folder"]},
        "llama.cpp": {"model": bench.model, "f16_path": prepared["f16_path"]},
        "vllm": {"folder": prepared["folder"]},
    }
    return {name: common | own | {"cache": name} for name in bench.caches} | {
        name: common | baselines[name] for name in bench.baselines
    }


def _run_in_turns(bench: Bench, kind: str, arguments: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Round after round, so that a machine that grows slower or faster does so for every subject."""
    rounds = [{name: _run_settings(bench, kind, name, call) for name, call in arguments.items()} for _ in range(bench.repeats)]
    runs: dict[str, Outcome] = {}
    for name in arguments:
        repeats_by_setting = zip(*(turn[name] for turn in rounds), strict=True)
        runs[name] = _fastest([merge_repeats(repeats) for repeats in repeats_by_setting], name, kind)
    return runs


def _run_settings(bench: Bench, kind: str, name: str, arguments: Outcome) -> list[Outcome]:
    """One outcome for each setting of the subject; only one if the subject is missing."""
    outcomes: list[Outcome] = []
    for setting in _SETTINGS.get(name, [{}]):
        outcomes.append(_run(bench, kind, name, arguments, setting))
        if "missing" in outcomes[-1]:
            break
    return outcomes


def _run(bench: Bench, kind: str, name: str, arguments: Outcome, setting: Outcome) -> Outcome:
    label = f"{kind}: {name}" + "".join(f", {key}={value}" for key, value in setting.items())
    _say(label)
    outcome = run_job(
        f"{_MODULES[name]}:{kind}", arguments | setting, num_threads=bench.threads, timeout_seconds=bench.timeout_seconds
    )
    if is_absent(outcome):
        _say(f"{label}: {outcome.get('missing') or outcome.get('failed')}")
    return outcome


def _fastest(outcomes: Sequence[Outcome], name: str, kind: str) -> Outcome:
    """The outcome that counts; the others are told under "slower_settings"."""
    figure = _FIGURE[kind]
    worked = sorted((o for o in outcomes if not is_absent(o)), key=lambda o: o[figure], reverse=True)
    if not worked:
        return outcomes[0]
    told = [*(_SETTINGS[name][0] if name in _SETTINGS else ()), figure]
    slower = [{key: outcome[key] for key in told} for outcome in worked[1:]]
    return worked[0] | ({"slower_settings": slower} if slower else {})


def _conclusion(bench: Bench, kind: str, prepared: Mapping[str, Any], runs: Mapping[str, Outcome], machine: Outcome) -> Outcome:
    return {
        "runs": {name: _published(run, runs.get("native", {}), compare=name != "native") for name, run in runs.items()},
        "ratios": _ratios(bench, _FIGURE[kind], runs),
        "model": prepared["model_name"],
        "seed": bench.seed,
        "repeats": bench.repeats,
        "machine": machine,
    }


def _published(run: Outcome, native: Mapping[str, Any], *, compare: bool) -> Outcome:
    """The outcome with its token ids replaced by a checksum and, with `compare`, by how far they agree with native's."""
    if is_absent(run):
        return run
    tokens: Sequence[int] = run["token_ids"]
    published = {name: value for name, value in run.items() if name != "token_ids"}
    published["token_checksum"] = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
    if compare and (natives := native.get("token_ids")):
        compared = min(len(tokens), len(natives))
        same = agreeing(tokens, natives)
        published |= {"tokens_compared": compared, "tokens_agreeing": same, "same_tokens_as_native": same == compared}
    return published


def _ratios(bench: Bench, figure: str, runs: Mapping[str, Outcome]) -> dict[str, float]:
    """`{"native/transformers": 12.3}`: how many times as fast each cache is as each baseline, and as the native cache."""
    pairs = [(cache, baseline) for cache in bench.caches for baseline in bench.baselines]
    if "native" in bench.caches:
        pairs = [(cache, "native") for cache in bench.caches if cache != "native"] + pairs
    return {
        f"{cache}/{baseline}": runs[cache][figure] / runs[baseline][figure]
        for cache, baseline in pairs
        if not is_absent(runs[cache]) and not is_absent(runs[baseline])
    }


def _say(what: str) -> None:
    print(f"vera bench: {what}", file=sys.stderr, flush=True)
