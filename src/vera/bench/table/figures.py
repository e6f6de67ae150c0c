"""From runs to the table: pure arithmetic.

cache_bytes          fast memory in use, mean over the steps
process_bytes        the most private memory of the process once it has its model; mapped files, such as the warm store and
                     weights that are mapped, are not in it
itl_ms_mean, p99     over all steps after the prompt, the very first included; all sequences take a step together
ttft_ms              one prompt in an idle engine
decode_tokens_per_s  of all sequences together, prompts not counted
qps                  answers a second while they are decoded, prompts not counted
goodput              those of them whose mean inter-token latency and time to first token keep the limits
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vera.bench.statistics import is_absent, merge_repeats
from vera.bench.table.plan import ADAPTIVE, FP8, NATIVE, REFERENCE, Step, fits_context
from vera.bench.table.settings import TableBench

FIGURES = (
    "cache_bytes",
    "process_bytes",
    "itl_ms_mean",
    "itl_ms_p99",
    "ttft_ms",
    "decode_tokens_per_s",
    "qps",
    "goodput",
    "recompute_share",
    "kl_mean",
    "top1_agreement",
)
"""What every row has; None where it was not measured."""
_MORE = (
    "itl_ms_p50",
    "attention_ms",
    "cache_peak_bytes",
    "process_peak_bytes",
    "warm_bytes",
    "cold_units_share",
    "exact_read_share",
    "hits_per_step",
    "uncovered_hits",
    "policy_ms",
    "pages_touched_per_step",
    "recalibrations",
    "sequences",
    "ceiling_bytes",
    "failed_repeats",
)
"""What a row has besides, where it was measured."""
_RATIOS = {
    "process_bytes": "process_bytes",
    "itl_mean": "itl_ms_mean",
    "itl_p99": "itl_ms_p99",
    "throughput": "decode_tokens_per_s",
    "cache_bytes": "cache_bytes",
}
_GROWING = ("cache_bytes", "itl_ms_mean", "policy_ms")
_GAIN = 1.05
"""Below this many times native's throughput, the adaptive cache is said not to help with speed."""
_SAVING = 0.95
"""Above this share of native's cache bytes, it is said not to help with memory."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """A run and what came of it: figures, or `{"failed": why}`."""

    step: Step
    outcome: Mapping[str, Any]


def rows_of(bench: TableBench, done: Sequence[Done], *, max_context: int) -> list[Row]:
    """A row for each place and cache that ran, rounds merged: medians, with their least and largest under "spread"."""
    rounds: dict[tuple[Any, ...], list[Done]] = {}
    for one in done:
        step = one.step
        if step.kind != "drift":
            rounds.setdefault((step.part, step.variant.name, step.batch, step.context, step.new_tokens), []).append(one)
    drifts = drifts_of(done)
    rows = [_row(bench, runs, drifts, max_context=max_context) for runs in rounds.values()]
    return rows + [_drift_row(drift) for drift in drifts if drift["cache"] == FP8.name and "kl_mean" in drift]


def drifts_of(done: Iterable[Done]) -> list[dict[str, Any]]:
    """Each drift that was measured, or failed."""
    return [
        {
            "cache": one.step.variant.name,
            "text": one.step.text,
            "context": one.step.context,
            "tokens": one.step.new_tokens,
            **one.outcome,
        }
        for one in done
        if one.step.kind == "drift" and (one.step.variant != REFERENCE or is_absent(one.outcome))
    ]


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Adaptive by native in the headline, of medians; None where one of the two is missing."""
    native, adaptive = (find(rows, "headline", variant.name) for variant in (NATIVE, ADAPTIVE))
    ratios = {name: _quotient(adaptive, native, figure) for name, figure in _RATIOS.items()}
    native, adaptive = (find(rows, "equal memory", variant.name) for variant in (NATIVE, ADAPTIVE))
    return ratios | {
        "sequences_at_equal_memory": _quotient(adaptive, native, "sequences"),
        "throughput_at_equal_memory": _quotient(adaptive, native, "decode_tokens_per_s"),
    }


