"""How a service that follows a profile of the parameter store starts: from its active version, and from its own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vera.config import LIVE_SETTINGS, CacheConfig
from vera.errors import ConfigError
from vera.params import ParameterStore
from vera.server.operations import Oversight


def follow_profile(
    profile: str, given: Mapping[str, Any], *, store: Path | None = None, shadow_share: float
) -> tuple[CacheConfig, Oversight]:
    """The cache that a service starts with, and what it is operated with. `given`: the settings that its own options name.

    With an active version: that one, with what is given in its place. Without one, requests are served natively over an adaptive
    cache until a version is activated or rolled out; with `mode` given as adaptive, they are served within bounds from the start.
    Raises ConfigError for settings that are the version's to say, UnknownVersion and StoreError.
    """
    if live := sorted(set(given) & LIVE_SETTINGS):
        raise ConfigError(
            f"{', '.join(live)} changes while a service runs, so the version of profile {profile!r} says it; "
            f"make one with `vera params create {profile} --set {live[0]}={given[live[0]]} --reason WHY`, or leave out --profile"
        )
    if given.get("mode") == "native":
        raise ConfigError(
            "mode 'native' cannot follow a profile, whose versions need an adaptive cache; leave out --profile, "
            "or the mode: until a version is active, requests are served natively"
        )
    opened = ParameterStore(store)
    try:
        active = opened.active(profile)
        if active is not None:
            config = replace(active.config(), **given)
        else:
            config = CacheConfig(**{"mode": "adaptive", **({} if "mode" in given else {"fidelity": "native"}), **given})
        return config, Oversight(opened, profile, pinned=frozenset(given) - {"mode"}, shadow_share=shadow_share)
    except BaseException:
        opened.close()
        raise


def follow_nothing(config: CacheConfig, *, shadow_share: float) -> Oversight | None:
    """For a service without a profile: the degrade switch, whose history lasts as long as the process. None: it is native."""
    if config.mode == "native":
        return None
    folder = TemporaryDirectory(prefix="vera-operations-")
    store = ParameterStore(Path(folder.name) / "params.sqlite3")
    return Oversight(store, None, keeps=False, shadow_share=shadow_share, folder=folder)
