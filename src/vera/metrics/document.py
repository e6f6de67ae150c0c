"""docs/metrics.md, from the registry: `python -m vera.metrics.document > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from vera.metrics.registry import FIGURES, METRICS, Figure, Metric, Watcher

_OPENING = """\
# Metrics

Written from `vera/metrics/registry.py` by `python -m vera.metrics.document > docs/metrics.md`; change it there.

`GET /metrics` shows these to Prometheus. In the package lie a Grafana dashboard (`vera/ops/grafana.json`, to be imported; it asks
for a Prometheus data source) and alert rules (`vera/ops/alerts.yml`, for `rule_files`). Where they are:

    python -c "import importlib.resources as r; print(*r.files('vera.ops').iterdir(), sep='\\n')"

Three groups watch: **algorithms** (heat, tolerance, recompute share, drift), **backend** (latency, page moves, kernel, host
copies) and **operations** (memory level, alerts, load tests, the switch). What is marked *adaptive* says something with an
adaptive cache only; what the words mean is in the [glossary](glossary.md).
"""

_METRIC_COLUMNS = ("name", "kind", "unit", "labels", "what it is", "a bad value", "watched by")
_FIGURE_COLUMNS = ("figure", "unit", "formula", "a bad value", "watched by")


def render() -> str:
    """The whole document."""
    return "\n".join(
        [
            _OPENING,
            "## Metrics by name\n",
            *_table(_METRIC_COLUMNS, map(_metric, METRICS.values())),
            "",
            "## Figures\n",
            "What dashboards show and alerts watch, over five minutes and all servers.\n",
            *_table(_FIGURE_COLUMNS, map(_figure, FIGURES.values())),
            "",
        ]
    )


def _metric(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return (
        f"`{metric.name}`",
        metric.kind.value,
        metric.unit,
        labels,
        _marked(metric.meaning, adaptive=metric.adaptive),
        metric.bad,
        _watchers(metric.watchers),
    )


def _figure(figure: Figure) -> tuple[str, ...]:
    formula = figure.promql.replace("|", "\\|")
    return (
        f"`{figure.name}`",
        figure.unit,
        f"`{formula}`",
        _marked(figure.bad, adaptive=figure.adaptive),
        _watchers(figure.watchers),
    )


def _marked(text: str, *, adaptive: bool) -> str:
    return f"*adaptive.* {text}" if adaptive else text


def _watchers(watchers: tuple[Watcher, ...]) -> str:
    return ", ".join(watchers)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.stdout.write(render())
