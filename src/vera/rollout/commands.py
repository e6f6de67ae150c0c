"""`vera rollout` and `vera degrade`: what a running service is told, over its admin API."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vera.errors import ConfigError, ParamsError
from vera.params.commands import author_or_user, print_json

rollout_app = typer.Typer(
    help="Gradual rollouts of a running service: a share of the requests, a look, then more.", no_args_is_help=True
)
degrade_app = typer.Typer(help="The degrade switch of a running service: native at once, and the way back.", no_args_is_help=True)

_TIMEOUT_SECONDS = 60.0
_KEY = "VERA_ADMIN_KEY"

Url = Annotated[str, typer.Option("--url", help="Where the service listens. Its admin key comes from VERA_ADMIN_KEY.")]
Author = Annotated[str | None, typer.Option("--author", help="Who makes this change; the system's user if not given.")]
Reason = Annotated[str, typer.Option("--reason", help="Why: kept for ever with the change.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]

_DEFAULT_URL = "http://127.0.0.1:8000"


@rollout_app.command()
def start(
    candidate: Annotated[str, typer.Argument(help="The version, as PROFILE@NUMBER.")],
    reason: Reason,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Steps as WEIGHT[:PAUSE[:SAMPLES]],... (percent, seconds, requests).")
    ] = None,
    patience: Annotated[float | None, typer.Option("--patience", help="Seconds a step may wait for samples.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="What the candidate may be, such as itl_ratio=1.5; repeatable.")
    ] = None,
    native: Annotated[bool, typer.Option("--native", help="Compare with a native cache although a version is active.")] = False,
    author: Author = None,
    url: Url = _DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Serve a small share of the requests with a version, and more of them as long as the guard finds all well."""
    body: dict[str, Any] = {"candidate": candidate, "plan": plan, "patience_seconds": patience, "native": native}
    body |= {"limits": _limits(limit) if limit else None, **_signed(author, reason)}
    _show_rollout(_ask(url, "/admin/rollout/start", body), as_json=as_json)


@rollout_app.command()
def status(url: Url = _DEFAULT_URL, as_json: AsJson = False) -> None:
    """Where the latest rollout stands, what its arms have shown, and what the guard says."""
    _show_rollout(_ask(url, "/admin/rollout"), as_json=as_json)


