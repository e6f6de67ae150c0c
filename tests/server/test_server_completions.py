"""/v1/completions: the forms of a prompt, echo and log-probabilities."""

from __future__ import annotations

import pytest
import torch
from servers import running, speaking_engine, speaking_model

from tiny_models import tiny_model, tiny_tokenizer

PATH = "/v1/completions"
TOKENS = [40, 41, 42, 100, 101, 7, 9]


def reference_logprobs(tokens):
    """The log-probability of each token but the first: dense attention, no cache."""
    model = tiny_model(vocab_size=len(tiny_tokenizer()))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return [float(rows[place, token]) for place, token in enumerate(tokens[1:])]


@pytest.mark.parametrize(
    ("prompt", "count"), [("the thing", 1), (["the thing"], 1), (["a", "the", "and"], 3), (TOKENS, 1), ([TOKENS, [5, 6]], 2)]
)
def test_every_form_of_a_prompt_is_answered_in_order(server, prompt, count):
    answer = server.complete(prompt, max_tokens=6, temperature=0)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    singles = prompt if count > 1 else [prompt]
    for choice, single in zip(answer["choices"], singles, strict=True):
        assert choice["text"] == server.complete(single, max_tokens=6, temperature=0)["choices"][0]["text"]


def test_several_answers_to_several_prompts(server):
    answer = server.complete(["a", "the"], n=2, seed=5, temperature=1.5, max_tokens=8)
    alone = server.complete("the", n=2, seed=5, temperature=1.5, max_tokens=8)
    assert [choice["text"] for choice in answer["choices"][2:]] == [choice["text"] for choice in alone["choices"]]
    assert answer["usage"]["completion_tokens"] <= 32 and answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("limit", [0, 1])
def test_echoed_prompt_has_its_logprobs(server, limit):
    answer = server.complete(TOKENS, max_tokens=limit, echo=True, logprobs=1, temperature=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(TOKENS)] == pytest.approx(reference_logprobs(TOKENS), abs=1e-4)
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == len(TOKENS) + limit
    assert answer["usage"]["completion_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"


def test_greedy_tokens_are_the_best_of_their_top_logprobs(server):
    answer = server.complete(TOKENS, max_tokens=8, logprobs=2, temperature=0)["choices"][0]["logprobs"]
    for token, logprob, top in zip(answer["tokens"], answer["token_logprobs"], answer["top_logprobs"], strict=True):
        assert max(top, key=top.get) == token and top[token] == logprob


def test_offsets_point_into_the_text(server):
    prompt = "the thing and naïve"
    answer = server.complete(prompt, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert answer["text"] == prompt
    for token, offset in zip(answer["logprobs"]["tokens"], answer["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or answer["text"][offset:].startswith(token)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2}])
@pytest.mark.parametrize("prompt", ["the thing", TOKENS, ["the", "and a"]])
@pytest.mark.parametrize("limit", [0, 5])
def test_streamed_echo_is_the_unstreamed_one(server, prompt, more, limit):
    body = {"prompt": prompt, "max_tokens": limit, "echo": True, "seed": 11, **more}
    whole = server.post(PATH, body).json()
    events = server.events(PATH, body)
    for choice in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        if "logprobs" in more:
            for name, values in choice["logprobs"].items():
                assert [value for chunk in chunks for value in chunk["logprobs"][name]] == values, name


def test_offsets_of_an_answer_go_on_after_the_prompt(server):
    (letter,) = speaking_model().tokenizer("q")["input_ids"]
    body = {"max_tokens": 4, "logprobs": 0, "logit_bias": {str(letter): 100}, "temperature": 0}
    assert server.complete("the", **body)["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    echoed = server.complete("the", echo=True, **body)["choices"][0]
    assert (echoed["text"], echoed["logprobs"]["text_offset"]) == ("theqqqq", [0, 3, 4, 5, 6])


def test_cached_tokens_are_those_of_each_prompt(server):
    known, new = [77] * 40, [78] * 40
    server.complete(known, max_tokens=1)
    for prompts in ([known, new], [[79] * 40, known]):
        usage = server.complete(prompts, n=2, max_tokens=2)["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (80, 32)


def test_echoed_token_ids_read_as_their_text(server):
    tokens = speaking_model().tokenizer("the thing")["input_ids"]
    assert server.complete(tokens, max_tokens=0, echo=True)["choices"][0]["text"] == "the thing"


def test_prompt_of_the_whole_context_cannot_be_scored(server):
    longest = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    refusal = server.post(PATH, {"prompt": [5] * longest, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert refusal.status_code == 400 and refusal.json()["error"]["code"] == "context_length_exceeded"
    assert server.complete([5] * (longest - 1), max_tokens=0, echo=True)["usage"]["prompt_tokens"] == longest - 1


def test_tokenize_and_detokenize_are_each_others_inverse(server):
    answer = server.post("/tokenize", {"prompt": "the thing é"}).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "the thing é"}


def test_tokenized_messages_are_what_a_chat_reads(server):
    messages = [{"role": "user", "content": "hello"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert count == server.chat(messages, max_tokens=1)["usage"]["prompt_tokens"]


def test_special_tokens_are_added_to_a_text_unless_it_says_no():
    with running(lambda: speaking_engine(speaking_model(add_bos=True))) as server:
        for path_options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            count = server.post("/tokenize", {"prompt": "hello", **path_options}).json()["count"]
            assert count == server.complete("hello", max_tokens=1, **path_options)["usage"]["prompt_tokens"]
        added = server.complete("hello", max_tokens=1)["usage"]["prompt_tokens"]
        assert server.complete("hello", max_tokens=1, add_special_tokens=False)["usage"]["prompt_tokens"] == added - 1


def test_tokenized_messages_heed_the_template_s_arguments():
    shouting = "{% for message in messages %}{{ message.content }}{% if shout %}!!!{% endif %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": {"shout": True}}
    with running(lambda: speaking_engine(speaking_model(chat_template=shouting))) as server:
        plain = server.post("/tokenize", {"messages": body["messages"]}).json()["count"]
        count = server.post("/tokenize", body).json()["count"]
        assert count == server.chat(max_tokens=1, **body)["usage"]["prompt_tokens"] == plain + 3
