"""Requests that cannot be honoured: OpenAI's error bodies with the field named, never a 500, and the next request works."""

from __future__ import annotations

import json

import pytest
from servers import HELLO, raw_request, running, speaking_engine, speaking_model

from vera.models import adopt_model

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"

WRONG_CHATS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0]"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": "\ud800"}], "vera": {"\ud800": 1}}, "vera"),
    ({"messages": HELLO, "max_tokens": "5"}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": -1}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": True}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"messages": HELLO, "max_tokens": 10**30}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 100_000}, None),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "n": 17}, "n"),
    ({"messages": HELLO, "n": 1000}, "n"),
    ({"messages": HELLO, "temperature": -0.1}, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "top_p": 0}, "top_p"),
    ({"messages": HELLO, "top_k": -2}, "top_k"),
    ({"messages": HELLO, "stop": ["x"] * 17}, "stop"),
    ({"messages": HELLO, "stop": ""}, "stop"),
    ({"messages": HELLO, "stop": [5]}, "stop"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"messages": HELLO, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": HELLO, "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"messages": HELLO, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"messages": HELLO, "logprobs": 5}, "logprobs"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "stream": "yes"}, "stream"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HELLO, "vera": {"fidelity": "exakt"}}, "vera.fidelity"),
    ({"messages": HELLO, "vera": {"fidelity": "exact"}}, "vera.fidelity"),
    ({"messages": HELLO, "vera": {"attention_tolerance": 2}}, "vera.attention_tolerance"),
    ({"messages": HELLO, "vera": {"attention_tolerance": 0.1}}, "vera.attention_tolerance"),
    ({"messages": HELLO, "vera": {"tolerance": 0.1}}, "vera.tolerance"),
    ({"messages": HELLO, "vera": {"timeout_seconds": 0}}, "vera.timeout_seconds"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"max_length": 1}}, None),
    ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    ({"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"messages": HELLO, "verbosity": "low"}, "verbosity"),
    ({"messages": HELLO, "bad_words": ["x"]}, "bad_words"),
    ({"messages": HELLO, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"messages": HELLO, "typical_p": 0.5}, "typical_p"),
    ({"messages": HELLO, "cache_salt": "mine"}, "cache_salt"),
    ({"messages": HELLO, "echo": True}, "echo"),
    ({"messages": HELLO, "seed": 2**64}, "seed"),
    ({"messages": HELLO, "priority": "high"}, "priority"),
]

WRONG_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [5, "x"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"prompt": [5] * 5000}, "prompt"),
    ({"prompt": "x" * 200_000}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
    ({"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"prompt": "x", "top_logprobs": 5}, "top_logprobs"),
    ({"prompt": "x", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
]


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(("body", "param", "stream"), [(*case, stream) for case in WRONG_CHATS for stream in (False, True)])
def test_wrong_chat_is_refused_by_field(server, body, param, stream):
    # Python's escapes, because httpx does not send text that is not Unicode.
    content = json.dumps({"stream": stream and "stream_options" not in body, **body})
    error = error_of(server.client.post(CHAT, content=content, headers={"Content-Type": "application/json"}))
    assert error["type"] == "invalid_request_error"
    assert param is None or (error["param"] or "").startswith(param)


@pytest.mark.parametrize(("body", "param"), WRONG_COMPLETIONS)
def test_wrong_completion_is_refused_by_field(server, body, param):
    error = error_of(server.post(COMPLETE, body))
    assert (error["param"] or "").startswith(param)


def test_next_request_works_after_all_that(server):
    for body, _ in WRONG_CHATS[:5]:
        server.client.post(CHAT, content=json.dumps(body))
    assert server.chat(max_tokens=3, temperature=0)["usage"]["completion_tokens"] == 3
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", None),
        (b"{", "invalid_json"),
        (b"[]", None),
        (b"nothing", "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
        (b'{"messages": ' + b"[" * 100_000, "json_too_deep"),
        (b'{"messages": ' + b"[" * 40 + b"]" * 40 + b"}", "json_too_deep"),
        (b'{"a": ' * 200_000, "json_too_deep"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", None),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', None),
        (b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}', None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_body_that_is_no_request_is_refused(server, content, code):
    error = error_of(server.client.post(CHAT, content=content, headers={"Content-Type": "application/json"}))
    assert code is None or error["code"] == code


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "x"])
def test_body_of_another_type_is_refused(server, content_type):
    error_of(server.client.post(CHAT, content=b'{"x": 1}', headers={"Content-Type": content_type}))


def test_brackets_within_a_text_are_no_depth(server):
    assert server.chat([{"role": "user", "content": "[" * 50 + '\\"{' * 50}], max_tokens=1)["choices"]


def test_large_body_is_refused_whether_its_length_is_told_or_not():
    with running(max_body_bytes=1000) as small:
        told = small.client.post(COMPLETE, json={"prompt": "x" * 2000})
        assert error_of(told, 413)["code"] == "body_too_large"
        untold = small.client.post(COMPLETE, content=(b"x" * 100 for _ in range(20)))
        assert error_of(untold, 413)["code"] == "body_too_large"
        assert small.complete("x", max_tokens=1)["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
def test_unknown_model_is_not_found(server, path):
    body = {"model": "gpt-4", "messages": HELLO, "prompt": "x", "tokens": [5]}
    if path == "/tokenize":
        del body["messages"]
    error = error_of(server.post(path, body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_unknown_path_and_method_have_openais_form(server):
    error_of(server.client.get("/v1/nothing"), 404)
    refused = server.client.get(CHAT)
    error_of(refused, 405)
    assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize("value", [None, [], {}])
def test_empty_values_of_what_is_not_served_change_nothing(server, value):
    assert server.chat(max_tokens=1, tools=value, response_format=value, functions=value)["choices"]
    assert server.chat(max_tokens=1, response_format={"type": "text"}, tool_choice="none", store=True, metadata={"a": "b"})[
        "choices"
    ]


def test_text_is_refused_by_a_model_without_a_tokenizer():
    silent = adopt_model(speaking_model().module, None, name="silent")
    with running(lambda: speaking_engine(silent)) as server:
        error_of(server.post(CHAT, {"messages": HELLO}))
        error_of(server.post(COMPLETE, {"prompt": "text"}))
        error_of(server.post("/tokenize", {"prompt": "text"}))
        error_of(server.post("/detokenize", {"tokens": [5]}))
        error_of(server.post(COMPLETE, {"prompt": [5, 6], "stop": "x"}))
        answer = server.complete([5, 6], max_tokens=3, logprobs=1, temperature=0)
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def test_tokenize_refuses_both_and_neither(server):
    error_of(server.post("/tokenize", {}))
    error_of(server.post("/tokenize", {"prompt": "x", "messages": HELLO}))
    error_of(server.post("/tokenize", {"prompt": 5}))
    assert error_of(server.post("/detokenize", {"tokens": [5, 99999]}))["param"] == "tokens"
    error_of(server.post("/detokenize", {"tokens": "x"}))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ],
)
def test_tokenize_refuses_what_a_request_with_it_would_not_have(server, body, param):
    assert error_of(server.post("/tokenize", body))["param"] == param


@pytest.mark.parametrize("head", [b"NONSENSE\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\x00\xff\r\n\r\n"])
def test_what_is_no_http_does_not_stop_the_server(server, head):
    raw_request(server.url, head)
    assert server.client.get("/health").status_code == 200


def test_every_status_that_was_seen_is_documented(server):
    document = server.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, response in operation["responses"].items():
                if status != "200":
                    assert response["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody"), (path, status)
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "ErrorBody", "VeraUsage"} <= set(schemas)
    assert not any("422" in json.dumps(operations) for operations in document["paths"].values())
