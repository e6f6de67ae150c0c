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
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.errors import EngineStopped
from vera.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


class AsyncEngine:
    """Owns an Engine from `start` to `close`. Its methods belong to the event loop that called `start`."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._streams: dict[str, asyncio.Queue[Update | EngineStopped]] = {}
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._beat = clock()
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vera-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the loop's thread. Call once, from the event loop that will await the answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Update]:
        """The updates of one answer until it is finished. Leaving the iterator early aborts the request.

        Raises what `Engine.add_request` raises, before the first update, and EngineStopped if the engine ends first.
        """
        added: list[str] = []

        def add() -> asyncio.Queue[Update | EngineStopped]:
            added.append(
                self._engine.add_request(
                    prompt_token_ids, params, request_id=request_id, priority=priority, timeout_seconds=timeout_seconds
                )
            )
            # Registered on the engine's thread, so before the step that can bring the first update.
            queue: asyncio.Queue[Update | EngineStopped] = asyncio.Queue()
            self._streams[added[0]] = queue
            return queue

        finished = False
        adding = self._call(add)
        try:
            queue = await asyncio.wrap_future(adding)
            while not finished:
                update = await queue.get()
                if isinstance(update, EngineStopped):
                    finished = True
                    raise update
                finished = update.finished
                yield update
        finally:
            if not finished and not adding.cancel():
                # Cancelled before or after the request was added: either way nothing of it may stay.
                self._post(lambda: added and self._engine.abort(added[0]))
            if added:
                self._streams.pop(added[0], None)

    async def inspect(self, read: Callable[[Engine], Any]) -> Any:
        """`read(engine)`, run between two steps on the engine's thread."""
        return await asyncio.wrap_future(self._call(lambda: read(self._engine)))

    def seconds_since_beat(self) -> float:
        """How long ago the loop last came by; grows while a step runs and for ever once the loop hangs or is dead."""
        return self._clock() - self._beat

    def is_alive(self, *, longest_step_seconds: float = 60.0) -> bool:
        """The loop runs and came by within the time that the longest legal step may take."""
        return self._thread.is_alive() and self._death is None and self.seconds_since_beat() < longest_step_seconds

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Lets running answers finish for that long, ends the others with an abort, stops the thread. Idempotent."""
        deadline = self._clock() + drain_seconds
        while self._streams and self._thread.is_alive() and self._clock() < deadline:
            await asyncio.sleep(0.01)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    # -- between the threads -------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Has the engine's thread run this between two steps."""
        future: Future[Any] = Future()
        with self._wake:
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
                self._wake.wait(timeout=1.0)

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
            if (queue := self._streams.get(update.request_id)) is not None:
                queue.put_nowait(update)

    def _end(self) -> None:
        """Every stream gets its last event, every open call its answer."""
        stopped = EngineStopped(f"the engine's loop has ended: {self._death or 'it was closed'}")
        with self._wake:
            self._stopping = True
            calls = list(self._inbox)
            self._inbox.clear()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(stopped)
        self._on_loop(lambda: self._end_streams(stopped))
        self._engine.close()

    def _end_streams(self, stopped: EngineStopped) -> None:
        for queue in self._streams.values():
            queue.put_nowait(stopped)

    def _on_loop(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            _log.debug("the event loop is closed; its streams are gone")
