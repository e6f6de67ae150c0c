"""A heat log as text: tiers and scores over time, and the latest distribution."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from vera.cache.features import HISTOGRAM_BINS
from vera.heatlog.history import TIERS, HeatHistory
from vera.inspection.terminal import sparkline

_SHADES = " ░▒▓█"
_LABEL = 12
"""Columns left of a picture."""
_BAR = 40


def draw_history(history: HeatHistory, console: Console) -> None:
    """Prints everything."""
    console.print(Group(*_sections(history, max(20, console.width - _LABEL))), highlight=False)


def _sections(history: HeatHistory, width: int) -> Iterator[RenderableType]:
    yield Text(
        f"{history.about.get('model', 'a model')}: {len(history.times):,} recalibrations, {_moment(history.times[0])} to "
        f"{_moment(history.times[-1])}",
        style="bold",
    )
    if history.num_damaged or history.num_missed:
        yield Text(f"{history.num_damaged:,} damaged lines, up to {history.num_missed:,} recalibrations missed", style="yellow")
    columns = history.columns(width)
    yield from _tiers(history, columns)
    yield from _scores(columns)
    yield from _latest(history)


def _tiers(history: HeatHistory, columns: HeatHistory) -> Iterator[Text]:
    yield _heading("tiers", "share of the pages, each from 0 to its largest")
    shares = history.tier_shares
    for tier, name in enumerate(TIERS):
        yield Text(f"{name:>{_LABEL - 1}} " + sparkline(columns.tier_shares[:, tier].tolist(), len(columns.times)))
        now, least, most = shares[-1, tier], shares[:, tier].min(), shares[:, tier].max()
        yield Text(f"{'':>{_LABEL}}now {now:.1%}, {least:.1%} to {most:.1%}", style="dim")


def _scores(columns: HeatHistory) -> Iterator[Text]:
    yield _heading("heat", f"scores upwards, time to the right; the darker, the more pages: {_steps(columns)}")
    shares = columns.distributions
    top = shares.max() or 1.0
    levels = np.ceil(shares / top * (len(_SHADES) - 1)).astype(int)
    for part in range(HISTOGRAM_BINS - 1, -1, -1):
        yield Text(f"{part / HISTOGRAM_BINS:>{_LABEL - 1}.2f} " + "".join(_SHADES[level] for level in levels[:, part]))


def _steps(columns: HeatHistory) -> str:
    top = columns.distributions.max()
    return ", ".join(f"{shade} to {top * level / (len(_SHADES) - 1):.0%}" for level, shade in enumerate(_SHADES) if level)


def _latest(history: HeatHistory) -> Iterator[Text]:
    threshold = history.hot_score_threshold
    named = "" if threshold is None else f"; hot from {threshold:g}"
    yield _heading("now", f"pages by score, and in all recalibrations{named}")
    latest, always = history.distributions[-1], history.to_dict()["score"]["histogram"]
    top = max(float(latest.max()), 1e-9)
    for part in range(HISTOGRAM_BINS - 1, -1, -1):
        bar = "█" * math.ceil(latest[part] / top * _BAR) if latest[part] else ""
        yield Text(f"{part / HISTOGRAM_BINS:>{_LABEL - 1}.2f} {latest[part]:>7.2%} {always[part]:>7.2%} {bar}")
    score = history.to_dict()["score"]
    yield Text(
        f"{'':>{_LABEL}}score: mean {score['mean']:.2f}, P50 {score['p50']:.2f}, P90 {score['p90']:.2f}, P99 {score['p99']:.2f}; "
        f"the distribution moved by {history.shift:.0%}"
    )


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _heading(name: str, explanation: str) -> Text:
    return Text.assemble(("\n" + name, "bold"), (f"  {explanation}", "dim"))