def ratio_spread_of(done: Sequence[Done]) -> dict[str, list[float]]:
    """The least and the largest ratio of one round's pair; nothing where fewer than two rounds worked."""
    turns: dict[int, dict[str, Mapping[str, Any]]] = {}
    for one in done:
        if one.step.part == "headline" and not is_absent(one.outcome):
            turns.setdefault(one.step.round, {})[one.step.variant.name] = _of_serving(one.outcome)
    pairs = [turn for turn in turns.values() if len(turn) == 2]
    if len(pairs) < 2:
        return {}
    columns = {
        name: [pair[ADAPTIVE.name][figure] / pair[NATIVE.name][figure] for pair in pairs] for name, figure in _RATIOS.items()
    }
    return {name: [min(values), max(values)] for name, values in columns.items()}


def find(rows: Iterable[Row], part: str, cache: str) -> Row | None:
    """The first such row that has figures."""
    return next((row for row in rows if row["part"] == part and row["cache"] == cache and not is_absent(row)), None)


# -- cost that grows as the work grows ---------------------------------------------------------------------------------


def growth_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How cache bytes, step time and policy time grow along context and along batch, all else alike.

    An exponent of 1 is growth in proportion. Of the adaptive cache only what is really tiered is looked at. Each entry says of
    which values it was made; two are a line, not a proof.
    """
    growth = []
    lengths = {row["new_tokens"] for row in rows if row["part"] == "sweep"}
    for cache in (NATIVE.name, ADAPTIVE.name):
        measured = [row for row in rows if row["cache"] == cache and _is_comparable(row, lengths)]
        for along, fixed in (("context", "batch"), ("batch", "context")):
            for value in sorted({row[fixed] for row in measured}):
                line = sorted((row for row in measured if row[fixed] == value), key=lambda row: int(row[along]))
                if len(line) > 1:
                    growth.append(_growth(cache, along, fixed, value, line))
    return growth


def policy_cost_of(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Policy time against pages hit, promoted or cooled, over all rows that are tiered:
    `ms = fixed + slope * pages`.

    None: fewer than three such rows.
    """
    points = [
        (row["pages_touched_per_step"], row["policy_ms"])
        for row in rows
        if not row.get("native_by_min_context") and row.get("policy_ms") is not None
    ]
    if len(points) < 3:
        return None
    slope, fixed, explained = line_through(points)
    return {
        "rows": len(points),
        "fixed_ms": fixed,
        "us_per_page": 1e3 * slope,
        "explained": explained,
        "largest_share_of_step": max(row["policy_ms"] / row["itl_ms_mean"] for row in rows if row.get("policy_ms") is not None),
    }


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of log y over log x by least squares; None for fewer than two points, or one that is not above 0."""
    if len(points) < 2 or any(x <= 0 or y <= 0 for x, y in points):
        return None
    return line_through([(math.log(x), math.log(y)) for x, y in points])[0]


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Slope, intercept and the share of the variance that is explained, by least squares."""
    xs, ys = ([point[side] for point in points] for side in (0, 1))
    middle_x, middle_y = fmean(xs), fmean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0
    intercept = middle_y - slope * middle_x
    total = sum((y - middle_y) ** 2 for y in ys)
    left = sum((y - intercept - slope * x) ** 2 for x, y in points)
    return slope, intercept, 1 - left / total if total else 1.0


# -- where it does not help --------------------------------------------------------------------------------------------


