"""Which runs make the table, the most valuable first, and about how long each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vera.bench.table.settings import TableBench

_LOADING_SECONDS = 8.0
"""Until a new process has its model."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A cache as it is measured."""

    name: str
    """Its name in the table."""
    mode: str = "adaptive"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of CacheConfig that make it what it is."""
    cold_share: float | None = None
    """The warm store is so small that this share of the units is cold."""
    ceiling_share: float | None = None
    """The ceiling, by what the native cache takes for the same sequences. None: a half, and a little."""
    fp8_pages: bool = False
    """Keys and values lose what float8 pages lose. There are no such pages in Vera, so this has a drift and no speed."""


NATIVE = Variant("native", mode="native")
ADAPTIVE = Variant("adaptive")
REFERENCE = Variant("reference", mode="native", settings={"page_dtype": "float32"})
"""What drift is measured from: the native cache with float32 pages."""
EXACT = Variant("exact", settings={"fidelity": "exact"})
SKETCH_ONLY = Variant(
    "sketches only",
    settings={"attention_tolerance": 1.0, "hot_score_threshold": 1.0, "hot_max_share": 0.0, "skip_share": 0.0},
)
FP8 = Variant("fp8 pages", mode="native", fp8_pages=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run, in a process of its own."""

    part: str
    """Of settings.PARTS: which part of the table it belongs to."""
    kind: str
    """`decode`, `capacity` or `drift`."""
    variant: Variant
    context: int
    """Tokens of the prompt."""
    new_tokens: int
    batch: int = 1
    """Sequences; for `capacity` those of the native cache, whose memory is the ceiling."""
    round: int = 0
    text: str = ""
    """Of `drift`."""

    @property
    def label(self) -> str:
        """For people."""
        what = f"{self.part}: {self.variant.name}, {self.batch} x {self.context:,} + {self.new_tokens:,} tokens"
        if self.kind == "capacity":
            what = f"{self.part}: {self.variant.name}, the memory of {self.batch} native x {self.context:,} tokens"
        if self.kind == "drift":
            what = f"{self.part}: {self.variant.name}, {self.text}, {self.new_tokens:,} after {self.context:,} tokens"
        return what + (f", round {self.round + 1}" if self.part == "headline" else "")


def plan(bench: TableBench, *, max_context: int, has_chat: bool = True) -> list[Step]:
    """The runs in the order in which they are made. `max_context` is the model's; drift is measured only within it.

    `has_chat`: the model has a chat template, so that its drift in chats can be measured.
    """
    texts = [text for text in bench.drift_texts if text != "chat" or has_chat]
    main = texts[0] if bench.has("drift") and texts and fits_context(bench.context, bench.drift_tokens, max_context) else None
    steps = _headline(bench)
    steps += _drift(bench, (REFERENCE, NATIVE, ADAPTIVE), bench.context, main)
    if bench.has("equal memory"):
        steps += [_step(bench, "equal memory", variant, kind="capacity") for variant in (NATIVE, ADAPTIVE)]
    if bench.has("controls"):
        steps += _settings_rows(bench, "controls", _controls(bench))
        fp8 = [FP8] if FP8.name in bench.controls else []
        steps += _drift(bench, _controls(bench) + fp8, bench.context, main)
    if bench.has("sweep"):
        steps += _sweep(bench)
    if bench.has("tolerance"):
        steps += _settings_rows(bench, "tolerance", _tolerances(bench))
        steps += _drift(bench, _tolerances(bench), bench.context, main)
    if bench.has("ceiling"):
        steps += _settings_rows(bench, "ceiling", _ceilings(bench))
    if bench.has("long"):
        steps += [_step(bench, "long", variant, batch=1, context=bench.long_context) for variant in (NATIVE, ADAPTIVE)]
    if bench.has("drift"):
        for context in sorted(bench.contexts, reverse=True)[1:]:
            if context > bench.min_context and fits_context(context, bench.drift_tokens, max_context):
                steps += _drift(bench, (REFERENCE, ADAPTIVE), context, texts[0] if texts else None)
        for text in texts[1:]:
            steps += _drift(bench, (REFERENCE, ADAPTIVE), bench.context, text if main else None)
    return steps


