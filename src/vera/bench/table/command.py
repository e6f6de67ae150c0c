"""`vera bench table`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from vera.bench.options import settings_from
from vera.bench.statistics import is_absent
from vera.bench.table.settings import PARTS, TableBench, quick
from vera.errors import ConfigError, VeraError

if TYPE_CHECKING:
    from vera.bench.table.run import Progress

_stderr = Console(stderr=True)


def bench_table(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    quickly: Annotated[bool, typer.Option("--quick", help="Small batches, short answers, ten minutes on two cores.")] = False,
    batch: Annotated[
        str | None, typer.Option("--batch", help="Batches with commas between; the largest in the headline.")
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Tokens of prompts with commas between; the longest in the headline.")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", help="Tokens of a headline answer.")] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Rounds of the headline, native and adaptive in turns.")
    ] = None,
    budget_minutes: Annotated[
        float | None, typer.Option("--budget-minutes", help="The run ends within this; what did not fit is named.")
    ] = None,
    parts: Annotated[
        str | None, typer.Option("--parts", help=f"What to measure, with commas between: {', '.join(PARTS)}.")
    ] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option("--slo-itl-ms", help="Goodput: most milliseconds of a request's mean inter-token latency.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", help="Goodput: most milliseconds until its first token.")
    ] = None,
    adaptive: Annotated[
        list[str] | None,
        typer.Option("--set", help="Adaptive: a cache setting such as attention_tolerance=0.05; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which part of the document is the prompt.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to compute with; all cores if not given.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write results.md, results/table.json and images/ into this folder.")
    ] = None,
    again: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: take this JSON of an earlier run, for the page and pictures.")
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures too, with --out; needs `plots`.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")] = False,
) -> None:
    """Native and adaptive on the same work in turns: memory, latency, throughput, drift, and where adaptive does not help."""
    from vera.bench.table.plots import check_plots
    from vera.bench.table.report import render_table
    from vera.bench.table.results import read_document, write_results
    from vera.bench.table.run import run_table

    if out is not None and plots:
        check_plots()
    given = {
        "batches": None if batch is None else _whole_numbers("--batch", batch),
        "contexts": None if context is None else _whole_numbers("--context", context),
        "new_tokens": new_tokens,
        "repeats": repeats,
        "budget_minutes": budget_minutes,
        "parts": None if parts is None else _names(parts),
        "slo_itl_ms": slo_itl_ms,
        "slo_ttft_ms": slo_ttft_ms,
        "adaptive": settings_from(adaptive) if adaptive else None,
        "seed": seed,
        "num_threads": threads,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if again is not None:
        if settings or quickly:
            raise ConfigError(
                "--from measures nothing, so it takes no option that says what to measure; leave out one or the other"
            )
        document = read_document(again)
    else:
        bench = TableBench(model=model, **(quick(**settings) if quickly else settings))
        with _bar() as tell:
            document = run_table(bench, command=_command(), tell=tell)
    (_stderr if as_json else Console()).print(render_table(document))
    if out is not None:
        for path in write_results(document, out, plots=plots):
            _stderr.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    _complain(document)


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A progress bar with the time left where a person is watching; elsewhere a line for each run."""
    if not _stderr.is_terminal:
        yield lambda at: _stderr.print(
            f"vera bench: {at.what} ({_clock(at.seconds)} so far, about {_clock(at.seconds_left)} left)",
            markup=False,
            soft_wrap=True,
        )
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f}%"), TextColumn("about {task.fields[left]} left"))
    with Bar(*columns, TextColumn("{task.description}", markup=False), console=_stderr, transient=True) as bar:
        task = bar.add_task("", total=None, left="…")
        yield lambda at: bar.update(
            task,
            description=at.what,
            completed=at.seconds,
            total=at.seconds + at.seconds_left,
            left=_clock(at.seconds_left),
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _command() -> str:
    """As it was typed, but for where `vera` lies."""
    return shlex.join(["vera", *sys.argv[1:]])


def _complain(document: dict[str, Any]) -> None:
    """A VeraError if one of the headline's runs failed: then there are no ratios. Other failures are in the table."""
    failed = [f"{row['cache']}: {row['failed']}" for row in document["rows"] if row["part"] == "headline" and is_absent(row)]
    if failed:
        raise VeraError(f"the headline could not be measured: {'; '.join(failed)}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in _names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be whole numbers with commas between, such as 1,4,16") from None
