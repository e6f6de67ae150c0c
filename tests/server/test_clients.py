"""What OpenAI's client and LangChain make of answers, errors, retries and headers of a real server."""

from __future__ import annotations

import asyncio
import threading
import time

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from servers import HELLO, adaptive_engine, running, speaking_engine

from vera.server import errors

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}
LONG = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
CHAT = "/v1/chat/completions"


def client_of(server, **options):
    return openai.OpenAI(**{"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, **options})


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as made:
        yield made


# OpenAI: answers


def test_several_answers_stop_strings_and_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, seed=4, max_tokens=20, stop=["e", "\n"], logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert "e" not in choice.message.content and choice.finish_reason in ("stop", "length")
        assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in choice.logprobs.content)


def test_several_prompts_are_answered_in_order(client):
    answer = client.completions.create(prompt=["one", "two", "three"], n=2, echo=True, **GREEDY)
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two", "thr", "thr"]


def test_usage_comes_in_a_last_chunk_without_choices(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="hello", **options, **GREEDY))
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 8
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


def test_stream_helper_gathers_the_whole_answer(client):
    # The helper raises for an answer that ends by its length.
    stop = client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].message.content[-1]
    whole = client.chat.completions.create(messages=HELLO, stop=stop, **GREEDY).choices[0]
    with client.chat.completions.stream(messages=HELLO, stop=stop, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        gathered = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert (gathered.message.content, gathered.finish_reason) == (whole.message.content, "stop")


def test_raw_and_streamed_responses_have_the_request_id(client):
    own = {"X-Request-Id": "mine-7"}
    raw = client.chat.completions.with_raw_response.create(messages=HELLO, extra_headers=own, **GREEDY)
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine-7"
    assert raw.headers["content-type"] == "application/json"
    with client.chat.completions.with_streaming_response.create(
        messages=HELLO, stream=True, extra_headers=own, **GREEDY
    ) as response:
        assert response.headers["x-request-id"] == "mine-7"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_extension_is_asked_for_and_told():
    with running(adaptive_engine) as server, client_of(server) as client:
        for terms in ({"fidelity": "native"}, {"fidelity": "exact"}, {"fidelity": "bounded", "attention_tolerance": 0.5}):
            answer = client.completions.create(prompt=[7, 8, 9] * 60, extra_body={"vera": terms}, **GREEDY)
            told = answer.usage.vera
            assert (told["fidelity"], told["attention_tolerance"]) == (terms["fidelity"], terms.get("attention_tolerance"))
        assert sum(told["cached_tokens"].values()) == answer.usage.prompt_tokens_details.cached_tokens > 0
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(prompt="x", extra_body={"vera": {"fidelity": "exakt"}}, **GREEDY)
        assert wrong.value.param == "vera.fidelity"


def test_async_client_asks_at_the_same_time_and_cancels(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            plain = [client.chat.completions.create(messages=HELLO, seed=seed, **GREEDY) for seed in range(8)]
            answers = await asyncio.gather(*plain)
            stream = await client.completions.create(stream=True, **LONG)
            await anext(stream)
            await stream.close()
            left = asyncio.create_task(client.completions.create(**LONG))
            await asyncio.sleep(0.1)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            return answers

    assert len({answer.choices[0].message.content for answer in asyncio.run(ask())}) == 1
    server.wait_until_idle()


# OpenAI: errors and retries


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"messages": HELLO, "n": 99}, openai.BadRequestError, None, "n"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, openai.BadRequestError, "unsupported_parameter", "tools"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, openai.BadRequestError, "context_length_exceeded", None),
        ({"messages": HELLO, "model": "gpt-4"}, openai.NotFoundError, "model_not_found", "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_become_the_clients_exceptions(client, fields, kind, code, param, stream):
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{"model": "tiny", "stream": stream, **fields})
    assert refused.value.code == code and (param is None or refused.value.param == param)
    assert refused.value.type == "invalid_request_error" and refused.value.request_id


