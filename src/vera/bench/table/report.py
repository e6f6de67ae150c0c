"""The table for people: cells, the terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.bench.statistics import is_absent
from vera.bench.table.settings import PARTS

_BUSY_LOAD = 0.5
"""Running threads a core before the runs from which figures are doubtful."""

NOTHING = "–"
"""Not measured, or there is no such thing."""


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


def _ms(value: float) -> str:
    return f"{value:,.1f}"


def _seconds(value: float) -> str:
    return f"{value / 1e3:,.1f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _requests(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _kl(value: float) -> str:
    return f"{value:.1e}"


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("cache MiB", "cache_bytes", _mib),
    ("process MiB", "process_bytes", _mib),
    ("ITL ms", "itl_ms_mean", _ms),
    ("P99 ms", "itl_ms_p99", _ms),
    ("TTFT s", "ttft_ms", _seconds),
    ("tokens/s", "decode_tokens_per_s", _rate),
    ("QPS", "qps", _requests),
    ("goodput", "goodput", _requests),
    ("recompute", "recompute_share", _percent),
    ("KL", "kl_mean", _kl),
    ("top-1", "top1_agreement", _percent),
)
"""Heading, key of a row, and how it is written."""

RATIO_NAMES = {
    "process_bytes": "total memory of the process",
    "cache_bytes": "cache memory",
    "itl_mean": "mean inter-token latency",
    "itl_p99": "P99 inter-token latency",
    "throughput": "decode throughput",
    "sequences_at_equal_memory": "sequences at equal cache memory",
    "throughput_at_equal_memory": "decode throughput at equal cache memory",
}


def cells(row: Mapping[str, Any]) -> list[str]:
    """One for each of COLUMNS."""
    return [NOTHING if row[key] is None else written(row[key]) for _, key, written in COLUMNS]


def place(row: Mapping[str, Any]) -> str:
    """Batch x context + answer, and what has to be known about them."""
    marks = ("*" if row["native_by_min_context"] else "") + ("†" if row["timing_only"] else "")
    return f"{row['batch']} x {row['context']:,} + {row['new_tokens']}{marks}"


def parts_of(document: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The rows, part by part."""
    for part in PARTS:
        if rows := [row for row in document["rows"] if row["part"] == part]:
            yield part, rows


def render_table(document: Mapping[str, Any]) -> RenderableType:
    """The whole document for a terminal."""
    title = f"native and adaptive, batch x context + answer ({document['model']}, {document['seconds'] / 60:.1f} minutes)"
    costs, answers = _HALVES
    tables = (_half(document, costs, title), _half(document, answers, "the same rows: requests and drift"))
    return Group(*tables, *(Text(line) for line in _notes(document)))


_HALVES = (
    ("cache_bytes", "process_bytes", "itl_ms_mean", "itl_ms_p99", "decode_tokens_per_s"),
    ("ttft_ms", "qps", "goodput", "recompute_share", "kl_mean", "top1_agreement"),
)
"""All columns beside each other are too wide for most terminals."""


