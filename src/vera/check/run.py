"""The check from beginning to end: look, measure, load, measure, judge."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vera.cache.memory import available_bytes
from vera.check.advice import Advice, Load, ModelFacts, Verdict, advise
from vera.check.costs import PageCosts, measure_costs
from vera.check.machine import Machine, look_at_machine
from vera.check.rates import Rates, measure_rates
from vera.config import CacheConfig
from vera.errors import ConfigError, ModelError, ModelNotFound
from vera.models import EMBEDDED, LoadedModel, load_model

_GIB = 2**30
_LONGEST_CONTEXT = 32_768
"""Tokens of each sequence, where nobody says and the model could do more."""

__all__ = ["Report", "Verdict", "run_check"]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, measured and decided."""

    machine: Machine
    rates: Rates
    source: str
    """The model that was asked for, or `embedded`."""
    model: ModelFacts | None
    no_model: str | None
    """Why no model was looked at."""
    costs: PageCosts | None
    load: Load
    advice: Advice
    seconds: float
    """What the check took, loading included."""

    @property
    def command(self) -> str | None:
        """How to serve the model with the settings that fit; None: it cannot be served, or there is none."""
        if self.model is None or not self.advice.settings:
            return None
        values = {setting.name: setting.value for setting in self.advice.settings}
        words = ["vera", "serve", self.source, "--cache", str(values.pop("mode"))]
        words += ["--cache-max-size-ratio", str(values.pop("cache_max_size_ratio"))]
        for name, value in values.items():
            words += ["--set", f"{name}={value}"]
        words += ["--max-num-seqs", str(self.load.sequences)]
        if self.advice.threads is not None:
            words += ["--threads", str(self.advice.threads)]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        model = None
        if self.model is not None:
            spec = asdict(self.model.spec) | {"eos_token_ids": sorted(self.model.spec.eos_token_ids)}
            model = spec | {"can_recompute": self.model.can_recompute}
        return {
            "verdict": self.advice.verdict.value,
            "exit_code": self.advice.verdict.exit_code,
            "reasons": list(self.advice.reasons),
            "notes": list(self.advice.notes),
            "settings": {setting.name: setting.value for setting in self.advice.settings},
            "settings_reasons": {setting.name: setting.reason for setting in self.advice.settings},
            "threads": self.advice.threads,
            "command": self.command,
            "load": asdict(self.load),
            "machine": asdict(self.machine),
            "rates": asdict(self.rates),
            "source": self.source,
            "model": model,
            "no_model": self.no_model,
            "costs": None if self.costs is None else asdict(self.costs),
            "seconds": self.seconds,
        }


def run_check(
    source: str | None = None,
    *,
    warm_dir: Path | None = None,
    sequences: int = 16,
    context: int | None = None,
    num_threads: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measures for about five seconds, besides loading the model at `source` (None: the embedded one, if it is installed).

    `sequences` of `context` tokens (None: the model's context, at most 32,768) are what is to be served at the same time.
    `warm_dir` is where a warm file would lie; None: the folder for temporary files. `tell` is told what is going on. A model that
    cannot be served is part of the report; ConfigError is raised for what cannot be meant.
    """
    _check_options(sequences, context, num_threads)
    start = time.perf_counter()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    tell("looking at the machine")
    machine = look_at_machine()
    rates = measure_rates(machine, warm_dir or Path(tempfile.gettempdir()))
    name = source or EMBEDDED
    loaded, why = _load(name, machine, tell)
    load = _load_of(sequences, context, loaded)
    facts = costs = None
    if loaded is not None:
        machine = replace(machine, available_bytes=available_bytes())
        facts = ModelFacts(loaded.spec, loaded.has_windows)
        tell("measuring what pages cost")
        costs = measure_costs(loaded, CacheConfig(mode="adaptive"))
    advice = advise(machine, rates, facts, costs, load)
    if why is not None and not (source is None and isinstance(why, ModelNotFound)):
        advice = replace(advice, verdict=Verdict.CANNOT, reasons=(str(why),), settings=())
    return Report(
        machine=machine,
        rates=rates,
        source=name,
        model=facts,
        no_model=None if why is None else str(why),
        costs=costs,
        load=load,
        advice=advice,
        seconds=time.perf_counter() - start,
    )


def _check_options(sequences: int, context: int | None, num_threads: int | None) -> None:
    for name, value in (("sequences", sequences), ("context", context), ("threads", num_threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be a whole number from 1 up")


def _load(name: str, machine: Machine, tell: Callable[[str], None]) -> tuple[LoadedModel | None, ModelError | None]:
    """The model, or why there is none."""
    try:
        _check_memory(name, machine)
        return load_model(name, progress=tell), None
    except ModelError as error:
        return None, error


def _check_memory(name: str, machine: Machine) -> None:
    """Raises ModelError for a folder whose weights would not fit memory while they are loaded, in float32."""
    needed = 4 * _num_weights(Path(name).expanduser())
    if needed > machine.available_bytes:
        raise ModelError(
            f"loading {name} takes {needed / _GIB:.1f} GiB, and {machine.available_bytes / _GIB:.1f} GiB are available; free "
            "memory, or take a smaller model"
        )


def _num_weights(folder: Path) -> int:
    """By the headers of the weight files; 0 where there are none, or they cannot be read: loading says that better."""
    count = 0
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        try:
            with safe_open(file, framework="pt") as tensors:
                count += sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return 0
    return count


def _load_of(sequences: int, context: int | None, model: LoadedModel | None) -> Load:
    longest = model.spec.max_context if model is not None else _LONGEST_CONTEXT
    if model is not None and context is not None and context > longest:
        raise ConfigError(f"context={context} is above the {longest} tokens that {model.spec.name} was made for; lower it")
    return Load(sequences, context or min(longest, _LONGEST_CONTEXT))
