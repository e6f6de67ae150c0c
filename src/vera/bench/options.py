"""Options that several commands share."""

from __future__ import annotations

import json
from typing import Any

from vera.errors import ConfigError


def settings_from(pairs: list[str]) -> dict[str, Any]:
    """`name=value` options as a dict; a value is JSON, or else text. Raises ConfigError for one without `=`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not of the form name=value, such as attention_tolerance=0.05")
        try:
            settings[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            settings[name.strip()] = value
    return settings
