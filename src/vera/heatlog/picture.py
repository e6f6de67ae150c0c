"""A heat log as a PNG. Needs matplotlib, which is an extra; `vera.inspection.check_picture` says so before."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vera.cache.features import HISTOGRAM_BINS
from vera.heatlog.history import TIERS, HeatHistory
from vera.inspection.terminal import HEAT_COLOURS, TIER_COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 1200


def save_history(history: HeatHistory, path: Path) -> None:
    """Writes tiers and scores over time, and the distributions, to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1))
    columns = history.columns(_COLUMNS)
    first, last = (datetime.fromtimestamp(history.times[index]).isoformat(" ", "seconds") for index in (0, -1))
    model = history.about.get("model", "a model")
    figure.suptitle(f"{model}: {len(history.times):,} recalibrations, {first} to {last}")
    _draw_tiers(columns, figure.add_subplot(grid[0, 0]))
    _draw_scores(columns, figure.add_subplot(grid[1, 0]), figure)
    _draw_distributions(history, figure.add_subplot(grid[:, 1]))
    figure.savefig(path)


def _draw_tiers(columns: HeatHistory, axes: Axes) -> None:
    colours = [_unit(TIER_COLOURS[tier]) for tier in range(len(TIERS))]
    places = np.arange(len(columns.times) + 1)
    shares = np.concatenate([columns.tier_shares, columns.tier_shares[-1:]])
    axes.stackplot(places, shares.T, colors=colours, labels=TIERS, step="post")
    axes.set(title="tiers", ylabel="share of the pages", xlim=(0, len(columns.times)), ylim=(0, 1))
    axes.legend(loc="lower left")
    _time_ticks(columns, axes)


def _draw_scores(columns: HeatHistory, axes: Axes, figure: Figure) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("heat", [_unit(colour) for colour in HEAT_COLOURS])
    extent = (0, len(columns.times), 0, 1)
    image = axes.imshow(
        columns.distributions.T, aspect="auto", origin="lower", interpolation="nearest", cmap=colours, extent=extent
    )
    figure.colorbar(image, ax=axes, label="share of the pages")
    if columns.hot_score_threshold is not None:
        axes.axhline(columns.hot_score_threshold, color="white", linewidth=1)
    axes.set(title="heat (the line: hot from there)", ylabel="score")
    _time_ticks(columns, axes)


def _draw_distributions(history: HeatHistory, axes: Axes) -> None:
    places = (np.arange(HISTOGRAM_BINS) + 0.5) / HISTOGRAM_BINS
    height = 0.9 / HISTOGRAM_BINS
    axes.barh(places, history.distributions[-1], height=height, color=_unit(TIER_COLOURS[0]), label="latest")
    axes.plot(history.distributions.mean(axis=0), places, color="#404040", label="mean")
    axes.set(title="pages by score", xlabel="share of the pages", ylim=(0, 1))
    axes.legend(loc="upper right")


def _time_ticks(columns: HeatHistory, axes: Axes) -> None:
    """Recalibrations are drawn evenly, whatever time lies between them."""
    chosen = np.linspace(0, len(columns.times) - 1, min(6, len(columns.times))).astype(int)
    names = [datetime.fromtimestamp(columns.times[index]).strftime("%m-%d %H:%M:%S") for index in chosen]
    axes.set_xticks(chosen, names)


def _unit(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
