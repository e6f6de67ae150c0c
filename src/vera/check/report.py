"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.check.advice import Verdict, attention_speedup
from vera.check.rates import Rate, Timing
from vera.check.run import Report

_GIB = 2**30
_SENTENCES = {
    Verdict.SUITS: ("green", "An adaptive cache suits"),
    Verdict.CANNOT: ("red", "Vera cannot serve this here"),
    Verdict.NATIVE: ("yellow", "Serve it with a native cache"),
}


def draw_report(report: Report, console: Console) -> None:
    """Prints everything. The command to serve with comes last, on one line however long it is."""
    console.print(Group(*_sections(report)), highlight=False)
    if report.command is not None:
        console.print(f"\n    {report.command}\n", soft_wrap=True, highlight=False, markup=False)


def _sections(report: Report) -> Iterator[RenderableType]:
    yield _table("machine", _machine(report))
    yield _table(f"measured ({report.machine.threads} threads, medians)", _rates(report))
    if report.model is not None:
        yield _table("model", _model(report))
    else:
        yield Text(f"No model was looked at: {report.no_model}", style="yellow")
    colour, sentence = _SENTENCES[report.advice.verdict]
    yield Text.assemble((f"\n{sentence}", f"bold {colour}"), ": ", "; ".join(report.advice.reasons), ".")
    for note in report.advice.notes:
        yield Text(f"Note: {note}.")
    if report.advice.threads is not None:
        yield Text(f"Compute with --threads {report.advice.threads}: the container has no more than that of the cores' time.")
    if report.command is not None:
        title = f"settings that fit {report.load.sequences} sequences of {report.load.context:,} tokens"
        yield _table(title, ((f"{setting.name}={setting.value}", setting.reason) for setting in report.advice.settings))


def _table(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _machine(report: Report) -> Iterator[tuple[str, str]]:
    machine = report.machine
    quota = "" if machine.core_quota is None else f", {machine.core_quota:g} cores' worth of time"
    yield "CPU", f"{machine.cpu}: {machine.cores} cores{quota}, {machine.busy_share:.0%} busy"
    yield "features", " ".join(machine.features) or "none that matter"
    kernel = f"{machine.isa} (of {', '.join(machine.isas)})" if machine.isa is not None else f"none: {machine.no_kernel}"
    yield "kernel", kernel
    limit = " (a container's limit)" if machine.is_limited else ""
    yield "memory", f"{_gib(machine.available_bytes)} of {_gib(machine.memory_bytes)} available{limit}"
    yield (
        "software",
        f"Python {machine.python}, torch {machine.torch} ({machine.torch_build}), transformers {machine.transformers}",
    )
    for device in machine.devices:
        yield "device", f"{device.name}: {device.model}, {_gib(device.free_bytes)} of {_gib(device.memory_bytes)} free"


def _rates(report: Report) -> Iterator[tuple[str, str]]:
    rates, disk = report.rates, report.rates.disk
    yield "memory", _bytes_rate(rates.memory_read) + " read"
    for way, rate in rates.copies.items():
        yield f"copies, {way}", _bytes_rate(rate)
    where = f"{disk.folder} ({disk.filesystem}, {_gib(disk.free_bytes)} free)"
    yield "disk", f"{_bytes_rate(disk.write)} written, {_bytes_rate(disk.read)} read; {where}"
    yield "products", f"{_flops(rates.gemm_prompt)} for prompts (512 rows), {_flops(rates.gemm_decode)} for decoding (16 rows)"


def _model(report: Report) -> Iterator[tuple[str, str]]:
    assert report.model is not None and report.costs is not None
    spec, costs = report.model.spec, report.costs
    windows = sum(window is not None for window in spec.windows)
    windowed = f", {windows} of them with a sliding window" if windows else ""
    yield spec.name, f"{spec.architecture}, {_gib(spec.weight_bytes)} of weights, context {spec.max_context:,}"
    yield (
        "attention",
        f"{spec.num_layers} layers{windowed}, {spec.num_query_heads} heads over {spec.num_kv_heads}, size {spec.head_dim}",
    )
    yield "an exact page", f"{_time(costs.exact, 1e6, 'µs')} to read"
    if costs.sketch is not None:
        gain = attention_speedup(spec, costs)
        yield "a sketch", f"{_time(costs.sketch, 1e6, 'µs')} to read; attention of long contexts {gain:.1f} times as fast"
    if costs.recompute is not None:
        yield "a cold block", f"{_time(costs.recompute, 1e3, 'ms')} to recompute in a window of {costs.window_layers} layers"
    disk, memory = (1e3 * costs.unit_bytes / rate.per_second for rate in (report.rates.disk.read, report.rates.memory_read))
    yield "its warm copy", f"{disk:.2f} ms to read from the disk, {memory:.2f} ms from memory"


def _time(timing: Timing, factor: float, unit: str) -> str:
    quickest = f", {factor * timing.least:.2f} at best" if timing.is_unsteady else ""
    return f"{factor * timing.seconds:.2f} {unit}{quickest}"


def _bytes_rate(rate: Rate) -> str:
    return f"{rate.per_second / 1e9:.1f} GB/s{_mark(rate)}"


def _flops(rate: Rate) -> str:
    return f"{rate.per_second / 1e9:.0f} GFLOP/s{_mark(rate)}"


def _mark(rate: Rate) -> str:
    return " (unsteady)" if rate.is_unsteady else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"
