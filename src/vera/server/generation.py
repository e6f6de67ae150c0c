"""From a request to its answers, whole or as a stream; what chats and completions share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vera.engine.request import FinishReason, Update
from vera.engine.sampler import TokenLogprob
from vera.server.disconnects import unless_gone
from vera.server.errors import as_api_error, deadline_exceeded
from vera.server.logs import RequestRecord, record_of
from vera.server.protocol import Generation
from vera.server.service import Job, Service
from vera.server.streaming import DONE, READING_SECONDS, EventStream, compact, event

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> None:
        self.texts.append(update.delta)
        self.logprobs += update.logprobs
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Form(ABC):
    """How one request's answers are written: as a chat or as a completion."""

    kind: str
    """The `object` of a whole answer."""
    chunk_kind: str
    """The `object` of a chunk."""

    def __init__(self, job: Job, model: str, *, prefix: str, with_usage: bool) -> None:
        """`with_usage`: chunks have a `usage`, null but in the last one."""
        self.job = job
        self._head: dict[str, Any] = {"id": f"{prefix}-{job.id}", "created": int(time.time()), "model": model}
        self._with_usage = with_usage
        self._chunk_head = compact({**self._head, "object": self.chunk_kind, "system_fingerprint": None})[:-1]
        self._chunk_tail = b',"usage":null}' if with_usage else b"}"

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The events before an answer's first update."""

    @abstractmethod
    def piece(self, index: int, update: Update) -> bytes:
        """The event of one update; empty where it brings nothing to show."""

    @abstractmethod
    def choice(self, answer: Answer) -> dict[str, Any]:
        """A finished answer."""

    def chunk(self, choices: bytes) -> bytes:
        """An event with these choices, given as JSON."""
        return b"".join((b"data: ", self._chunk_head, b',"choices":[', choices, b"]", self._chunk_tail, b"\n\n"))

    def usage_event(self) -> bytes:
        usage = compact(self.job.usage.to_dict())
        return b"".join((b"data: ", self._chunk_head, b',"choices":[],"usage":', usage, b"}\n\n"))

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.kind,
            "choices": [self.choice(answer) for answer in answers],
            "usage": self.job.usage.to_dict(),
            "system_fingerprint": None,
        }

    @property
    def with_usage(self) -> bool:
        return self._with_usage


class Generator(ABC):
    """Serves one request. Subclasses say how its prompts are read, and which form its answers have."""

    def __init__(self, request: Request, body: Generation, service: Service) -> None:
        body.check(service.settings.max_n)
        service.check_model(body.model)
        self.body = body
        self.service = service
        self.record: RequestRecord = record_of(request.scope)
        self._request = request

    @property
    @abstractmethod
    def num_answers(self) -> int:
        """How many places in the queue it takes."""

    @abstractmethod
    async def prepare(self) -> Form:
        """Reads the prompts. Raises RequestError for what cannot be answered."""

    async def respond(self) -> Response:
        """Raises ClientGone if nobody waits any more, and errors as they are to be told, as long as nothing was sent."""
        if not self.body.stream:
            return await unless_gone(self._request.receive, self._whole())
        events = self._events()
        try:
            # Not sooner: what goes wrong before the first token is told by the status.
            first = await unless_gone(self._request.receive, _next(events))
        except BaseException:
            await events.aclose()
            raise
        limit = self.service.settings.request_timeout_seconds + READING_SECONDS
        return EventStream(first, events, self.record, limit)

    async def _prepared(self) -> Form:
        """`prepare`, given up at the request's deadline: other prompts may be read first."""
        limit = self.service.time_limit(self.body.vera)
        try:
            async with asyncio.timeout(limit - (time.monotonic() - self.record.started)):
                return await self.prepare()
        except TimeoutError:
            raise deadline_exceeded(f"the prompt was not read within {limit:g} s and the request was given up") from None

    async def _whole(self) -> Response:
        with closing(self.service.admit(self.num_answers)):
            form = await self._prepared()
            answers = [Answer(index) for index in range(form.job.num_answers)]
            try:
                async with aclosing(self.service.answers(form.job)) as batches:
                    async for batch in batches:
                        for index, update in batch:
                            answers[index].add(update)
            finally:
                self._note(form.job)
            return Response(compact(form.whole(answers)), media_type="application/json")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """All events but the first end of a request that fails before its first token, which raises."""
        begun = False
        with closing(self.service.admit(self.num_answers)):
            form = await self._prepared()
            opened: set[int] = set()
            try:
                async with aclosing(self.service.answers(form.job)) as batches:
                    async for batch in batches:
                        events = []
                        for index, update in batch:
                            if index not in opened:
                                opened.add(index)
                                events.append(form.opening(index))
                            events.append(form.piece(index, update))
                        if any(events):
                            begun = True
                            yield b"".join(events)
                if form.with_usage:
                    yield form.usage_event()
            except Exception as error:
                if not begun:
                    raise
                told = as_api_error(error)
                self.record.details["error"] = told.code
                yield event(told.body())
            finally:
                self._note(form.job)
        yield DONE

    def _note(self, job: Job) -> None:
        """For the access line."""
        usage, details = job.usage, self.record.details
        details |= {
            "stream": bool(self.body.stream),
            "answers": job.num_answers,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "first_token_seconds": job.first_token_seconds and round(job.first_token_seconds, 6),
        }
        if self.service.settings.log_prompts:
            details["body"] = self.body.model_dump(mode="json", exclude_unset=True)


def finish_name(update: Update | Answer) -> str | None:
    """OpenAI's word for it; answers that ended otherwise are told as errors."""
    return None if update.finish_reason is None else update.finish_reason.value


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)