def _half(document: Mapping[str, Any], keys: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", min_width=12)
    table.add_column("work", no_wrap=True)
    shown = [place for place, (_, key, _) in enumerate(COLUMNS) if key in keys]
    for column in shown:
        table.add_column(COLUMNS[column][0], justify="right", no_wrap=True)
    for part, rows in parts_of(document):
        table.add_row(Text(part, style="bold"))
        for row in rows:
            written = ["failed"] if is_absent(row) else [cells(row)[column] for column in shown]
            table.add_row(f"  {row['cache']}", place(row).replace(" ", ""), *written)
    return table


def markdown_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of rows."""
    lines = [
        "| cache | batch x context + answer | " + " | ".join(heading for heading, _, _ in COLUMNS) + " |",
        "|---|---|" + "--:|" * len(COLUMNS),
    ]
    for row in rows:
        written = ["failed", *[""] * (len(COLUMNS) - 1)] if is_absent(row) else cells(row)
        lines.append(f"| {row['cache']} | {place(row)} | " + " | ".join(written) + " |")
    return lines


def spread_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The least and the largest of the rounds, for each row that has several and each figure in which they differ."""
    lines = []
    for row in rows:
        ranges = [
            f"{heading} {written(row['spread'][key][0])} to {written(row['spread'][key][1])}"
            for heading, key, written in COLUMNS
            if key in row["spread"] and written(row["spread"][key][0]) != written(row["spread"][key][1])
        ]
        if ranges:
            lines.append(f"{row['cache']}, {row['repeats']} rounds: {', '.join(ranges)}")
    return lines


def ratio_lines(document: Mapping[str, Any]) -> list[str]:
    """Each ratio that was measured, with its name and its spread."""
    lines = []
    for key, name in RATIO_NAMES.items():
        value = document["ratios"].get(key)
        if value is not None:
            limits = document["ratio_spread"].get(key)
            lines.append(f"{name}: {value:.2f}x" + (f" ({limits[0]:.2f} to {limits[1]:.2f})" if limits else ""))
    return lines


def machine_line(machine: Mapping[str, Any]) -> str:
    """One line about where it ran."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, torch {machine['torch']}, load {machine['load_average']:.2f} before the runs"
    )


def was_busy(machine: Mapping[str, Any]) -> bool:
    return bool(machine["load_average"] > _BUSY_LOAD * machine["cores"])


def policy_line(cost: Mapping[str, Any]) -> str:
    """What `policy_cost_of` found, in words."""
    return (
        f"policy: {cost['fixed_ms']:.2f} ms a step and {cost['us_per_page']:.1f} us for each page hit or moved "
        f"(over {cost['rows']} rows, {cost['explained']:.0%} of the differences explained); "
        f"at most {cost['largest_share_of_step']:.1%} of a step"
    )


def growth_lines(growth: Sequence[Mapping[str, Any]]) -> list[str]:
    """Exponents of growth, a line a series."""
    lines = []
    for entry in growth:
        fixed = "batch" if entry["along"] == "context" else "context"
        exponents = [f"{name} {value:.2f}" for name, value in entry["exponents"].items() if value is not None]
        if exponents:
            values = ", ".join(f"{value:,}" for value in entry["values"])
            lines.append(f"{entry['cache']}, {fixed} {entry[fixed]:,}, {entry['along']} {values}: {', '.join(exponents)}")
    return lines


def no_gain_lines(document: Mapping[str, Any]) -> list[str]:
    """Where the adaptive cache does not help, a line a place."""
    return [
        f"{place(entry)}: throughput {entry['throughput']:.2f}x, cache memory {entry['cache_bytes']:.2f}x"
        for entry in document["without_gain"]
    ]


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    rows = document["rows"]
    if any(row["native_by_min_context"] for row in rows):
        yield f"* within min_context={document['settings']['min_context']}: both caches serve it natively"
    if any(row["timing_only"] for row in rows):
        yield f"† beyond the model's context of {document['max_context']:,} tokens: timing only"
    yield from spread_lines(rows)
    yield from ratio_lines(document)
    for line in no_gain_lines(document):
        yield f"adaptive hardly helps at {line}"
    if document["policy_cost"]:
        yield policy_line(document["policy_cost"])
    for row in rows:
        if is_absent(row):
            yield f"{row['part']}, {row['cache']}, {place(row)}: {row['failed']}"
    for drift in document["drift"]:
        if is_absent(drift):
            yield f"drift, {drift['cache']}, {drift['text']} at {drift['context']:,}: {drift['failed']}"
    for left in document["left_out"]:
        yield f"left out: {left['what']} ({left['why']})"
    yield machine_line(document["machine"])
    if was_busy(document["machine"]):
        yield "The machine was busy before the runs: repeat them on a quiet one before trusting these figures."
