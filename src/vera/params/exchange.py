"""Versions as YAML, to read, to keep elsewhere and to bring into another store."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml

from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.params.records import Version
from vera.params.settings import checked, content_hash, full_settings
from vera.params.store import ParameterStore, signature

_FORMAT_KEY = "vera_parameters"
_FORMAT = 1
_MAX_BYTES = 4 * 2**20
_FIELDS = ("version", "hash", "author", "reason", "time", "parent", "settings")
_REQUIRED = ("author", "reason", "settings")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    added: tuple[Version, ...]
    present: tuple[Version, ...]
    """Versions of this store that have the settings of one in the file already; nothing was added for them."""


def export_yaml(store: ParameterStore, profiles: Iterable[str] | None = None) -> str:
    """All versions of the profiles (None: of all), with who made them and why. What is active is not in it."""
    names = store.profiles() if profiles is None else list(profiles)
    document = {_FORMAT_KEY: _FORMAT, "profiles": {name: [_entry(version) for version in store.versions(name)] for name in names}}
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def import_yaml(store: ParameterStore, text: str, *, author: str, reason: str) -> Imported:
    """Appends the versions of a file under the next free numbers, all of them or, if one is refused, none.

    They keep their own author, reason and time; `author` and `reason` are of the import. Versions whose settings the profile has
    already are left out, so importing twice adds nothing. Nothing is activated and nothing overwritten. Raises ConfigError
    where the file is wrong, with the place.
    """
    entries = _read(text)
    added, present = [], []
    refs: dict[str, str] = {}
    with store.changing():
        for profile, place, entry, config in entries:
            known = store.versions(profile) if profile in store.profiles() else []
            digest = content_hash(full_settings(config))
            if twin := next((version for version in known if version.hash == digest), None):
                present.append(twin)
                version = twin
            else:
                origin: dict[str, Any] = {name: entry[name] for name in ("author", "reason", "time", "version") if name in entry}
                version = store.add_imported(
                    profile, config, author=author, reason=reason, origin=origin, parent=refs.get(str(entry.get("parent")))
                )
                added.append(version)
            refs[f"{profile}@{entry.get('version', place)}"] = version.ref
    return Imported(tuple(added), tuple(present))


def _entry(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "hash": version.hash,
        "author": version.author,
        "reason": version.reason,
        "time": version.time,
        "parent": version.parent,
        "settings": dict(version.settings),
    }


def _read(text: str) -> list[tuple[str, int, dict[str, Any], CacheConfig]]:
    """Profile, place in its list, entry and settings of each version in the file, checked."""
    document = _load(text)
    if not isinstance(document, dict) or document.get(_FORMAT_KEY) != _FORMAT:
        raise ConfigError(f"this is no export of parameter versions: it must begin with `{_FORMAT_KEY}: {_FORMAT}`")
    if unknown := set(map(str, document)) - {_FORMAT_KEY, "profiles"}:
        raise ConfigError(f"unknown {', '.join(sorted(unknown))}; beside {_FORMAT_KEY} there is only `profiles`")
    profiles = document.get("profiles")
    if not isinstance(profiles, dict) or not all(isinstance(entries, list) for entries in profiles.values()):
        raise ConfigError("`profiles` must map names to lists of versions")
    return [
        (str(profile), place, *_check_entry(f"{profile}, entry {place}", entry))
        for profile, entries in profiles.items()
        for place, entry in enumerate(entries, 1)
    ]


def _check_entry(where: str, entry: Any) -> tuple[dict[str, Any], CacheConfig]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a mapping; each version has {', '.join(_FIELDS)}")
    if unknown := sorted(set(map(str, entry)) - set(_FIELDS)):
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    if missing := [name for name in _REQUIRED if not entry.get(name)]:
        raise ConfigError(f"{where}: {', '.join(missing)} is missing")
    if isinstance(moment := entry.get("time"), datetime):
        entry = {**entry, "time": moment.isoformat()}
    for name in ("author", "reason", "time", "hash", "parent"):
        if entry.get(name) is not None and not isinstance(entry[name], str):
            raise ConfigError(f"{where}: {name}={entry[name]!r} is not a text; put it in quotes")
    if isinstance(moment := entry.get("time"), str) and not _is_time(moment):
        raise ConfigError(f"{where}: time={moment!r} is no ISO 8601 time, such as 2026-01-31T12:00:00Z")
    if not isinstance(entry["settings"], dict):
        raise ConfigError(f"{where}: settings must map names to values")
    try:
        author, reason = signature(entry["author"], entry["reason"])
        config = checked(entry["settings"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    stored = entry.get("hash")
    if stored is not None and stored not in (content_hash(entry["settings"]), content_hash(full_settings(config))):
        raise ConfigError(
            f"{where}: the settings are not those that were exported as {stored[:12]}; leave `hash` out if that is meant"
        )
    return {**entry, "author": author, "reason": reason}, config


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _load(text: str) -> Any:
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"the file has {len(text)} characters; at most {_MAX_BYTES} are read")
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"this is not the YAML of an export: {' '.join(str(error).split())}") from None


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Without anchors: each value is written where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses what would be taken silently in another sense: names given twice, and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not taken", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        if twice := {str(name) for name in names if names.count(name) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(sorted(twice))} is given twice", node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))
"""1e-3 is a number, although YAML 1.1 wants 1.0e-3."""
