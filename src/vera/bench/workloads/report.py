"""A result for people: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.bench.statistics import is_absent
from vera.bench.workloads.figures import NAMES

_BUSY_LOAD = 0.5
"""Running threads a core before the runs from which figures are doubtful."""
_BUSY_NOTE = " The machine was busy before the runs: repeat them on a quiet one before trusting these figures."

_Row = tuple[str, str, Callable[[Any], str]]


def render_workloads(result: Mapping[str, Any]) -> RenderableType:
    """A table for each workload of what `run_workloads` returned, each with its conditions and its verdict."""
    parts: list[RenderableType] = []
    for workload in result["workloads"]:
        table = Table(title=f"{workload['name']}: {workload['about']}", title_justify="left")
        for heading in ("", "native", "adaptive", "adaptive / native"):
            table.add_column(heading, justify="right" if heading else "left")
        for cells in _rows(workload):
            table.add_row(*cells)
        parts += [table, Text(_conditions(workload)), Text(workload["verdict"]), Text("")]
    return Group(*parts, Text(_machine(result)))


def markdown(result: Mapping[str, Any]) -> str:
    """The same as a page."""
    lines = ["# Workloads through the service", "", _machine(result), ""]
    for workload in result["workloads"]:
        lines += [f"## {workload['name']}", "", f"{_sentence(workload['about'])} {_conditions(workload)}", ""]
        lines += ["| | native | adaptive | adaptive / native |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(workload)]
        lines += ["", workload["verdict"], ""]
    return "\n".join(lines)


def _rows(workload: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    native, adaptive, ratios = workload["native"], workload["adaptive"], workload["ratios"]
    rows = []
    for name, key, written in _ROWS:
        ratio = ratios.get(key)
        rows.append(
            (name, _cell(native, key, written), _cell(adaptive, key, written), "" if ratio is None else _ratio(workload, key))
        )
    return rows


def _cell(run: Mapping[str, Any], key: str, written: Callable[[Any], str]) -> str:
    if is_absent(run):
        return "failed"
    value = run.get(key)
    return "-" if value is None else written(value)


def _ratio(workload: Mapping[str, Any], key: str) -> str:
    told = f"{workload['ratios'][key]:.2f}x"
    spread = workload["ratio_spread"].get(key)
    return f"{told} ({spread[0]:.2f}-{spread[1]:.2f})" if spread else told


def _conditions(workload: Mapping[str, Any]) -> str:
    limits = ", ".join(f"{name} {limit / 1e3:g} s" for name, limit in workload["goodput"].items())
    settings = ", ".join(f"{name} {value}" for name, value in workload["adaptive_settings"].items() if name != "mode")
    load = workload["load"]
    asked = "requests"
    if load["dataset"] == "multi-turn":
        asked = f"conversations of {load['num_turns']} turns, idle for {load['think_seconds']:g} s before each"
    together = f", {workload['max_concurrency']} at a time" if workload["max_concurrency"] else ""
    return (
        f"{load['num_prompts']} {asked}{together}; answers of about {load['output_len']} tokens, "
        f"at most {workload['longest_sequence_tokens']:,} tokens in all. Ceiling of either cache "
        f"{_mib(workload['cache_bytes'])} MiB; warm pages are beside it. A good request keeps {limits}. "
        f"Adaptive: {settings or 'defaults'}."
    )


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    repeats = f"medians of {result['repeats']} runs each, in turns" if result["repeats"] > 1 else "one run each"
    return (
        f"{result['model']}, {machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {machine['threads']} threads, "
        f"load {machine['load_average']:.2f} before the runs; {repeats}; commit {result['commit'] or 'unknown'}."
        f"{' Quick: too short to judge by.' if result['quick'] else ''}"
        f"{_BUSY_NOTE if machine['load_average'] > _BUSY_LOAD * machine['cores'] else ''}"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _two_places(value: float) -> str:
    return f"{value:,.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


_ROWS: list[_Row] = [
    (NAMES["qps"], "qps", _two_places),
    (NAMES["goodput_qps"], "goodput_qps", _two_places),
    (NAMES["output_tokens_per_s"], "output_tokens_per_s", _two_places),
    *((NAMES[key], key, _whole) for key in NAMES if "_ms_" in key),
    ("prompt tokens found in the cache", "cached_share", _percent),
    ("recompute share", "recompute_share", _percent),
    ("hits a step", "hits_per_step", _two_places),
    ("preemptions", "preemptions", _whole),
    ("CPU seconds of the service", "cpu_seconds", _whole),
    ("peak of the cache MiB", "peak_cache_bytes", _mib),
    ("peak of the warm store MiB", "peak_warm_bytes", _mib),
    ("peak of the process MiB", "peak_process_bytes", _mib),
]
