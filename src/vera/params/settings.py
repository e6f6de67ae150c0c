"""What a version is made of: a full set of cache settings, its identity, and what of it can change while a service runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from vera.config import CacheConfig
from vera.errors import ConfigError


class Change(StrEnum):
    """When a changed setting takes effect."""

    LIVE = "live"
    """While the service runs, from the next step or the next request on."""
    BOUNDED = "live up to start"
    """While the service runs, as long as it is not above the value that the service was started with."""
    RESTART = "restart"
    """Only when a service starts."""


_CHANGES: dict[str, tuple[Change, str]] = {
    "mode": (Change.RESTART, "decides what memory is set aside for"),
    "cache_max_size_ratio": (Change.RESTART, "the arena is allocated once"),
    "cache_max_bytes": (Change.RESTART, "the arena is allocated once"),
    "page_size": (Change.RESTART, "the layout of all pages"),
    "page_dtype": (Change.RESTART, "the layout of all pages"),
    "prefix_reuse": (Change.RESTART, "blocks are indexed from the first request on, or never"),
    "poison": (Change.RESTART, "pages are filled from the first one on, or never"),
    "hot_score_threshold": (Change.LIVE, "read at each recalibration"),
    "cold_drop_step": (Change.LIVE, "read before each scan"),
    "recompute_layer_limit": (Change.RESTART, "checkpoints lie at the windows' first layers"),
    "attention_tolerance": (Change.LIVE, "taken by each request as it comes"),
    "sketch_bits": (Change.RESTART, "the layout of all sketches"),
    "recalibrate_every": (Change.LIVE, "read after each token"),
    "min_context": (Change.LIVE, "taken by each request as it comes"),
    "fidelity": (Change.LIVE, "taken by each request as it comes"),
    "warm_store": (Change.RESTART, "the warm store is opened once"),
    "warm_bytes": (Change.RESTART, "the warm store is sized once"),
    "warm_dir": (Change.RESTART, "the warm store is opened once"),
    "hot_max_share": (Change.LIVE, "read at each recalibration and admission"),
    "recompute_target": (Change.LIVE, "read before each scan"),
    "recompute_budget": (Change.BOUNDED, "the room to restore blocks in is set aside once"),
    "recompute_time_share": (Change.LIVE, "read before each restore"),
    "skip_share": (Change.LIVE, "read in each step"),
}
"""The one place that says which settings are live, and why."""

_DEFAULTS = CacheConfig()
_NAMES = tuple(setting.name for setting in fields(CacheConfig))


def change_of(name: str) -> Change:
    """When a change of this setting takes effect."""
    _check_known([name])
    return _CHANGES[name][0]


def reason_of(name: str) -> str:
    """Why `change_of` says what it says."""
    _check_known([name])
    return _CHANGES[name][1]


def setting_names() -> tuple[str, ...]:
    """All cache settings, in the order of `CacheConfig`."""
    return _NAMES


def checked(settings: Mapping[str, Any] | CacheConfig) -> CacheConfig:
    """The settings as a config; what is not given takes its default.

    Raises ConfigError: an unknown name (with the name that was probably meant), a wrong type, a value out of range.
    """
    if isinstance(settings, CacheConfig):
        settings = settings.to_dict()
    _check_known(settings)
    try:
        return CacheConfig.from_dict({name: _normal(name, value) for name, value in settings.items()})
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"a setting is of the wrong type: {error}") from None


def full_settings(config: CacheConfig) -> dict[str, Any]:
    """All settings, JSON-ready, equal for equal configs: numbers in the type of their default, pairs as lists."""
    return {name: _plain(_normal(name, value)) for name, value in config.to_dict().items()}


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII. Raises ValueError or TypeError for what JSON cannot say."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_hash(settings: Mapping[str, Any]) -> str:
    """The identity of a full set of settings: the SHA-256 of its canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical(dict(settings)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that two sets of settings do not share."""

    name: str
    before: Any
    after: Any
    live: bool
    """A service that was started with `before` can take `after` over as it runs."""


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """What differs between two full sets of settings, in the order of `CacheConfig`. A missing one stands for its default."""
    old, new = full_settings(checked(before)), full_settings(checked(after))
    return [
        Difference(name, old[name], new[name], _is_live(name, old[name], new[name])) for name in _NAMES if old[name] != new[name]
    ]


def needs_restart(started: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """What keeps a service that was started with the first settings from taking over the second without a restart."""
    return [difference for difference in differences(started, wanted) if not difference.live]


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` where a known name is close, else nothing."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _is_live(name: str, before: Any, after: Any) -> bool:
    change = change_of(name)
    return change is Change.LIVE or (change is Change.BOUNDED and after <= before)


def _check_known(names: Iterable[Any]) -> None:
    for name in names:
        if name not in _NAMES:
            hint = suggestion(str(name), _NAMES) or f"; known are {', '.join(_NAMES)}"
            raise ConfigError(f"unknown setting {name}{hint}")


def _normal(name: str, value: Any) -> Any:
    """A number in the type of the setting's default, where that changes nothing of its value: 1 and 1.0 are one setting."""
    default = getattr(_DEFAULTS, name)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not one of true, false")
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        return tuple(_as_float(item) for item in value)
    if isinstance(default, float):
        return _as_float(value)
    if isinstance(value, float) and value.is_integer() and not isinstance(default, bool):
        return int(value)
    return value


def _as_float(value: Any) -> Any:
    return float(value) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
