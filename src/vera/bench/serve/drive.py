"""Asks what the workload plans, when it plans it: arrivals, a limit on concurrency, turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from vera.bench.serve.answer import Answer
from vera.bench.serve.workload import Conversation, Message

Ask = Callable[[Sequence[Message], int], Awaitable[Answer]]
"""Sends messages, of which the last is the user's, and at most how many tokens to answer. Raises nothing but cancellation."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a workload."""

    answers: list[Answer]
    """In the order in which they ended. What was under way at an interruption is not among them."""
    seconds: float
    """From the first arrival's clock to the last answer, or to the interruption."""
    interrupted: bool
    max_send_lag_seconds: float
    """How late the client was at worst for an arrival: more than some milliseconds mean that it had too much to do."""


async def drive(
    conversations: Sequence[Conversation],
    ask: Ask,
    *,
    max_concurrency: int | None = None,
    stop: asyncio.Event | None = None,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Holds all conversations, each from its time on, and returns when the last one has ended or `stop` is set.

    A conversation ends early where an answer fails. Its idle times do not count as concurrency. `progress` takes the number of
    answers so far.
    """
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    driver = _Driver(ask, gate, progress)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(driver.hold(conversation)) for conversation in conversations]
        stopper = group.create_task(_cancel_when(stop or asyncio.Event(), tasks))
        await asyncio.wait(tasks)
        stopper.cancel()
    return Run(
        answers=driver.answers,
        seconds=time.perf_counter() - driver.start,
        interrupted=any(task.cancelled() for task in tasks),
        max_send_lag_seconds=driver.max_send_lag_seconds,
    )


class _Driver:
    def __init__(self, ask: Ask, gate: AbstractAsyncContextManager[Any], progress: Callable[[int], None] | None) -> None:
        self.answers: list[Answer] = []
        self.max_send_lag_seconds = 0.0
        self.start = time.perf_counter()
        self._ask = ask
        self._gate = gate
        self._progress = progress

    async def hold(self, conversation: Conversation) -> None:
        due = self.start + conversation.at_seconds
        await asyncio.sleep(due - time.perf_counter())
        self.max_send_lag_seconds = max(self.max_send_lag_seconds, time.perf_counter() - due)
        messages: list[Message] = []
        for turn in conversation.turns:
            await asyncio.sleep(turn.wait_seconds)
            messages += turn.messages
            answer = await self._one(messages, turn.output_tokens)
            if answer.error is not None:
                return
            messages.append({"role": "assistant", "content": answer.text})

    async def _one(self, messages: list[Message], output_tokens: int) -> Answer:
        arrived = time.perf_counter()
        async with self._gate:
            queued = time.perf_counter() - arrived
            answer = replace(await self._ask(messages, output_tokens), queued_seconds=queued)
        self.answers.append(answer)
        if self._progress is not None:
            self._progress(len(self.answers))
        return answer


async def _cancel_when(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    await stop.wait()
    for task in tasks:
        task.cancel()
