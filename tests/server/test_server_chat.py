"""/v1/chat/completions: answers, whole and streamed."""

from __future__ import annotations

import pytest
from servers import HELLO, speaking_engine, speaking_model

from engines import finish
from vera.engine.text import encode_chat
from vera.sampling_params import SamplingParams

PATH = "/v1/chat/completions"


def expected(messages, **params):
    """Text, finish reason and number of tokens of the engine alone."""
    engine = speaking_engine()
    prompt = encode_chat(speaking_model().tokenizer, messages)
    answer = engine.add_request(prompt, SamplingParams(**params))
    updates = finish(engine)[answer]
    tokens = sum(len(update.new_token_ids) for update in updates)
    return "".join(update.delta for update in updates), updates[-1].finish_reason.value, tokens


def joined(events, index=0):
    """The text of one answer of a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_answer_is_the_engines(server):
    answer = server.chat(temperature=0, max_tokens=20)
    text, reason, tokens = expected(HELLO, max_tokens=20)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == (reason, tokens)
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["e", "\n"]}, {"logprobs": True, "top_logprobs": 2}, {"min_tokens": 8}])
def test_streamed_answers_are_the_unstreamed_ones(server, more):
    body = {"messages": HELLO, "max_tokens": 30, "seed": 7, "temperature": 1.2, **more}
    whole = server.post(PATH, body).json()
    events = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert joined(events, choice["index"]) == choice["message"]["content"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        if "logprobs" in more:
            assert [e for chunk in chunks if chunk["logprobs"] for e in chunk["logprobs"]["content"]] == choice["logprobs"][
                "content"
            ]
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert events[-1]["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == whole["usage"][name]


def test_usage_is_only_sent_when_asked_for(server):
    events = server.events(PATH, {"messages": HELLO, "max_tokens": 3})
    assert all("usage" not in event and event["choices"] for event in events)


def test_a_seed_repeats_an_answer_and_answers_differ(server):
    first, second = (server.chat(seed=3, n=2, max_tokens=20, temperature=1.5) for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert texts[0] != texts[1]
    assert first["usage"]["prompt_tokens"] == server.chat(max_tokens=1)["usage"]["prompt_tokens"], "the prompt counts once"


def test_temperature_is_one_if_not_given(server):
    plain, warm, greedy = (server.chat(seed=1, max_tokens=20, **more) for more in ({}, {"temperature": 1}, {"temperature": 0}))
    assert plain["choices"] == warm["choices"] != greedy["choices"]


def test_answer_without_a_limit_goes_to_the_end_of_the_context():
    from servers import running

    with running(lambda: speaking_engine(max_model_len=100)) as small:
        answer = small.chat(temperature=0, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 100
        assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_name_each_token_with_its_bytes(server):
    answer = server.chat(temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"], "greedy takes the most likely token"
        assert len(entry["top_logprobs"]) == 3
    raw = bytes(byte for entry in entries for byte in entry["bytes"])
    assert raw.decode(errors="replace") == answer["choices"][0]["message"]["content"]


def test_stop_token_and_stop_string_are_named(server):
    first = server.chat(temperature=0, max_tokens=5, logprobs=True)["choices"][0]
    token = first["logprobs"]["content"][0]["token"]
    stopped = server.chat(temperature=0, max_tokens=5, stop=[token])["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"], stopped["message"]["content"]) == ("stop", token, "")


def test_content_may_be_parts_of_text(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}]
    plain = [{"role": "user", "content": "hello\nthere"}]
    assert (
        server.chat(parts, max_tokens=4, temperature=0)["choices"] == server.chat(plain, max_tokens=4, temperature=0)["choices"]
    )


def test_next_turn_of_a_chat_finds_its_blocks(server):
    first = [{"role": "user", "content": "a growing conversation " * 4}]
    answer = server.chat(first, max_tokens=16, temperature=0)
    turn = [*first, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, *HELLO]
    usage = server.chat(turn, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] // 16 * 16 - 16
    tiers = usage["vera"]["cached_tokens"]
    assert tiers == {"hot": usage["prompt_tokens_details"]["cached_tokens"], "warm": 0, "cold": 0}
    assert sum(tiers.values()) + usage["vera"]["computed_tokens"] == usage["prompt_tokens"]
