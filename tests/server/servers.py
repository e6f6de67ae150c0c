"""Real servers on loopback over tiny random models, each in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx

from engines import PAGE, make_engine
from tiny_models import tiny_model, tiny_tokenizer
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.heatlog.log import HeatLog
from vera.models import LoadedModel, adopt_model
from vera.server.metrics import ServerMetrics
from vera.server.operations import Oversight
from vera.server.run import Server, uvicorn_config
from vera.server.service import Service
from vera.server.settings import ServerSettings

NAME = "tiny"
HELLO = [{"role": "user", "content": "hello there"}]


@cache
def speaking_model(**tokenizer: Any) -> LoadedModel:
    """A tiny Llama whose vocabulary is its tokenizer's, so that it reads and writes text."""
    texts = tiny_tokenizer(**tokenizer)
    return adopt_model(tiny_model(vocab_size=len(texts)), texts, name=NAME)


def speaking_engine(model: LoadedModel | None = None, **config: Any) -> Engine:
    return make_engine(model or speaking_model(), **{"blocks": 600, "max_num_seqs": 8, **config})


def adaptive_engine(**cache_settings: Any) -> Engine:
    """Sequences above 64 tokens are tiered."""
    max_num_seqs = cache_settings.pop("max_num_seqs", 8)
    settings = {
        "mode": "adaptive",
        "page_size": PAGE,
        "page_dtype": "float32",
        "min_context": 64,
        "warm_store": "ram",
        "cache_max_bytes": 30_000_000,
        **cache_settings,
    }
    return Engine(speaking_model(), EngineConfig(cache=CacheConfig(**settings), max_batch_tokens=128, max_num_seqs=max_num_seqs))


class RunningServer:
    """A server that answers. `client` is for its own tests' thread."""

    def __init__(
        self, service: Service, server: Server, thread: threading.Thread, url: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.service = service
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=30)
        self._server = server
        self._thread = thread
        self._loop = loop

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, messages: Any = None, **fields: Any) -> dict[str, Any]:
        return self._answer("/v1/chat/completions", {"messages": messages or HELLO, **fields})

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self._answer("/v1/completions", {"prompt": prompt, **fields})

    def events(self, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        """What a stream brings before its end marker."""
        with self.client.stream("POST", path, json={**body, "stream": True}, **options) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert [line for line in lines if line == "data: [DONE]"] == lines[-1:], "there is exactly one end marker, at the end"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def inspect(self, read: Callable[[Engine], Any]) -> Any:
        """`read(engine)`, between two steps."""
        return self.on_loop(self.service._engine.inspect(read))

    def on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def metric(self, name: str) -> float:
        """The value of a metric, 0 if it has not been counted yet; `name` with its labels as Prometheus writes them."""
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def busy(self) -> tuple[int, int, int]:
        """Running, waiting, and bytes of pages in use (an adaptive cache counts frames that are partly empty, so not there)."""

        def read(engine: Engine) -> tuple[int, int, int]:
            return engine.num_running, engine.num_waiting, 0 if engine.cache.adaptive else engine.cache.used_bytes

        return self.inspect(read)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Nothing runs or waits, all pages are free, and the service holds no place."""
        deadline = time.monotonic() + seconds
        while (figures := (*self.busy(), self.service.is_idle)) != (0, 0, 0, True):
            assert time.monotonic() < deadline, f"still busy: {figures}"
            time.sleep(0.01)

    def signal(self) -> None:
        """What a TERM signal does."""
        self._server.handle_exit(signal.SIGTERM, None)

    def join(self, seconds: float) -> float:
        """Waits for the server's end; the seconds it took."""
        start = time.monotonic()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still there after {seconds} s"
        return time.monotonic() - start

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def running(
    load: Callable[[], Engine] = speaking_engine,
    *,
    ready: bool = True,
    heat_log: HeatLog | None = None,
    oversight: Oversight | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """A server on a free port; `ready`: after the model is loaded. Ends with everything given back."""
    chosen = ServerSettings(**{"port": 0, "grace_seconds": 0.0, **settings})
    service = Service(load, chosen, ServerMetrics(), heat_log=heat_log, oversight=oversight)
    server = Server(uvicorn_config(service, chosen), service, grace_seconds=chosen.grace_seconds)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    def run() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    _wait(lambda: server.started or not thread.is_alive())
    port = server.servers[0].sockets[0].getsockname()[1]
    running = RunningServer(service, server, thread, f"http://127.0.0.1:{port}", loops[0])
    try:
        if ready:
            _wait(lambda: running.client.get("/ready").status_code == 200)
        yield running
    finally:
        running.client.close()
        running.signal()
        running.join(20)


def raw_request(url: str, head: bytes) -> bytes:
    """Sends bytes as they are over a connection of its own; all that comes back until the server closes it or is silent."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        connection.sendall(head)
        received = b""
        while part := connection.recv(65536):
            received += part
            if b"\r\n\r\n" in received and received.endswith((b"}", b"\r\n0\r\n\r\n")):
                break
        return received


def _wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
