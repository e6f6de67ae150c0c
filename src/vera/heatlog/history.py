"""Reading the heat log: its recalibrations in order, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vera.cache.features import HISTOGRAM_BINS
from vera.errors import ConfigError, VeraError
from vera.heatlog.log import FORMAT

TIERS = ("hot", "warm", "cold")

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class HeatHistory:
    """Recalibrations, the oldest first; there is at least one."""

    about: dict[str, Any]
    """The facts that the latest of them were written with."""
    times: Floats
    """`[n]`: seconds since 1970, when each was taken from the server."""
    tiers: Integers
    """`[n, 3]`: pages by tier, in the order of `TIERS`."""
    histograms: Integers
    """`[n, HISTOGRAM_BINS]`: pages by score, in equal parts of 0 to 1."""
    num_damaged: int
    """Lines that could not be read."""
    num_missed: int
    """The most recalibrations that the log does not have."""

    @property
    def tier_shares(self) -> Floats:
        """`[n, 3]`: each tier's share of the pages."""
        return _shares(self.tiers)

    @property
    def distributions(self) -> Floats:
        """`[n, HISTOGRAM_BINS]`: each part's share of the pages."""
        return _shares(self.histograms)

    @property
    def hot_score_threshold(self) -> float | None:
        """The latest that the log knows of."""
        threshold = self.about.get("hot_score_threshold")
        return float(threshold) if isinstance(threshold, int | float) else None

    @property
    def shift(self) -> float:
        """How far the distribution moved from the first quarter of the log to the last: 0 not at all, 1 entirely.

        The total variation distance: half the sum of the differences of all shares.
        """
        quarter = max(1, len(self.times) // 4)
        first, last = _shares(self.histograms[:quarter].sum(axis=0)), _shares(self.histograms[-quarter:].sum(axis=0))
        return float(np.abs(first - last).sum() / 2)

    def columns(self, most: int) -> HeatHistory:
        """At most so many, each the sum of neighbours: for drawing."""
        if len(self.times) <= most:
            return self
        parts = [0, *(np.arange(1, most) * len(self.times) // most)]
        return HeatHistory(
            self.about,
            self.times[parts],
            np.add.reduceat(self.tiers, parts, axis=0),
            np.add.reduceat(self.histograms, parts, axis=0),
            self.num_damaged,
            self.num_missed,
        )

    def to_dict(self) -> dict[str, Any]:
        """A summary, JSON-ready."""
        shares = self.tier_shares
        together = _shares(self.histograms.sum(axis=0))
        return {
            "recalibrations": len(self.times),
            "first": float(self.times[0]),
            "last": float(self.times[-1]),
            "about": self.about,
            "damaged_lines": self.num_damaged,
            "missed": self.num_missed,
            "tiers": {
                name: {
                    "pages": int(self.tiers[-1, tier]),
                    "share": float(shares[-1, tier]),
                    "mean_share": float(shares[:, tier].mean()),
                    "least_share": float(shares[:, tier].min()),
                    "most_share": float(shares[:, tier].max()),
                }
                for tier, name in enumerate(TIERS)
            },
            "score": {
                "mean": float((together * _centres()).sum()),
                "p50": _quantile(together, 0.5),
                "p90": _quantile(together, 0.9),
                "p99": _quantile(together, 0.99),
                "from_threshold_share": self.share_from_threshold(),
                "histogram": [float(share) for share in together],
                "latest_histogram": [float(share) for share in self.distributions[-1]],
            },
            "shift": self.shift,
        }

    def share_from_threshold(self) -> float | None:
        """Of the latest pages, those whose score is in a part of 0 to 1 that begins at `hot_score_threshold` or above."""
        if self.hot_score_threshold is None:
            return None
        starts = np.arange(HISTOGRAM_BINS) / HISTOGRAM_BINS
        return float(self.distributions[-1][starts >= self.hot_score_threshold - 1e-9].sum())


def read_heat_log(path: Path, *, last: int | None = None) -> HeatHistory:
    """The log at `path` with the files that it filled before; of all recalibrations the `last` ones.

    A line that is damaged is left out and counted; half a line at the very end is one that is being written. Raises ConfigError
    where there is no log, VeraError where it has no recalibration.
    """
    about: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    damaged = 0
    for line, is_whole in _lines(path):
        entry = _entry(line)
        if entry is None:
            damaged += is_whole
        elif "heat_log" in entry:
            about = {name: value for name, value in entry.items() if name not in ("heat_log", "time")}
        else:
            records.append(entry)
    if not records:
        what = f"all {damaged} lines are damaged" if damaged else "nothing was recalibrated while it was written"
        raise VeraError(f"the heat log {path} has no recalibration: {what}; sequences above min_context make some")
    kept = records if last is None else records[-last:]
    return HeatHistory(
        about,
        np.array([record["time"] for record in kept], dtype=np.float64),
        np.array([[record[tier] for tier in TIERS] for record in kept], dtype=np.int64),
        np.array([record["histogram"] for record in kept], dtype=np.int64),
        damaged,
        sum(record.get("missed", 0) for record in kept),
    )


def _lines(path: Path) -> Iterator[tuple[str, bool]]:
    """The lines of all files, the oldest first, and whether each is whole."""
    files = _files(path)
    if not files:
        raise ConfigError(f"there is no heat log at {path}; `vera serve --cache adaptive --heat-log FILE` writes one")
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield line, line.endswith("\n") or file != path


def _files(path: Path) -> list[Path]:
    """`path.N` to `path.1`, then `path`, as far as they are there."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the heat log in it")
    full = [file for file in path.parent.glob(f"{_literal(path.name)}.*") if file.suffix[1:].isdecimal()]
    full.sort(key=lambda file: -int(file.suffix[1:]))
    return [*full, path] if path.exists() else full


def _literal(name: str) -> str:
    """A glob that matches the name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _entry(line: str) -> dict[str, Any] | None:
    """None: it is no line of a heat log that this version reads."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not _is_number(entry.get("time")):
        return None
    if "heat_log" in entry:
        return entry if entry["heat_log"] == FORMAT else None
    counts = [entry.get(tier) for tier in TIERS]
    histogram = entry.get("histogram")
    if not isinstance(histogram, list) or len(histogram) != HISTOGRAM_BINS:
        return None
    return entry if all(map(_is_count, [*counts, *histogram, entry.get("missed", 0)])) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**62


def _shares(counts: Integers) -> Floats:
    """Of the sum over the last axis; 0 where that is 0."""
    return np.asarray(counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1))


def _centres() -> Floats:
    return np.asarray((np.arange(HISTOGRAM_BINS) + 0.5) / HISTOGRAM_BINS)


def _quantile(shares: Floats, share: float) -> float:
    """Within a part of 0 to 1, scores are taken to lie evenly."""
    cumulated = np.concatenate([[0.0], np.cumsum(shares)])
    return float(np.interp(share, cumulated, np.linspace(0, 1, HISTOGRAM_BINS + 1)))
