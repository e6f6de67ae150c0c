"""Vera: an inference engine for language models whose KV cache is adaptive. Start with `LLM`."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vera.cache import CacheUse
    from vera.config import CacheConfig, EngineConfig
    from vera.errors import VeraError
    from vera.llm import LLM, Completion, Output
    from vera.models import load_model
    from vera.sampling_params import SamplingParams

__version__ = "0.1.0"

# How long a thread of torch's pool spins before it sleeps; read when torch is loaded. The default, about 5 ms at each of some
# hundred parallel regions, turns a step of 40 ms into seconds once anything else wants a core. This costs 5% where nothing does.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Imported on first use: torch and transformers take seconds, and `vera --help` needs neither.
_HOMES = {
    "LLM": "vera.llm",
    "CacheConfig": "vera.config",
    "CacheUse": "vera.cache",
    "Completion": "vera.llm",
    "EngineConfig": "vera.config",
    "Output": "vera.llm",
    "SamplingParams": "vera.sampling_params",
    "VeraError": "vera.errors",
    "load_model": "vera.models",
}

__all__ = ["LLM", "CacheConfig", "CacheUse", "Completion", "EngineConfig", "Output", "SamplingParams", "VeraError", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vera' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
