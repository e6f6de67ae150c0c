"""`vera serve` as a child on a free port of loopback, watched while it works."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from vera.bench.memory import parse_status
from vera.errors import VeraError

_START_SECONDS = 300.0
"""Loading a model that is converted already takes seconds; a busy machine may need more."""
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 1.0
"""Between two looks at its memory. A peak that is shorter can be missed."""
_LAST_LINES = 20


class ServiceFailed(VeraError):
    """The service did not start, or died; the message has its last words."""


class WatchedService:
    """Use it as a context manager: inside, the service takes requests, and its memory is looked at once a second."""

    def __init__(self, arguments: Sequence[str], *, threads: int) -> None:
        self._arguments = ["--host", "127.0.0.1", "--port", "0", "--grace", "0", "--threads", str(threads), *arguments]
        self._threads = threads
        self._admin_key = secrets.token_urlsafe(24)
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.base_url = ""
        self.peak_cache_bytes = 0
        """Most bytes of fast memory in use, what is kept for reuse included."""
        self.peak_warm_bytes = 0
        self.peak_process_bytes = 0
        """Private memory; a mapped warm file is not in it."""
        self.cpu_seconds = 0.0
        """What its threads have worked since it was ready, up to the last look."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vera.bench.workloads.launch", str(os.getpid()), *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(self._admin_key, self._threads),
            start_new_session=True,  # Ctrl-C ends the run first, then the service
        )
        self._reader = threading.Thread(target=self._read, name="vera-service-log", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="vera-service-memory", daemon=True)
        self._reader.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self._cpu_at_start = _cpu_seconds(self._process.pid)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._watcher.join()
        self._stop()

    def stats(self) -> dict[str, Any]:
        """`/admin/stats`. Raises ServiceFailed if the service is gone."""
        try:
            request = urllib.request.Request(
                f"{self.base_url}/admin/stats", headers={"Authorization": f"Bearer {self._admin_key}"}
            )
            with _NO_PROXY.open(request, timeout=60) as response:
                stats: dict[str, Any] = json.load(response)
                return stats
        except OSError as error:
            raise ServiceFailed(f"{self.base_url}/admin/stats cannot be read ({error}){self._last_words()}") from None

    def look(self) -> None:
        """Takes what it holds now into the peaks."""
        cache = (self.stats()["cache"] or {}).get("bytes", {})
        self.peak_cache_bytes = max(self.peak_cache_bytes, cache.get("hot", {}).get("used", 0))
        self.peak_warm_bytes = max(self.peak_warm_bytes, cache.get("warm", {}).get("used", 0))
        status = Path(f"/proc/{self._process.pid}/status").read_text(errors="replace")
        self.peak_process_bytes = max(self.peak_process_bytes, parse_status(status).private_bytes)
        self.cpu_seconds = _cpu_seconds(self._process.pid) - self._cpu_at_start

    def _wait_until_ready(self) -> None:
        if not self._ready.wait(_START_SECONDS):
            raise ServiceFailed(f"the service was not ready within {_START_SECONDS:g} s{self._last_words()}")
        if self._ended.is_set():
            raise ServiceFailed(f"the service did not start{self._last_words()}")

    def _read(self) -> None:
        """Follows the log to its end. It says where the service listens and when it takes requests; the rest is last words."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = _event(line)
            match event.get("message"):
                case "listening":
                    self.base_url = f"http://{event['addresses'][0]}"
                case "ready":
                    self._ready.set()
                case message if not event or event.get("level") != "info":
                    self._last_lines.append(str(message or line).strip())
        self._ended.set()
        self._ready.set()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                self.look()
            except (OSError, KeyError, psutil.Error, VeraError):  # it has gone; whoever sends requests will say so
                return

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _last_words(self) -> str:
        return f": {self._last_lines[-1]}" if self._last_lines else ""


def _cpu_seconds(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _environment(admin_key: str, threads: int) -> dict[str, str]:
    """No keys of the caller's own: nobody else knows the port, and `bench serve` sends none."""
    kept = {name: value for name, value in os.environ.items() if name != "VERA_API_KEY"}
    return kept | {"VERA_ADMIN_KEY": admin_key, "OMP_NUM_THREADS": str(threads)}


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
