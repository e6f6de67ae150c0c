"""Parts of the server by themselves: depth of JSON, texts of tokens, usage, names of fields."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import speaking_model

from tiny_models import tiny_tokenizer
from vera.cache import CacheUse
from vera.engine.audit import AuditResult
from vera.engine.request import FinishReason, Update
from vera.errors import CapacityError, ConfigError, EngineStopped, RequestError, RequestTooLong
from vera.server.disconnects import unless_gone
from vera.server.encoding import Encoder
from vera.server.errors import ApiError, as_api_error
from vera.server.limits import ClientGone, is_deeper
from vera.server.logs import CLIENT_GONE, RequestRecord
from vera.server.metrics import ServerMetrics
from vera.server.streaming import EventStream
from vera.server.tokens import TokenTexts
from vera.server.usage import UsageMeter

values = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\,: a', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=3), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value):
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.booleans())
def test_depth_is_that_of_the_parsed_value(value, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    depth = depth_of(value)
    assert not is_deeper(body, depth)
    assert depth == 0 or is_deeper(body, depth - 1)


@given(st.text())
@settings(max_examples=50)
def test_tokens_bytes_joined_are_the_texts(text):
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    joined = b"".join(bytes(texts.bytes(token)) for token in tokenizer(text)["input_ids"])
    assert joined.decode() == text


def test_part_of_a_character_is_written_as_its_bytes():
    tokenizer = tiny_tokenizer()
    assert [TokenTexts(tokenizer).text(token) for token in tokenizer("é")["input_ids"]] == ["bytes:\\xc3", "bytes:\\xa9"]


@given(st.text(min_size=1))
@settings(max_examples=50, deadline=None)
def test_a_text_is_refused_unread_only_if_it_cannot_fit(text):
    async def encode():
        encoder = Encoder(speaking_model(), 10)
        try:
            return await encoder.prompt(text)
        finally:
            encoder.close()

    fits = len(tiny_tokenizer()(text)["input_ids"]) <= 10
    try:
        asyncio.run(encode())
    except RequestTooLong:
        assert not fits


def test_usage_adds_answers_up_and_counts_each_prompt_once():
    def use(hits, error_sum, error_count, error_max, **cached):
        made = CacheUse(hits=hits, decode_steps=2, error_sum=error_sum, error_count=error_count, error_max=error_max)
        made.cached_tokens |= cached
        return made

    meter = UsageMeter([10, 20], 2, "bounded", 0.1)
    for index, made in enumerate(
        [use(1, 1.0, 10, 0.3, hot=4), use(2, 2.0, 10, 0.5, hot=8), use(0, 0.0, 0, 0.0, warm=16), use(5, 3.0, 40, 0.2)]
    ):
        cached = 16 if index == 2 else 4 if index == 0 else 8
        meter.add(index, Update("", [1, 2], num_cached_tokens=cached))
        meter.add(index, Update("", [3], num_cached_tokens=cached, finish_reason=FinishReason.STOP, cache_use=made))
    told = meter.to_dict()
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (30, 12, 42)
    assert told["prompt_tokens_details"]["cached_tokens"] == 20
    assert told["vera"]["cached_tokens"] == {"hot": 4, "warm": 16, "cold": 0}
    assert (told["vera"]["computed_tokens"], told["vera"]["hits"], told["vera"]["decode_steps"]) == (10, 8, 8)
    assert (told["vera"]["error_mean"], told["vera"]["error_max"]) == (pytest.approx(0.1), 0.5)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("the prompt has no tokens"), 400, "prompt"),
        (RequestError("fidelity='x' is not one of"), 400, "vera.fidelity"),
        (ConfigError("logit_bias token=-1 must be"), 400, "logit_bias"),
        (RequestError("the role of messages[3] is None"), 400, "messages[3]"),
        (RequestTooLong("the prompt's 5 tokens"), 400, "prompt"),
        (CapacityError("full"), 429, None),
        (EngineStopped("gone"), 503, None),
        (ValueError("a secret of ours"), 500, None),
    ],
)
def test_errors_have_their_status_and_field(error, status, param):
    told = as_api_error(error)
    assert (told.status, told.param) == (status, param)
    assert status < 500 or "secret" not in str(told)


def test_message_that_is_not_unicode_can_be_told():
    body = json.loads(ApiError(400, "\ud800" * 5000).response().body)
    assert len(body["error"]["message"]) < 1100


def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves():
    async def main():
        cleaned = []

        async def work():
            try:
                await asyncio.sleep(20)
            finally:
                await asyncio.sleep(0)
                cleaned.append(True)

        async def leave():
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await unless_gone(leave, work())
        return cleaned

    assert asyncio.run(main()) == [True]


def test_work_of_a_patient_client_is_returned():
    async def main():
        async def work():
            return 5

        return await unless_gone(lambda: asyncio.sleep(20), work())

    assert asyncio.run(main()) == 5


def test_client_that_never_reads_is_taken_for_one_that_left():
    async def main():
        closed = []

        async def events():
            try:
                while True:
                    yield b"data: x\n\n"
            finally:
                closed.append(True)

        async def send(message):
            await asyncio.sleep(20)

        record = RequestRecord("id", "POST", "/", None, 0.0)
        stream = EventStream(b"data: first\n\n", events(), record, limit_seconds=0.05)
        await stream({"type": "http"}, lambda: asyncio.sleep(20), send)
        return record.status

    assert asyncio.run(main()) == CLIENT_GONE


def test_too_many_texts_at_once_are_refused(monkeypatch):
    monkeypatch.setattr("vera.server.encoding._MOST_QUEUED", 2)

    async def main():
        encoder = Encoder(speaking_model(), 100)
        try:
            outcomes = await asyncio.gather(*(encoder.prompt("text") for _ in range(3)), return_exceptions=True)
            assert await encoder.prompt("text") == outcomes[0], "places are given back"
            return outcomes
        finally:
            encoder.close()

    first, second, third = asyncio.run(main())
    assert first == second and isinstance(third, ApiError) and third.status == 429


class SlowEncoding:
    """Stands for `encode_prompt`: counts the texts it is given, and is held up by the first until `gate` is open."""

    def __init__(self, monkeypatch):
        self.gate, self.texts = threading.Event(), []
        monkeypatch.setattr("vera.server.encoding.encode_prompt", self)

    def __call__(self, tokenizer, prompt, **options):
        self.texts.append(prompt)
        self.gate.wait(20)
        return [5]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


class Prompt(list):
    """Token ids that can be seen to go."""


def test_prompts_of_clients_that_left_are_not_kept(monkeypatch):
    slow = SlowEncoding(monkeypatch)

    async def main():
        encoder = Encoder(speaking_model(), 100)
        try:
            first = asyncio.create_task(encoder.prompt("first"))
            await until(lambda: slow.texts)
            prompt = Prompt([5])
            kept, leaving = weakref.ref(prompt), asyncio.create_task(encoder.prompt(prompt))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            del prompt, leaving
            await asyncio.sleep(0)
            gc.collect()
            assert kept() is None
            last = asyncio.create_task(encoder.prompt("last"))
            await asyncio.sleep(0)
            slow.gate.set()
            return await first, await last
        finally:
            slow.gate.set()
            encoder.close()

    assert asyncio.run(main()) == ([5], [5])
    assert slow.texts == ["first", "last"]


def test_text_that_is_being_read_holds_its_turn_when_its_client_leaves(monkeypatch):
    slow = SlowEncoding(monkeypatch)

    async def main():
        encoder = Encoder(speaking_model(), 100)
        try:
            first = asyncio.create_task(encoder.prompt("first"))
            await until(lambda: slow.texts)
            first.cancel()
            next_one = asyncio.create_task(encoder.prompt("next"))
            await asyncio.sleep(0.05)
            meanwhile = list(slow.texts)
            slow.gate.set()
            return meanwhile, await next_one
        finally:
            encoder.close()

    assert asyncio.run(main()) == (["first"], [5])


def test_texts_that_wait_at_the_end_are_refused(monkeypatch):
    slow = SlowEncoding(monkeypatch)

    async def main():
        encoder = Encoder(speaking_model(), 100)
        reading = [asyncio.create_task(encoder.prompt("text")) for _ in range(2)]
        await until(lambda: slow.texts)
        encoder.close()
        slow.gate.set()
        return await asyncio.gather(*reading, return_exceptions=True)

    first, second = asyncio.run(main())
    assert first == [5] and isinstance(second, EngineStopped)


@pytest.mark.parametrize(("num_audits", "seen"), [(3, 3), (4, 4), (7, 4)])
def test_audits_since_the_last_scrape_are_observed_as_far_as_they_are_kept(num_audits, seen):
    metrics = ServerMetrics()
    audits = tuple(AuditResult("a", 0, error, 0.1) for error in (0.1, 0.2, 0.3, 0.4))
    metrics._take_audits(SimpleNamespace(num_audits=num_audits, audits=audits))
    metrics._take_audits(SimpleNamespace(num_audits=num_audits, audits=audits))
    assert metrics.registry.get_sample_value("vera_attention_error_true_count") == seen
