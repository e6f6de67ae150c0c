"""What metrics, statistics and logs take of a step: at most one percent, with everything on and scraped every second."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import running

from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.heatlog.log import HeatLog
from vera.models import load_model
from vera.params import ParameterStore
from vera.server import service as service_module
from vera.server.logs import JsonFormatter
from vera.server.metrics import ServerMetrics
from vera.server.operations import Operations, Oversight
from vera.server.service import Service

pytestmark = [pytest.mark.bench, pytest.mark.embedded, pytest.mark.timeout(1200)]

COUNTED = [
    (ServerMetrics, ("observe_first", "observe_next", "observe_end", "count_response", "render")),
    (Operations, ("serve", "begun", "ended", "_new_audits", "_take_audit", "_signals", "_look_at_store", "overview", "status")),
    (Service, ("jobs", "_count_tokens")),
    (HeatLog, ("take",)),
    (JsonFormatter, ("format",)),
    (service_module, ("take_snapshot",)),
]
"""Those that call each other are counted twice: the figure is an upper one."""


def test_metrics_and_logs_take_less_than_one_percent_of_the_steps(monkeypatch, tmp_path):
    spent = {}

    def timed(owner, name):
        whole = getattr(owner, name)

        def run(*arguments, **more):
            start = time.thread_time()
            try:
                return whole(*arguments, **more)
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - start

        monkeypatch.setattr(owner, name, run)

    for owner, names in COUNTED:
        for name in names:
            timed(owner, name)

    def load():
        return Engine(load_model("embedded"), EngineConfig(cache=CacheConfig(mode="adaptive", min_context=512)))

    prompt = [100 + at * 7 % 5000 for at in range(2000)]
    heat_log = HeatLog(tmp_path / "heat.jsonl", about={})
    oversight = Oversight(ParameterStore(tmp_path / "params.sqlite3"), "long-document")
    with running(load, oversight=oversight, heat_log=heat_log, admin_key="admin") as server, ThreadPoolExecutor(16) as pool:
        server.client.timeout = 600
        server.complete(prompt, max_tokens=1)
        spent.clear()
        before = server.inspect(lambda engine: (engine.stats.decode_seconds, engine.stats.steps))
        body = {"prompt": prompt, "max_tokens": 256, "ignore_eos": True}
        answers = [pool.submit(server.events, "/v1/completions", body) for _ in range(16)]
        while not all(answer.done() for answer in answers):
            server.client.get("/metrics")
            server.client.get("/admin/stats", headers={"Authorization": "Bearer admin"})
            time.sleep(1)
        assert all(answer.result() for answer in answers)
        after = server.inspect(lambda engine: (engine.stats.decode_seconds, engine.stats.steps))
    seconds, steps = (then - now for then, now in zip(after, before, strict=True))
    parts = {name: round(value / seconds, 5) for name, value in sorted(spent.items(), key=lambda item: -item[1])}
    print(
        json.dumps({"steps": steps, "ms_per_step": seconds / steps * 1e3, "share": sum(spent.values()) / seconds, "parts": parts})
    )
    assert sum(spent.values()) / seconds <= 0.01
