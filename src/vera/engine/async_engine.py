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
from dataclasses import dataclass, replace
from typing import Any

from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.errors import EngineStopped, RequestError
from vera.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """One answer on its way to its reader."""

    updates: asyncio.Queue[Update | EngineStopped]
    id: str = ""
    """The engine's; empty until the request is added."""
    finished: bool = False


class AsyncEngine:
    """Owns an Engine from `start` to `close`. Its methods belong to the event loop that called `start`."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        """By the engine's id. Entries come and go on the engine's thread; the event loop looks them up."""
        self._named: dict[str, _Stream] = {}
        """Open streams by the ids that callers gave them."""
        self._num_open = 0
        self._draining = False
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
        fidelity: str | None = None,
        attention_tolerance: float | None = None,
    ) -> AsyncIterator[Update]:
        """The updates of one answer until it is finished. Leaving the iterator early aborts the request.

        `fidelity` and `attention_tolerance` take the place of the cache's settings, as in `Engine.add_request`. Raises what
        that raises, before the first update, and EngineStopped if the engine ends first. An id may be used again once its
        stream has ended.
        """
        if self._draining:
            raise EngineStopped("the engine is closing and takes no new requests")
        if request_id in self._named:
            raise RequestError(f"a request {request_id!r} is being answered already; choose another id")
        stream = _Stream(asyncio.Queue())
        arrived_at = self._engine.clock()

        def add() -> None:
            # The engine's own ids are never used twice, so a late update of an ended stream reaches nobody.
            stream.id = self._engine.add_request(
                prompt_token_ids,
                params,
                priority=priority,
                timeout_seconds=timeout_seconds,
                arrived_at=arrived_at,
                fidelity=fidelity,
                attention_tolerance=attention_tolerance,
            )
            self._streams[stream.id] = stream

        def forget() -> None:
            if self._streams.pop(stream.id, None) is not None and not stream.finished:
                self._engine.abort(stream.id)

        adding = self._call(add)
        if request_id is not None:
            self._named[request_id] = stream
        self._num_open += 1
        try:
            await asyncio.wrap_future(adding)
            while not stream.finished:
                update = await stream.updates.get()
                if isinstance(update, EngineStopped):
                    raise update
                stream.finished = update.finished
                yield update if request_id is None else replace(update, request_id=request_id)
        finally:
            self._num_open -= 1
            if request_id is not None:
                del self._named[request_id]
            if not adding.cancel():
                self._post(forget)

    async def set_fidelity(self, request_id: str, fidelity: str) -> None:
        """How an adaptive cache serves an open stream from its next step on; see `Engine.set_fidelity`.

        `request_id` is the one that was given to `stream`, or else the one that its updates have. Raises RequestError for an
        unknown request or fidelity.
        """
        if (stream := self._named.get(request_id) or self._streams.get(request_id)) is None:
            raise RequestError(f"no stream of a request {request_id!r} is open")
        await asyncio.wrap_future(self._call(lambda: self._engine.set_fidelity(stream.id, fidelity)))

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
        """Takes no new requests, lets the open ones finish for that long, ends the others with EngineStopped. Idempotent.

        When it is cancelled while it waits, the engine ends at once.
        """
        self._draining = True
        deadline = self._clock() + drain_seconds
        try:
            while self._num_open and self._thread.is_alive() and self._clock() < deadline:
                await asyncio.sleep(0.01)
        finally:
            with self._wake:
                self._stopping = True
                self._wake.notify()
        if self._thread.ident is None:
            self._engine.close()
        else:
            await asyncio.to_thread(self._thread.join)

    # -- between the threads -------------------------------------------------------------------------------------------

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
            if (stream := self._streams.get(update.request_id)) is not None:
                stream.updates.put_nowait(update)

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
        for stream in list(self._streams.values()):
            stream.updates.put_nowait(stopped)

    def _on_loop(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            _log.debug("the event loop is closed; its streams are gone")
