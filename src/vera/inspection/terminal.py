"""An inspection as text: in colours where there are any, in shades where not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from vera.inspection.recorder import COLD, HOT, WARM, Inspection

Floats = NDArray[np.float64]
Colour = tuple[int, int, int]

TIER_COLOURS: dict[int, Colour] = {HOT: (240, 90, 50), WARM: (66, 62, 54), COLD: (60, 130, 246)}
HEAT_COLOURS: tuple[Colour, ...] = ((10, 8, 30), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))
"""Of scores from 0 to 1, in equal parts."""
_SHADES = "·░▒▓█"
_LEVELS = "▁▂▃▄▅▆▇█"
_LABEL = 6
"""Columns left of a map."""
_MAX_REPEAT = 3
"""Columns that one block takes at the most."""
_BINS = 10
_INDENT = "      "


def draw(inspection: Inspection, console: Console) -> None:
    """Prints everything: tiers, heat, hits, errors and bytes."""
    width = max(20, console.width - _LABEL)
    coloured = console.color_system is not None and not console.no_color
    console.print(Group(*_sections(inspection, width, coloured=coloured)), highlight=False)


def _sections(inspection: Inspection, width: int, *, coloured: bool) -> Iterator[RenderableType]:
    yield Text(
        f"{inspection.model}: {inspection.prompt_tokens:,} tokens read, {inspection.answer_tokens:,} written; "
        f"{inspection.num_blocks:,} blocks of {inspection.cache.page_size} tokens",
        style="bold",
    )
    if inspection.why_untiered is not None:
        yield Text(f"Nothing is tiered: {inspection.why_untiered}.", style="yellow")
    if inspection.num_blocks:
        yield from _tier_map(inspection, width, coloured=coloured)
        yield from _heat_map(inspection, width, coloured=coloured)
    yield from _hits(inspection, width)
    yield from _errors(inspection, width)
    yield Text()
    yield _bytes(inspection)


# -- maps --------------------------------------------------------------------------------------------------------------


def _tier_map(inspection: Inspection, width: int, *, coloured: bool) -> Iterator[RenderableType]:
    yield _heading("tiers", "layers downwards, blocks to the right")
    shares = {tier: _fit(inspection.tier_shares(tier), width) for tier in (HOT, WARM, COLD)}
    if coloured:
        colours = sum(shares[tier][..., None] * np.array(TIER_COLOURS[tier]) for tier in shares)
        yield from _coloured(np.asarray(colours))
        legend = Text(_INDENT)
        for name, tier in (("hot", HOT), ("warm", WARM), ("cold", COLD)):
            legend.append("■ ", style=_style(TIER_COLOURS[tier])).append(f"{name}   ")
        yield legend
    else:
        yield from _lettered(_tier_letters(shares[HOT], shares[COLD]))
        yield Text(f"{_INDENT}█ all hot  ▓ half or more  ▒ some  · warm  o some cold")


def _tier_letters(hot: Floats, cold: Floats) -> NDArray[np.str_]:
    return np.select([cold > 0, hot >= 1, hot >= 0.5, hot > 0], ["o", "█", "▓", "▒"], default="·")


def _heat_map(inspection: Inspection, width: int, *, coloured: bool) -> Iterator[RenderableType]:
    threshold = inspection.cache.hot_score_threshold
    yield _heading("heat", f"score of the hottest KV head; 0.5 is average, hot from {threshold:g}")
    scores = _fit(inspection.heat_map(), width)
    if coloured:
        yield from _coloured(_palette(scores))
        legend = Text(f"{_INDENT}0 ")
        for score in np.linspace(0, 1, 24):
            legend.append("█", style=_style(tuple(_palette(np.array(score)).astype(int))))
        yield legend.append(" 1")
    else:
        yield from _lettered(np.array(list(_SHADES))[np.clip(scores * len(_SHADES), 0, len(_SHADES) - 1).astype(int)])
        steps = "  ".join(f"{shade} from {index / len(_SHADES):g}" for index, shade in enumerate(_SHADES))
        yield Text(_INDENT + steps)


def _fit(cells: Floats, width: int) -> Floats:
    """`[layers, blocks]` as `[layers, columns]`: each block in several columns, or the mean of several in one."""
    blocks = cells.shape[1]
    if blocks <= width:
        return np.repeat(cells, min(_MAX_REPEAT, width // blocks), axis=1)
    return np.stack([part.mean(axis=1) for part in np.array_split(cells, width, axis=1)], axis=1)


def _palette(scores: Floats) -> Floats:
    """A colour for each score, `[..., 3]`."""
    stops = np.linspace(0, 1, len(HEAT_COLOURS))
    channels = np.array(HEAT_COLOURS, dtype=np.float64).T
    return np.stack([np.interp(scores, stops, channel) for channel in channels], axis=-1)


def _coloured(colours: Floats) -> Iterator[Text]:
    """`[layers, columns, 3]`, two layers a line: the upper one in the foreground, the lower one in the background."""
    cells = colours.round().astype(int)
    for first in range(0, len(cells), 2):
        line = Text(_label(first))
        pair = cells[first : first + 2]
        for column in range(cells.shape[1]):
            lower = pair[1, column] if len(pair) > 1 else None
            line.append("▀", style=_style(tuple(pair[0, column]), None if lower is None else tuple(lower)))
        yield line


def _lettered(cells: NDArray[np.str_]) -> Iterator[Text]:
    for layer, row in enumerate(cells):
        yield Text(_label(layer) + "".join(row))


def _label(layer: int) -> str:
    return f"{layer:>{_LABEL - 1}} "


def _style(colour: Sequence[int], background: Sequence[int] | None = None) -> Style:
    return Style(color=_hex(colour), bgcolor=None if background is None else _hex(background))


def _hex(colour: Sequence[int]) -> str:
    return "#" + "".join(f"{int(channel):02x}" for channel in colour)


# -- over time ---------------------------------------------------------------------------------------------------------


def _hits(inspection: Inspection, width: int) -> Iterator[RenderableType]:
    steps = inspection.steps
    yield _heading("hits", "pages that error control asked for, each step")
    if not steps:
        yield Text(f"{_INDENT}none: {_why_unbounded(inspection)}")
        return
    hits = [step.hits for step in steps]
    yield Text(_INDENT + sparkline(hits, width))
    recomputes, uncovered = sum(step.recomputed for step in steps), sum(step.uncovered_hits for step in steps)
    yield Text(
        f"{_INDENT}{len(steps)} steps: mean {inspection.rates.hits_per_step or 0:.1f}, most {max(hits)}; "
        f"{recomputes} restored cold pages, {uncovered} hits uncovered"
    )
    yield Text(f"{_INDENT}{inspection.rates.exact_read_share or 0:.1%} of the pages were read exactly")


def _why_unbounded(inspection: Inspection) -> str:
    if inspection.cache.fidelity == "exact" and inspection.why_untiered is None:
        return "the fidelity is exact, so every page is read exactly"
    return "no step read a sketch"


def sparkline(values: Sequence[float], width: int) -> str:
    """A character for each value, from 0 to the largest; where they are too many, for the largest of several."""
    shown = values if len(values) <= width else [max(part) for part in np.array_split(np.array(values), width)]
    top = max(shown, default=0) or 1
    return "".join(_LEVELS[min(len(_LEVELS) - 1, math.ceil(value / top * (len(_LEVELS) - 1)))] for value in shown)


def _errors(inspection: Inspection, width: int) -> Iterator[RenderableType]:
    tolerance = inspection.cache.attention_tolerance
    yield _heading("errors", f"of one layer of each step, by attention_tolerance={tolerance:g}")
    if not inspection.steps:
        yield Text(f"{_INDENT}none: {_why_unbounded(inspection)}")
        return
    if not tolerance:
        yield Text(f"{_INDENT}none: the tolerance is 0, so every page is read exactly")
        return
    if inspection.audits:
        yield from _histograms(*inspection.errors_over_tolerance(), bar=max(4, min(30, (width - 14) // 2 - 6)))
    else:
        yield Text(f"{_INDENT}the true ones are unknown, because every layer has cold pages")
    mean = np.mean([step.error for step in inspection.steps]) / tolerance
    yield Text(
        f"{_INDENT}estimated over all layers: mean {mean:.2f}, largest of any head {inspection.error_max / tolerance:.2f} "
        f"(values left out may add {inspection.cache.skip_share:g})"
    )


def _histograms(estimated: Floats, true: Floats, *, bar: int) -> Iterator[RenderableType]:
    """Side by side, the longest bar `bar` columns wide."""
    counts = error_histogram(estimated), error_histogram(true)
    most = max(1, *counts[0], *counts[1])
    yield Text(f"{_INDENT}{'':<10} {'estimated':<{bar + 6}} true", style="dim")
    for index, pair in enumerate(zip(*counts, strict=True)):
        name = f"{index / _BINS:.1f}-{(index + 1) / _BINS:.1f}" if index < _BINS else "above 1"
        left, right = (f"{'█' * math.ceil(count / most * bar):<{bar}} {count:>4}" for count in pair)
        yield Text(f"{_INDENT}{name:<10} {left} {right}")


def error_histogram(shares: Iterable[float]) -> list[int]:
    """How many lie in each tenth of the tolerance, and above it."""
    counts = [0] * (_BINS + 1)
    for share in shares:
        counts[min(_BINS, math.floor(share * _BINS))] += 1
    return counts


# -- bytes -------------------------------------------------------------------------------------------------------------


def _bytes(inspection: Inspection) -> Table:
    memory, pages = inspection.memory, inspection.pages
    total = max(1, sum(pages.values()))
    table = Table("", "pages", "MiB", title="where the pages are", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("hot: exact in fast memory", _share(pages["hot"], total), "")
    table.add_row("  whole blocks", "", _mib(memory.exact_blocks))
    table.add_row("  single pages", "", _mib(memory.hot_pages))
    table.add_row("sketches of the others", "", _mib(memory.sketches))
    table.add_row("tables, statistics, free room of frames", "", _mib(_rest(inspection)))
    table.add_row("fast memory in all", "", _mib(memory.fast), style="bold")
    table.add_row("the same blocks in a native cache", "", _mib(memory.native))
    table.add_section()
    table.add_row(f"warm: exact in the store ({inspection.cache.warm_store})", _share(pages["warm"], total), _mib(memory.warm))
    table.add_row("checkpoints", "", _mib(memory.checkpoints))
    table.add_row("cold: released", _share(pages["cold"], total), "")
    return table


def _rest(inspection: Inspection) -> int:
    memory = inspection.memory
    return memory.fast - memory.exact_blocks - memory.hot_pages - memory.sketches


def _share(pages: int, total: int) -> str:
    return f"{pages:,} ({pages / total:.0%})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _heading(name: str, explanation: str) -> Text:
    return Text.assemble(("\n" + name, "bold"), (f"  {explanation}", "dim"))
