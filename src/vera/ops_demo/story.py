"""The demonstration from start to end."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from vera.errors import VeraError
from vera.ops_demo.service import Service
from vera.ops_demo.settings import PROFILE, Candidate, OpsDemo
from vera.ops_demo.traffic import Traffic, Visit
from vera.ops_demo.watch import Ending, watch_rollout
from vera.params import ParameterStore

_POLL_SECONDS = 0.5
_NARROWEST = 80


def run_ops_demo(demo: OpsDemo, console: Console, *, keep: bool) -> dict[str, Any]:
    """Shows everything on `console`; returns what came of it, JSON-ready. With `keep` it serves on until Ctrl-C.

    Raises VeraError for whatever did not go as it should; the service has ended then, and its folder is gone.
    """
    with tempfile.TemporaryDirectory(prefix="vera-demo-ops-") as folder, ExitStack() as stack:
        service = Service(demo.model, Path(folder), demo.serve_options, shadow_share=demo.shadow_share)
        console.print("A service with an adaptive cache follows a profile, of which no version is active yet:", highlight=False)
        _print_command(console, service.command)
        with console.status("loading the model"):
            stack.enter_context(service)
        store = stack.enter_context(ParameterStore(service.store))
        story = _Story(demo, console, service, stack.enter_context(Traffic(service.url, demo)), store)
        result = story.tell()
        story.look(keep=keep)
        if keep:
            story.serve_on()
        return result


class _Story:
    def __init__(self, demo: OpsDemo, console: Console, service: Service, traffic: Traffic, store: ParameterStore) -> None:
        self._demo = demo
        self._console = console
        self._service = service
        self._traffic = traffic
        self._store = store

    def tell(self) -> dict[str, Any]:
        begun = time.monotonic()
        baseline = self._baseline()
        good = self._roll_out(self._demo.good, "A version, rolled out from native")
        if not good.promoted:
            raise VeraError(f"the good candidate {good.candidate} was rolled back by {good.author}: {good.reason}")
        again = self._check_arms(good.candidate)
        self._compare()
        bad = self._roll_out(self._demo.bad, "A bad version")
        if bad.promoted:
            raise VeraError(f"the bad candidate {bad.candidate} was promoted by {bad.author}: {bad.reason}")
        degraded = self._degrade()
        return {
            "baseline": baseline,
            "good": good.to_dict(),
            "bad": bad.to_dict(),
            "degraded": degraded,
            "visitors_that_came_again": again,
            "requests": len(self._traffic.visits()),
            "seconds": round(time.monotonic() - begun, 1),
        }

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _baseline(self) -> dict[str, Any]:
        demo, console = self._demo, self._console
        self._title("1. The baseline: native")
        console.print(
            f"{demo.num_clients} clients ask questions about {demo.num_documents} documents. Without a version all answers are "
            "native: what the candidate is compared with.",
            highlight=False,
        )
        visits = self._wait_for(demo.baseline_requests, 0.0, "answers")
        native = self._service.ask("/admin/stats")["operations"]["modes"]["native"]
        tokens = [visit.prompt_tokens for visit in visits]
        console.print(
            f"  {native['requests']} answers, {native['errors']} failed; prompts of {min(tokens):,} to {max(tokens):,} tokens; "
            f"P99: first token {_seconds(native['ttft_p99'])}, between tokens {_seconds(native['itl_p99'])}",
            highlight=False,
        )
        if others := {visit.fidelity for visit in visits} - {"native"}:
            raise VeraError(f"answers of the baseline were {', '.join(sorted(others))} instead of native")
        return {name: native[name] for name in ("requests", "errors", "ttft_p99", "itl_p99")}

    def _roll_out(self, candidate: Candidate, title: str) -> Ending:
        number = 2 if candidate is self._demo.good else 3
        self._title(f"{number}. {title}: {candidate.reason}")
        changes = [word for change in candidate.changes for word in ("--set", change)]
        self._vera("params", "create", PROFILE, *changes, "--reason", candidate.reason, "--store", str(self._service.store))
        ref = self._store.versions(PROFILE)[-1].ref
        limits = [word for limit in candidate.limits for word in ("--limit", limit)]
        plan = ("--plan", candidate.plan, *limits)
        self._vera("rollout", "start", ref, *plan, "--reason", candidate.reason, "--url", self._service.url, shows=False)
        if number == 2:
            self._console.print(
                "For a demonstration the steps are short and the samples few, and latencies are not compared: on a small, busy "
                "machine they are noise. Divergence from native and audited errors are judged as in earnest.",
                style="dim",
                highlight=False,
            )
        return watch_rollout(
            self._store,
            lambda: self._service.ask("/admin/rollout"),
            self._console,
            check=self._check,
            patience_seconds=self._demo.patience_seconds,
        )

    def _compare(self) -> None:
        operations = self._service.ask("/admin/stats")["operations"]
        self._console.print(f"  active by now: {operations['version']['ref']}; since the start:", highlight=False)
        for mode, shown in operations["modes"].items():
            self._console.print(
                f"    {mode:<9}{shown['requests']} answers; P99: first token {_seconds(shown['ttft_p99'])}, "
                f"between tokens {_seconds(shown['itl_p99'])}",
                style="dim",
                highlight=False,
            )

    def _degrade(self) -> dict[str, int]:
        self._title("4. The degrade switch")
        url = ("--url", self._service.url)
        self._vera("degrade", "on", "--reason", "to see it at work", *url)
        degraded = self._arms_since(time.monotonic(), "degraded answers")
        if set(degraded) != {"native"}:
            raise VeraError(f"answers of the degraded service were {', '.join(sorted(degraded))} instead of native")
        self._console.print(f"  {degraded.total()} requests since then: all native", highlight=False)
        self._vera("degrade", "off", "--reason", "seen", *url)
        adaptive = self._arms_since(time.monotonic(), "adaptive answers")
        if set(adaptive) != {"bounded"}:
            raise VeraError(f"answers after degrading were {', '.join(sorted(adaptive))} instead of bounded")
        self._console.print(f"  {adaptive.total()} requests since then: all adaptive again", highlight=False)
        self._vera("degrade", "auto", "--reason", "the breaker watches again", *url)
        return {"native": degraded.total(), "adaptive": adaptive.total()}

    def _check_arms(self, candidate: str) -> int:
        """How many visitors came again while the candidate's share grew; VeraError for one who was taken back to native."""
        came: dict[str, list[Visit]] = {}
        for visit in sorted(self._traffic.visits(), key=lambda visit: visit.begun):
            if (visit.arm, visit.version) in (("stable", None), ("candidate", candidate)):
                came.setdefault(visit.visitor, []).append(visit)
        for visitor, visits in came.items():
            for before, after in pairwise(visits):
                if before.version == candidate and after.version is None and after.begun >= before.begun + before.seconds:
                    raise VeraError(f"{visitor} was served with {candidate}, and natively later in the same rollout")
        again = sum(len(visits) > 1 for visits in came.values())
        self._console.print(f"  {again} visitors came again meanwhile; none was taken back from the candidate", highlight=False)
        return again

    # -- the end -------------------------------------------------------------------------------------------------------

    def look(self, *, keep: bool) -> None:
        """Where everything is that was shown."""
        service, console = self._service, self._console
        self._title("5. Where to look")
        self._vera("params", "history", PROFILE, "--limit", "12", "--store", str(service.store))
        self._vera("heat", str(service.heat_log))
        for what, where in (
            ("the page", f"{service.url}/dashboard, with the admin key {service.admin_key}"),
            ("Prometheus", f"{service.url}/metrics"),
            ("the trail", f"vera params history {PROFILE} --store {service.store}"),
            ("the heat", f"vera heat {service.heat_log}"),
            ("commands", f"export VERA_ADMIN_KEY={service.admin_key}; vera rollout status --url {service.url}"),
            ("the flow", "docs/operations.md: all of it, step by step"),
        ):
            console.print(f"  [bold]{what:<12}[/]", end="", highlight=False)
            console.print(where, markup=False, highlight=False, soft_wrap=True)
        if not keep:
            console.print("The service ends now, and its folder goes with it; with --keep it serves on.", highlight=False)

    def serve_on(self) -> None:
        """Until Ctrl-C."""
        self._console.print("The clients go on asking. Ctrl-C ends the service and removes its folder.", highlight=False)
        try:
            while True:
                self._check()
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._console.print("\nending", style="dim")

    # -- details -------------------------------------------------------------------------------------------------------

    def _vera(self, *words: str, shows: bool = True) -> None:
        """Runs another `vera` command, and shows it with what it prints."""
        _print_command(self._console, shlex.join(["vera", *words]))
        printed = self._service.run(*words, width=max(_NARROWEST, self._console.width) - 2)
        if shows:
            for line in printed.splitlines():
                self._console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def _arms_since(self, since: float, what: str) -> Counter[str]:
        visits = self._wait_for(self._demo.degraded_requests, since, what)
        return Counter(visit.fidelity for visit in visits)

    def _wait_for(self, number: int, since: float, what: str) -> list[Visit]:
        """The answers to requests that began since then, once there are so many."""
        deadline = time.monotonic() + self._demo.patience_seconds
        with self._console.status("") as line:
            while len(visits := self._traffic.visits(since)) < number:
                self._check()
                if time.monotonic() > deadline:
                    raise VeraError(
                        f"after {self._demo.patience_seconds:.0f} s there were {len(visits)} of {number} {what}; "
                        "this machine may be too busy; try again when it is idle"
                    )
                line.update(f"{len(visits)} of {number} {what}")
                time.sleep(_POLL_SECONDS)
        return visits

    def _check(self) -> None:
        self._service.check()
        self._traffic.check()

    def _title(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold", markup=False, highlight=False)


def _print_command(console: Console, command: str) -> None:
    console.print(f"$ {command}", style="cyan", markup=False, highlight=False, soft_wrap=True)


def _seconds(value: Any) -> str:
    return "-" if value is None else f"{float(value):.3f} s"
