"""What a body may be: so many bytes, so many levels of JSON, and sent in reasonable time. Checked before anything reads it."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vera.server.errors import ApiError, bad_request

_BODY_SECONDS = 60.0
"""How long a client may take to send a body."""
_SCANNED_OPENINGS = 10_000
"""Bodies with more brackets than this are scanned in a thread: it takes milliseconds."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
"""A string that does not end takes the rest, and nothing is tried twice: time and memory stay linear in the body."""


class ClientGone(Exception):
    """The client left before its answer was there; nobody needs one."""


class BodyLimit:
    """ASGI middleware: collects the whole body within the limits and passes it on in one piece."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_depth: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_depth = max_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_length(Headers(scope=scope).get("content-length"))
            async with asyncio.timeout(_BODY_SECONDS):
                body = await self._collect(receive)
            _check_text(body)
            await self._check_depth(body)
        except TimeoutError:
            slow = ApiError(408, f"the body did not come within {_BODY_SECONDS:.0f} s", code="slow_body")
            await slow.response()(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientGone:
            pass
        else:
            await self._app(scope, _replay(body, receive), send)

    def _check_length(self, announced: str | None) -> None:
        if announced is not None and announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()

    async def _collect(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        # The connection stays: closing it while the client sends could destroy the answer before it is read.
        message = f"the body is above the {self._max_bytes} bytes that this server takes; shorten it"
        return ApiError(413, message, code="body_too_large")

    async def _check_depth(self, body: bytes) -> None:
        openings = body.count(b"[") + body.count(b"{")
        if openings <= self._max_depth:
            return
        if openings < _SCANNED_OPENINGS:
            deep = is_deeper(body, self._max_depth)
        else:
            deep = await asyncio.to_thread(is_deeper, body, self._max_depth)
        if deep:
            raise bad_request(f"the body's JSON has more than {self._max_depth} levels; flatten it", None, code="json_too_deep")


def _check_text(body: bytes) -> None:
    """Python's parser also reads UTF-16, in which brackets cannot be counted, and surrogates."""
    try:
        body.decode()
        is_text = b"\0" not in body
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise bad_request("the body is not valid UTF-8", None, code="invalid_json")


def is_deeper(body: bytes, limit: int) -> bool:
    """Lists and objects lie within each other more than `limit` deep. Brackets within strings do not count."""
    depth = 0
    for token in _TOKENS.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message; after that, what the connection says (that the client has left)."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
