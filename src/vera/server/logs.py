"""The log: one JSON line an event on stderr, and one access line a request. Prompts are in it only if the settings say so."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vera.server.metrics import ServerMetrics

_access = logging.getLogger("vera.server.access")

_RECORD = "vera.record"
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_GONE = 499
"""The status in the log of a request whose client left before it was answered."""


@dataclass(slots=True)
class RequestRecord:
    """What the access line says of one request; whoever serves it adds to `details`."""

    id: str
    method: str
    path: str
    client: str | None
    started: float
    """By time.monotonic, in seconds."""
    status: int = CLIENT_GONE
    details: dict[str, Any] = field(default_factory=dict)

    def line(self, now: float) -> dict[str, Any]:
        return {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "client": self.client,
            "status": self.status,
            "seconds": round(now - self.started, 6),
            **self.details,
        }


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope[_RECORD]
    return record


class AccessLog:
    """ASGI middleware, the outermost: gives each request its id (the client's `X-Request-Id`, if it sent a good one), sends it
    back, and logs and counts the request when it has ended."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _GOOD_ID.fullmatch(asked) else uuid.uuid4().hex
        client = scope["client"][0] if scope.get("client") else None
        record = scope[_RECORD] = RequestRecord(request_id, scope["method"], scope["path"], client, time.monotonic())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_response(route, record.status)
            _access.info("request", extra={"fields": record.line(time.monotonic())})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's own fields, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging() -> None:
    """Sends everything that this process logs to stderr, as JSON lines. For a process of its own, not for a library's user."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
