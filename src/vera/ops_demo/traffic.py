"""Load: clients that ask about documents, one question after the other, each as a visitor who keeps its key."""

from __future__ import annotations

import json
import secrets
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self

from vera.bench.workload import document_text
from vera.errors import VeraError
from vera.ops_demo.settings import OpsDemo

QUESTIONS = (
    "What is this text about?",
    "Name two things that the text explains.",
    "Summarise the text in one sentence.",
    "What should a beginner remember of it?",
)
_TIMEOUT_SECONDS = 600.0
_JOIN_SECONDS = 1.0
_MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Visit:
    """One request that was answered."""

    visitor: str
    begun: float
    """time.monotonic."""
    seconds: float
    prompt_tokens: int
    fidelity: str
    arm: str | None
    version: str | None


class Traffic:
    """A context manager: clients ask while it is entered. Any thread may look."""

    def __init__(self, url: str, demo: OpsDemo) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._demo = demo
        self._documents = documents(demo.num_documents, demo.document_characters)
        self._name = secrets.token_hex(4)
        self._numbers = count()
        self._lock = threading.Lock()
        self._visits: list[Visit] = []
        self._failures: list[str] = []
        self._ending = threading.Event()
        # Not waited for at an interpreter's end: an answer may take minutes.
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(demo.num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def visits(self, since: float = 0.0) -> list[Visit]:
        """Those answered by now that began at `since` or later."""
        with self._lock:
            return [visit for visit in self._visits if visit.begun >= since]

    def check(self) -> None:
        """Raises VeraError if requests have failed."""
        with self._lock:
            failures, answered = list(self._failures), len(self._visits)
        if failures:
            raise VeraError(f"{len(failures)} of {len(failures) + answered} requests failed; the first: {failures[0]}")

    def _ask_on(self) -> None:
        while not self._ending.is_set() and len(self._failures) < _MAX_FAILURES:
            with self._lock:
                number = next(self._numbers)
            try:
                visit = self._ask(number, f"visitor-{self._name}-{_visitor(number)}")
            except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
                if not self._ending.is_set():
                    with self._lock:
                        self._failures.append(_told(error))
                continue
            with self._lock:
                self._visits.append(visit)
            self._ending.wait(self._demo.think_seconds)

    def _ask(self, number: int, visitor: str) -> Visit:
        document = self._documents[number % len(self._documents)]
        question = QUESTIONS[number // len(self._documents) % len(QUESTIONS)]
        body = {
            "messages": [{"role": "user", "content": f"{document}\n\n{question}"}],
            "max_tokens": self._demo.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "user": visitor,
        }
        begun = time.monotonic()
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            usage: dict[str, Any] = json.loads(answer.read())["usage"]
        vera = usage["vera"]
        return Visit(
            visitor=visitor,
            begun=begun,
            seconds=time.monotonic() - begun,
            prompt_tokens=usage["prompt_tokens"],
            fidelity=vera["fidelity"],
            arm=vera["arm"],
            version=vera["params_version"],
        )


def _visitor(number: int) -> int:
    """Who asks this question: every third one is the second of somebody who came a little before."""
    return number - 5 if number >= 5 and number % 3 == 0 else number


def documents(number: int, characters: int) -> list[str]:
    """Parts of the text that benchmarks read, far from each other."""
    text = document_text()
    stride = len(text) // number
    return [text[index * stride : index * stride + characters] for index in range(number)]


def _told(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code}: {error.read(500).decode('utf-8', 'replace')}"
    return f"{type(error).__name__}: {error}"
