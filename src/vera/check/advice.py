"""Whether an adaptive cache suits, and with which settings: pure decisions over what was found and measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from vera.cache import CacheShape, warm_bytes_per_block
from vera.check.costs import PageCosts
from vera.check.machine import Machine
from vera.check.rates import Rates, Timing
from vera.config import CacheConfig
from vera.models import ModelSpec

_MIB = 2**20
_GIB = 2**30
_RATIOS = (0.6, 0.45)
"""Shares of memory for the cache that are tried, the usual one first; both are within the recommended range."""
_TOTAL_SHARE = 0.9
"""Of the memory that is available, what cache and a warm store in memory may take together."""
_DISK_SHARE = 0.8
"""Of the disk's free space, what the warm file may take."""
_EXACT_READS = 0.1
"""Share of the pages that is read exactly within bounds; see docs/log.md."""
_WORTH = 1.05
"""Attention has to become faster by this for speed alone to be a reason."""
_SLOW_RECOMPUTE_SECONDS = 0.06
"""A block that takes longer makes P99 jitter."""
_MARGIN = 1.1
_BUSY = 0.25
"""Share of the cores that others may take before figures are doubted."""


class Verdict(StrEnum):
    """What comes of the check, and the exit code of `vera check`."""

    SUITS = "suits"
    """An adaptive cache suits; or, where no model was looked at, the machine does."""
    CANNOT = "cannot"
    """Vera cannot serve this here."""
    NATIVE = "native"
    """Vera serves it, with a native cache: an adaptive one cannot be, or gains nothing here."""

    @property
    def exit_code(self) -> int:
        """2 is wrong usage, as everywhere."""
        return {Verdict.SUITS: 0, Verdict.CANNOT: 1, Verdict.NATIVE: 3}[self]


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served at the same time."""

    sequences: int
    context: int
    """Tokens of each."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of a model that was loaded."""

    spec: ModelSpec
    can_recompute: bool
    """It keeps its decoder layers in one list, so that some of them can be run alone."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value to serve with, and why."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The verdict with its reasons, and the settings that fit."""

    verdict: Verdict
    reasons: tuple[str, ...]
    """Why it is so; the first one decides."""
    notes: tuple[str, ...] = ()
    """What else should be known."""
    settings: tuple[Setting, ...] = ()
    """Of the cache; none if it cannot be."""
    threads: int | None = None
    """Threads to compute with, where torch's own choice is not good."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes for each token of context."""

    native: float
    fast: float
    """In fast memory, once it is tiered: sketches, hot pages, and pages of layers with a window."""
    warm: float
    """In the warm store: exact copies and checkpoints."""


def advise(machine: Machine, rates: Rates, model: ModelFacts | None, costs: PageCosts | None, load: Load) -> Advice:
    """`costs` are those of `model`. With no model, only the machine is judged."""
    config = CacheConfig(mode="adaptive")
    is_unsteady = rates.is_unsteady or (costs is not None and costs.is_unsteady)
    notes = (*_machine_notes(machine, rates, is_unsteady=is_unsteady), *_model_notes(model))
    threads = _threads(machine)
    if model is None or costs is None:
        if machine.no_kernel is not None:
            return Advice(Verdict.NATIVE, (_no_kernel(machine.no_kernel),), notes, threads=threads)
        return Advice(Verdict.SUITS, ("the native kernel runs here; no model was looked at",), notes, threads=threads)
    sizes = _sizes(model.spec, config)
    if too_small := _too_small(machine, model.spec, sizes):
        return Advice(Verdict.CANNOT, (too_small,), notes, threads=threads)
    against = _against(costs, model.spec, config)
    gains = _gains(machine, model.spec, costs, sizes, load)
    if against or not gains:
        reasons = against or (_no_gain(machine, costs, sizes, load),)
        return Advice(Verdict.NATIVE, reasons, notes, _native_settings(), threads)
    return Advice(Verdict.SUITS, gains, notes, _adaptive_settings(machine, rates, model, costs, sizes, load), threads)


