"""The life of a server: start, signals, the end. Processes where only a process can tell, threads of this one elsewhere."""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from servers import running, speaking_engine

from tiny_models import save_tiny, tiny_tokenizer
from vera.errors import ConfigError, ModelNotFound, VeraError
from vera.server import run as server_run
from vera.server import service as server_service
from vera.server.settings import ServerSettings

LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}

HANGING = """
import sys, time
sys.path[:0] = {paths!r}
from servers import speaking_engine
from vera.server.run import serve
from vera.server.settings import ServerSettings

def load():
    engine = speaking_engine()
    original, steps = engine.step, []
    def step():
        steps.append(engine.num_running)
        if steps[-20:] == [3] * 20:
            time.sleep(1000)
        return original()
    engine.step = step
    return engine

serve(load, ServerSettings(port=0, grace_seconds=0.2))
"""


@contextmanager
def process_of(*command, **environment):
    """A server's process, its address once it takes requests, and what it logs."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    lines, ready = [], threading.Event()

    def read():
        for line in process.stderr:
            lines.append(json.loads(line))
            if lines[-1]["message"] == "ready":
                ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(60), lines
        address = next(line["addresses"][0] for line in lines if line["message"] == "listening")
        yield process, f"http://{address}", lines
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        process.stderr.close()


def read_stream(url, events, body=LONG, **options):
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60, **options) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))


def started_streams(url, count, body=LONG, **options):
    """Threads that read streams, and the lists that their events go to; each has begun."""
    streams = [[] for _ in range(count)]
    threads = [threading.Thread(target=read_stream, args=(url, events, body), kwargs=options) for events in streams]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while not all(streams):
        assert time.monotonic() < deadline, "a stream did not begin"
        time.sleep(0.01)
    return threads, streams


def assert_ended_with_an_event(threads, streams):
    for thread, events in zip(threads, streams, strict=True):
        thread.join(10)
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        assert json.loads(events[-2])["error"]["code"] == "engine_stopped"


def test_term_ends_the_process_and_every_stream_within_the_grace_time(tmp_path):
    save_tiny(tmp_path / "tiny", tokenizer=tiny_tokenizer(), vocab_size=len(tiny_tokenizer()), eos_token_id=None)
    command = [
        "-m",
        "vera.cli",
        "serve",
        str(tmp_path / "tiny"),
        "--port",
        "0",
        "--cache-max-bytes",
        "50000000",
        "--grace",
        "0.5",
    ]
    keys = {"VERA_API_KEY": "a-key", "VERA_ADMIN_KEY": "an-admin-key"}
    with process_of(*command, **keys) as (process, url, lines):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/admin/stats", headers={"Authorization": "Bearer an-admin-key"}).status_code == 200
        threads, streams = started_streams(url, 3, headers={"Authorization": "Bearer a-key"})
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - start < 5
        assert_ended_with_an_event(threads, streams)
    logged = json.dumps(lines)
    assert "a-key" not in logged and "an-admin-key" not in logged
    settings = next(line["settings"] for line in lines if line["message"] == "starting")
    assert (settings["api_keys"], settings["admin_key"], settings["grace_seconds"]) == (1, True, 0.5)


def test_engine_that_hangs_does_not_keep_the_process():
    here = Path(__file__).parent
    script = HANGING.format(paths=[str(here), str(here.parent)])
    with process_of("-c", script) as (process, url, _):
        threads, streams = started_streams(url, 3)
        start = time.monotonic()
        process.terminate()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - start < 9
        assert_ended_with_an_event(threads, streams)


def test_draining_server_answers_probes_and_refuses():
    with running(grace_seconds=30) as server:
        threads, streams = started_streams(server.url, 1, {"prompt": [5], "max_tokens": 600, "ignore_eos": True})
        server.signal()
        time.sleep(0.1)
        assert server.client.get("/ready").json()["error"]["code"] == "server_draining"
        assert server.client.get("/health").status_code == 200
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.join(20) < 15
        threads[0].join(5)
        assert streams[0][-1] == "[DONE]" and json.loads(streams[0][-2])["choices"][0]["finish_reason"] == "length"


def test_second_signal_does_without_the_grace():
    with running(lambda: speaking_engine(max_num_seqs=1), grace_seconds=60) as server:
        threads, streams = started_streams(server.url, 1)
        waiting = []
        waiter = threading.Thread(
            target=lambda: waiting.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))
        )
        waiter.start()
        time.sleep(0.2)
        server.signal()
        server.signal()
        assert server.join(10) < 5
        assert_ended_with_an_event(threads, streams)
        waiter.join(5)
        assert waiting[0].status_code == 503 and waiting[0].json()["error"]["code"] == "engine_stopped"


def test_signal_while_the_model_is_loaded_ends_the_server_at_once():
    gate = threading.Event()

    def load():
        gate.wait(20)
        return speaking_engine()

    with running(load, ready=False, grace_seconds=60) as server:
        server.signal()
        assert server.join(10) < 5
        assert server.service.leaves_threads
        gate.set()


def test_streams_of_a_hung_engine_end_without_it(monkeypatch):
    monkeypatch.setattr(server_service, "_JOIN_SECONDS", 0.3)
    with running() as server:
        threads, streams = started_streams(server.url, 2)
        gate = threading.Event()
        server.service._engine._post(lambda: gate.wait(30))
        time.sleep(0.1)
        server.signal()
        assert server.join(10) < 5
        assert server.service.leaves_threads
        gate.set()
        assert_ended_with_an_event(threads, streams)


def test_port_that_is_taken_is_said(monkeypatch):
    monkeypatch.setattr(server_run, "configure_logging", lambda: None)
    with socket.socket() as taken, pytest.raises(VeraError, match="cannot listen"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server_run.serve(speaking_engine, ServerSettings(port=taken.getsockname()[1]))


def test_model_that_cannot_be_loaded_is_said(monkeypatch):
    monkeypatch.setattr(server_run, "configure_logging", lambda: None)

    def load():
        raise ModelNotFound("nothing is at /nowhere")

    with pytest.raises(ModelNotFound, match="nowhere"):
        server_run.serve(load, ServerSettings(port=0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "VERA_API_KEY"),
        (["--set", "attention_tolerence=0.1"], "attention_tolerence"),
        (["--api-key-file", "/nowhere"], "nowhere"),
    ],
)
def test_wrong_option_is_said_before_anything_is_loaded(arguments, words):
    command = [sys.executable, "-m", "vera.cli", "serve", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, run.stderr
    assert words in run.stderr and "Traceback" not in run.stderr


def test_server_speaks_https_with_a_certificate(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-keyout",
        key,
        "-out",
        certificate,
        *names,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    with running(tls_certificate=str(certificate), tls_key=str(key), ready=False) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        url = server.url.replace("http://", "https://")
        assert httpx.get(f"{url}/version", verify=context).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/version")


def test_queue_takes_the_load_that_the_benchmark_has_by_default():
    from vera.bench.serve import Workload
    from vera.cli import serve

    assert inspect.signature(serve).parameters["max_waiting"].default >= Workload().num_requests


def test_tls_file_that_is_not_pem_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(server_run, "configure_logging", lambda: None)
    (tmp_path / "certificate.pem").write_text("nothing")
    path = str(tmp_path / "certificate.pem")
    with pytest.raises(ConfigError, match=r"tls_certificate='.*certificate\.pem'.*PEM"):
        server_run.serve(speaking_engine, ServerSettings(port=0, tls_certificate=path, tls_key=path))


def test_collector_leaves_alone_what_loading_made():
    made = []
    try:
        server_run.set_aside_after(lambda: made.append([[] for _ in range(1000)]))()
        young = {id(thing) for thing in gc.get_objects()}
        assert not any(id(thing) in young for thing in made[0])
    finally:
        gc.unfreeze()
