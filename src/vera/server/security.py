"""Who may do what. Every path needs a key but a few public ones, known or not: a new route is shut until it is listed here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vera.server.errors import ApiError
from vera.server.settings import ServerSettings

PUBLIC = frozenset({"/health", "/ready"})
"""What probes ask, who have no key."""
_PAGES = "/dashboard"
"""Files that hold no data: what the page shows it asks for with a key."""
_ADMIN = "/admin"
_HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")
"""A name or an address, IPv6 in brackets, and perhaps a port."""


class Gate:
    """ASGI middleware. Without API keys all but the admin routes are open; these are shut without an admin key.

    A server that is open without having been told to be answers only to names that nobody else can give it: a web page could have
    a name of its own point at this machine, and the browser would let the page read the answers (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in settings.api_keys]
        self._own_names = None if settings.api_keys or settings.allow_no_key else {"", "localhost", settings.host.lower()}
        self._admin_keys = [] if settings.admin_key is None else [settings.admin_key.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_host(scope)
                self._check(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "").strip()
        if self._own_names is None or _name_in(host).lower() in self._own_names or _is_address(_name_in(host)):
            return
        raise ApiError(
            403,
            f"a server without keys is reached by its address or as localhost, and not as {host!r}; "
            "set VERA_API_KEY, or say --allow-no-key",
            code="foreign_host",
        )

    def _check(self, scope: Scope) -> None:
        path: str = scope["path"]
        key = _key_of(scope)
        if path == _ADMIN or path.startswith(f"{_ADMIN}/"):
            self._check_admin(key)
        elif path in PUBLIC or path == _PAGES or path.startswith(f"{_PAGES}/"):
            return
        elif self._api_keys and not _matches(key, [*self._api_keys, *self._admin_keys]):
            raise _unauthorised(key)

    def _check_admin(self, key: bytes | None) -> None:
        if not self._admin_keys:
            raise ApiError(403, "the admin routes are shut: this server was started without VERA_ADMIN_KEY", code="no_admin_key")
        if _matches(key, self._admin_keys):
            return
        if _matches(key, self._api_keys):
            raise ApiError(403, "this key does not open the admin routes; use the admin key", code="admin_key_required")
        raise _unauthorised(key)


def _name_in(host: str) -> str:
    """A Host header without its port; as it is if it is none."""
    parts = _HOST.fullmatch(host)
    return parts[1].strip("[]") if parts else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _unauthorised(key: bytes | None) -> ApiError:
    message = "no key was sent; send 'Authorization: Bearer KEY'" if key is None else "the key is not one of this server's"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _key_of(scope: Scope) -> bytes | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" and key.strip() else None


def _matches(key: bytes | None, keys: Iterable[bytes]) -> bool:
    """Compares with all of them, in a time that tells nothing about how much of a key was right."""
    return key is not None and sum(compare_digest(key, known) for known in keys) > 0
