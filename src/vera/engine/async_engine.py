"""The engine for asyncio: a thread of its own runs the steps, coroutines await their updates.

Coroutines never touch the engine; they leave calls in an inbox that the thread empties between steps. After each step the
thread wakes the event loop once, with the updates of the whole batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from vera.config import CacheConfig
from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.errors import CapacityError, EngineStopped, RequestError
from vera.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that is wanted, in the terms of `Engine.add_request`."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams | None = None
    priority: int = 0
    timeout_seconds: float | None = None
    fidelity: str | None = None
    attention_tolerance: float | None = None
    cache_settings: CacheConfig | None = None


class _Reader:
    """Who awaits the updates of some answers. Belongs to the event loop; `ids` are written on the engine's thread."""

    __slots__ = ("_ready", "_stopped", "_waiter", "ids", "num_unfinished")

    def __init__(self, num_answers: int) -> None:
        self.ids: list[str] = []
        """The engine's, in the order of the asks; empty until they are added."""
        self.num_unfinished = num_answers
        self._ready: list[tuple[int, Update]] = []
        self._stopped: EngineStopped | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, update: Update) -> None:
        self._ready.append((index, update))
        self._wake()

    def stop(self, stopped: EngineStopped) -> None:
        self._stopped = stopped
        self._wake()

    async def take(self) -> list[tuple[int, Update]]:
        """All that has come, at least one update. Raises EngineStopped once nothing more will come."""
        if not self._ready and self._stopped is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._ready:
            assert self._stopped is not None
            raise self._stopped
        taken, self._ready = self._ready, []
        self.num_unfinished -= sum(update.finished for _, update in taken)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Owns an Engine from `start` to `close`. Its methods belong to the event loop that called `start`."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._answers: dict[str, tuple[_Reader, int]] = {}
        """By the engine's id: who reads an answer, and which of the reader's it is. Entries come and go on the engine's thread;
        the event loop looks them up."""
        self._named: dict[str, _Reader] = {}
        """Open streams by the ids that callers gave them."""
        self._num_open = 0
        self._draining = False
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._resting = False
        self._beat = clock()
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vera-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the loop's thread. Call once, from the event loop that will await the answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def answers(self, asks: Sequence[Ask]) -> AsyncGenerator[list[tuple[int, Update]], None]:
        """The updates of several answers, each with the place of its ask, until all are finished; together what came together.

        All are added or none: what `Engine.add_request` refuses of one raises before the first update. Raises EngineStopped if
        the engine ends first. Leaving the iterator early aborts what is unfinished.
        """
        reader = _Reader(len(asks))
        async with aclosing(self._read(asks, reader)) as batches:
            async for batch in batches:
                yield batch

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
    ) -> AsyncGenerator[Update, None]:
        """The updates of one answer until it is finished. Leaving the iterator early aborts the request.

        `fidelity` and `attention_tolerance` take the place of the cache's settings, as in `Engine.add_request`. Raises what
        that raises, before the first update, and EngineStopped if the engine ends first. An id may be used again once its
        stream has ended.
        """
        if request_id in self._named:
            raise RequestError(f"a request {request_id!r} is being answered already; choose another id")
        reader = _Reader(1)
        ask = Ask(prompt_token_ids, params, priority, timeout_seconds, fidelity, attention_tolerance)
        if request_id is not None:
            self._named[request_id] = reader
        try:
            async with aclosing(self._read([ask], reader)) as batches:
                async for batch in batches:
                    for _, update in batch:
                        yield update if request_id is None else replace(update, request_id=request_id)
        finally:
            if request_id is not None:
                del self._named[request_id]

    async def set_fidelity(self, request_id: str, fidelity: str) -> None:
        """How an adaptive cache serves an open stream from its next step on; see `Engine.set_fidelity`.

        `request_id` is the one that was given to `stream`, or else the one that its updates have. Raises RequestError for an
        unknown request or fidelity.
        """
        if (reader := self._named.get(request_id)) is None and request_id not in self._answers:
            raise RequestError(f"no stream of a request {request_id!r} is open")

        def change() -> None:
            self._engine.set_fidelity(reader.ids[0] if reader is not None else request_id, fidelity)

        await asyncio.wrap_future(self._call(change))

    async def inspect(self, read: Callable[[Engine], Any]) -> Any:
        """`read(engine)`, run between two steps on the engine's thread."""
        return await asyncio.wrap_future(self._call(lambda: read(self._engine)))

    def seconds_since_beat(self) -> float:
        """How long ago the loop last came by; grows while a step runs, and for ever once the loop hangs or is dead."""
        return self._clock() - self._beat

    def is_alive(self, *, longest_step_seconds: float = 60.0) -> bool:
        """The loop rests because there is nothing to do, or came by within the time that the longest legal step may take."""
        rests = self._resting and not self._inbox
        return self.is_running and self._death is None and (rests or self.seconds_since_beat() < longest_step_seconds)

    @property
    def is_running(self) -> bool:
        """The loop's thread has not ended."""
        return self._thread.is_alive()

    async def close(self, *, drain_seconds: float = 0.0, join_seconds: float = 60.0) -> None:
        """Takes no new requests, lets the open ones finish for that long, ends the others with EngineStopped. Idempotent.

        When it is cancelled while it waits, the engine ends at once. A loop that hangs is waited for `join_seconds`; then the
        streams end without it, and the thread is left to itself (`is_running` tells).
        """
        self._draining = True
        try:
            await self._until(lambda: not self._num_open or not self.is_running, drain_seconds)
        finally:
            with self._wake:
                self._stopping = True
                self._wake.notify()
        if self._thread.ident is None:
            self._engine.close()
        elif not await self._until(lambda: not self.is_running, join_seconds):
            self._end_readers(EngineStopped(f"the engine's loop hangs for {self.seconds_since_beat():.0f} s and was given up"))

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits that long for it; False: it never came true."""
        deadline = self._clock() + seconds
        while not (met := condition()) and self._clock() < deadline:
            await asyncio.sleep(0.005)
        return met

    # -- between the threads -------------------------------------------------------------------------------------------

    async def _read(self, asks: Sequence[Ask], reader: _Reader) -> AsyncGenerator[list[tuple[int, Update]], None]:
        if self._draining:
            raise EngineStopped("the engine is closing and takes no new requests")
        arrived_at = self._engine.clock()

        def add() -> None:
            try:
                self._check(asks)
                for index, ask in enumerate(asks):
                    # The engine's own ids are never used twice, so a late update of an ended answer reaches nobody.
                    answer = self._engine.add_request(
                        ask.prompt_token_ids,
                        ask.params,
                        priority=ask.priority,
                        timeout_seconds=ask.timeout_seconds,
                        arrived_at=arrived_at,
                        fidelity=ask.fidelity,
                        attention_tolerance=ask.attention_tolerance,
                        cache_settings=ask.cache_settings,
                    )
                    reader.ids.append(answer)
                    self._answers[answer] = reader, index
            except BaseException:
                forget()
                raise

        def forget() -> None:
            for answer in reader.ids:
                if self._answers.pop(answer, None) is not None:
                    self._engine.abort(answer)  # does nothing to what is finished

        adding = self._call(add)
        self._num_open += 1
        try:
            await asyncio.wrap_future(adding)
            while reader.num_unfinished:
                yield await reader.take()
        finally:
            self._num_open -= 1
            if not adding.cancel():
                self._post(forget)

    def _check(self, asks: Sequence[Ask]) -> None:
        """Refuses now what would be refused of a later ask, so that no earlier one has to be taken back."""
        for ask in asks:
            self._engine.check_request(ask.prompt_token_ids, ask.params or SamplingParams())
        limit = self._engine.config.max_waiting
        if self._engine.num_waiting + len(asks) > limit:
            raise CapacityError(
                f"{len(asks)} more requests would be above the {limit} that may wait; try later or raise max_waiting"
            )

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Has the engine's thread run this between two steps."""
        future: Future[Any] = Future()
        with self._wake:
            if self._thread.ident is None:
                raise EngineStopped("the engine's loop was not started; call start first")
            if self._stopping or not self._thread.is_alive():
                raise EngineStopped(f"the engine's loop has ended: {self._death or 'it was closed'}")
            self._inbox.append((function, future))
            self._wake.notify()
        return future

    def _post(self, function: Callable[[], Any]) -> None:
        """The same for what needs no answer; after the end there is nothing left to do."""
        try:
            self._call(function)
        except EngineStopped:
            _log.debug("a call came after the engine's end")

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._beat = self._clock()
                self._empty_inbox()
                if self._engine.has_unfinished():
                    self._deliver(self._engine.step())
                else:
                    self._rest()
        except BaseException as error:
            self._death = error
            _log.exception("the engine's loop died")
        finally:
            self._end()

    def _rest(self) -> None:
        with self._wake:
            if not self._inbox and not self._stopping:
                self._resting = True
                self._wake.wait(timeout=1.0)
                self._resting = False

    def _empty_inbox(self) -> None:
        while self._inbox:
            function, future = self._inbox.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

    def _deliver(self, updates: list[Update]) -> None:
        if updates:
            self._on_loop(lambda: self._hand_out(updates))

    def _hand_out(self, updates: list[Update]) -> None:
        for update in updates:
            if (home := self._answers.get(update.request_id)) is not None:
                reader, index = home
                reader.put(index, update)

    def _end(self) -> None:
        """Every reader gets its last event, every open call its answer."""
        stopped = EngineStopped(f"the engine's loop has ended: {self._death or 'it was closed'}")
        with self._wake:
            self._stopping = True
        self._on_loop(lambda: self._end_readers(stopped))
        self._engine.close()

    def _end_readers(self, stopped: EngineStopped) -> None:
        """On the event loop: nothing more will come."""
        for reader in {id(reader): reader for reader, _ in self._answers.values()}.values():
            reader.stop(stopped)
        while self._inbox:
            _, future = self._inbox.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(stopped)

    def _on_loop(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            _log.debug("the event loop is closed; its streams are gone")
