"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vera.server.disconnects import unless_gone
from vera.server.limits import ClientGone
from vera.server.logs import CLIENT_GONE, RequestRecord

READING_SECONDS = 60.0
"""How long a client may take to read what is left of a stream once its deadline has passed."""

DONE = b"data: [DONE]\n\n"
"""The last event on every path."""


def compact(value: dict[str, Any]) -> bytes:
    """As JSON in ASCII, without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + compact(value) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. When the client leaves, the generator is closed at once, wherever it is.

    A client that does not read is taken for one that has left after `limit_seconds`, so that it cannot hold its place for ever.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], record: RequestRecord, limit_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._record = record
        self._limit_seconds = limit_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, TimeoutError):
            self._record.status = CLIENT_GONE
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async with asyncio.timeout(self._limit_seconds):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for sent in self._events:
                await send({"type": "http.response.body", "body": sent, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
