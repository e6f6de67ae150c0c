"""Probes, metrics, statistics and the log."""

from __future__ import annotations

import json
import logging
import threading
import time

import pytest
from servers import HELLO, adaptive_engine, running, speaking_engine

from vera.errors import ModelNotFound
from vera.server import metrics as server_metrics
from vera.server.logs import JsonFormatter

CHAT = "/v1/chat/completions"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def status(server, path):
    return server.client.get(path).status_code


def test_healthy_server_says_so(server):
    assert server.client.get("/health").json() == server.client.get("/ready").json() == {"status": "ok"}


def test_probes_may_ask_for_the_head_alone(server):
    for path in ("/health", "/ready"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_server_answers_probes_while_it_loads():
    gate = threading.Event()

    def load():
        gate.wait(20)
        return speaking_engine()

    with running(load, ready=False) as server:
        assert status(server, "/ready") == status(server, "/health") == 503
        refused = server.post(CHAT, {"messages": HELLO})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "server_loading"
        assert status(server, "/version") == status(server, "/metrics") == 200
        assert status(server, "/v1/models") == 503
        gate.set()
        server.on_loop(server.service.loaded())
        assert status(server, "/ready") == status(server, "/health") == 200


def test_server_whose_model_cannot_be_loaded_ends():
    def load():
        raise ModelNotFound("nothing is there")

    with running(load, ready=False) as server:
        server.join(10)
        assert isinstance(server.service.failure, ModelNotFound)


def test_hung_engine_is_not_healthy_and_recovers():
    with running(health_timeout_seconds=0.3) as server:
        gate = threading.Event()
        hang = threading.Thread(target=lambda: server.inspect(lambda _: gate.wait(20)))
        hang.start()
        time.sleep(0.6)
        assert server.client.get("/health").json()["error"]["code"] == "engine_dead"
        assert status(server, "/ready") == 503
        assert status(server, "/metrics") == 200
        gate.set()
        hang.join()
        time.sleep(0.05)
        assert status(server, "/health") == 200


def test_dead_engine_is_not_healthy_and_refuses():
    with running() as server:

        def die(_):
            raise SystemExit

        server.service._engine._post(lambda: die(None))
        time.sleep(0.2)
        assert status(server, "/health") == 503
        refused = server.post(CHAT, {"messages": HELLO})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_stopped"


def test_metrics_count_what_was_served():
    with running() as server:
        first = server.chat(max_tokens=5, temperature=0, ignore_eos=True)["usage"]
        server.chat(max_tokens=5, temperature=0, ignore_eos=True)
        server.post(CHAT, {})
        assert server.metric("vera_generation_tokens_total") == 10
        assert server.metric("vera_prompt_tokens_total") == 2 * first["prompt_tokens"]
        assert server.metric("vera_prefix_cache_hits_total") == (first["prompt_tokens"] - 1) // 16 * 16
        assert server.metric("vera_time_to_first_token_seconds_count") == 2
        assert server.metric("vera_inter_token_latency_seconds_count") == 8
        assert server.metric("vera_e2e_request_latency_seconds_count") == 2
        assert server.metric('vera_request_success_total{finished_reason="length"}') == 2
        assert server.metric(f'vera_http_responses_total{{route="{CHAT}",status="200"}}') == 2
        assert server.metric(f'vera_http_responses_total{{route="{CHAT}",status="400"}}') == 1
        assert server.metric("vera_num_requests_running") == server.metric("vera_num_requests_waiting") == 0
        fast = '{device="cpu",tier="hot"}'
        assert 0 < server.metric(f"vera_cache_bytes{fast}") <= server.metric(f"vera_cache_capacity_bytes{fast}")


def test_route_of_an_unknown_path_is_not_kept_in_metrics(server):
    before = server.metric('vera_http_responses_total{route="other",status="404"}')
    server.client.get("/v1/some/secret/path")
    assert server.metric('vera_http_responses_total{route="other",status="404"}') == before + 1
    assert "secret" not in server.client.get("/metrics").text


def test_each_metric_has_one_definition(server):
    text = server.client.get("/metrics").text
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helped) == len(set(helped)) and all(name.startswith("vera_") for name in helped)


