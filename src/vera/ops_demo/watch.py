"""A rollout, told as it goes: its events from the audit trail, and in between what the arms have shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vera.errors import VeraError
from vera.ops_demo.settings import PROFILE
from vera.params import Event, ParameterStore

_POLL_SECONDS = 0.5
_OVER = ("rollout.promote", "rollout.abort")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rollout ended."""

    candidate: str
    promoted: bool
    author: str
    reason: str
    weights: tuple[float, ...]
    """Percent: each step that was reached."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "candidate": self.candidate,
            "promoted": self.promoted,
            "author": self.author,
            "reason": self.reason,
            "weights": list(self.weights),
            "seconds": round(self.seconds, 1),
        }


def watch_rollout(
    store: ParameterStore,
    status: Callable[[], dict[str, Any]],
    console: Console,
    *,
    check: Callable[[], None],
    patience_seconds: float,
) -> Ending:
    """Prints the latest rollout's events until it is over. `status` is what the service says of it; `check` may raise.

    Raises VeraError if it takes longer than `patience_seconds`.
    """
    begun = time.monotonic()
    started = [event for event in store.history(PROFILE, kind="rollout") if event.kind == "rollout.start"][-1]
    steps = [step["weight"] for step in started.payload["plan"]["steps"]]
    baseline = started.payload["baseline"] or "native"
    seen, weights = started.seq, [steps[0]]
    told = status()
    _print(console, f"{steps[0]:g}%", f"of the visitors get {started.payload['candidate']}, the others {baseline}")
    with console.status("") as line:
        while time.monotonic() - begun < patience_seconds:
            check()
            for event in store.events(seen):
                seen = event.seq
                if event.profile != PROFILE:
                    continue
                _print_event(console, event, steps)
                if event.kind == "rollout.step":
                    weights.append(event.payload["weight"])
                if event.kind in _OVER:
                    seconds = time.monotonic() - begun
                    promoted = event.kind == "rollout.promote"
                    return Ending(str(event.ref), promoted, event.author, event.reason, tuple(weights), seconds)
            told = status()
            line.update(_line(told))
            time.sleep(_POLL_SECONDS)
    verdict = (told.get("verdict") or {}).get("reason", "nothing yet")
    raise VeraError(
        f"the rollout was not over after {patience_seconds:.0f} s, at {weights[-1]:g}%; the guard says: {verdict}. "
        "This machine may be too busy; try again when it is idle"
    )


def _print_event(console: Console, event: Event, steps: list[float]) -> None:
    if event.kind == "rollout.step":
        _print(console, f"{event.payload['weight']:g}%", f"{event.author}: {event.reason}")
    elif event.kind == "rollout.hold":
        _print(console, "held", f"{event.author}: {event.reason}", style="yellow")
    elif event.kind == "rollout.resume":
        _print(console, "resumed", f"{event.author}: {event.reason}")
    elif event.kind == "rollout.promote":
        _print(console, "promoted", f"{event.author}: {event.reason}", style="green")
    elif event.kind == "rollout.abort":
        _print(console, "rolled back", f"{event.author}: {event.reason}", style="red")
    elif event.kind == "degrade":
        _print(console, "degrade switch", f"{event.payload['state']}, by {event.author}: {event.reason}", style="yellow")
    for arm, shown in event.payload.get("arms", {}).items():
        if shown["requests"]:
            console.print(f"                  {arm}: {_shown(shown)}", style="dim", highlight=False, soft_wrap=True)


def _print(console: Console, what: str, text: str, *, style: str = "bold") -> None:
    console.print(f"  {time.strftime('%H:%M:%S')}  [{style}]{what}[/]  ", end="", highlight=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _line(told: Mapping[str, Any]) -> str:
    if (verdict := told.get("verdict")) is None:
        return "the guard has not looked yet"
    counts = ", ".join(f"{arm} {shown['requests']}" for arm, shown in told["arms"].items())
    return f"requests: {counts}; guard: {verdict['reason']}"


def _shown(arm: Mapping[str, Any]) -> str:
    parts = [f"requests {arm['requests']}"]
    for name, form in (
        ("error_rate", "failed {:.0%}"),
        ("audit_error", "audited error {:.4f}"),
        ("shadow_kl", "divergence from native {:.1e} nats a token"),
        ("shadow_agreement", "same most likely token {:.1%}"),
    ):
        if (value := arm[name]) is not None:
            parts.append(form.format(float(value)))
    return ", ".join(parts)