def without_gain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The places where the adaptive cache is hardly faster than the native one, or takes hardly less memory."""
    found = []
    for row in rows:
        if row["cache"] != ADAPTIVE.name or is_absent(row) or row["part"] == "equal memory":
            continue
        native = _same_place(rows, row)
        throughput, cache = (_quotient(row, native, figure) for figure in ("decode_tokens_per_s", "cache_bytes"))
        if throughput is None or cache is None:
            continue
        if throughput < _GAIN or cache > _SAVING:
            found.append(
                {name: row[name] for name in ("batch", "context", "new_tokens", "native_by_min_context", "timing_only")}
                | {"throughput": throughput, "cache_bytes": cache}
            )
    return found


def _same_place(rows: Sequence[Row], row: Row) -> Row | None:
    place = ("part", "batch", "context", "new_tokens")
    return next(
        (other for other in rows if other["cache"] == NATIVE.name and all(other[name] == row[name] for name in place)), None
    )


# -- details -----------------------------------------------------------------------------------------------------------


def _row(bench: TableBench, runs: Sequence[Done], drifts: Sequence[Mapping[str, Any]], *, max_context: int) -> Row:
    step = runs[0].step
    worked = [_with_requests(bench, run.outcome) for run in runs if not is_absent(run.outcome)]
    merged = merge_repeats([*worked, *(run.outcome for run in runs if is_absent(run.outcome))])
    timing_only = not fits_context(step.context, step.new_tokens, max_context)
    short = step.variant.mode == "adaptive" and step.context + step.new_tokens <= bench.min_context
    row: Row = {
        "part": step.part,
        "cache": step.variant.name,
        "batch": merged.get("sequences", step.batch),
        "context": step.context,
        "new_tokens": step.new_tokens,
        "timing_only": timing_only,
        "native_by_min_context": short,
        "repeats": len(worked),
    }
    if is_absent(merged):
        return row | dict.fromkeys(FIGURES) | {"spread": {}, "failed": merged.get("failed") or merged.get("missing")}
    drift = None if timing_only else _drift_at(NATIVE.name if short else step.variant.name, step.context, drifts)
    figures = {name: merged.get(name) for name in FIGURES} | {
        name: drift[name] if drift else None for name in ("kl_mean", "top1_agreement")
    }
    spread = {name: limits for name, limits in merged.get("spread", {}).items() if name in FIGURES}
    return row | figures | {name: merged[name] for name in _MORE if name in merged} | {"spread": spread}


def _with_requests(bench: TableBench, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run with those of its requests, which all took the same steps."""
    qps = outcome["decode_tokens_per_s"] / outcome["steps"]
    good = outcome["itl_ms_mean"] <= bench.slo_itl_ms and outcome["ttft_ms"] <= bench.slo_ttft_ms
    return {**_of_serving(outcome), "qps": qps, "goodput": qps if good else 0.0}


def _of_serving(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """A run with its memory as rows tell it: that of serving, and beside it the peak, loading included."""
    return {**outcome, "process_bytes": outcome["serving_bytes"], "process_peak_bytes": outcome["process_bytes"]}


def _drift_at(cache: str, context: int, drifts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the first text that has it."""
    found = (drift for drift in drifts if drift["cache"] == cache and drift["context"] == context and "kl_mean" in drift)
    return next(found, None)


def _drift_row(drift: Mapping[str, Any]) -> Row:
    """A cache that is only compared, and not timed."""
    return {
        "part": "controls",
        "cache": drift["cache"],
        "batch": 1,
        "context": drift["context"],
        "new_tokens": drift["tokens"],
        "timing_only": False,
        "native_by_min_context": False,
        "repeats": 1,
        **dict.fromkeys(FIGURES),
        "kl_mean": drift["kl_mean"],
        "top1_agreement": drift["top1_agreement"],
        "spread": {},
    }


def _is_comparable(row: Row, lengths: Collection[int]) -> bool:
    """Whether the row has figures, answers as long as the sweep's, and is not native where it says adaptive."""
    in_sweep = row["part"] in ("sweep", "long", "headline") and row["new_tokens"] in lengths
    return in_sweep and not is_absent(row) and not row["native_by_min_context"]


def _growth(cache: str, along: str, fixed: str, value: int, line: Sequence[Row]) -> dict[str, Any]:
    exponents = {}
    for figure in _GROWING:
        points = [(float(row[along]), float(row[figure])) for row in line if row.get(figure) is not None]
        exponents[figure] = exponent(points)
    return {"cache": cache, "along": along, fixed: value, "values": [row[along] for row in line], "exponents": exponents}


def _quotient(one: Row | None, other: Row | None, figure: str) -> float | None:
    if one is None or other is None or not other.get(figure) or one.get(figure) is None:
        return None
    return float(one[figure] / other[figure])