@rollout_app.command()
def promote(
    reason: Reason,
    step: Annotated[bool, typer.Option("--step", help="Only to the next step.")] = False,
    author: Author = None,
    url: Url = _DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make the candidate the active version now."""
    _show_rollout(_ask(url, "/admin/rollout/promote", {**_signed(author, reason), "full": not step}), as_json=as_json)


def _add_change(name: str, text: str) -> None:
    def change(reason: Reason, author: Author = None, url: Url = _DEFAULT_URL, as_json: AsJson = False) -> None:
        _show_rollout(_ask(url, f"/admin/rollout/{name}", _signed(author, reason)), as_json=as_json)

    rollout_app.command(name, help=text)(change)


_add_change("abort", "Serve all requests as before, at once.")
_add_change("hold", "Keep the share as it is until `resume`; the guard goes on watching.")
_add_change("resume", "End every hold, the guard's too.")


def _add_override(name: str, override: str, text: str) -> None:
    def change(reason: Reason, author: Author = None, url: Url = _DEFAULT_URL, as_json: AsJson = False) -> None:
        _show_switch(_ask(url, "/admin/degrade", {"override": override, **_signed(author, reason)}), as_json=as_json)

    degrade_app.command(name, help=text)(change)


_add_override("on", "degraded", "Serve natively, running requests too, which lose no token; until `off` or `auto`.")
_add_override("off", "adaptive", "Serve adaptively until `auto`, whatever the breaker's signals say.")
_add_override("auto", "auto", "Let the breaker decide by what it sees; it goes back by itself, carefully.")


@degrade_app.command("status")
def degrade_status(url: Url = _DEFAULT_URL, as_json: AsJson = False) -> None:
    """How the switch stands, since when, and why."""
    _show_switch(_ask(url, "/admin/degrade"), as_json=as_json)


# -- the service -------------------------------------------------------------------------------------------------------


def _ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The service's answer. Raises ParamsError with what it says when it refuses, and where it cannot be reached."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url {url!r} does not begin with http:// or https://")
    if not (key := os.environ.get(_KEY, "").strip()):
        raise ConfigError(f"{_KEY} is not set; set it to the admin key that the service was started with")
    data = None if body is None else json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            return _object(answer.read())
    except urllib.error.HTTPError as error:
        told = _object(error.read()).get("error")
        message = told.get("message") if isinstance(told, dict) else None
        raise ParamsError(f"the service answers {error.code}: {message or error.reason}") from None
    except (urllib.error.URLError, OSError) as error:
        cause = getattr(error, "reason", error)
        raise ParamsError(f"no service answers at {url} ({cause}); name it with --url") from None


def _object(text: bytes) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _signed(author: str | None, reason: str) -> dict[str, str]:
    return {"author": author_or_user(author), "reason": reason}


def _limits(pairs: list[str]) -> dict[str, Any]:
    limits = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            limits[name.strip()] = None if value.strip() in ("none", "null") else json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--limit {pair!r} is not of the form NAME=NUMBER, such as itl_ratio=1.5, or NAME=none")
    return limits


# -- for people --------------------------------------------------------------------------------------------------------


def _show_rollout(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    console = Console()
    if (rollout := status.get("rollout")) is None:
        console.print("no rollout yet; `vera rollout start PROFILE@NUMBER --reason WHY` begins one", highlight=False)
        return
    steps = " > ".join(
        f"[bold]{step['weight']:g}%[/bold]" if index == rollout["step"] else f"{step['weight']:g}%"
        for index, step in enumerate(rollout["plan"]["steps"])
    )
    console.print(f"rollout {rollout['id']}: {rollout['baseline'] or 'native'} -> {rollout['candidate']}, {rollout['state']}")
    console.print(f"steps: {steps}")
    console.print(f"latest: {rollout['reason']}", markup=False)
    if verdict := status.get("verdict"):
        console.print(f"guard: {verdict['decision']}: {verdict['reason']}", markup=False)
    console.print(_arms_table(status["arms"]))


_ARM_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("requests", "requests", "{:,.0f}".format),
    ("error_rate", "failed", "{:.2%}".format),
    ("ttft_p99", "first token P99", "{:.3f} s".format),
    ("itl_p99", "between tokens P99", "{:.4f} s".format),
    ("recompute_share", "recompute share", "{:.1%}".format),
    ("audit_error", "audited error", "{:.4f}".format),
    ("shadow_tokens", "shadow tokens", "{:,.0f}".format),
    ("shadow_kl", "divergence from native", "{:.2e} nats".format),
    ("shadow_agreement", "agreement with native", "{:.2%}".format),
)


def _arms_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("", *arms, box=None, pad_edge=False)
    for name, title, form in _ARM_ROWS:
        values = [arm.get(name) for arm in arms.values()]
        table.add_row(title, *("-" if value is None else value if isinstance(value, str) else form(value) for value in values))
    return table


def _show_switch(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    meaning = {"closed": "adaptive", "open": "native: degraded", "half-open": "adaptive for a few again"}[status["state"]]
    override = "" if status["override"] == "none" else " (by hand)"
    console = Console()
    console.print(f"{status['state']}: {meaning}{override}, for {status['seconds']:.0f} s", highlight=False)
    console.print(f"reason: {status['reason']}", markup=False, highlight=False)
    if "moved" in status:
        console.print(f"running requests moved: {status['moved']}", highlight=False)
    if status["failure"]:
        console.print(f"not recorded yet: {status['failure']}", markup=False, highlight=False)
