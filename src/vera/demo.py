"""The main job, to watch: several questions about one long document, answered with a native and then with an adaptive cache.

The questions share the document's prefix, so each cache reads it once. What both cost is in the table at the end, and whether
the answers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vera.bench.memory import MemoryMeter
from vera.bench.shape import shape_of
from vera.bench.workload import document_excerpt
from vera.cache.housekeeping import TierStats
from vera.config import CacheConfig
from vera.engine.engine import Engine
from vera.engine.text import encode_chat
from vera.errors import UnsupportedModel, VeraError
from vera.llm import LLM
from vera.models import LoadedModel
from vera.sampling_params import SamplingParams

QUESTIONS = (
    "What is an assert statement for?",
    "What does an assignment do? Answer in one sentence.",
    "Name two kinds of atoms in Python.",
    "What is the document above about?",
)
CACHES = ("native", "adaptive")
_SLACK = 1.25
"""Ceiling of both caches, by what native takes for the document, the questions and the answers."""


def run_demo(
    model: LoadedModel,
    *,
    context: int,
    max_tokens: int,
    num_threads: int | None,
    console: Console,
    adaptive: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Streams the answers to `console` and ends with a table; returns the table's figures, JSON-ready.

    `adaptive` are settings of the adaptive cache that differ from the defaults.
    """
    if model.tokenizer is None:
        raise UnsupportedModel(f"{model.spec.name} has no tokenizer, so the demo cannot ask it anything; name another model")
    settings = {"native": CacheConfig(), "adaptive": CacheConfig.from_dict({"mode": "adaptive", **(adaptive or {})})}
    document = document_excerpt(model.tokenizer, context)
    conversations = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS]
    prompts = [encode_chat(model.tokenizer, conversation) for conversation in conversations]
    runs: dict[str, dict[str, Any]] = {}
    # One after the other, so that the memory of only one cache is held at any time.
    for name in CACHES:
        console.print(
            f"{model.spec.name}, {name} cache: {len(QUESTIONS)} questions about one document of {context:,} tokens",
            style="bold",
            highlight=False,
        )
        runs[name] = _run(model, settings[name], prompts, max_tokens, num_threads, console)
    same = [one == other for one, other in zip(*(runs[name]["answers"] for name in CACHES), strict=True)]
    result = {
        "context": context,
        "questions": len(QUESTIONS),
        "min_context": settings["adaptive"].min_context,
        "same_answers": same,
        "runs": runs,
    }
    console.print(_table(result))
    if max(map(len, prompts)) + max_tokens <= settings["adaptive"].min_context:
        console.print(
            f"Up to min_context={settings['adaptive'].min_context:,} tokens an adaptive cache serves natively: "
            "take a longer --context to see it at work.",
            style="yellow",
            highlight=False,
        )
    return result


def _run(
    model: LoadedModel,
    settings: CacheConfig,
    prompts: list[list[int]],
    max_tokens: int,
    num_threads: int | None,
    console: Console,
) -> dict[str, Any]:
    """Answers all prompts with a cache of these settings; what it cost, and the answers' texts."""
    longest = max(map(len, prompts)) + max_tokens
    if settings.cache_max_bytes is None:
        all_tokens = longest + len(prompts) * (max_tokens + settings.page_size)
        settings = replace(settings, cache_max_bytes=int(_SLACK * shape_of(model).native_bytes(settings, all_tokens)))
    llm = LLM(
        model,
        cache=settings,
        num_threads=num_threads,
        max_num_seqs=len(prompts),
        max_model_len=min(longest, model.spec.max_context),
    )
    with MemoryMeter() as memory, llm:
        answers, peaks = _answer(llm.engine, prompts, max_tokens, console)
        stats = llm.engine.stats.snapshot()
        tiers = asdict((llm.engine.cache.tier_stats or TierStats()).rates)
    return {
        "prompt_tokens": stats["prompt_tokens"],
        "prefix_tokens_reused": stats["cached_tokens"],
        **{
            name: stats[name]
            for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99")
        },
        **peaks,
        "process_bytes": memory.peak_private_bytes,
        **tiers,
        "answers": answers,
    }


def _answer(engine: Engine, prompts: list[list[int]], max_tokens: int, console: Console) -> tuple[list[str], dict[str, int]]:
    """The answers' texts, shown as they grow, and the most bytes in use meanwhile, in fast memory and in the warm store."""
    params = SamplingParams(max_tokens=max_tokens)
    numbers = {engine.add_request(prompt, params): number for number, prompt in enumerate(prompts)}
    answers = [""] * len(prompts)
    peaks = {"cache_bytes": 0, "warm_bytes": 0}
    with Live(_progress(engine, answers), console=console, auto_refresh=False) as live:
        while engine.has_unfinished():
            for update in engine.step():
                answers[numbers[update.request_id]] += update.delta
                if update.error:
                    raise VeraError(f"question {numbers[update.request_id] + 1} failed: {update.error}")
            peaks["cache_bytes"] = max(peaks["cache_bytes"], engine.cache.used_bytes)
            peaks["warm_bytes"] = max(peaks["warm_bytes"], engine.cache.warm_bytes)
            live.update(_progress(engine, answers), refresh=True)
    return answers, peaks


def _progress(engine: Engine, answers: list[str]) -> Group:
    stats = engine.stats
    lines = [Text.assemble((f"{question}\n", "bold"), f"{answer}\n") for question, answer in zip(QUESTIONS, answers, strict=True)]
    read, written = stats.prefill_tokens, stats.generated_tokens
    return Group(*lines, Text(f"{read:,} tokens read, {written} written\n", style="dim"))


def _table(result: dict[str, Any]) -> Table:
    table = Table("measure", *CACHES, title="what it cost")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, key, unit in (
        ("prefill, tokens/s", "prefill_tokens_per_s", "{:,.0f}"),
        ("decode, tokens/s", "decode_tokens_per_s", "{:,.0f}"),
        ("time to first token, median, ms", "ttft_ms_p50", "{:,.0f}"),
        ("between tokens, P50, ms", "itl_ms_p50", "{:,.0f}"),
        ("between tokens, P99, ms", "itl_ms_p99", "{:,.0f}"),
        ("prompt tokens", "prompt_tokens", "{:,}"),
        ("  of them reused by prefix", "prefix_tokens_reused", "{:,}"),
        ("pages hit a step", "hits_per_step", "{:.1f}"),
        ("pages read exactly", "exact_read_share", "{:.0%}"),
        ("steps with a recompute", "recompute_share", "{:.1%}"),
    ):
        table.add_row(label, *_cells(result, key, unit))
    for label, key in (
        ("cache in use, peak, MiB", "cache_bytes"),
        ("warm store, peak, MiB", "warm_bytes"),
        ("process memory, peak, MiB", "process_bytes"),
    ):
        table.add_row(label, *(f"{result['runs'][name][key] / 2**20:,.0f}" for name in CACHES))
    table.add_row("the same answer as native", "", f"{sum(result['same_answers'])} of {result['questions']}")
    return table


def _cells(result: dict[str, Any], key: str, unit: str) -> list[str]:
    values = [result["runs"][name][key] for name in CACHES]
    return ["-" if value is None else unit.format(value) for value in values]
