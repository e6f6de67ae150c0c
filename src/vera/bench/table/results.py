"""docs/results.md, made from the JSON alone: the same document gives the same page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vera.bench.statistics import is_absent
from vera.bench.table.plots import save_plots
from vera.bench.table.report import (
    COLUMNS,
    NOTHING,
    RATIO_NAMES,
    growth_lines,
    machine_line,
    markdown_rows,
    no_gain_lines,
    parts_of,
    place,
    policy_line,
    spread_lines,
    was_busy,
)
from vera.errors import VeraError

PAGE, DATA, IMAGES = Path("results.md"), Path("results/table.json"), Path("images")
"""Where they lie in the folder of documents."""

_TITLES = {
    "headline": "Native and adaptive in turns",
    "equal memory": "At equal memory",
    "controls": "Controls",
    "sweep": "Over batch and context",
    "tolerance": "Over the tolerance",
    "ceiling": "Over the ceiling",
    "long": "A longer prompt",
}
_WORDS = {
    "headline": "Each run has a process of its own; figures are medians of the rounds, and ratios have the least and the largest "
    "of a round's pair in brackets.",
    "equal memory": "The ceiling is what the native cache takes for a few sequences. Copies of a prompt are added to each cache "
    "until one is refused; what stays to the end is counted (the batch) and timed.",
    "controls": "`exact` keeps pages as adaptive does and reads each exactly; `sketches only` never reads one exactly; "
    "`fp8 pages` are what other engines offer, and have a drift only, since Vera has none; `cold` rows have a warm store so "
    "small that this share of the units is recomputed when needed.",
    "sweep": "One run each: differences of a few percent mean nothing.",
    "tolerance": "`attention_tolerance`, at the headline's batch and context.",
    "ceiling": "The cache's ceiling in shares of native's memory for the same sequences: the effect of `cache_max_size_ratio`.",
    "long": "One sequence.",
}


def write_results(document: Mapping[str, Any], folder: Path, *, plots: bool = True) -> list[Path]:
    """Writes page, JSON and pictures into the folder of documents; returns the paths. Folders are made where they lack."""
    folder = folder.expanduser()
    for name in (DATA.parent, IMAGES):
        (folder / name).mkdir(parents=True, exist_ok=True)
    pictures = save_plots(document, folder / IMAGES) if plots else []
    written = {**document, "pictures": pictures}
    (folder / DATA).write_text(json.dumps(written, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(results_page(read_document(folder / DATA)), encoding="utf-8")
    return [folder / PAGE, folder / DATA, *(folder / IMAGES / name for name in pictures)]


def read_document(path: Path) -> dict[str, Any]:
    """What `vera bench table` wrote or printed. A VeraError says so for anything else."""
    try:
        document = _parsed(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VeraError(f"{path} cannot be read as the JSON of `vera bench table`: {error}") from None
    if not isinstance(document, dict) or document.get("bench") != "table":
        raise VeraError(f"{path} is not of `vera bench table`; give the file that --out wrote, or the output of --json")
    return document


def _parsed(text: str) -> Any:
    """A JSON file, or an output whose last line is JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.rstrip().rpartition("\n")[2])


def results_page(document: Mapping[str, Any]) -> str:
    """The Markdown page."""
    return "\n".join(_lines(document)) + "\n"


def headline_lines(document: Mapping[str, Any], names: Mapping[str, str] = RATIO_NAMES) -> list[str]:
    """The ratios as a Markdown table: both caches, and adaptive by native."""
    lines = [f"| {names.get('', '')} | native | adaptive | {names.get('ratio', 'adaptive / native')} |", "|---|--:|--:|--:|"]
    for key, (part, figure, written) in _HEADLINE.items():
        pair = [
            next((row for row in document["rows"] if row["part"] == part and row["cache"] == cache and not is_absent(row)), None)
            for cache in ("native", "adaptive")
        ]
        values = [NOTHING if row is None or row.get(figure) is None else written(row[figure]) for row in pair]
        lines.append(f"| {names[key]} | {values[0]} | {values[1]} | {_ratio(document, key)} |")
    return lines


