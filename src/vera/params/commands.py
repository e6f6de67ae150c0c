"""`vera params`: one function a command."""

from __future__ import annotations

import getpass
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vera.errors import ConfigError, ParamsError, StoreError
from vera.params.exchange import export_yaml, import_yaml
from vera.params.records import Version
from vera.params.settings import checked, differences, full_settings
from vera.params.store import NATIVE, ParameterStore
from vera.params.tables import (
    difference_table,
    history_table,
    print_verification,
    profile_table,
    version_table,
    versions_table,
)

app = typer.Typer(
    help="Versions of the cache's settings: who changed what, when and why, and the way back.", no_args_is_help=True
)

Store = Annotated[
    Path | None, typer.Option("--store", help="The store's file; params.sqlite3 in Vera's home if not given. Made on first use.")
]
Author = Annotated[str | None, typer.Option("--author", help="Who makes this change; the system's user if not given.")]
Reason = Annotated[str, typer.Option("--reason", help="Why: kept for ever with the change.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]
Ref = Annotated[str, typer.Argument(help="PROFILE@NUMBER, or eight digits of its hash; a profile alone is its active version.")]


@app.command("list")
def list_command(
    profile: Annotated[str | None, typer.Argument(help="Its versions; if not given, all profiles.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """The profiles, or the versions of one."""
    with ParameterStore(store) as opened:
        names = opened.profiles() if profile is None else [profile]
        active = {name: opened.active(name) for name in names}
        versions = {name: opened.versions(name) for name in names}
        if as_json:
            print_json(
                {
                    "store": str(opened.path),
                    "head": opened.head,
                    "profiles": {
                        name: {"active": _ref(active[name]), "versions": [version.to_dict() for version in versions[name]]}
                        for name in names
                    },
                }
            )
        elif profile is None:
            Console().print(profile_table(versions, active))
        else:
            Console().print(versions_table(versions[profile], active[profile]))


@app.command()
def show(ref: Ref, store: Store = None, as_json: AsJson = False) -> None:
    """One version: its settings, which of them are live, who made it and why."""
    with ParameterStore(store) as opened:
        version = opened.find(ref)
        active = opened.active(version.profile)
    is_active = active is not None and active.number == version.number
    if as_json:
        print_json({**version.to_dict(), "ref": version.ref, "active": is_active})
    else:
        Console().print(version_table(version, is_active=is_active))


@app.command()
def diff(
    before: Ref,
    after: Annotated[
        str | None, typer.Argument(help="If not given, the first one is compared with what it was derived from.")
    ] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """What differs between two versions, and whether a running service can take it over. `native` stands for a native cache."""
    with ParameterStore(store) as opened:
        if after is None:
            version = opened.find(before)
            old, old_name = _settings_of(opened, version.parent or NATIVE)
            new, new_name = dict(version.settings), version.ref
        else:
            old, old_name = _settings_of(opened, before)
            new, new_name = _settings_of(opened, after)
    changes = differences(old, new)
    if as_json:
        changed = [
            {"name": change.name, "before": change.before, "after": change.after, "live": change.live} for change in changes
        ]
        print_json(
            {"before": old_name, "after": new_name, "live": all(change.live for change in changes), "differences": changed}
        )
    elif changes:
        Console().print(difference_table(old_name, new_name, changes))
    else:
        Console().print(f"{old_name} and {new_name} have the same settings", highlight=False)


@app.command()
def create(
    profile: Annotated[str, typer.Argument(help="An existing profile, or a new one: small letters, digits, hyphens.")],
    reason: Reason,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting that changes, such as attention_tolerance=0.02; repeatable.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="What it is derived from; if not given, the profile's active or newest version."),
    ] = None,
    activate: Annotated[bool, typer.Option("--activate", help="Activate it at once.")] = False,
    author: Author = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """A new version: another one with some settings changed. A new profile begins with an adaptive cache's defaults."""
    changes, by = _parse(settings or []), author_or_user(author)
    with ParameterStore(store) as opened, opened.changing():
        if source is None and profile not in opened.profiles():
            base, parent = full_settings(checked({"mode": "adaptive"})), None
        else:
            parent = opened.find(source or profile)
            base = dict(parent.settings)
        version = opened.create(profile, {**base, **changes}, author=by, reason=reason, parent=parent)
        if activate:
            opened.activate(version, author=by, reason=reason)
        before = base if parent is not None else full_settings(checked({}))
    if as_json:
        print_json({**version.to_dict(), "ref": version.ref, "active": activate})
        return
    console = Console()
    console.print(difference_table(_ref(parent) or NATIVE, version.ref, differences(before, version.settings)))
    console.print(f"{version.ref} is {'active' if activate else 'created, and not active yet'}", highlight=False)


@app.command()
def activate(
    ref: Annotated[str, typer.Argument(help="PROFILE@NUMBER, or eight digits of its hash.")],
    reason: Reason,
    author: Author = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Make a version the active one of its profile: services that follow the profile take it over."""
    with ParameterStore(store) as opened, opened.changing():
        before = opened.active(opened.get(ref).profile)
        version = opened.activate(ref, author=author_or_user(author), reason=reason)
    _print_switch(before, version, as_json=as_json)


@app.command()
def rollback(
    profile: Annotated[str, typer.Argument(help="The profile.")],
    reason: Reason,
    author: Author = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Back to the version that was active before; again, and one further back."""
    with ParameterStore(store) as opened, opened.changing():
        before = opened.active(profile)
        version = opened.rollback(profile, author=author_or_user(author), reason=reason)
    _print_switch(before, version, as_json=as_json)


@app.command()
def history(
    profile: Annotated[str | None, typer.Argument(help="Its events; if not given, all.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Such as activate, rollback, rollout or degrade.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most events, the latest ones.")] = 50,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """The audit trail, the newest last. It is shown even of a store that fails its verification."""
    with ParameterStore(store) as opened:
        events = opened.history(profile, kind=kind, limit=limit)
        path = str(opened.path)
    if as_json:
        print_json({"store": path, "events": [event.to_dict() for event in events]})
    else:
        Console().print(history_table(events))


@app.command()
def verify(
    head: Annotated[
        str | None, typer.Option("--head", help="NUMBER:HASH, noted down from an earlier verification: it must still be there.")
    ] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Walk the whole store and name the first event that was changed, lost or inserted. Exit code 1 if there is one."""
    with ParameterStore(store) as opened:
        result = opened.verify(head)
        path = opened.path
    if as_json:
        print_json({"store": str(path), **result.to_dict()})
    else:
        print_verification(Console(), result)
    if not result.ok:
        raise StoreError(
            f"{path} cannot be trusted: {result.problems[0].message}; put a copy back, or import an export elsewhere"
        )


@app.command()
def export(
    profiles: Annotated[list[str] | None, typer.Argument(help="Profiles; if not given, all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout if not given.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Versions with their reasons and authors, as YAML."""
    with ParameterStore(store) as opened:
        names = profiles or opened.profiles()
        text = export_yaml(opened, names)
        counts = {name: len(opened.versions(name)) for name in names}
    if output is not None:
        output.write_text(text, "utf-8")
    elif not as_json:
        sys.stdout.write(text)
    if as_json:
        print_json({"profiles": counts, "output": str(output) if output else None, **({} if output else {"yaml": text})})
    elif output is not None:
        Console().print(
            f"{sum(counts.values())} versions of {', '.join(names)} written to {output}", highlight=False, markup=False
        )


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="What `vera params export` wrote; `-` is stdin.")],
    reason: Reason,
    author: Author = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Append the versions of a file. Nothing is overwritten or activated; what is there already is left out."""
    text = _read(file)
    with ParameterStore(store) as opened:
        done = import_yaml(opened, text, author=author_or_user(author), reason=reason)
    added, present = [version.ref for version in done.added], [version.ref for version in done.present]
    if as_json:
        print_json({"added": added, "present": present})
        return
    console = Console()
    console.print(f"added: {', '.join(added) or 'nothing'}", highlight=False)
    if present:
        console.print(f"there already: {', '.join(present)}", highlight=False)


def _settings_of(store: ParameterStore, ref: str) -> tuple[dict[str, Any], str]:
    """Settings and name of a version, or of a native cache."""
    if ref == NATIVE:
        return full_settings(checked({})), NATIVE
    version = store.find(ref)
    return dict(version.settings), version.ref


def _parse(pairs: list[str]) -> dict[str, Any]:
    """`name=value` options as a dict; a value is JSON, or else text. A name given twice is refused."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{pair!r} is not of the form name=value, such as attention_tolerance=0.02")
        if name in settings:
            raise ConfigError(f"{name} is given twice; give it once")
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return settings


def author_or_user(given: str | None) -> str:
    """Who signs a change: the one that is given, or the system's user. Raises ConfigError if there is none."""
    if given is not None:
        return given
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError("the system does not say which user this is; name one with --author") from None


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ParamsError(f"{file} cannot be read: {error.strerror}; name a file that `vera params export` wrote") from None


def _print_switch(before: Version | None, after: Version, *, as_json: bool) -> None:
    old = dict(before.settings) if before is not None else full_settings(checked({}))
    changes = differences(old, after.settings)
    if as_json:
        restart = [change.name for change in changes if not change.live] if before is not None else []
        print_json({"before": _ref(before), "active": after.ref, "hash": after.hash, "needs_restart": restart})
        return
    console = Console()
    if before is not None and changes:
        console.print(difference_table(before.ref, after.ref, changes))
    console.print(f"{after.ref} is active; before it: {_ref(before) or 'none'}", highlight=False)


def _ref(version: Version | None) -> str | None:
    return version.ref if version is not None else None


def print_json(value: Any) -> None:
    """One line on stdout."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
