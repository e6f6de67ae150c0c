"""What a client is told when something goes wrong: OpenAI's error bodies.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from vera.errors import CapacityError, ConfigError, EngineStopped, RequestError, RequestTooLong, VeraError

_log = logging.getLogger(__name__)

RETRY_BUSY_SECONDS = 1
"""When to come back to a full queue."""
RETRY_AWAY_SECONDS = 5
"""When to come back to a server that loads or ends."""
_LONGEST_MESSAGE = 1000

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""By status; other 4xx are invalid_request_error, other 5xx server_error."""

_PARAM_HOMES = {
    "fidelity": "vera.fidelity",
    "attention_tolerance": "vera.attention_tolerance",
    "timeout_seconds": "vera.timeout_seconds",
}
"""Where a client writes what the engine calls by these names."""


class ApiError(VeraError):
    """Something that a client is told with this status. `param` names the field at fault, as in `messages[0].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        # A message may quote a client's text, which need not be valid Unicode.
        message = str(self).encode("utf-8", "backslashreplace").decode()
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[:_LONGEST_MESSAGE]}..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str) -> ApiError:
    """The server cannot take requests now; another try may find it ready."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AWAY_SECONDS)})


def too_busy(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_BUSY_SECONDS)})


def deadline_exceeded(message: str) -> ApiError:
    # The same request would take as long again, so clients are told not to repeat it by themselves.
    return ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})


def as_api_error(error: Exception) -> ApiError:
    """How a client is told of it. What is nobody's mistake but ours is logged and told without details."""
    match error:
        case ApiError():
            return error
        case RequestTooLong():
            return bad_request(str(error), _param_of(str(error)), code="context_length_exceeded")
        case RequestError() | ConfigError():
            return bad_request(str(error), _param_of(str(error)))
        case CapacityError():
            return too_busy(str(error))
        case EngineStopped():
            return unavailable(str(error), code="engine_stopped")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log says more", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, from pydantic's list of errors."""
    first = errors[0]
    param = _field_name(first["loc"])
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", None, code="invalid_json"
        )
    if param is None:
        return bad_request("the body must be a JSON object, sent with 'Content-Type: application/json'", None)
    alternatives = [error["msg"] for error in errors if _field_name(error["loc"]) == param]
    return bad_request(f"{param}: {' / '.join(dict.fromkeys(alternatives))}", param)


def _field_name(place: Sequence[Any]) -> str | None:
    """`("body", "messages", 0, "role")` as `messages[0].role`, without pydantic's names for the branches of a union."""
    name = ""
    for part in place[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not re.fullmatch(r"\w+", str(part)) or (name and part in ("str", "int", "float", "bool")):
            break
        else:
            name += f".{part}" if name else str(part)
    return name or None


def _param_of(message: str) -> str | None:
    """The field that a message of the engine is about: messages begin with `name=value`, or name a place."""
    if named := re.match(r"(\w+)(?: token)?=", message) or re.match(r"(prompt|tokens|stop_token_ids|logit_bias) has ", message):
        name = named[1]
        return _PARAM_HOMES.get(name, name)
    if place := re.search(r"messages(\[\d+\])?", message):
        return place[0]
    return "prompt" if "prompt" in message else None
