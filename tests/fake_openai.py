"""A server that speaks just enough of OpenAI's protocol, and fails in all the ways that servers do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any


class Refuse(Exception):
    """Raised by an answer before its first event: (status, body)."""


class Cut(Exception):
    """Raised by an answer in its middle: the connection is closed there."""


Answer = Callable[[dict[str, Any]], AsyncIterator[Any]]
"""Takes a request's body and yields events: dicts, or bytes that are sent as they are."""


class FakeServer:
    """Serves `answer` in a thread of its own; a context manager. Remembers what it was sent."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.running = self.peak = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                if head.startswith("GET /v1/models"):
                    _respond(writer, 200, {"data": [{"id": "org/fake"}, {"id": "other"}]})
                    continue
                length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                await self._stream(writer, body)
        except (asyncio.IncompleteReadError, ConnectionError, Cut, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        try:
            async for event in self.answer(body):
                data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
                writer.write(head + b"%x\r\n%s\r\n" % (len(data), data))
                head = b""
                await writer.drain()
            writer.write(head + b"0\r\n\r\n")
        except Refuse as refusal:
            _respond(writer, *refusal.args)
        finally:
            self.running -= 1


def _respond(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d Said\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)


DONE = b"data: [DONE]\n\n"


def chunk(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def delta(finish: str | None = None, **content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def usage(prompt: int, output: int, **others: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **others}}


def speaker(tokens: int = 3, *, first: float = 0.0, gap: float = 0.0, **others: Any) -> Answer:
    """Answers with `tokens` words: `first` seconds to the first, `gap` to each other one."""

    async def answer(body: dict[str, Any]) -> AsyncIterator[Any]:
        for i in range(tokens):
            await asyncio.sleep(gap if i else first)
            yield chunk(f" word{i}", "length" if i == tokens - 1 else None)
        yield usage(10, tokens, **others)
        yield DONE

    return answer
