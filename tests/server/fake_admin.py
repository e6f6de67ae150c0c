"""The admin routes as the page sees them, with figures that a test chooses: a service without a model."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from vera.server.page import add_page

KEY = "the-admin-key"
_SECONDS = 20

ARM = {
    "requests": 240,
    "errors": 1,
    "nonfinite": 0,
    "decode_steps": 9000,
    "recompute_steps": 180,
    "uncovered_hits": 12,
    "audits": 14,
    "error_rate": 1 / 240,
    "ttft_p99": 1.84,
    "itl_p99": 0.062,
    "recompute_share": 0.02,
    "audit_error": 0.0125,
    "audit_ratio": 0.71,
    "shadow_kl": 0.00042,
    "shadow_agreement": 0.991,
}
NATIVE_ARM = {
    **ARM,
    "requests": 300,
    "errors": 0,
    "error_rate": 0.0,
    "ttft_p99": 1.6,
    "itl_p99": 0.0775,
    "decode_steps": 0,
    "recompute_steps": 0,
    "uncovered_hits": 0,
    "recompute_share": None,
    "audit_error": None,
    "audit_ratio": None,
    "shadow_kl": None,
    "shadow_agreement": None,
}
ROLLOUT = {
    "rollout": {
        "id": 7,
        "profile": "long-document",
        "baseline": "long-document@2",
        "candidate": "long-document@3",
        "state": "running",
        "step": 1,
        "weight": 25.0,
        "held": [],
        "reason": "a smaller sketch for the night",
        "author": "mei",
        "plan": {
            "steps": [{"weight": weight, "pause_seconds": 60.0, "min_samples": 50} for weight in (5.0, 25.0, 50.0, 100.0)],
            "patience_seconds": 3600.0,
        },
        "limits": {"error_increase": 0.01},
    },
    "step_seconds": 41.5,
    "verdict": {
        "decision": "wait",
        "reason": "too few samples: 12 more requests of the candidate",
        "missing": {"requests of the candidate": 12},
        "breaches": [],
    },
    "arms": {"stable": {**ARM, "requests": 114}, "candidate": {**ARM, "requests": 38, "itl_p99": 0.0651}},
}
EVENTS = [
    ("rollout.step", "long-document", 3, "guard", "within all limits after 61 requests of the candidate"),
    ("rollout.start", "long-document", 3, "mei", "a smaller sketch for the night"),
    ("create", "long-document", 3, "mei", "half the sketch bits, as measured in the lab"),
    ("degrade", "long-document", None, "breaker", "all well for 61 s and 24 adaptive requests"),
    ("degrade", "long-document", None, "breaker", "audit_error 0.061 has reached 0.05"),
    ("activate", "long-document", 2, "jonas", "lower tolerance after the review of last week"),
    ("create", "long-document", 1, "vera", "ships with this release"),
]


class FakeService:
    """What the routes answer. Tests change `stats` and `fault`; `posts` is what the page has sent."""

    def __init__(self) -> None:
        self.stats = _stats()
        self.pages = {"req-1": _pages("req-1", layers=30, blocks=64), "req-2": _pages("req-2", layers=30, blocks=3, tiered=False)}
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.fault: tuple[int, str, str] | None = None
        """Status, code and message that every admin route answers with; None: it works."""
        self.refusal: tuple[int, str, str] | None = None
        """The same for posts alone."""
        self.polls = 0

    def advance(self, seconds: float = 1.0) -> None:
        """What a busy service counts in that time."""
        engine, counters = self.stats["engine"], self.stats["cache"]["counters"]
        self.stats["uptime_seconds"] += seconds
        self.stats["time"] += seconds
        grown = {"generated_tokens": 120, "steps": 30}
        engine.update({name: engine[name] + int(by * seconds) for name, by in grown.items()})
        engine["finished"]["stop"] += int(2 * seconds)
        moved = {"decode_steps": 100, "hits": 250, "cold_hits": 20, "uncovered_hits": 1, "recompute_steps": 3}
        counters.update({name: counters[name] + int(by * seconds) for name, by in moved.items()})


def _stats() -> dict[str, Any]:
    gib = 2**30
    return copy.deepcopy(
        {
            "state": "ready",
            "model": "SmolLM2-135M-Instruct",
            "time": 1_790_000_000.0,
            "uptime_seconds": 8040.0,
            "settings": {"server": {"port": 8000}, "engine": {"max_num_seqs": 16}},
            "engine": {
                "running": 2,
                "waiting": 1,
                "steps": 51_200,
                "prompt_tokens": 4_210_000,
                "cached_tokens": 1_100_000,
                "generated_tokens": 182_340,
                "prefill_tokens_per_s": 812.0,
                "decode_tokens_per_s": 121.0,
                "preemptions": 0,
                "finished": {"stop": 490, "length": 50},
                "ttft_ms_p50": 640.0,
                "ttft_ms_p99": 1840.0,
                "itl_ms_p50": 24.5,
                "itl_ms_p99": 61.9,
                "e2e_ms_p50": 5200.0,
                "e2e_ms_p99": 14_100.0,
            },
            "cache": {
                "bytes": {
                    "hot": {"device": "cpu", "used": int(0.75 * gib), "capacity": gib},
                    "warm": {"device": "host", "used": gib, "capacity": 4 * gib},
                },
                "idle_bytes": gib // 8,
                "pages": {"hot": 41_000, "warm": 96_000, "cold": 23_000},
                "page_moves": {"hot->warm": 310_000, "warm->hot": 18_200, "warm->cold": 25_000, "cold->hot": 2000},
                "counters": {
                    "hits": 100_000,
                    "cold_hits": 9000,
                    "uncovered_hits": 40,
                    "decode_steps": 60_000,
                    "recompute_steps": 1200,
                    "pages_exact": 2_000_000,
                    "pages_sketched": 8_000_000,
                    "values_skipped": 1_000_000,
                    "restored_blocks": 1500,
                    "restored_pages": 2000,
                    "restore_seconds": 9.0,
                },
                "audits": 45,
            },
            "errors": {"estimated_mean": 0.0176, "estimated_max": 0.05, "true_mean": 0.0125, "true_max": 0.021, "audits": 45},
            "requests": [
                _request("req-1", seconds=12.25, mode="adaptive", arm="candidate", version="long-document@3", fidelity="bounded"),
                _request("req-2", seconds=3.5, mode="native", arm="native", version=None, fidelity="native"),
                _request("req-3", seconds=0.5, mode="adaptive", arm="stable", version="long-document@2", phase="waiting"),
            ],
            "operations": {
                "profile": "long-document",
                "store": "/var/lib/vera/params.db",
                "version": {
                    "ref": "long-document@2",
                    "hash": "ab" * 32,
                    "author": "jonas",
                    "reason": "lower tolerance after the review of last week",
                    "time": "2026-11-30T09:12:44+00:00",
                },
                "refusal": None,
                "degrade": {
                    "state": "closed",
                    "override": "none",
                    "trips": 1,
                    "reason": "all well for 61 s and 24 adaptive requests",
                    "seconds": 3725.0,
                    "unrecorded": 0,
                    "failure": None,
                },
                "rollout": ROLLOUT,
                "modes": {"native": NATIVE_ARM, "adaptive": ARM},
                "events": [
                    {
                        "seq": len(EVENTS) - index,
                        "time": f"2026-11-30T{20 - index:02}:15:04+00:00",
                        "kind": kind,
                        "profile": profile,
                        "ref": profile if number is None else f"{profile}@{number}",
                        "author": author,
                        "reason": reason,
                    }
                    for index, (kind, profile, number, author, reason) in enumerate(EVENTS)
                ],
            },
        }
    )


def _request(name: str, *, seconds: float, mode: str, arm: str, version: str | None, **others: Any) -> dict[str, Any]:
    told = {
        "answers": 1,
        "phase": "answering",
        "prompt_tokens": 4096,
        "completion_tokens": 97,
        "priority": 0,
        "fidelity": "bounded",
    }
    return {"request_id": name, "seconds": seconds, "mode": mode, "arm": arm, "params_version": version, **told, **others}


def _pages(name: str, *, layers: int, blocks: int, tiered: bool = True) -> dict[str, Any]:
    """The first and the latest blocks are exact; of the others two of five are hot or warm, the old ones cold."""

    def code(layer: int, block: int) -> str:
        if not tiered or block in (0, blocks - 1, blocks - 2):
            return "e"
        return "hhwwc"[(block * 7 + layer // 5 * 3) % 5]

    tiers = ["".join(code(layer, block) for block in range(blocks)) for layer in range(layers)]
    heat = [[round(((block * 37 + layer * 11) % 100) / 100, 2) for block in range(blocks)] for layer in range(layers)]
    shape = {"tokens": blocks * 64 - 20, "page_size": 64, "layers": layers, "blocks": blocks}
    return {"request_id": name, **shape, "tier": tiers, "heat": heat if tiered else None}


def build(service: FakeService) -> FastAPI:
    """The page and the routes it asks."""
    app = FastAPI(redirect_slashes=False)
    add_page(app)

    @app.middleware("http")
    async def gate(request: Request, call_next: Any) -> Response:
        if not request.url.path.startswith("/admin"):
            return await call_next(request)
        if service.fault is not None:
            return _error(*service.fault)
        if (sent := request.headers.get("authorization")) != f"Bearer {KEY}":
            return _error(401, "invalid_api_key", "no key was sent" if sent is None else "the key is not one of this server's")
        if request.method == "POST" and service.refusal is not None:
            return _error(*service.refusal)
        return await call_next(request)

    @app.get("/admin/stats")
    async def stats() -> dict[str, Any]:
        service.polls += 1
        return service.stats

    @app.get("/admin/requests/{name}/pages", response_model=None)
    async def pages(name: str) -> Response | dict[str, Any]:
        found = service.pages.get(name)
        return found if found is not None else _error(404, "request_not_found", f"no request {name!r} is running")

    @app.post("/admin/{path:path}")
    async def act(path: str, request: Request) -> dict[str, Any]:
        body = await request.json()
        service.posts.append((path, body))
        return _done(service, path, body)

    return app


def _done(service: FakeService, path: str, body: dict[str, Any]) -> dict[str, Any]:
    operations = service.stats["operations"]
    if path == "degrade":
        state, override = {"degraded": ("open", "open"), "adaptive": ("closed", "closed"), "auto": ("half-open", "none")}[
            body["override"]
        ]
        operations["degrade"] |= {"state": state, "override": override, "reason": body["reason"], "seconds": 0.0}
        return {**operations["degrade"], "moved": service.stats["engine"]["running"]}
    rollout = operations["rollout"]["rollout"]
    rollout["reason"] = body["reason"]
    if path == "rollout/promote" and not body["full"]:
        rollout["step"] += 1
        rollout["weight"] = rollout["plan"]["steps"][rollout["step"]]["weight"]
    elif path in ("rollout/promote", "rollout/abort"):
        rollout["state"] = "promoted" if path == "rollout/promote" else "aborted"
        rollout["weight"] = 100.0 if path == "rollout/promote" else 0.0
    else:
        rollout["held"] = ["operator"] if path == "rollout/hold" else []
        rollout["state"] = "paused" if rollout["held"] else "running"
    return operations["rollout"]


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "param": None, "code": code}}, status)


class Running:
    """A fake service on a port. `stop` and `start` take it away and bring it back to the same port."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        config = uvicorn.Config(
            build(self.service), host="127.0.0.1", port=self._port, log_level="error", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        deadline = time.monotonic() + _SECONDS
        while not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive(), "the fake service does not start"
            time.sleep(0.01)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive(), "the fake service does not end"


@contextmanager
def running_fake() -> Iterator[Running]:
    """Ends with the server gone."""
    started = Running(FakeService())
    try:
        yield started
    finally:
        started.stop()
