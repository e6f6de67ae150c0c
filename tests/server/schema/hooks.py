"""Makes most fuzzed requests ones that the model can answer.

The OpenAPI document does not say how long the context is, which token ids there are, or which fields belong together, so nearly
all random bodies would be refused before they reach the engine.
"""

from __future__ import annotations

from typing import Any

import schemathesis

VOCABULARY = 260
LONGEST = 24
"""Tokens of an answer."""
DEADLINE_SECONDS = 20.0
VERSIONS = {"/admin/params/activate": "version", "/admin/rollout/start": "candidate"}
"""Where a body names a version: one that is there."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Mends bodies that fit the document. Those that are meant not to, and the systematic ones, are sent as they are."""
    mends = case.meta is not None and case.meta.generation.mode.is_positive and case.meta.phase.name.value != "coverage"
    if mends and isinstance(case.body, dict) and case.path in VERSIONS:
        case.body = {**case.body, VERSIONS[case.path]: "long-document@1", **({"plan": "50:0:1"} if case.body.get("plan") else {})}
        case.body.pop("limits", None)
    if mends and isinstance(case.body, dict) and case.path in ("/v1/chat/completions", "/v1/completions"):
        body = {name: value for name, value in case.body.items() if value is not None or len(name) % 2}
        mend(body)
        case.body = body


def mend(body: dict[str, Any]) -> None:
    """In place."""
    body.pop("model", None)
    # JSON Schema takes 5.0 for an integer, the server does not.
    body["max_tokens"] = 1 + int(body.get("max_tokens") or 0) % LONGEST
    for name in ("max_completion_tokens", "min_tokens"):
        body.pop(name, None)
    body["n"] = 1 + int(body.get("n") or 0) % 3
    body["stream"] = bool(body.get("stream")) or len(body) % 2 == 0
    if not body["stream"]:
        body.pop("stream_options", None)
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = _tokens(body["stop_token_ids"])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(place): bias for place, bias in enumerate(body["logit_bias"].values())}
    if isinstance(body.get("vera"), dict) and body["vera"].get("timeout_seconds"):
        body["vera"] = {**body["vera"], "timeout_seconds": DEADLINE_SECONDS}
    if "messages" in body:
        _mend_chat(body)
    else:
        body["prompt"] = _prompt(body["prompt"])


def _mend_chat(body: dict[str, Any]) -> None:
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    body.pop("chat_template_kwargs", None)
    body["messages"] = [{**message, "content": _content(message.get("content"))} for message in body["messages"][:4]]


def _content(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": str(part.get("text") or "x")[:40]} for part in content[:3]] or "x"
    return (content or "x")[:80]


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:80] or "x"
    if not prompt:
        return "x"
    if isinstance(prompt[0], int | float):
        return _tokens(prompt[:80])
    return [_prompt(part) for part in prompt[:3]]


def _tokens(tokens: list[float]) -> list[int]:
    return [int(token) % VOCABULARY for token in tokens]
