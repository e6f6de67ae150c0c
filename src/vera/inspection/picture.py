"""An inspection as a PNG. Needs matplotlib, which is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vera.errors import ConfigError, VeraError
from vera.inspection.recorder import COLD, HOT, TIERS, WARM, Inspection
from vera.inspection.terminal import HEAT_COLOURS, TIER_COLOURS, error_histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_picture(path: Path) -> None:
    """Says before a long run what `save_picture` would fail on: ConfigError or VeraError."""
    if find_spec("matplotlib") is None:
        raise VeraError("a picture needs matplotlib, which is not installed: pip install 'vera-engine[plots]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"png={str(path)!r} does not end with .png")
    if not path.parent.is_dir():
        raise ConfigError(f"png={str(path)!r}: there is no folder {str(path.parent)!r}")


def save_picture(inspection: Inspection, path: Path) -> None:
    """Writes tiers, heat, hits and errors to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=110, layout="constrained")
    (tiers, heat), (hits, errors) = figure.subplots(2, 2, height_ratios=(3, 2))
    figure.suptitle(
        f"{inspection.model}: {inspection.prompt_tokens:,} tokens read, {inspection.answer_tokens:,} written"
        + (f"\nNothing is tiered: {inspection.why_untiered}." if inspection.why_untiered else "")
    )
    _draw_tiers(inspection, tiers)
    _draw_heat(inspection, heat, figure)
    _draw_hits(inspection, hits)
    _draw_errors(inspection, errors)
    figure.savefig(path)


def _draw_tiers(inspection: Inspection, axes: Axes) -> None:
    from matplotlib.patches import Patch

    shares = {tier: inspection.tier_shares(tier)[..., None] for tier in (HOT, WARM, COLD)}
    axes.imshow(
        sum(shares[tier] * np.array(_unit(TIER_COLOURS[tier])) for tier in shares), aspect="auto", interpolation="nearest"
    )
    axes.set(title="tiers (a cell is shared by the KV heads)", xlabel=_block_label(inspection), ylabel="layer")
    pages = inspection.pages
    handles = [Patch(color=_unit(TIER_COLOURS[tier]), label=f"{name}: {pages[name]:,} pages") for tier, name in enumerate(TIERS)]
    axes.legend(handles=handles, loc="upper center", ncols=3, bbox_to_anchor=(0.5, -0.13), frameon=False)


def _draw_heat(inspection: Inspection, axes: Axes, figure: Figure) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("heat", [_unit(colour) for colour in HEAT_COLOURS])
    image = axes.imshow(inspection.heat_map(), aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=1)
    bar = figure.colorbar(image, ax=axes)
    bar.ax.axhline(inspection.cache.hot_score_threshold, color="white")
    axes.set(
        title=f"heat of the hottest KV head (hot from {inspection.cache.hot_score_threshold:g})",
        xlabel=_block_label(inspection),
        ylabel="layer",
    )


def _draw_hits(inspection: Inspection, axes: Axes) -> None:
    steps = inspection.steps
    axes.bar(range(len(steps)), [step.hits for step in steps], width=1.0, color=_unit(TIER_COLOURS[HOT]), label="pages hit")
    restored = [number for number, step in enumerate(steps) if step.recomputed]
    if restored:
        axes.plot(
            restored, [0] * len(restored), "^", color=_unit(TIER_COLOURS[COLD]), label="restored a cold page", clip_on=False
        )
    axes.set(title="hits", xlabel="decode step", ylabel="pages")
    if steps:
        axes.legend(loc="upper right")


def _draw_errors(inspection: Inspection, axes: Axes) -> None:
    series = inspection.errors_over_tolerance()
    names = [*(f"{tenth / 10:.1f}" for tenth in range(10)), "above 1"]
    places = np.arange(len(names))
    for offset, name, colour, shares in zip((-0.2, 0.2), ("estimated", "true"), ("#f0a030", "#404040"), series, strict=True):
        axes.bar(places + offset, error_histogram(shares), width=0.4, color=colour, label=name)
    axes.set_xticks(places, names)
    axes.set(title="errors of one layer of each step", xlabel="error / attention_tolerance, from", ylabel="steps")
    if len(series[0]):
        axes.legend(loc="upper right")


def _block_label(inspection: Inspection) -> str:
    return f"block of {inspection.cache.page_size} tokens"


def _unit(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
