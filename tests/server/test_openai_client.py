"""OpenAI's own Python client, unchanged, against a real server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from servers import HELLO, running, speaking_engine

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    assert whole.usage.vera["fidelity"] == "native"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=HELLO, **options, **GREEDY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"


def test_async_client_streams(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(seed):
                stream = await client.chat.completions.create(
                    model="tiny", messages=HELLO, seed=seed, max_tokens=20, stream=True, extra_body={"top_k": 5, "min_tokens": 3}
                )
                return [chunk.choices[0].finish_reason async for chunk in stream]

            return await asyncio.gather(*(one(seed) for seed in range(10)))

    for reasons in asyncio.run(ask()):
        assert reasons[-1] in ("stop", "length") and reasons[:-1] == [None] * (len(reasons) - 1)


def test_completions_with_logprobs(client):
    answer = client.completions.create(prompt=[5, 6, 7], echo=True, logprobs=2, **GREEDY)
    assert len(answer.choices[0].logprobs.token_logprobs) == 3 + answer.usage.completion_tokens


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 4096


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=99)
    assert wrong.value.param == "temperature"


def test_error_in_mid_stream_raises(server, client):
    def break_later(engine):
        original, steps = engine._sampler.sample, []

        def sample(*arguments):
            steps.append(1)
            if len(steps) > 3:
                engine._sampler.sample = original
                raise RuntimeError("broken")
            return original(*arguments)

        engine._sampler.sample = sample

    server.inspect(break_later)
    with pytest.raises(openai.APIError, match="broken"):
        list(client.completions.create(model="tiny", prompt=[9, 9], max_tokens=50, stream=True, extra_body={"ignore_eos": True}))


def test_wrong_key_and_full_queue_are_told_and_retried():
    with running(lambda: speaking_engine(max_waiting=1), api_keys=("key",)) as server:
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
            long = {"model": "tiny", "prompt": [5], "max_tokens": 400, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(stream=True, **long)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt=[5], max_tokens=1)
            patient = client.with_options(max_retries=5).completions.create(model="tiny", prompt=[5], max_tokens=1)
            assert patient.usage.completion_tokens == 1
            stream.close()
