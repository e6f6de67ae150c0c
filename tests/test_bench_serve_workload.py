"""What `vera bench serve` asks, and when: the same from the same seed."""

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vera.bench.serve import Workload
from vera.bench.serve.workload import arrival_times, completion_prompt, conversations, warm_up
from vera.errors import ConfigError
from vera.models import load_model


def _contents(workload):
    return [conversation.turns[0].messages[0]["content"] for conversation in conversations(workload)]


def _gaps(times):
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("dataset", ["random", "prefix_repetition", "multi-turn", "text"])
def test_the_same_seed_asks_the_same_at_the_same_times(dataset):
    def plan(seed):
        return conversations(Workload(dataset=dataset, num_prompts=5, input_len=20, request_rate=3, seed=seed))

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


def test_the_rate_does_not_change_the_prompts():
    assert _contents(Workload(num_prompts=5)) == _contents(Workload(num_prompts=5, request_rate=2.0))


def test_all_at_once_without_a_rate():
    assert {conversation.at_seconds for conversation in conversations(Workload(num_prompts=4))} == {0.0}


def test_arrivals_are_a_poisson_process_of_the_rate():
    gaps = _gaps(arrival_times(4000, 8.0, 1.0, seed=0))
    assert sum(gaps) == pytest.approx(4000 / 8.0)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8.0, rel=0.1)  # of an exponential distribution it equals the mean
    assert statistics.median(gaps) == pytest.approx(0.693 / 8.0, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_how_much_the_gaps_vary(burstiness):
    gaps = _gaps(arrival_times(4000, 8.0, burstiness, seed=0))
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_infinite_burstiness_is_a_beat():
    assert arrival_times(4, 2.0, float("inf"), seed=0) == [0.5, 1.0, 1.5, 2.0]


@given(
    length=st.integers(1, 60),
    ratio=st.floats(0, 0.99),
    prefix=st.integers(0, 20),
    seed=st.integers(0, 1000),
)
def test_prompts_have_as_many_words_as_they_should_have_tokens(length, ratio, prefix, seed):
    workload = Workload(num_prompts=3, input_len=length, output_len=length, range_ratio=ratio, prefix_len=prefix, seed=seed)
    for conversation in conversations(workload):
        (turn,) = conversation.turns
        assert length * (1 - ratio) - 1 < len(turn.messages[0]["content"].split()) - prefix < length * (1 + ratio) + 1
        assert max(1, length * (1 - ratio) - 1) <= turn.output_tokens < length * (1 + ratio) + 1


def test_random_prompts_share_their_prefix_and_nothing_else():
    prompts = [prompt.split() for prompt in _contents(Workload(num_prompts=3, input_len=50, prefix_len=30))]
    assert len({tuple(words[:30]) for words in prompts}) == 1
    assert len({tuple(words[30:40]) for words in prompts}) == 3


def test_prefixes_are_taken_equally_often():
    workload = Workload(dataset="prefix_repetition", num_prompts=12, input_len=10, prefix_len=40, num_prefixes=4)
    shared = Counter(tuple(prompt.split()[:40]) for prompt in _contents(workload))
    assert sorted(shared.values()) == [3, 3, 3, 3]


def test_turns_wait_but_for_the_first():
    (conversation,) = conversations(Workload(dataset="multi-turn", num_prompts=1, input_len=5, num_turns=3, think_seconds=2.5))
    assert [turn.wait_seconds for turn in conversation.turns] == [0.0, 2.5, 2.5]


def test_each_turn_as_text_begins_with_the_one_before_and_its_answer():
    first = [{"role": "user", "content": "how are you"}]
    second = [*first, {"role": "assistant", "content": " well"}, {"role": "user", "content": "and now"}]
    assert completion_prompt(second) == completion_prompt(first) + " well" + " and now"


def test_texts_are_excerpts_of_about_the_length():
    prompts = _contents(Workload(dataset="text", num_prompts=3, input_len=1000))
    assert all(3500 < len(prompt) < 4500 for prompt in prompts)
    assert len({prompt[:200] for prompt in prompts}) == 3


def test_warm_up_shares_nothing_with_what_is_measured():
    workload = Workload(num_prompts=3, input_len=20, prefix_len=20)
    content = warm_up(workload).messages[0]["content"]
    assert len(content.split()) == 40
    assert all(content.split()[:5] != prompt.split()[:5] for prompt in _contents(workload))


def test_custom_prompts_come_in_their_order_and_again(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "output_tokens": 3}\n\n{"messages": [{"role": "system", "content": "two"}]}\n', encoding="utf-8"
    )
    planned = conversations(Workload(dataset="custom", num_prompts=3, output_len=7, path=path))
    turns = [conversation.turns[0] for conversation in planned]
    assert [turn.messages[0]["content"] for turn in turns] == ["one", "two", "one"]
    assert [turn.output_tokens for turn in turns] == [3, 7, 3]


@pytest.mark.parametrize(
    "content", ["", "one", "[]", "{}", '{"prompt": 3}', '{"prompt": "a", "output_tokens": 0}', '{"messages": []}', b"\xff"]
)
def test_a_file_that_cannot_be_asked_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        conversations(Workload(dataset="custom", path=path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset": "sharegpt"},
        {"num_prompts": 0},
        {"range_ratio": 1.0},
        {"request_rate": 0.0},
        {"burstiness": -1.0},
        {"think_seconds": float("inf")},
        {"dataset": "custom"},
        {"dataset": "text", "prefix_len": 3},
    ],
)
def test_workload_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Workload(**wrong)


@pytest.mark.embedded
def test_random_words_are_one_token_each():
    tokenizer = load_model("embedded").tokenizer
    (prompt,) = _contents(Workload(num_prompts=1, input_len=5000))
    assert len(tokenizer.encode(prompt, add_special_tokens=False)) == 5000
