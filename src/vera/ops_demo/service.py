"""`vera serve` as a child process, and other `vera` commands beside it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vera.bench.signals import end_with
from vera.errors import VeraError
from vera.ops_demo.settings import PROFILE

_START_SECONDS = 300.0
_GRACE_SECONDS = 2
_END_SECONDS = 20.0
_ASK_SECONDS = 60.0
_POLL_SECONDS = 0.2


class Service:
    """A context manager: the service takes requests when it is entered, and has ended when it is left."""

    def __init__(self, model: str, folder: Path, options: tuple[str, ...], *, shadow_share: float) -> None:
        """Store, heat log and log lie in `folder`."""
        self.url = ""
        self.admin_key = secrets.token_urlsafe(16)
        self.store = folder / "params.sqlite3"
        self.heat_log = folder / "heat.jsonl"
        self.log = folder / "service.log"
        self._command = [
            *("serve", model, "--port", "0", "--profile", PROFILE, "--params-store", str(self.store)),
            *("--heat-log", str(self.heat_log), "--shadow-share", str(shadow_share), "--grace", str(_GRACE_SECONDS)),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises VeraError if the service ends while it starts, or takes longer than five minutes."""
        parent = os.getpid()
        bind: Callable[[], None] | None = (lambda: end_with(parent)) if sys.platform == "linux" else None
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C is for the demonstration, which ends the service in order.
            self._process = subprocess.Popen(
                _words(self._command), stderr=log, stdout=log, env=self._environment(), start_new_session=True, preexec_fn=bind
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    @property
    def command(self) -> str:
        """As a person would type it."""
        return " ".join(["vera", *self._command])

    def check(self) -> None:
        """Raises VeraError if the service has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise VeraError(f"the service has ended with exit code {code}; its last words: {self._last_words()}")

    def run(self, *words: str, width: int) -> str:
        """What another `vera` command prints for a terminal so wide. Raises VeraError with what it says when it fails."""
        environment = self._environment() | {"COLUMNS": str(width)}
        done = subprocess.run(
            _words(words), capture_output=True, text=True, env=environment, timeout=_START_SECONDS, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise VeraError(f"`vera {' '.join(words)}` failed with exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout.rstrip()

    def ask(self, path: str) -> dict[str, Any]:
        """An answer of the admin API. Raises VeraError if there is none."""
        self.check()
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.admin_key}"})
        try:
            with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as answer:
                told: dict[str, Any] = json.loads(answer.read())
                return told
        except (urllib.error.URLError, OSError, ValueError) as error:
            self.check()
            raise VeraError(f"{self.url}{path} cannot be read: {error}; what the service did is in {self.log}") from None

    def _environment(self) -> dict[str, str]:
        # Keys of another service would shut this one's API.
        kept = {name: value for name, value in os.environ.items() if name != "VERA_API_KEY"}
        return kept | {"VERA_ADMIN_KEY": self.admin_key}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            told = {line["message"]: line for line in self._logged()}
            if "listening" in told and "ready" in told:
                self.url = f"http://{told['listening']['addresses'][0]}"
                return
            time.sleep(_POLL_SECONDS)
        raise VeraError(f"the service was not ready after {_START_SECONDS:.0f} s; its last words: {self._last_words()}")

    def _logged(self) -> list[dict[str, Any]]:
        """The whole lines of its log by now."""
        *lines, _ = self.log.read_text("utf-8", "replace").split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").split("\n")
        said = [line for line in lines if line and not line.startswith("{")] or [line for line in lines if line]
        return " ".join(said[-3:])[-800:] or "none"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()


def _words(command: list[str] | tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "vera.cli", *command]
