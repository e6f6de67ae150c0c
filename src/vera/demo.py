"""The main job, to watch: several questions about one long document, answered at the same time.

The questions share the document's prefix, so it is read once; what that saves is in the table at the end.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vera.bench.workload import document_excerpt
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


def run_demo(model: LoadedModel, *, context: int, max_tokens: int, num_threads: int | None, console: Console) -> dict[str, Any]:
    """Streams the answers to `console` and ends with a table; returns the table's figures, JSON-ready."""
    if model.tokenizer is None:
        raise UnsupportedModel(f"{model.spec.name} has no tokenizer, so the demo cannot ask it anything; name another model")
    document = document_excerpt(model.tokenizer, context)
    conversations = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS]
    prompts = [encode_chat(model.tokenizer, conversation) for conversation in conversations]
    console.print(
        f"{model.spec.name}: {len(QUESTIONS)} questions about one document of {context} tokens, native cache", highlight=False
    )
    with LLM(model, num_threads=num_threads) as llm:
        answers, peak_bytes = _answer(llm.engine, prompts, max_tokens, console)
        stats = llm.engine.stats.snapshot()
    result = {
        "questions": len(QUESTIONS),
        "prompt_tokens": stats["prompt_tokens"],
        "prefix_tokens_reused": stats["cached_tokens"],
        "prefill_tokens_per_s": stats["prefill_tokens_per_s"],
        "decode_tokens_per_s": stats["decode_tokens_per_s"],
        "ttft_ms_p50": stats["ttft_ms_p50"],
        "itl_ms_p50": stats["itl_ms_p50"],
        "itl_ms_p99": stats["itl_ms_p99"],
        "cache_bytes": peak_bytes,
        "answers": answers,
    }
    console.print(_table(result))
    return result


def _answer(engine: Engine, prompts: list[list[int]], max_tokens: int, console: Console) -> tuple[list[str], int]:
    """The answers' texts, shown as they grow, and the most bytes of cache in use meanwhile."""
    params = SamplingParams(max_tokens=max_tokens)
    numbers = {engine.add_request(prompt, params): number for number, prompt in enumerate(prompts)}
    answers = [""] * len(prompts)
    peak_bytes = 0
    with Live(_progress(engine, answers), console=console, auto_refresh=False) as live:
        while engine.has_unfinished():
            for update in engine.step():
                answers[numbers[update.request_id]] += update.delta
                if update.error:
                    raise VeraError(f"question {numbers[update.request_id] + 1} failed: {update.error}")
            peak_bytes = max(peak_bytes, engine.cache.used_bytes)
            live.update(_progress(engine, answers), refresh=True)
    return answers, peak_bytes


def _progress(engine: Engine, answers: list[str]) -> Group:
    stats = engine.stats
    lines = [Text.assemble((f"{question}\n", "bold"), f"{answer}\n") for question, answer in zip(QUESTIONS, answers, strict=True)]
    read, written = stats.prefill_tokens, stats.generated_tokens
    return Group(*lines, Text(f"{read} tokens read, {written} written", style="dim"))


def _table(result: dict[str, Any]) -> Table:
    table = Table("measure", "native", title="what it cost")
    table.columns[1].justify = "right"
    table.add_row("prefill", _number(result["prefill_tokens_per_s"], "tokens/s"))
    table.add_row("decode", _number(result["decode_tokens_per_s"], "tokens/s"))
    table.add_row("time to first token, median", _number(result["ttft_ms_p50"], "ms"))
    table.add_row("between tokens, P50", _number(result["itl_ms_p50"], "ms"))
    table.add_row("between tokens, P99", _number(result["itl_ms_p99"], "ms"))
    table.add_row("cache in use, peak", f"{result['cache_bytes'] / 2**20:,.0f} MiB")
    table.add_row("prompt tokens", f"{result['prompt_tokens']:,}")
    table.add_row("of them reused by prefix", f"{result['prefix_tokens_reused']:,}")
    return table


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f} {unit}"
