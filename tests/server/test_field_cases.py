"""Faults that servers of language models have had in the field, one test or a few a kind, through the public door."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from servers import HELLO, adaptive_engine, running, speaking_engine, speaking_model
from test_server_completions import reference_logprobs

from engines import PAGE
from tiny_models import tiny_tokenizer
from vera.engine.sampler import Sampled
from vera.models import adopt_model

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOKENIZER = tiny_tokenizer()
LONG = {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True}


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


@pytest.fixture(scope="module")
def scripted():
    """A server whose model says what it is told to: the token ids in the list, and the last one for ever."""
    script = [5]

    def load():
        engine = speaking_engine()

        def sample(logits, rows):
            return [Sampled(script[min(len(row.output_token_ids), len(script) - 1)]) for row in rows]

        engine._sampler.sample = sample
        return engine

    with running(load) as server:

        def say(tokens):
            script[:] = tokens

        server.say = say
        yield server


def deltas(server, **body):
    events = server.events(COMPLETE, {"prompt": [5], "temperature": 0, **body})
    return [choice["text"] for event in events for choice in event["choices"]]


# Characters split across tokens


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "\ud55c\uae00", "é", "a\N{GRINNING FACE}b\ud55cé"])
def test_split_characters_arrive_whole(scripted, text):
    tokens = ids_of(text)
    assert len(tokens) > len(text), "the tokenizer splits characters"
    scripted.say(tokens)
    pieces = deltas(scripted, max_tokens=len(tokens))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_end_in_the_middle_of_a_character_reads_the_same_streamed(scripted):
    tokens = ids_of("a\N{GRINNING FACE}")
    scripted.say(tokens)
    for limit in range(1, len(tokens) + 1):
        whole = scripted.complete([5], max_tokens=limit, temperature=0)["choices"][0]["text"]
        assert "".join(deltas(scripted, max_tokens=limit)) == whole


def test_invalid_bytes_do_not_stall_a_stream(scripted):
    (broken,) = (token for token in range(300) if TOKENIZER.convert_ids_to_tokens(token) == "\u0122")  # the byte 0xff
    scripted.say([broken] * 6 + ids_of("end"))
    text = "".join(deltas(scripted, max_tokens=9))
    assert text.startswith("\ufffd") and text.endswith("end")


# Stop strings across chunks


@pytest.mark.parametrize(
    ("said", "stop", "shown", "reason"),
    [
        ("Hello world, bye", ["world"], "Hello ", "stop"),
        ("wonder", ["world"], "wonder", "length"),
        ("xab", ["ab", "b"], "x", "stop"),
        ("world", ["world"], "", "stop"),
        ("naïve", ["ïv"], "na", "stop"),
    ],
)
def test_stop_strings_never_reach_the_client(scripted, said, stop, shown, reason):
    tokens = ids_of(said)
    scripted.say(tokens)
    body = {"max_tokens": len(tokens), "stop": stop}
    choice = scripted.complete([5], temperature=0, **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (shown, reason)
    assert "".join(deltas(scripted, **body)) == shown
    if shown == "Hello ":
        kept = scripted.complete([5], temperature=0, include_stop_str_in_output=True, **body)
        assert kept["choices"][0]["text"] == "Hello world"


# A stream that does not end


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_error_in_mid_stream_ends_it_at_once(path):
    with running() as server:

        def break_later(engine):
            original, steps = engine._sampler.sample, []

            def sample(*arguments):
                steps.append(1)
                if len(steps) == 3:
                    raise RuntimeError("broken at token 3")
                return original(*arguments)

            engine._sampler.sample = sample

        server.inspect(break_later)
        start = time.monotonic()
        events = server.events(path, {**LONG, "prompt": [5]} if path == CHAT else {"prompt": [5], "max_tokens": 99})
        assert time.monotonic() - start < 1
        assert [("error" in event) for event in events][-1] and sum("error" in event for event in events) == 1
        server.wait_until_idle()


def test_wrong_request_for_a_stream_is_refused_before_any_event(server):
    for wrong in ({"n": 0}, {"model": "other"}, {"max_tokens": 99_999}, {"vera": {"fidelity": "exact"}}):
        response = server.post(CHAT, {"messages": HELLO, "stream": True, **wrong})
        assert response.status_code in (400, 404) and response.headers["content-type"] == "application/json"


def test_degrading_to_native_in_mid_stream_ends_normally():
    with running(adaptive_engine) as server:
        body = {"prompt": [5] * 200, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", COMPLETE, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.inspect(lambda engine: [engine.set_fidelity(name, "native") for name in list(engine._requests)])
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.wait_until_idle(20)


# Empty prompts, no tokens


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_empty_prompt_is_refused_and_the_server_goes_on(server, prompt):
    for more in ({}, {"max_tokens": 0, "echo": True}, {"stream": True}):
        assert server.post(COMPLETE, {"prompt": prompt, **more}).status_code == 400
    assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_empty_prompt_is_one_token_where_the_tokenizer_adds_one():
    model = adopt_model(speaking_model().module, tiny_tokenizer(add_bos=True), name="with-bos")
    with running(lambda: speaking_engine(model)) as server:
        assert server.complete("", max_tokens=2)["usage"]["prompt_tokens"] == 1
        assert server.complete("", max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]["tokens"] == ["<s>"]


@pytest.mark.parametrize(("limit", "status"), [(-1, 400), (0, 400), (None, 200), ("missing", 200)])
def test_number_of_tokens_is_checked(server, limit, status):
    body = {"prompt": [5] * 4050, **({} if limit == "missing" else {"max_tokens": limit})}
    response = server.post(COMPLETE, {**body, "ignore_eos": True})
    assert response.status_code == status
    assert status == 400 or response.json()["usage"]["total_tokens"] == 4096


# Prompts longer than what is served


def test_limit_is_what_the_pool_holds_everywhere():
    with running(lambda: speaking_engine(blocks=7)) as server:
        longest = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert longest < 4096
        for prompt, answer in ((longest, 1), (longest + 1, 1), (150, 1), (5000, 1), (longest - 5, 6)):
            refused = server.post(COMPLETE, {"prompt": [5] * prompt, "max_tokens": answer})
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert str(longest) in message and str(prompt) in message
        usage = server.complete([5] * (longest - 1), max_tokens=1)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (longest - 1, 1)


# Log-probabilities of a prompt that is in the cache


@pytest.mark.parametrize("chunk", [16, 64])
def test_prompt_logprobs_are_right_whether_or_not_the_prompt_is_cached(chunk):
    prompt = random.Random(3).choices(range(5, 250), k=117)
    with running(lambda: speaking_engine(max_batch_tokens=chunk)) as server:
        server.complete(prompt, max_tokens=1)
        for _ in range(2):
            answer = server.complete(prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
            assert answer["token_logprobs"][0] is None and len(answer["token_logprobs"]) == 117
            assert answer["token_logprobs"][1:] == pytest.approx(reference_logprobs(prompt), abs=1e-4)


# A chat template that refuses


STRICT = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


@pytest.fixture(scope="module")
def strict():
    model = adopt_model(speaking_model().module, tiny_tokenizer(chat_template=STRICT), name="strict")
    with running(lambda: speaking_engine(model)) as started:
        yield started


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "roles must alternate"),
        ([{"role": "narrator", "content": "a"}], "roles must alternate"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": ""}], "empty"),
    ],
)
def test_refusing_template_is_the_clients_error(strict, messages, words):
    refused = strict.post(CHAT, {"messages": messages})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert strict.metric(f'vera_http_responses_total{{route="{CHAT}",status="400"}}') >= 1
    assert strict.chat(max_tokens=1)["choices"]


def test_model_without_a_template_says_so():
    model = adopt_model(speaking_model().module, tiny_tokenizer(chat_template=None), name="plain")
    with running(lambda: speaking_engine(model)) as server:
        refused = server.post(CHAT, {"messages": HELLO})
        assert refused.status_code == 400 and "template" in refused.json()["error"]["message"]
        assert server.complete("x", max_tokens=1)["choices"]


# Clients that leave


def test_clients_that_leave_at_any_moment_leave_nothing_behind():
    with running(lambda: speaking_engine(blocks=120, max_num_seqs=4, max_batch_tokens=16, max_waiting=200)) as server:

        def visit(number):
            chance = random.Random(number)
            body = {"prompt": [chance.randrange(5, 250)] * chance.randrange(1, 600), "max_tokens": chance.randrange(1, 400)}
            body["stream"], patience = chance.random() < 0.7, chance.uniform(0.001, 0.2)
            try:
                with httpx.stream("POST", server.url + COMPLETE, json=body, timeout=patience) as response:
                    for count, _ in enumerate(response.iter_raw()):
                        if count >= chance.randrange(6):
                            break
            except httpx.HTTPError:
                pass

        with ThreadPoolExecutor(24) as clients:
            list(clients.map(visit, range(120)))
        server.wait_until_idle()
        server.inspect(lambda engine: engine.check_invariants())
        assert server.service._engine._answers == {} and server.service.jobs() == []


def test_client_that_leaves_while_preempted_frees_everything():
    with running(lambda: speaking_engine(blocks=12, max_num_seqs=4)) as server, ThreadPoolExecutor(4) as clients:

        def slow_down(engine):
            original = engine.step
            engine.step = lambda: (time.sleep(0.01), original())[1]

        def visit(_):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(server.url + COMPLETE, json={"prompt": [7] * 60, "max_tokens": 120, "ignore_eos": True}, timeout=0.6)

        server.inspect(slow_down)
        list(clients.map(visit, range(4)))
        server.wait_until_idle()
        assert server.metric("vera_num_preemptions_total") > 0


# A request that can never fit


def test_request_that_never_fits_blocks_nobody():
    with running(lambda: speaking_engine(blocks=8)) as server:
        longest = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
        with ThreadPoolExecutor(2) as clients:
            never = clients.submit(server.post, COMPLETE, {"prompt": [5] * (longest + PAGE), "max_tokens": 1})
            small = clients.submit(httpx.post, server.url + COMPLETE, json={"prompt": [5], "max_tokens": 1})
            assert never.result().status_code == 400 and small.result().status_code == 200


def test_prompts_and_answers_that_crowd_each_other_out_all_finish():
    with running(lambda: speaking_engine(blocks=14, max_num_seqs=4)) as server, ThreadPoolExecutor(4) as clients:

        def ask(number):
            body = {"prompt": [number + 5] * 100, "max_tokens": 60, "ignore_eos": True}
            return httpx.post(server.url + COMPLETE, json=body, timeout=60).json()["usage"]["completion_tokens"]

        assert list(clients.map(ask, range(4))) == [60] * 4


# Hit numbers that flatter


def test_random_prompts_have_no_hits_even_after_preemptions():
    with running(lambda: speaking_engine(blocks=12, max_num_seqs=4)) as server, ThreadPoolExecutor(4) as clients:

        def ask(number):
            prompt = random.Random(number).choices(range(5, 250), k=60)
            body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True}
            return httpx.post(server.url + COMPLETE, json=body, timeout=60).json()["usage"]

        usages = list(clients.map(ask, range(12)))
        assert server.metric("vera_num_preemptions_total") > 0
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0] * 12
        assert server.metric("vera_prefix_cache_hits_total") == 0
        assert server.metric("vera_prefix_cache_queries_total") == 12 * 60


def test_repeated_prompt_is_cached_in_full_blocks_streamed_or_not():
    prompt = random.Random(1).choices(range(5, 250), k=117)
    with running() as server:
        told = [server.complete(prompt, max_tokens=1)["usage"] for _ in range(2)]
        body = {"prompt": prompt, "max_tokens": 1, "stream_options": {"include_usage": True}}
        told.append(server.events(COMPLETE, body)[-1]["usage"])
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in told] == [0, 112, 112]
    assert told[1] == told[2]
    for usage in told:
        assert sum(usage["vera"]["cached_tokens"].values()) + usage["vera"]["computed_tokens"] == 117


# Counters that go down


def test_counters_only_grow():
    with running(adaptive_engine) as server, ThreadPoolExecutor(6) as clients:
        before, asked, body = {}, [], {"prompt": [5] * 90, "max_tokens": 40}
        for number in range(12):
            asked.append(clients.submit(httpx.post, server.url + COMPLETE, json=body, timeout=60))
            lines = [line.rpartition(" ") for line in server.client.get("/metrics").text.splitlines() if line[0] != "#"]
            now = {name: float(value) for name, _, value in lines if "_total" in name}
            assert all(now[name] >= value for name, value in before.items())
            before = now
            time.sleep(0.01 * (number % 3))
        assert all(one.result().status_code == 200 for one in asked)


# Healthy while hung


def test_long_but_legal_step_stays_healthy():
    with running(health_timeout_seconds=5) as server:
        held = threading.Thread(target=lambda: server.inspect(lambda _: time.sleep(0.6)))
        held.start()
        time.sleep(0.3)
        assert server.client.get("/health").status_code == 200
        held.join()


def test_pending_requests_of_a_dead_engine_get_an_error():
    with running() as server, ThreadPoolExecutor(2) as clients:

        def die(_):
            raise SystemExit

        whole = clients.submit(httpx.post, server.url + CHAT, json=LONG, timeout=30)
        stream = clients.submit(httpx.post, server.url + CHAT, json={**LONG, "stream": True}, timeout=30)
        time.sleep(0.3)
        server.service._engine._post(lambda: die(None))
        assert whole.result().status_code == 503
        assert stream.result().text.rstrip().endswith("data: [DONE]") and "engine_stopped" in stream.result().text


# Settings that do nothing


def test_effective_settings_can_be_read_and_are_proven_by_effect():
    with running(lambda: speaking_engine(blocks=50), admin_key="admin") as server:
        stats = server.client.get("/admin/stats", headers={"Authorization": "Bearer admin"}).json()
        asked = stats["settings"]["engine"]["cache"]["cache_max_bytes"]
        capacity = server.metric('vera_cache_capacity_bytes{device="cpu",tier="hot"}')
        assert 0.9 * asked < capacity <= asked
        assert stats["settings"]["server"]["max_n"] == 16


@pytest.mark.parametrize("name", ["fidelty", "tolerance", "attention_tolerence"])
def test_misspelt_setting_of_a_request_is_refused_by_name(server, name):
    refused = server.post(CHAT, {"messages": HELLO, "vera": {name: 0.1}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == f"vera.{name}"
