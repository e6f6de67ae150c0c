"""A server process: uvicorn, signals, and the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from vera.engine.engine import Engine
from vera.errors import ConfigError, VeraError
from vera.heatlog.log import HeatLog
from vera.server.app import build_app
from vera.server.connections import Connection
from vera.server.logs import configure_logging
from vera.server.metrics import ServerMetrics
from vera.server.operations import Oversight
from vera.server.service import Service
from vera.server.settings import ServerSettings

_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 5
"""How long connections may take to send what is theirs once every answer has ended."""
_TICK_SECONDS = 0.02


def serve(load: Callable[[], Engine], settings: ServerSettings, *, oversight: Oversight | None = None) -> None:
    """Serves until a signal ends it. The port answers probes at once, `load` runs meanwhile.

    The first TERM or INT drains: no new requests, `grace_seconds` for those in flight, then every stream ends with an event. The
    second one does without the grace. Raises what `load` raises, VeraError if the port cannot be had, and ConfigError for TLS
    files that are not good.
    """
    configure_logging()
    heat_log = None if settings.heat_log is None else HeatLog(Path(settings.heat_log), about={})
    service = Service(set_aside_after(load), settings, ServerMetrics(), heat_log=heat_log, oversight=oversight)
    config = uvicorn_config(service, settings)
    try:
        config.load()
    except OSError as error:
        # Nothing else of it reads files, and the error of a bad PEM file does not name it.
        files = f"tls_certificate={settings.tls_certificate!r} and tls_key={settings.tls_key!r}"
        raise ConfigError(f"{files} cannot be used ({error}); give a certificate and its key, as PEM files") from None
    server = Server(config, service, grace_seconds=settings.grace_seconds)
    _log.info("starting", extra={"fields": {"settings": settings.to_dict()}})
    try:
        server.run()
    except SystemExit:
        # uvicorn's word for a port that is taken.
        raise VeraError(f"cannot listen on {settings.host}:{settings.port}; another process may have the port") from None
    if service.failure is not None:
        raise service.failure
    if service.leaves_threads:
        _log.warning("the process ends although a thread of the engine or the loader still runs")
        _exit_now()


def set_aside_after(load: Callable[[], Engine]) -> Callable[[], Engine]:
    """The same, after which Python's garbage collector leaves alone what there is: it all lives as long as the process.

    torch, transformers and a model are some 400,000 objects; one collection that walks over them takes 0.4 s, for which every
    answer waits. Garbage that comes later is collected as ever.
    """

    def load_and_set_aside() -> Engine:
        engine = load()
        gc.collect()
        gc.freeze()
        return engine

    return load_and_set_aside


class Server(uvicorn.Server):
    """uvicorn, but a signal first lets answers finish while the port still tells probes that the server is ending."""

    def __init__(self, config: uvicorn.Config, service: Service, *, grace_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_seconds = grace_seconds
        self._num_signals = 0
        self._following: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            addresses = [listening.getsockname() for server in self.servers for listening in server.sockets]
            _log.info("listening", extra={"fields": {"addresses": [f"{host}:{port}" for host, port, *_ in addresses]}})
            self._following = asyncio.create_task(self._follow())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not kept as uvicorn does, which raises the signal once more at the end: an asked-for end is exit code 0.
        self._num_signals += 1
        self.force_exit = self._num_signals > 2

    async def _follow(self) -> None:
        """Ends the server when loading fails, or after a signal."""
        while not self._num_signals and self._service.failure is None:
            await asyncio.sleep(_TICK_SECONDS)
        if self._service.failure is None:
            await self._drain()
        await self._service.close()
        self.should_exit = True

    async def _drain(self) -> None:
        _log.info("draining", extra={"fields": {"grace_seconds": self._grace_seconds}})
        self._service.drain()
        deadline = time.monotonic() + self._grace_seconds
        while self._num_signals < 2 and time.monotonic() < deadline and not self._service.is_idle:
            await asyncio.sleep(_TICK_SECONDS)


def uvicorn_config(service: Service, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service, settings),
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        http=Connection,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )


def _exit_now() -> None:
    """Ends the process at once, successfully: a thread that hangs in native code cannot be joined."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
