"""Streams that do not run to their end: clients that leave, engines that fail, deadlines, full queues."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from servers import HELLO, adaptive_engine, running, speaking_engine

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
LONG = {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def small():
    """A server that runs two answers at a time and takes three more."""
    with running(lambda: speaking_engine(max_num_seqs=2, max_waiting=5, max_batch_tokens=16)) as started:
        yield started


def leave_after(server, seconds, body, path=CHAT):
    """Asks, and hangs up after so many seconds."""
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + path, json=body, timeout=seconds)


def fail_at_step(engine, number, error):
    """Has the sampler raise at a step from now on."""
    original, steps = engine._sampler.sample, 0

    def sample(*arguments):
        nonlocal steps
        steps += 1
        if steps >= number:
            raise error
        return original(*arguments)

    engine._sampler.sample = sample
    return lambda: setattr(engine._sampler, "sample", original)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["decoding", "reading its prompt", "waiting"])
def test_client_that_leaves_frees_everything(small, stream, where):
    aborts = small.inspect(lambda engine: engine.stats.finished["abort"])
    body, count = {**LONG, "stream": stream}, 1
    if where == "reading its prompt":
        body = {"prompt": [5] * 3500, "max_tokens": 500, "stream": stream, "ignore_eos": True}
    elif where == "waiting":
        count = 4
    with ThreadPoolExecutor(count) as clients:
        list(clients.map(lambda _: leave_after_start(small, body), range(count)))
    small.wait_until_idle()
    assert small.inspect(lambda engine: engine.stats.finished["abort"]) == aborts + count


def leave_after_start(server, body):
    """Hangs up after a few chunks, or a moment after the request was sent if there are none."""
    path = CHAT if "messages" in body else COMPLETE
    try:
        with httpx.stream("POST", server.url + path, json=body, timeout=0.15) as response:
            for count, _ in enumerate(response.iter_raw()):
                if count == 2:
                    return
    except httpx.TimeoutException:
        pass


def test_normal_requests_are_never_aborted(server):
    aborts = server.inspect(lambda engine: engine.stats.finished["abort"])
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: server.events(CHAT, {"messages": HELLO, "max_tokens": 3, "seed": number}), range(40)))
    assert server.inspect(lambda engine: engine.stats.finished["abort"]) == aborts
    assert server.metric('vera_request_success_total{finished_reason="abort"}') == aborts


def test_full_queue_is_told_and_tried_again_later(small):
    held = [threading.Thread(target=leave_after, args=(small, 1.0, LONG)) for _ in range(5)]
    for client in held:
        client.start()
    time.sleep(0.4)
    refused = small.post(CHAT, LONG)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert small.client.get("/health").status_code == 200
    for client in held:
        client.join()
    small.wait_until_idle()
    assert small.chat(max_tokens=1)["choices"]


def test_more_answers_than_ever_fit_are_refused_at_once(small):
    refused = small.post(CHAT, {**LONG, "n": 6})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    small.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_ends_an_answer(small, stream):
    body = {**LONG, "vera": {"timeout_seconds": 0.3}}
    if stream:
        error = small.events(CHAT, body)[-1]["error"]
    else:
        response = small.post(CHAT, body)
        assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
    assert error["code"] == "deadline_exceeded" and error["type"] == "timeout_error"
    small.wait_until_idle()


def test_server_has_a_deadline_of_its_own():
    with running(speaking_engine, request_timeout_seconds=0.2) as server:
        for asked in ({}, {"vera": {"timeout_seconds": 1000}}):
            assert server.post(CHAT, {**LONG, **asked}).status_code == 504


@pytest.mark.parametrize("step", [1, 4])
def test_failing_engine_is_told_and_serves_on(small, step):
    for stream in (False, True):
        restore = small.inspect(lambda engine: fail_at_step(engine, step, RuntimeError("a broken sampler")))
        if stream and step > 1:
            events = small.events(CHAT, LONG)
            assert "a broken sampler" in events[-1]["error"]["message"]
            assert [event for event in events if "error" in event] == events[-1:]
        else:
            response = small.post(CHAT, {**LONG, "stream": stream})
            assert response.status_code == 500 and "a broken sampler" in response.json()["error"]["message"]
        restore()
        small.wait_until_idle()
        assert small.chat(max_tokens=2, temperature=0)["usage"]["completion_tokens"] == 2


def test_one_failing_answer_ends_its_request_whole(small):
    """A sequence whose logits are not finite takes its siblings with it: nobody gets half of what was asked for."""
    restore = small.inspect(lambda engine: fail_at_step(engine, 3, RuntimeError("broken")))
    events = small.events(CHAT, {**LONG, "n": 2})
    assert "error" in events[-1]
    restore()
    small.wait_until_idle()


def test_adaptive_cache_tells_what_it_did():
    # Tolerance 0: every sketched page is asked for.
    with running(adaptive_engine) as server:
        prompt = [7, 8, 9] * 70
        native = server.complete(prompt, max_tokens=8, temperature=0, vera={"fidelity": "native"})
        exact = server.complete(prompt, max_tokens=8, temperature=0, vera={"fidelity": "exact"})
        strict = server.complete(prompt, max_tokens=8, temperature=0, vera={"attention_tolerance": 0.0})
        assert native["choices"][0]["text"] == exact["choices"][0]["text"] == strict["choices"][0]["text"]
        told = strict["usage"]["vera"]
        assert (told["fidelity"], told["attention_tolerance"]) == ("bounded", 0.0)
        assert told["decode_steps"] > 0 and told["hits"] > 0
        assert sum(told["cached_tokens"].values()) == strict["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert exact["usage"]["vera"]["attention_tolerance"] is None
        loose = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "vera": {"attention_tolerance": 0.5}}
        streamed = server.events(COMPLETE, {**loose, "stream_options": {"include_usage": True}})[-1]["usage"]["vera"]
        assert 0 < streamed["error_mean"] <= streamed["error_max"]
        assert streamed["params_version"] is streamed["arm"] is None
        assert server.metric("vera_decode_steps_total") >= 14
        assert server.metric('vera_page_hits_total{tier="warm"}') >= told["hits"]
        assert server.metric("vera_attention_error_estimated_count") >= 1
        assert server.metric('vera_cache_bytes{device="host",tier="warm"}') > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["vera", "setting"])
def test_deadline_passes_while_other_prompts_are_read(monkeypatch, stream, field):
    gate, reading = threading.Event(), threading.Event()

    def slow(*_, **__):
        reading.set()
        gate.wait(20)
        return [5]

    monkeypatch.setattr("vera.server.encoding.encode_prompt", slow)
    settings, terms = ({}, {"vera": {"timeout_seconds": 0.2}}) if field == "vera" else ({"request_timeout_seconds": 0.2}, {})
    with running(**settings) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(httpx.post, server.url + COMPLETE, json={"prompt": "long", "max_tokens": 1}, timeout=20)
        assert reading.wait(5)
        start = time.monotonic()
        refused = server.post(CHAT, {"messages": HELLO, "stream": stream, **terms})
        assert refused.status_code == 504 and refused.json()["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() - start < 5
        gate.set()
        first.result()
        server.wait_until_idle()


def test_usage_tells_the_promise_and_whether_it_was_needed():
    with running(adaptive_engine) as server:
        told = server.chat(max_tokens=2, temperature=0, ignore_eos=True)["usage"]["vera"]
        assert (told["fidelity"], told["decode_steps"]) == ("bounded", 0)
        fields = server.client.get("/openapi.json").json()["components"]["schemas"]["VeraUsage"]["properties"]
        assert "promised" in fields["fidelity"]["description"] and "read exactly" in fields["decode_steps"]["description"]
