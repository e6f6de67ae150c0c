"""A client's connection: uvicorn's, with limits for what comes before and after a request.

uvicorn waits for a request's head for as long as it takes and takes one of any size. It leaves a running request alone when the
client has sent another one ahead and gone, and loses the body of a request that offers HTTP/2 (as Java's client does).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from vera.server.errors import ApiError, bad_request

HEAD_SECONDS = 20.0
"""How long a request's head may take, and how long the rest of a body may that nobody reads any more."""
MAX_HEAD_BYTES = 64 * 1024
MAX_AHEAD = 16
"""How many requests a client may send before the first of them is answered."""
_NOT_PASSED_ON = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """Belongs to the event loop; uvicorn makes one for each connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cycles: list[RequestResponseCycle] = []
        """Requests that are answered or wait for those before them."""
        self._reads_head = True
        """False from the end of a request's head to the end of its body."""
        self._head_bytes = 0
        self._num_heads = 0
        self._clock: asyncio.TimerHandle | None = None
        """Ends the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)
        self.pipeline.clear()
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        in_head, num_heads = self._reads_head, self._num_heads
        if in_head and self._clock is None:
            self._start_clock()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.logger.warning("what a client sent is no HTTP request")
            self._refuse(bad_request("this is no HTTP/1.1 request", None, code="invalid_http"))
            return
        if in_head and self._num_heads == num_heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"the request's head is above the {MAX_HEAD_BYTES} bytes that this server takes; shorten its headers"
                self._refuse(ApiError(431, message, code="head_too_large"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it comes again without the offer
        self._reads_head = False
        self._num_heads += 1
        self._stop_clock()
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.close()
            return
        super().on_headers_complete()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]
        # uvicorn stops reading for a request that was sent ahead, and would not see the client leave.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._reads_head, self._head_bytes = True, 0
        if self.cycle.response_complete:
            self._start_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._reads_head or self.transport.is_closing()):
            self._start_clock()

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg, None, code="invalid_http"))

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError. A client that offers another protocol is served in this one, as if it had not asked."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if (method := self.parser.get_method()) == b"CONNECT":
                raise httptools.HttpParserError("there are no tunnels here") from None
            lines = [method + b" " + self.url + b" HTTP/1.1"]
            lines += [name + b": " + value for name, value in self.headers if name not in _NOT_PASSED_ON]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join([*lines, b"", data[offer.args[0] :]]))

    def _refuse(self, error: ApiError) -> None:
        """Answers what never became a request, unless another answer is under way, and ends the connection."""
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            body = json.dumps(error.body()).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _start_clock(self) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _expire(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_clock()  # an earlier request is still being answered
        else:
            self.transport.close()
