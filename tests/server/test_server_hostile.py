"""Bodies that are made to cost: time and memory stay within what their length excuses."""

import time
import tracemalloc

import pydantic
import pytest

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
    ],
)
def test_list_full_of_faults_is_told_by_a_few_of_them(model, body):
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10