# -- the verdict -------------------------------------------------------------------------------------------------------


def _against(costs: PageCosts, spec: ModelSpec, config: CacheConfig) -> tuple[str, ...]:
    """What an adaptive cache is refused for, or would never do anything for."""
    reasons = []
    if spec.head_dim % 16:
        reasons.append(f"an adaptive cache needs a head size that is a multiple of 16, and the model's is {spec.head_dim}")
    if all(window is not None for window in spec.windows):
        reasons.append("every layer has a sliding window, so there is nothing to tier")
    if spec.max_context <= config.min_context:
        reasons.append(
            f"sequences of up to min_context={config.min_context} tokens stay native, and the model's context ends at "
            f"{spec.max_context}"
        )
    if costs.no_kernel is not None:
        reasons.append(_no_kernel(costs.no_kernel))
    return tuple(reasons)


def _gains(machine: Machine, spec: ModelSpec, costs: PageCosts, sizes: _Sizes, load: Load) -> tuple[str, ...]:
    """What an adaptive cache is good for here."""
    reasons = []
    wanted, there = load.sequences * load.context * sizes.native, _RATIOS[0] * machine.available_bytes
    if wanted > there:
        reasons.append(
            f"{load.sequences} sequences of {load.context:,} tokens take {wanted / _GIB:.1f} GiB in a native cache, and "
            f"{there / _GIB:.1f} GiB are there; tiered they take {load.sequences * load.context * sizes.fast / _GIB:.1f} GiB"
        )
    speedup = attention_speedup(spec, costs)
    if speedup >= _WORTH and load.context > CacheConfig().min_context:
        reasons.append(
            f"attention over long contexts becomes {speedup:.1f} times as fast: a sketch is read in {_us(costs.sketch)}, "
            f"an exact page in {_us(costs.exact)}"
        )
    return tuple(reasons)


def attention_speedup(spec: ModelSpec, costs: PageCosts) -> float:
    """Of a decode step's attention: all pages exact, by a tenth of them exact and the others sketched.

    Of each the quickest run counts, because what else runs on the machine only slows. Layers with a window gain nothing.
    """
    if costs.sketch is None:
        return 1.0
    tiered = sum(window is None for window in spec.windows) / len(spec.windows)
    exact = costs.exact.least
    bounded = _EXACT_READS * exact + (1 - _EXACT_READS) * costs.sketch.least
    return exact / (tiered * bounded + (1 - tiered) * exact)


def _no_gain(machine: Machine, costs: PageCosts, sizes: _Sizes, load: Load) -> str:
    wanted = load.sequences * load.context * sizes.native
    return (
        f"{load.sequences} sequences of {load.context:,} tokens take {wanted / _GIB:.2f} GiB, which is there "
        f"({machine.available_bytes / _GIB:.1f} GiB available), and reading sketches would save no time worth having "
        f"({_us(costs.sketch)} a sketch, {_us(costs.exact)} an exact page, contexts of {load.context:,} tokens)"
    )


def _too_small(machine: Machine, spec: ModelSpec, sizes: _Sizes) -> str | None:
    tokens = min(spec.max_context, 512)
    needed, ceiling = tokens * sizes.native, _RATIOS[0] * machine.available_bytes
    if needed <= ceiling:
        return None
    return (
        f"one sequence of {tokens} tokens takes {needed / _MIB:.0f} MiB of cache, and {ceiling / _MIB:.0f} MiB can be had "
        f"({_RATIOS[0]:.0%} of the {machine.available_bytes / _MIB:.0f} MiB available); free memory, or take a smaller model"
    )


def _no_kernel(why: str) -> str:
    return f"sketches would be read in plain torch, slower than a kernel reads exact pages: {why}"


# -- notes -------------------------------------------------------------------------------------------------------------


