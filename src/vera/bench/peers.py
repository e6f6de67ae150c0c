"""`vera bench peers`: Vera beside whatever else is installed, on the same work in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from vera.bench.options import settings_from
from vera.bench.report import render
from vera.bench.runs import Outcome, run_decode
from vera.bench.settings import BASELINES, CACHES, DecodeBench
from vera.bench.statistics import is_absent
from vera.errors import VeraError

_AGAINST = ("native", "transformers")
"""What everything is compared with."""
_FIGURES = ("decode_tokens_per_s", "process_bytes", "cache_bytes")


def run_peers(bench: DecodeBench) -> Outcome:
    """Both caches of Vera and all of BASELINES, JSON-ready; otherwise as `run_decode`.

    A peer that is not installed is in "runs" as `{"missing": why, and how to install it}`; one that broke as `{"failed": why}`,
    and the others go on. "ratios" has, for "native" and for "transformers", what each of the others has of that one's figures;
    what either side does not have is left out.
    """
    result = run_decode(replace(bench, caches=CACHES, baselines=BASELINES))
    return {**result, "bench": "peers", "ratios": {name: _by(result["runs"], name) for name in _AGAINST}}


def _by(runs: Mapping[str, Outcome], against: str) -> dict[str, dict[str, float]]:
    """Of every run that worked but `against` itself: its figures, each by `against`'s."""
    yardstick = runs[against]
    if is_absent(yardstick):
        return {}
    return {
        name: {figure: run[figure] / yardstick[figure] for figure in _FIGURES if run.get(figure) and yardstick.get(figure)}
        for name, run in runs.items()
        if name != against and not is_absent(run)
    }


def render_peers(result: Mapping[str, Any]) -> RenderableType:
    """The table of a decode run, and what each subject is by native and by transformers."""
    table = render({**result, "bench": "decode", "ratios": {}})
    lines = [
        f"{name} by {against}: {by['decode_tokens_per_s']:.2f} times the tokens/s, {by['process_bytes']:.2f} times the memory"
        for against, by_name in result["ratios"].items()
        for name, by in by_name.items()
    ]
    return Group(table, *(Text(line) for line in lines))


def bench_peers(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    batch: Annotated[int, typer.Option("--batch", help="Sequences decoded together.")] = 16,
    context: Annotated[int, typer.Option("--context", help="Tokens of each sequence's prompt.")] = 8000,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Steps that are timed.")] = 32,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each, in turns; figures are then medians.")] = 1,
    baseline_seconds: Annotated[
        float, typer.Option("--baseline-seconds", help="transformers stops after about this much decoding.")
    ] = 60.0,
    adaptive: Annotated[
        list[str] | None,
        typer.Option("--set", help="Adaptive: a cache setting such as attention_tolerance=0.05; repeatable."),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to compute with; all cores if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")] = False,
) -> None:
    """Vera's caches beside transformers, llama.cpp and vLLM on the same work; what is not installed is named."""
    result = run_peers(
        DecodeBench(
            model=model,
            batch=batch,
            context=context,
            new_tokens=new_tokens,
            caches=CACHES,
            repeats=repeats,
            baseline_seconds=baseline_seconds,
            adaptive=settings_from(adaptive or []),
            num_threads=threads,
        )
    )
    Console(stderr=as_json).print(render_peers(result))
    if as_json:
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    if failed := [f"{name}: {run['failed']}" for name, run in result["runs"].items() if "failed" in run]:
        raise VeraError("; ".join(failed))
