"""Bodies that are made to cost: time and memory stay within what their length excuses."""

import time
import tracemalloc

import pydantic
import pytest
from servers import running

from vera.server.limits import is_deeper
from vera.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest


@pytest.mark.parametrize("end", [b"", b"\\", b'"'])
def test_depth_of_a_string_full_of_escaped_quotes_is_found_at_once(end):
    body = b'{"a":[' + b"[]," * 40 + b'"' + b'\\"' * 500_000 + end
    start = time.perf_counter()
    assert not is_deeper(body, 32)
    assert time.perf_counter() - start < 1.0  # trying again at each quote took hours


def test_depth_of_a_long_string_takes_no_memory():
    body = b'{"a":"' + b"x" * 4_000_000 + b'"}' + b"[" * 5
    tracemalloc.start()
    try:
        assert is_deeper(body, 4)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "limit", "deep"),
    [
        (b'["[[[[", "\\"["]', 2, False),
        (b'"a\\\\" [[[', 2, True),
        (b"[[]]", 2, False),
        (b"[[[]]]", 2, True),
        (b'{"a": {"b": {}}}', 2, True),
        (b'"unended [[[[', 2, False),
    ],
)
def test_depth_counts_brackets_outside_of_strings(text, limit, deep):
    assert is_deeper(text, limit) is deep


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * 100_000}),
        (CompletionRequest, {"prompt": [[1.5] * 100_000]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 100_000}),
        (ChatRequest, {"messages": [1] * 100_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        (TokenizeRequest, {"messages": [1] * 100_000}),
        (CompletionRequest, {"prompt": "a", "vera": {f"name{i}": 1 for i in range(100_000)}}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}}),
    ],
)
def test_value_full_of_faults_is_told_by_a_few_of_them(model, body):
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10


def test_object_with_too_many_names_is_refused_by_its_own():
    with running() as server:
        for field, value in (("vera", {f"name{i}": 1 for i in range(17)}), ("logit_bias", {str(i): 1 for i in range(1025)})):
            error = server.post("/v1/completions", {"prompt": "a", field: value}).json()["error"]
            assert error["param"] == field and "at most" in error["message"]


def test_prompt_that_cannot_fit_is_not_walked_for_its_echo(server, monkeypatch):
    walked = []
    monkeypatch.setattr("vera.server.encoding.IncrementalText", lambda *_, **__: walked.append(True))
    refused = server.post("/v1/completions", {"prompt": [5] * 4096, "echo": True, "logprobs": 1, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "prompt"
    assert walked == []