def _ratio(document: Mapping[str, Any], key: str) -> str:
    value, limits = document["ratios"].get(key), document["ratio_spread"].get(key)
    if value is None:
        return NOTHING
    return f"{value:.2f}x" + (f" ({limits[0]:.2f}–{limits[1]:.2f})" if limits else "")


_HEADLINE: dict[str, tuple[str, str, Any]] = {
    "process_bytes": ("headline", "process_bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
    "cache_bytes": ("headline", "cache_bytes", lambda value: f"{value / 2**20:,.0f} MiB"),
    "itl_mean": ("headline", "itl_ms_mean", lambda value: f"{value:,.1f} ms"),
    "itl_p99": ("headline", "itl_ms_p99", lambda value: f"{value:,.1f} ms"),
    "throughput": ("headline", "decode_tokens_per_s", lambda value: f"{value:,.1f} tokens/s"),
    "sequences_at_equal_memory": ("equal memory", "sequences", lambda value: f"{value:,}"),
    "throughput_at_equal_memory": ("equal memory", "decode_tokens_per_s", lambda value: f"{value:,.1f} tokens/s"),
}


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield (
        "Written by `vera bench table` from [its JSON](results/table.json); do not edit. The same command gives your "
        "machine's figures."
    )
    yield ""
    yield from _origin(document)
    for part, rows in parts_of(document):
        yield ""
        yield f"## {_TITLES[part]}"
        yield ""
        if part == "headline":
            yield from headline_lines(document)
            yield ""
        yield _WORDS[part]
        yield ""
        yield from markdown_rows(rows)
        if lines := spread_lines(rows):
            yield ""
            yield from (f"- {line}" for line in lines)
        yield from _marks(document, rows)
    yield from _drift(document)
    yield from _growth(document)
    yield from _pictures(document)
    yield from _where_not(document)
    yield from _how_to_read(document)
    yield from _not_measured(document)


def _origin(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"- command: `{document['command']}`"
    yield f"- date: {document['date']}; {document['seconds'] / 60:.0f} minutes"
    yield f"- commit: {document['commit'] or 'not in a repository'}; version {document['version']}"
    yield f"- machine: {machine_line(document['machine'])}"
    yield f"- model: {document['model']}, made for {document['max_context']:,} tokens; {document['settings']['page_dtype']} pages"
    if document["settings"]["adaptive"]:
        yield f"- settings of the adaptive cache: `{json.dumps(document['settings']['adaptive'], sort_keys=True)}`"
    if was_busy(document["machine"]):
        yield "- **The machine was busy before the runs: these figures are not to be trusted.**"


def _marks(document: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Iterator[str]:
    if any(row["native_by_min_context"] for row in rows):
        yield ""
        yield f"\\* within `min_context` ({document['settings']['min_context']:,} tokens): the adaptive cache serves it natively."
    if any(row["timing_only"] for row in rows):
        yield ""
        yield f"† beyond the model's {document['max_context']:,} tokens: timing only, its answers mean nothing."
    for row in rows:
        if is_absent(row):
            yield ""
            yield f"{row['cache']}, {place(row)} failed: {row['failed']}"


def _drift(document: Mapping[str, Any]) -> Iterator[str]:
    drifts = document["drift"]
    if not drifts:
        return
    yield from ("", "## Drift", "")
    yield (
        "From the native cache with float32 pages, teacher-forced: the same text through both, token by token, one sequence. "
        "KL is in nats; top-1 is how often the most likely token is the same. Measured once for each cache, not for each batch."
    )
    yield ""
    yield "| cache | text | tokens after the prompt | KL mean | KL P99 | KL max | top-1 |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for drift in drifts:
        name = f"| {drift['cache']} | {drift['text']} | {drift['tokens']} after {drift['context']:,} |"
        if is_absent(drift):
            yield f"{name} failed: {drift['failed']} | | | |"
            continue
        kl = " | ".join(f"{drift[key]:.1e}" for key in ("kl_mean", "kl_p99", "kl_max"))
        yield f"{name} {kl} | {drift['top1_agreement']:.2%} |"


def _growth(document: Mapping[str, Any]) -> Iterator[str]:
    lines = growth_lines(document["growth"])
    if not lines and not document["policy_cost"]:
        return
    yield from ("", "## How the cost grows", "")
    yield (
        "Expected: cache bytes in proportion to the tokens held; a step's time to the bytes that attention reads, beside a "
        "constant for the weights; the policy's time to the pages that are hit or moved, not to those kept, since heat is "
        "read once in `recalibrate_every` tokens of a sequence. Exponents of a power law, by least squares (1: in proportion, "
        "0: constant):"
    )
    yield ""
    yield from (f"- {line}" for line in lines)
    if document["policy_cost"]:
        yield f"- {policy_line(document['policy_cost'])}"


def _pictures(document: Mapping[str, Any]) -> Iterator[str]:
    if not document["pictures"]:
        return
    yield from ("", "## Pictures")
    for name in document["pictures"]:
        yield ""
        yield f"![{name.removeprefix('results-').removesuffix('.png')}](images/{name})"


def _where_not(document: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Where adaptive does not help", "")
    lines = no_gain_lines(document)
    if lines:
        yield "Less than 1.05x native's throughput, or more than 0.95x of its cache memory:"
        yield ""
        yield from (f"- {line}" for line in lines)
    else:
        yield "At every place that was measured it is faster, and takes less memory."
    recomputing = [row for row in document["rows"] if (row["recompute_share"] or 0) > 0]
    if recomputing:
        yield ""
        yield "Where cold pages had to be recomputed, that is what steps waited for: see the rows with a recompute share."


def _how_to_read(document: Mapping[str, Any]) -> Iterator[str]:
    settings = document["settings"]
    yield from ("", "## How to read this", "")
    yield "- The ratios are of two things measured in turns on one machine; the absolute figures are that machine's."
    yield "- *cache*: bytes of fast memory in use, mean over the steps. Warm pages are not in it: they lie in a mapped file."
    yield (
        "- *process*: the most private memory of the process once the model is loaded (loading takes about 1 GiB for a while, "
        "whatever the cache). Mapped files are not in it: warm pages, and weights that are read where they lie."
    )
    yield (
        "- *ITL*, *P99*: every step after the prompt counts, the first ones too, in which an adaptive cache hits most. All "
        "sequences take their steps together, so a step is one inter-token latency of each."
    )
    yield "- *TTFT*: one prompt in an idle engine. A batch is then filled with copies of it, each with pages of its own."
    yield "- *tokens/s*, *QPS*: while the batch decodes; prompts are not counted in them. With prompts: `vera bench serve`."
    yield (
        f"- *goodput*: the QPS of requests with a mean ITL of at most {settings['slo_itl_ms']:g} ms and a TTFT of at most "
        f"{settings['slo_ttft_ms'] / 1e3:g} s. All sequences of a row take the same steps, so it is all of them or none."
    )
    yield "- *recompute*: the share of sequences' steps in which a cold page was restored."
    yield f"- *KL*, *top-1*: see Drift; in the rows, that of {settings['drift_texts'][0]} at the same prompt length."
    yield f"- {NOTHING}: not measured, or there is no such thing."


def _not_measured(document: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## What was not measured", "")
    yield "- No GPU ran any of this: there are no figures for GPUs, and the ratios of a CPU say little about them."
    yield "- Sequences in a batch have the same content, if not the same pages; different prompts hit different pages at a time."
    yield "- Nothing here goes through the HTTP service, and no prompt is read while others decode."
    yield from (f"- {left['what']}: left out, {left['why']}." for left in document["left_out"])
    missing = [heading for heading, key, _ in COLUMNS if all(row[key] is None for row in document["rows"])]
    if missing:
        yield f"- In no row: {', '.join(missing)}."
