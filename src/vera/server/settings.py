"""How the server is run: checked on construction. How the engine is run is in `vera.config`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vera.errors import ConfigError
from vera.sampling_params import MAX_N


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Keys are never shown: `to_dict` and `repr` leave them out."""

    host: str = "127.0.0.1"
    """The address to listen on. Any but this machine's own loopback needs a key, or `allow_no_key`."""
    port: int = 8000
    """0: any free one; the log says which."""
    served_model_name: str | None = None
    """What clients call the model. None: the name of its folder or file."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the API. None at all: it is open to whoever reaches the port."""
    admin_key: str | None = None
    """Opens the admin routes, and all others. None: the admin routes are shut."""
    allow_no_key: bool = False
    """Listen beyond loopback although there is no key, and answer whatever name the server is asked by."""
    tls_certificate: str | None = None
    """A PEM file; with `tls_key` the server speaks HTTPS."""
    tls_key: str | None = None
    max_body_bytes: int = 4 * 2**20
    """Most bytes of a request's body."""
    max_json_depth: int = 32
    """Most levels of lists and objects within each other in a body."""
    max_n: int = 16
    """Most answers to one prompt."""
    max_prompts: int = 256
    """Most prompts in one request."""
    request_timeout_seconds: float = 600.0
    """When a request is given up, waiting included. A request may ask for less."""
    health_timeout_seconds: float = 60.0
    """The longest legal step: `/health` fails when the engine does not come by for longer than that."""
    grace_seconds: float = 30.0
    """How long running answers may go on after a TERM signal; then each stream is ended with an event."""
    log_prompts: bool = False
    """Write prompts into the access log."""
    heat_log: str | None = None
    """The file that the heat distributions of an adaptive cache are appended to; see `vera heat`."""

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r} must be a whole number from 0 to 65535")
        for name in ("max_body_bytes", "max_json_depth", "max_n", "max_prompts"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number from 1 up")
        if self.max_n > MAX_N:
            raise ConfigError(f"max_n={self.max_n} is above the {MAX_N} answers that the engine takes; lower it")
        for name in ("request_timeout_seconds", "health_timeout_seconds"):
            if not 0 < getattr(self, name) <= 7 * 24 * 3600:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be above 0, and at most a week (604800)")
        if not 0 <= self.grace_seconds <= 24 * 3600:
            raise ConfigError(f"grace_seconds={self.grace_seconds!r} must be from 0 to a day (86400)")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate and tls_key belong together; give both or neither")
        for name in ("tls_certificate", "tls_key"):
            if (path := getattr(self, name)) is not None and not Path(path).is_file():
                raise ConfigError(f"{name}={path!r} is no file; give the path of a PEM file")
        if any(not key for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key]))):
            raise ConfigError("a key is empty; leave it out or give one with characters")
        if self.admin_key in self.api_keys:
            raise ConfigError("the admin key is also an API key; give it a value of its own")
        if not (self.api_keys or self.allow_no_key or _is_loopback(self.host)):
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines and no key is set; "
                "set VERA_API_KEY, give --api-key-file, or say --allow-no-key"
            )

    def to_dict(self) -> dict[str, Any]:
        """The effective settings without the keys, JSON-ready."""
        shown = {name: value for name, value in asdict(self).items() if name not in _SECRETS}
        return shown | {"api_keys": len(self.api_keys), "admin_key": self.admin_key is not None}

    def __repr__(self) -> str:
        values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _SECRETS)
        return f"ServerSettings({values})"


_SECRETS = frozenset({"api_keys", "admin_key"})


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The API keys: those of VERA_API_KEY (several with commas between), and of the file, one a line.

    Raises ConfigError for a source that is there and has no key: it would open the server unnoticed.
    """
    sources: dict[str, list[str]] = {}
    if "VERA_API_KEY" in os.environ:
        sources["VERA_API_KEY"] = os.environ["VERA_API_KEY"].split(",")
    if path is not None:
        try:
            sources[f"the file of API keys {str(path)!r}"] = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of API keys {str(path)!r} cannot be read: {error}") from None
    keys: dict[str, None] = {}
    for source, lines in sources.items():
        if not (found := [line.strip() for line in lines if line.strip()]):
            raise ConfigError(f"{source} has no key, and a server without keys is open; put one there, or leave it out")
        keys |= dict.fromkeys(found)
    return tuple(keys)


def read_admin_key() -> str | None:
    """That of VERA_ADMIN_KEY; None: it is not set."""
    if (key := os.environ.get("VERA_ADMIN_KEY")) is None:
        return None
    if not key.strip():
        raise ConfigError("VERA_ADMIN_KEY is set and has no key; give it one, or leave it out")
    return key.strip()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
