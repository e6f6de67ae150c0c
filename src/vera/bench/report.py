"""Results for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.bench.statistics import is_absent

_BUSY_LOAD = 0.5
"""Running threads a core before the runs from which figures are doubtful: a thread that waits for a core makes all wait."""

_Column = tuple[str, str, Callable[[Any], str]]


def render(result: Mapping[str, Any]) -> RenderableType:
    """A table of what `run_decode` or `run_prefill` returned, a line a subject, and the conditions under it."""
    columns = _DECODE_COLUMNS if result["bench"] == "decode" else _PREFILL_COLUMNS
    table = Table(title=_title(result), title_justify="left")
    table.add_column("")
    columns = [column for column in columns if any(run.get(column[1]) is not None for run in result["runs"].values())]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for name, run in result["runs"].items():
        table.add_row(name, *_cells(run, columns))
    return Group(table, *_notes(result))


def _title(result: Mapping[str, Any]) -> str:
    if result["bench"] == "decode":
        return f"decode, {result['batch']} x {result['context']} tokens, {result['new_tokens']} steps ({result['model']})"
    return f"prefill, {result['context']} tokens ({result['model']})"


def _cells(run: Mapping[str, Any], columns: list[_Column]) -> list[str]:
    if is_absent(run):
        return ["missing" if "missing" in run else "failed", *[""] * (len(columns) - 1)]
    return ["-" if run.get(key) is None else written(run[key]) for _, key, written in columns]


def _notes(result: Mapping[str, Any]) -> list[Text]:
    notes = [f"{pair}: {ratio:.2f}x" for pair, ratio in result["ratios"].items()]
    for name, run in result["runs"].items():
        if is_absent(run):
            notes.append(f"{name}: {run.get('missing') or run.get('failed')}")
            continue
        if run.get("batch", result.get("batch")) != result.get("batch"):
            notes.append(f"{name}: only {run['batch']} sequences fit into memory")
        if run.get("steps", result.get("new_tokens")) != result.get("new_tokens"):
            notes.append(f"{name}: stopped after {run['steps']} steps")
        if not run.get("same_tokens_as_native", True):
            notes.append(f"{name}: its answer agrees for {run['tokens_agreeing']} of {run['tokens_compared']} tokens")
    machine = result["machine"]
    notes.append(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads, "
        f"torch {machine['torch']}, load {machine['load_average']:.2f} before the runs"
    )
    if machine["load_average"] > _BUSY_LOAD * machine["cores"]:
        notes.append("The machine was busy before the runs: repeat them on a quiet one before trusting these figures.")
    return [Text(note) for note in notes]


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _two_places(value: float) -> str:
    return f"{value:,.2f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


_DECODE_COLUMNS: list[_Column] = [
    ("tokens/s", "decode_tokens_per_s", _number),
    ("step P50 ms", "step_ms_p50", _number),
    ("P99 ms", "step_ms_p99", _number),
    ("cache MiB", "cache_bytes", _mib),
    ("process MiB", "process_bytes", _mib),
    ("peak RSS MiB", "rss_peak_bytes", _mib),
    ("kernel / plain sum", "kernel_bandwidth_share", _percent),
    ("overhead", "overhead_share", _percent),
    ("warm MiB", "warm_bytes", _mib),
    ("exact reads", "exact_read_share", _percent),
    ("hits/step", "hits_per_step", _two_places),
    ("recompute", "recompute_share", _percent),
    ("policy", "policy_share", _percent),
]
_PREFILL_COLUMNS: list[_Column] = [
    ("tokens/s", "prefill_tokens_per_s", _number),
    ("TTFT ms", "ttft_ms", _number),
    ("process MiB", "process_bytes", _mib),
    ("peak RSS MiB", "rss_peak_bytes", _mib),
]
