"""The same tokens as transformers, however the work is cut, shared or interrupted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import PAGE, answer, finish, greedy, make_engine, prompt_of, reference_tokens, tokens_of

BACKENDS = ["reference", "cpu"]
BORDERS = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_tokens_equal_transformers_for_every_chunk_size(backend, chunk):
    engine = make_engine(attention_backend=backend, max_batch_tokens=max(chunk, 1), max_num_seqs=1)
    for length in (1, 5, PAGE, 100):
        assert answer(engine, prompt_of(length), greedy(12)) == reference_tokens(prompt_of(length), 12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_equal_transformers_in_a_mixed_batch(backend):
    engine = make_engine(attention_backend=backend, blocks=200, max_num_seqs=16)
    prompts = [prompt_of(length, seed) for seed, length in enumerate([1, 2, 15, 16, 17, 31, 32, 33, 60, 100, 150, 200])]
    random.Random(0).shuffle(prompts)
    ids = [engine.add_request(prompt, greedy(20)) for prompt in prompts]
    updates = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(updates[request_id]) == reference_tokens(prompt, 20)


@pytest.mark.parametrize("length", BORDERS)
def test_second_time_around_uses_the_cache_and_answers_the_same(length):
    engine = make_engine()
    prompt = prompt_of(length)
    first = engine.add_request(prompt, greedy(PAGE + 3))
    before = finish(engine)[first]
    second = engine.add_request(prompt, greedy(PAGE + 3))
    after = finish(engine)[second]
    assert tokens_of(after) == tokens_of(before) == reference_tokens(prompt, PAGE + 3)
    assert before[-1].num_cached_tokens == 0
    assert after[-1].num_cached_tokens == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("after_outputs", [[1], [PAGE - 1], [PAGE], [PAGE + 1], [20], [5, 20], [1, 2]])
@pytest.mark.parametrize("prompt_length", [3, PAGE, 40])
def test_preempted_request_answers_as_if_nothing_had_happened(prompt_length, after_outputs):
    engine = make_engine()
    prompt = prompt_of(prompt_length)
    request_id = engine.add_request(prompt, greedy(40))
    updates, remaining = [], list(after_outputs)
    while engine.has_unfinished():
        updates += engine.step()
        if remaining and len(tokens_of(updates)) == remaining[0]:
            remaining.pop(0)
            engine._scheduler.preempt(engine._requests[request_id])
        engine.check_invariants()
    assert not remaining
    assert tokens_of(updates) == reference_tokens(prompt, 40)
    assert engine.stats.preemptions == len(after_outputs)


def test_request_preempted_in_the_middle_of_its_prompt_starts_over_rightly():
    engine = make_engine(max_batch_tokens=20, max_num_seqs=1)
    prompt = prompt_of(100)
    request_id = engine.add_request(prompt, greedy(5))
    engine.step()
    engine.step()
    engine._scheduler.preempt(engine._requests[request_id])
    assert tokens_of(finish(engine)[request_id]) == reference_tokens(prompt, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_that_is_too_small_for_all_recycles_every_page_and_answers_rightly(backend):
    engine = make_engine(attention_backend=backend, blocks=9, max_num_seqs=8)
    prompts = [prompt_of(length, seed) for seed in range(8) for length in (5, 9, 30)]
    ids = [engine.add_request(prompt, greedy(60)) for prompt in prompts]
    updates = finish(engine)
    assert engine.stats.preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(updates[request_id]) == reference_tokens(prompt, 60)
    computed_blocks = (engine.stats.prefill_tokens + engine.stats.decode_tokens) // PAGE
    assert computed_blocks >= 10 * 9, "not every page was recycled ten times"


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_mixture_of_lengths_prefixes_arrivals_and_preemptions_answers_rightly(data):
    engine = make_engine(
        blocks=data.draw(st.integers(8, 30)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_batch_tokens=data.draw(st.sampled_from([6, 7, 16, 33, 64])),
    )
    stems = [prompt_of(40, seed) for seed in range(2)]
    wanted, updates = {}, []
    for number in range(data.draw(st.integers(2, 8))):
        stem = data.draw(st.sampled_from(stems))[: data.draw(st.integers(1, 40))]
        prompt = stem + prompt_of(data.draw(st.sampled_from([0, 1, 20])), number)
        wanted[engine.add_request(prompt, greedy(24), priority=data.draw(st.integers(0, 1)))] = prompt
        for _ in range(data.draw(st.integers(0, 6))):
            updates += engine.step()
        if engine._scheduler.running and data.draw(st.booleans()):
            engine._scheduler.preempt(data.draw(st.sampled_from(engine._scheduler.running)))
    updates += [update for own in finish(engine).values() for update in own]
    for request_id, prompt in wanted.items():
        tokens = tokens_of([update for update in updates if update.request_id == request_id])
        assert tokens == reference_tokens(prompt, 24)
    assert engine.cache.used_bytes == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_family_answers_like_transformers(family, backend):
    import torch

    from engines import loaded
    from tiny_models import tiny_model

    reference = tiny_model(family)
    reference.set_attn_implementation("eager")
    prompt = prompt_of(50)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(20):
            tokens.append(int(reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    engine = make_engine(loaded(family), attention_backend=backend, max_batch_tokens=16)
    other = engine.add_request(prompt_of(30, 1), greedy(25))
    assert answer(engine, prompt, greedy(20)) == tokens[50:]
    assert other not in engine._requests