@pytest.mark.parametrize("adaptive", [False, True])
def test_stats_show_engine_cache_and_settings(adaptive):
    with running(adaptive_engine if adaptive else speaking_engine, admin_key="admin") as server:
        server.complete([5] * 200, max_tokens=10, ignore_eos=True)
        stats = server.client.get("/admin/stats", headers=bearer("admin")).json()
        assert stats["state"] == "ready" and stats["requests"] == []
        assert stats["engine"]["generated_tokens"] == 10
        assert 0 < stats["engine"]["itl_ms_p50"] <= stats["engine"]["itl_ms_p99"] <= stats["engine"]["e2e_ms_p99"]
        assert stats["cache"]["pages"]["hot"] > 0
        assert stats["settings"]["engine"]["cache"]["mode"] == ("adaptive" if adaptive else "native")
        assert ("warm" in stats["cache"]["bytes"]) is adaptive
        assert bool(stats["cache"]["counters"]) is adaptive


def test_stats_show_requests_in_flight():
    with running(admin_key="admin") as server:
        body = {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", CHAT, json=body, headers={"X-Request-Id": "mine"}) as response:
            chunks = response.iter_raw()
            next(chunks)
            (shown,) = server.client.get("/admin/stats", headers=bearer("admin")).json()["requests"]
        assert (shown["request_id"], shown["phase"], shown["answers"]) == ("mine", "answering", 1)
        server.wait_until_idle()


def test_every_answer_has_a_request_id(server):
    assert server.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for wrong in ("a b", "x" * 200, "a\tb", ""):
        given = server.client.get("/health", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert given != wrong and len(given) == 32
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1}, headers={"X-Request-Id": "mine-2"})
    assert answer.json()["id"] == "chatcmpl-mine-2"


def lines_of(caplog, *request_ids):
    """The access lines of these requests, which are written a moment after their answers are sent."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "vera.server.access"]
        found = {line["request_id"]: line for line in lines}
        if set(request_ids) <= set(found):
            return [found[request_id] for request_id in request_ids]
        time.sleep(0.01)
    raise AssertionError(f"no lines of {request_ids}: {found}")


def named(request_id):
    return {"headers": {"X-Request-Id": request_id}}


def test_each_request_has_one_line_without_its_prompt(server, caplog):
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4, "ignore_eos": True}
    with caplog.at_level(logging.INFO, "vera.server.access"):
        server.post(CHAT, body, **named("whole"))
        server.events(CHAT, body, **named("streamed"))
        server.post(CHAT, {"messages": 5}, **named("refused"))
        whole, streamed, refused = lines_of(caplog, "whole", "streamed", "refused")
    for line, stream in ((whole, False), (streamed, True)):
        assert (line["status"], line["path"], line["stream"], line["completion_tokens"]) == (200, CHAT, stream, 4)
        assert line["prompt_tokens"] > 0 and 0 < line["first_token_seconds"] < line["seconds"]
        assert line["client"] == "127.0.0.1"
    assert (refused["status"], refused["param"]) == (400, "messages")
    assert "secret" not in caplog.text


def test_prompts_are_logged_if_asked_for(caplog):
    body = {"messages": [{"role": "user", "content": "no secret"}], "max_tokens": 1}
    with running(log_prompts=True) as server, caplog.at_level(logging.INFO, "vera.server.access"):
        server.post(CHAT, body, **named("mine"))
        assert lines_of(caplog, "mine")[0]["body"] == body


def test_client_that_left_is_499_in_the_log(caplog):
    with running() as server, caplog.at_level(logging.INFO, "vera.server.access"):
        body = {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", CHAT, json=body, **named("mine")) as response:
            chunks = response.iter_raw()
            next(chunks)
        assert lines_of(caplog, "mine")[0]["status"] == 499


def test_failing_metric_does_not_stop_serving(monkeypatch, caplog):
    with running() as server:

        def broken(*arguments):
            raise ValueError("counters can only be incremented by non-negative amounts")

        for name in ("Histogram", "Counter"):
            monkeypatch.setattr(getattr(server_metrics, name), "observe" if name == "Histogram" else "inc", broken)
        monkeypatch.setattr("vera.server.service.take_snapshot", broken)
        assert server.chat(max_tokens=5, temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 5
        assert len(server.events(CHAT, {"messages": HELLO, "max_tokens": 5, "ignore_eos": True})) >= 2
        assert status(server, "/health") == status(server, "/metrics") == 200
        assert "non-negative" in caplog.text