def test_unknown_route_and_wrong_key_become_the_clients_exceptions(server):
    with client_of(server) as client, pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    with running(api_keys=("key",)) as locked, client_of(locked, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(messages=HELLO, **GREEDY)
        assert refused.value.code == "invalid_api_key"
        assert client.with_options(api_key="key").chat.completions.create(messages=HELLO, **GREEDY).choices


def test_full_queue_is_tried_again_when_the_server_says():
    with running(lambda: speaking_engine(max_waiting=1)) as server, client_of(server) as client:
        held = client.completions.create(stream=True, **LONG)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(prompt="x", **GREEDY)
        assert refused.value.response.headers["retry-after"] == "1"
        threading.Timer(0.3, held.close).start()
        start = time.monotonic()
        assert client.with_options(max_retries=3).completions.create(prompt="x", **GREEDY).choices
        assert 0.9 < time.monotonic() - start < 5
        assert server.metric('vera_http_responses_total{route="/v1/completions",status="429"}') == 2


def test_server_that_loads_is_tried_again(monkeypatch):
    monkeypatch.setattr(errors, "RETRY_AWAY_SECONDS", 1)
    loaded = threading.Event()

    def load():
        loaded.wait(30)
        return speaking_engine()

    with running(load, ready=False) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError) as away:
            client.models.list()
        assert (away.value.status_code, away.value.code) == (503, "server_loading")
        threading.Timer(0.3, loaded.set).start()
        assert client.with_options(max_retries=5).completions.create(prompt="x", **GREEDY).choices


def test_passed_deadline_is_not_tried_again():
    with running() as server, client_of(server, max_retries=5) as client:
        body = {**LONG["extra_body"], "vera": {"timeout_seconds": 0.05}}
        with pytest.raises(openai.InternalServerError) as passed:
            client.completions.create(**{**LONG, "extra_body": body})
        assert (passed.value.status_code, passed.value.code) == (504, "deadline_exceeded")
        assert server.metric('vera_http_responses_total{route="/v1/completions",status="504"}') == 1


def test_clients_own_timeout_frees_the_answer(server):
    with client_of(server, timeout=0.2) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG)
    server.wait_until_idle()


def test_failing_model_is_an_internal_error_and_the_next_request_works(server, client):
    def break_once(engine):
        original = engine._sampler.sample

        def sample(*arguments):
            engine._sampler.sample = original
            raise RuntimeError("broken")

        engine._sampler.sample = sample

    server.inspect(break_once)
    with pytest.raises(openai.InternalServerError, match="broken"):
        client.completions.create(prompt="x", **GREEDY)
    server.inspect(break_once)
    patient = client.with_options(max_retries=2).completions.create(prompt="x", **GREEDY)
    assert patient.usage.completion_tokens > 0


# LangChain


@pytest.fixture(scope="module")
def chat_model(server):
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8, max_retries=0)


def test_langchain_invokes_streams_and_batches(server, chat_model):
    expected = server.chat(temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
    whole = chat_model.invoke([("user", "hello there")])
    assert whole.content == expected and whole.usage_metadata["output_tokens"] == 8
    chunks = list(chat_model.stream([("user", "hello there")], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 8
    assert [answer.content for answer in chat_model.batch(["hello there"] * 5)] == [expected] * 5


def test_langchain_asks_asynchronously_with_the_extension(server, chat_model):
    own = chat_model.bind(extra_body={"vera": {"fidelity": "native"}, "top_k": 1})

    async def ask():
        streamed = [chunk.content async for chunk in own.astream("hello there")]
        return (await own.ainvoke("hello there")).content, "".join(streamed), await own.abatch(["hello there"] * 3)

    whole, streamed, batch = asyncio.run(ask())
    assert whole == streamed and {answer.content for answer in batch} == {whole}


def test_langchain_tells_errors_and_logprobs(chat_model):
    with pytest.raises(openai.BadRequestError) as refused:
        chat_model.bind(tools=[{"type": "function", "function": {"name": "f"}}]).invoke("x")
    assert refused.value.code == "unsupported_parameter"
    answer = chat_model.bind(logprobs=True, top_logprobs=1).invoke("x")
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


def test_langchain_completes_texts(server):
    model = OpenAI(base_url=f"{server.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=8)
    expected = server.complete("once", temperature=0, max_tokens=8)["choices"][0]["text"]
    assert model.invoke("once") == "".join(model.stream("once")) == expected
    assert model.batch(["once", "once"]) == [expected] * 2