def _machine_notes(machine: Machine, rates: Rates, *, is_unsteady: bool) -> list[str]:
    notes = list(machine.warnings)
    if machine.busy_share > _BUSY or is_unsteady:
        notes.append(
            f"the machine was busy ({machine.busy_share:.0%} of its cores before anything was measured, or runs of the same took "
            "unlike times), so rates are too low and costs too high; run this again when it is quiet"
        )
    if machine.is_limited:
        notes.append(f"a container's limit leaves {_gib(machine.available_bytes)} of the machine's {_gib(machine.memory_bytes)}")
    if rates.disk.in_memory:
        notes.append(
            f"{rates.disk.folder} lies in memory ({rates.disk.filesystem}); a warm file there takes as much memory as "
            "warm_store=ram (--warm-dir names another folder)"
        )
    if len(machine.devices) > 1:
        names = ", ".join(device.name for device in machine.devices[1:])
        notes.append(f"{names}: seen and measured, but this version computes on the CPU")
    return notes


def _model_notes(model: ModelFacts | None) -> list[str]:
    if model is None:
        return []
    notes, spec = [], model.spec
    windowed = sum(window is not None for window in spec.windows)
    if 0 < windowed < spec.num_layers:
        notes.append(f"{windowed} of {spec.num_layers} layers have a sliding window; their pages stay exact, the others gain")
    if not model.can_recompute:
        notes.append(
            "the model does not keep its decoder layers in one list, so nothing can be recomputed: no page becomes cold, and "
            "the warm store must hold everything"
        )
    return notes


def _threads(machine: Machine) -> int | None:
    """What a container's quota leaves; more threads would wait for each other."""
    if machine.core_quota is None or machine.core_quota >= machine.threads:
        return None
    return max(1, math.floor(machine.core_quota))


# -- settings ----------------------------------------------------------------------------------------------------------


def cache_config(advice: Advice) -> CacheConfig:
    """The settings as the engine takes them; all others are the defaults."""
    return CacheConfig.from_dict({setting.name: setting.value for setting in advice.settings})


def _native_settings() -> tuple[Setting, ...]:
    return (
        Setting("mode", "native", "every page stays exact"),
        Setting("cache_max_size_ratio", _RATIOS[0], "the usual share of the memory that is available"),
    )


@dataclass(frozen=True, slots=True)
class _Store:
    """Where exact copies wait."""

    kind: str
    num_bytes: int
    ratio: float
    """Of the memory for the cache itself."""
    holds_all: bool
    reason: str


def _adaptive_settings(
    machine: Machine, rates: Rates, model: ModelFacts, costs: PageCosts, sizes: _Sizes, load: Load
) -> tuple[Setting, ...]:
    store = _store(machine, rates, sizes, load)
    settings = [
        Setting("mode", "adaptive", "see above"),
        Setting("cache_max_size_ratio", store.ratio, _ratio_reason(machine, sizes, store)),
        Setting("warm_store", store.kind, store.reason),
        Setting("warm_bytes", store.num_bytes, _warm_reason(store, sizes)),
    ]
    if store.kind == "file":
        settings.append(Setting("warm_dir", rates.disk.folder, "where the disk was measured"))
    return (*settings, *_recompute_settings(model, costs, store))


