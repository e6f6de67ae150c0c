"""The table as pictures. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vera.bench.statistics import is_absent
from vera.bench.table.plan import ADAPTIVE, NATIVE
from vera.errors import VeraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {NATIVE.name: "#4c6a92", ADAPTIVE.name: "#c8553d"}
_LINES = ("-", "--", ":", "-.")

_Rows = Sequence[Mapping[str, Any]]


def check_plots() -> None:
    """A VeraError says so if there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise VeraError(
            "pictures need matplotlib, which is not installed: pip install 'vera-engine[plots]', "
            "or leave them out with --no-plots"
        )


def save_plots(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes `results-*.png` into `folder`, which must be there, and returns their names.

    A picture without a point is left out.
    """
    from matplotlib.figure import Figure

    drawings: dict[str, Callable[[Axes], bool]] = {
        "memory": lambda axes: _against_context(axes, document, "cache_bytes", 2**20, "cache memory, MiB (mean over the steps)"),
        "latency": lambda axes: _against_context(axes, document, "itl_ms_mean", 1, "inter-token latency, ms (mean)"),
        "drift": lambda axes: _drift(axes, document),
        "frontier": lambda axes: _frontier(axes, document),
    }
    names = []
    for name, draw in drawings.items():
        figure: Figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
        axes = figure.subplots()
        if draw(axes):
            names.append(f"results-{name}.png")
            figure.savefig(folder / names[-1], metadata={"Software": None})
    return names


def _against_context(axes: Axes, document: Mapping[str, Any], figure: str, unit: float, label: str) -> bool:
    """A line for each cache and batch of the sweep."""
    rows = _measured(document)
    lengths = {row["new_tokens"] for row in rows if row["part"] in ("sweep", "long")}
    rows = [row for row in rows if row["new_tokens"] in lengths and row["part"] in ("sweep", "long", "headline")]
    batches = sorted({row["batch"] for row in rows})
    for cache, colour in _COLOURS.items():
        for batch, style in zip(batches, _cycled(len(batches)), strict=True):
            line = sorted((row["context"], row[figure] / unit) for row in rows if row["cache"] == cache and row["batch"] == batch)
            if line:
                axes.plot(*zip(*line, strict=True), style, color=colour, marker="o", label=f"{cache}, batch {batch}")
    axes.set(xlabel="tokens of the prompt", ylabel=label, xscale="log", yscale="log")
    contexts = sorted({row["context"] for row in rows})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xticks([], minor=True)
    return _finished(axes)


def _drift(axes: Axes, document: Mapping[str, Any]) -> bool:
    drifts = [drift for drift in document["drift"] if drift.get("kl_mean") and drift["cache"] == ADAPTIVE.name]
    for text, style in zip(texts := sorted({drift["text"] for drift in drifts}), _cycled(len(texts)), strict=True):
        line = sorted((drift["context"], drift["kl_mean"]) for drift in drifts if drift["text"] == text)
        axes.plot(*zip(*line, strict=True), style, color=_COLOURS[ADAPTIVE.name], marker="o", label=text)
    axes.set(xlabel="tokens of the prompt", ylabel="KL from native (mean, nats)", yscale="log")
    return _finished(axes)


def _frontier(axes: Axes, document: Mapping[str, Any]) -> bool:
    """Memory against drift at the headline's batch and context; a point's size is its speed."""
    natives = {
        (row["batch"], row["context"], row["new_tokens"]): row
        for row in _measured(document)
        if row["cache"] == NATIVE.name and row["part"] != "equal memory"
    }
    drawn = False
    for row in _measured(document):
        native = natives.get((row["batch"], row["context"], row["new_tokens"]))
        if native is None or not row["kl_mean"] or row["part"] not in ("headline", "controls", "tolerance"):
            continue  # a drift of exactly 0 has no place on a logarithmic scale
        drawn = True
        speed = row["decode_tokens_per_s"] / native["decode_tokens_per_s"]
        x, y = row["kl_mean"], row["cache_bytes"] / native["cache_bytes"]
        axes.scatter(
            [x], [y], s=60 * speed, color=_COLOURS.get(row["cache"]), alpha=0.8, label=f"{row['cache']}: {speed:.2f}x speed"
        )
    axes.set(xlabel="KL from native (mean, nats)", ylabel="cache memory by native", xscale="log", ylim=(0, 1.15))
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(fontsize=8, frameon=False, loc="lower left")
    return drawn


def _measured(document: Mapping[str, Any]) -> _Rows:
    return [row for row in document["rows"] if not is_absent(row) and row["cache_bytes"] is not None]


def _cycled(count: int) -> list[str]:
    return [_LINES[place % len(_LINES)] for place in range(count)]


def _finished(axes: Axes) -> bool:
    """Whether there is anything on it."""
    if not axes.lines:
        return False
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return True