def fits_context(context: int, new_tokens: int, max_context: int) -> bool:
    """Whether a prompt and its answer, and one token more, are within the model's context."""
    return context + new_tokens + 1 <= max_context


def _headline(bench: TableBench) -> list[Step]:
    """Native and adaptive in turns, so that a machine that grows slower or faster does so for both."""
    return [
        _step(bench, "headline", variant, batch=bench.batch, new_tokens=bench.new_tokens, turn=turn)
        for turn in range(bench.repeats)
        for variant in (NATIVE, ADAPTIVE)
    ]


def _drift(bench: TableBench, variants: Sequence[Variant], context: int, text: str | None) -> list[Step]:
    """None of them without a text. A variant that is native at this length is left to the native row."""
    if text is None:
        return []
    return [
        _step(bench, "drift", variant, kind="drift", batch=1, context=context, new_tokens=bench.drift_tokens, text=text)
        for variant in variants
        if variant.mode == "native" or context > bench.min_context
    ]


def _settings_rows(bench: TableBench, part: str, variants: Sequence[Variant]) -> list[Step]:
    return [_step(bench, part, variant, batch=bench.batch) for variant in variants]


def _controls(bench: TableBench) -> list[Variant]:
    """The two ends between which the adaptive cache lies, and what it does without room for warm pages."""
    ends = [variant for variant in (EXACT, SKETCH_ONLY) if variant.name in bench.controls]
    cold = [Variant(f"adaptive, {share:.0%} cold", cold_share=share) for share in bench.cold_shares]
    return ends + cold


def _sweep(bench: TableBench) -> list[Step]:
    """Every batch and context, the largest first; the headline's own is left out where it was measured with as long an answer."""
    places = [(batch, context) for context in bench.contexts for batch in bench.batches]
    if bench.short_tokens == bench.new_tokens:
        places.remove((bench.batch, bench.context))
    return [
        _step(bench, "sweep", variant, batch=batch, context=context)
        for batch, context in sorted(places, key=lambda place: place[0] * place[1], reverse=True)
        for variant in (NATIVE, ADAPTIVE)
    ]


def _tolerances(bench: TableBench) -> list[Variant]:
    return [Variant(f"adaptive, tolerance {value:g}", settings={"attention_tolerance": value}) for value in bench.tolerances]


def _ceilings(bench: TableBench) -> list[Variant]:
    return [Variant(f"adaptive, ceiling {share:.0%}", ceiling_share=share) for share in bench.ceilings]


def _step(
    bench: TableBench,
    part: str,
    variant: Variant,
    *,
    kind: str = "decode",
    batch: int | None = None,
    context: int | None = None,
    new_tokens: int | None = None,
    turn: int = 0,
    text: str = "",
) -> Step:
    """What is not given is the headline's context, the shorter answer, and for `capacity` its own number of sequences."""
    return Step(
        part=part,
        kind=kind,
        variant=variant,
        context=context or bench.context,
        new_tokens=new_tokens or bench.short_tokens,
        batch=batch or bench.equal_sequences,
        round=turn,
        text=text,
    )


def seconds_of(step: Step) -> float:
    """About how long a run takes with a model of 135M parameters on two cores; others are so many times slower or faster."""
    prompt = step.context / 330 + (step.context / 9_000) ** 2 * 4
    if step.kind == "drift":
        return _LOADING_SECONDS + prompt + 0.05 * step.new_tokens
    steps = (2 if step.kind == "capacity" else 1) * step.new_tokens
    batch = step.batch if step.kind == "decode" else (1 if step.variant.mode == "native" else 2.4) * step.batch
    slower = 2.0 if step.variant.cold_share else 1.0
    return _LOADING_SECONDS + prompt + slower * steps * (0.014 + 0.0011 * batch + 0.85e-6 * batch * step.context)