def _store(machine: Machine, rates: Rates, sizes: _Sizes, load: Load) -> _Store:
    """Memory where everything fits it, since that is quicker; else a disk; else as much as there is of either."""
    for ratio in _RATIOS:
        needed = _warm_need(machine, sizes, load, ratio)
        if ratio * machine.available_bytes + needed <= _TOTAL_SHARE * machine.available_bytes:
            return _Store("ram", needed, ratio, True, f"exact copies of all that fits take {_gib(needed)}, and memory has that")
    needed, disk = _warm_need(machine, sizes, load, _RATIOS[0]), rates.disk
    room = 0 if disk.in_memory else int(_DISK_SHARE * disk.free_bytes)
    speed = f"{disk.write.per_second / 1e6:.0f} MB/s written, {disk.read.per_second / 1e6:.0f} MB/s read"
    if needed <= room:
        reason = f"exact copies of all that fits take {_gib(needed)}: too much for memory, but {disk.folder} has room ({speed})"
        return _Store("file", needed, _RATIOS[0], True, reason)
    left = int((_TOTAL_SHARE - _RATIOS[1]) * machine.available_bytes)
    if room > left:
        reason = (
            f"the disk has more room ({_gib(room)}) than memory ({_gib(left)}), if not for everything ({_gib(needed)}); {speed}"
        )
        return _Store("file", room, _RATIOS[0], False, reason)
    reason = f"memory has more room ({_gib(left)}) than the disk ({_gib(room)}), if not for everything ({_gib(needed)})"
    return _Store("ram", left, _RATIOS[1], False, reason)


def _warm_need(machine: Machine, sizes: _Sizes, load: Load, ratio: float) -> int:
    """Copies of as many tokens as are wanted and fit fast memory."""
    tokens = min(load.sequences * load.context, ratio * machine.available_bytes / sizes.fast)
    return -(-int(_MARGIN * tokens * sizes.warm) // (64 * _MIB)) * 64 * _MIB


def _ratio_reason(machine: Machine, sizes: _Sizes, store: _Store) -> str:
    rest = (
        "the warm store takes its part of the same memory"
        if store.kind == "ram"
        else "the rest is for the process and for what the system keeps of the warm file"
    )
    ceiling, available = store.ratio * machine.available_bytes, machine.available_bytes
    tokens = ceiling / sizes.fast
    return f"{_gib(ceiling)} of the {_gib(available)} available, room for {tokens:,.0f} tiered tokens; {rest}"


def _warm_reason(store: _Store, sizes: _Sizes) -> str:
    tokens = store.num_bytes / sizes.warm
    held = f"holds {tokens:,.0f} tokens at {sizes.warm / 1024:.1f} KiB"
    return held if store.holds_all else f"{held}; what is above that becomes cold, and is recomputed when it is needed"


def _recompute_settings(model: ModelFacts, costs: PageCosts, store: _Store) -> list[Setting]:
    if not model.can_recompute or costs.recompute is None:
        return [Setting("recompute_budget", 0, "this model's layers cannot be run in parts")]
    seconds = costs.recompute.least
    took = f"a block takes {1e3 * seconds:.0f} ms in {costs.window_layers} layers"
    if seconds <= _SLOW_RECOMPUTE_SECONDS:
        return [
            Setting("recompute_time_share", 0.15, took if not store.holds_all else f"{took}; seldom needed, since all is warm"),
        ]
    return [
        Setting("recompute_time_share", 0.1, f"{took}: restores are what makes P99 jitter here"),
        Setting("recompute_budget", 1, "at most one such pause a step"),
        Setting("recompute_layer_limit", 8, "a recompute of half as many layers takes half as long; checkpoints take more room"),
    ]


# -- sizes -------------------------------------------------------------------------------------------------------------


def _sizes(spec: ModelSpec, config: CacheConfig) -> _Sizes:
    windowed = tuple(layer for layer, window in enumerate(spec.windows) if window is not None)
    shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.hidden_size, windowed)
    block = shape.block_bytes(config)
    if spec.head_dim % 16:
        fast, warm = float(block), 0
    else:
        exact = config.hot_max_share + len(windowed) / spec.num_layers
        fast = shape.sketch_bytes(config) + min(1.0, exact) * block
        warm = warm_bytes_per_block(shape, replace(config, recompute_layer_limit=8))  # the most that may be advised
    return _Sizes(native=block / config.page_size, fast=fast / config.page_size, warm=warm / config.page_size)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


def _us(timing: Timing | None) -> str:
    return "never" if timing is None else f"{1e6 * timing.least:.2f} µs"
