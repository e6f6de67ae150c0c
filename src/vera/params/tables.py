"""The store as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from vera.params.records import Event, Verification, Version
from vera.params.settings import Difference, change_of, checked, full_settings, setting_names

_MINUTES = 16
"""Letters of an ISO time up to its minutes."""


def profile_table(versions: Mapping[str, Sequence[Version]], active: Mapping[str, Version | None]) -> Table:
    """One profile a row."""
    table = _table("profile", "active", "newest", "newest by")
    for name, of_profile in versions.items():
        newest = of_profile[-1]
        now = active[name]
        row = [name, str(now.number) if now else "-", str(newest.number), newest.author, newest.reason]
        table.add_row(*map(Text, row))
    return table


def versions_table(versions: Sequence[Version], active: Version | None) -> Table:
    """One version a row, the oldest first."""
    table = _table("version", "hash", "from", "by", "when (UTC)")
    for version in versions:
        mark = " (active)" if active is not None and active.number == version.number else ""
        parent = version.parent or "-"
        row = [str(version.number) + mark, version.hash[:8], parent, version.author, _when(version.time), version.reason]
        table.add_row(*map(Text, row))
    return table


def version_table(version: Version, *, is_active: bool) -> RenderableType:
    """One version in whole; what is not a default is bold."""
    defaults = full_settings(checked({}))
    table = Table("setting", "value", "changes take effect", title=Text(f"{version.ref}{' (active)' if is_active else ''}"))
    for name in setting_names():
        value = version.settings.get(name, defaults[name])
        style = "bold" if value != defaults[name] else ""
        table.add_row(name, Text(_value(value), style), change_of(name).value)
    facts = f"{version.reason}\nby {version.author}, {_when(version.time)} UTC, from {version.parent or '-'}\nhash {version.hash}"
    return Group(table, Text(facts))


def difference_table(before: str, after: str, changes: Sequence[Difference]) -> Table:
    """One setting a row."""
    table = Table("setting", before, after, "takes effect")
    for change in changes:
        table.add_row(
            change.name, Text(_value(change.before)), Text(_value(change.after)), "live" if change.live else "at restart"
        )
    return table


def history_table(events: Sequence[Event]) -> Table:
    """One event a row, the newest last."""
    table = _table("event", "when (UTC)", "what", "version", "by")
    for event in events:
        table.add_row(*map(Text, [str(event.seq), _when(event.time), event.kind, event.ref or "-", event.author, event.reason]))
    return table


def print_verification(console: Console, result: Verification) -> None:
    """What was found, the worst first, and the head to note down."""
    for problem in result.problems:
        console.print(Text(f"bad: {problem.message}", style="red"))
    for note in result.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    verdict = "all as written" if result.ok else "not to be trusted"
    console.print(Text(f"{result.num_events} events, {result.num_versions} versions: {verdict}"))
    console.print(Text(f"head {result.head}"), soft_wrap=True)


def _table(*columns: str) -> Table:
    """With a last column `why`; a narrow terminal folds instead of cutting."""
    return Table(*(Column(name, overflow="fold") for name in (*columns, "why")))


def _when(time: str) -> str:
    return time[:_MINUTES].replace("T", " ")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
