"""Schemathesis reads the OpenAPI document and sends what it allows, and what it does not, to a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import running, speaking_model

from engines import PAGE
from vera.config import LIVE_SETTINGS, CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.params import ParameterStore, setting_names
from vera.server.operations import Oversight

SCHEMA = Path(__file__).parent / "schema"
KEYS = {"api_keys": ("key",), "admin_key": "admin-key"}
PINNED = frozenset(setting_names()) - LIVE_SETTINGS
GENERATION = ("/v1/chat/completions", "/v1/completions")


def short_engine():
    """Its context is short, so that answers without a limit end soon; its cache is adaptive, so that all of `vera` is taken."""
    cache = CacheConfig(
        mode="adaptive", page_size=PAGE, page_dtype="float32", min_context=64, warm_store="ram", cache_max_bytes=30_000_000
    )
    config = EngineConfig(cache=cache, max_batch_tokens=128, max_num_seqs=8, max_waiting=64, max_model_len=320)
    return Engine(speaking_model(), config)


def run_schemathesis(server, tmp_path, seconds, *more):
    """Its report. It runs in a process of its own, with the admin key, which opens all routes."""
    report = tmp_path / "report.json"
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", SCHEMA / "schemathesis.toml"]
    command += ["run", f"{server.url}/openapi.json", "--max-time", str(seconds), "--no-color"]
    command += ["--header", "Authorization: Bearer admin-key", "--report", "json", "--report-json-path", report, *more]
    environment = {**os.environ, "SCHEMA_HOOKS": str(SCHEMA / "hooks.py")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=seconds + 400)
    assert report.exists(), run.stdout + run.stderr
    found = json.loads(report.read_text())
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    return found


def counted(server):
    """Answered requests by route and status, as the server counted them."""
    text = server.client.get("/metrics", headers={"Authorization": "Bearer admin-key"}).text
    lines = re.findall(r'^vera_http_responses_total\{route="(.*?)",status="(\d+)"\} (\S+)$', text, re.MULTILINE)
    return {(route, int(status)): int(float(value)) for route, status, value in lines}


def assert_holds(tmp_path, seconds, *more):
    oversight = Oversight(ParameterStore(tmp_path / "params.sqlite3"), "long-document", pinned=PINNED)
    with running(short_engine, oversight=oversight, **KEYS) as server:
        report = run_schemathesis(server, tmp_path, seconds, *more)
        responses = counted(server)
        server.wait_until_idle()
    print(json.dumps({"cases": report["test_cases"], "seconds": report["running_time"], "answered": sum(responses.values())}))
    print(json.dumps({f"{route} {status}": count for (route, status), count in sorted(responses.items())}))
    assert report["operations"]["tested"] == report["operations"]["total"] == 21
    assert report["failures"] == report["errors"] == []
    assert {status for (_, status) in responses if status >= 500} <= {504}
    for route in GENERATION:
        assert responses[route, 200] >= 20, "enough of them reach the engine"


@pytest.mark.slow
def test_server_does_what_its_openapi_document_says(tmp_path):
    assert_holds(tmp_path, 90, "--phases", "coverage,fuzzing", "--seed", "1")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_server_does_what_its_openapi_document_says_for_long(tmp_path):
    """Twenty minutes; fewer with SCHEMA_SECONDS."""
    assert_holds(tmp_path, int(os.environ.get("SCHEMA_SECONDS", "1200")))
