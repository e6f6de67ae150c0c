"""The engine through its public door: limits, endings, priorities, failures."""

import pytest
import torch

from engines import PAGE, FakeClock, answer, finish, greedy, loaded, make_engine, prompt_of, reference_tokens, tokens_of
from vera.config import EngineConfig
from vera.errors import CapacityError, ConfigError, EngineStopped, RequestError, RequestTooLong
from vera.sampling_params import SamplingParams


def reasons(updates):
    return {request_id: own[-1].finish_reason for request_id, own in updates.items()}


# Limits


@pytest.mark.parametrize(("prompt", "max_tokens"), [(100, 29), (128, 1), (129, 1), (5000, 1), (128, None)])
def test_request_that_can_never_fit_is_refused_with_both_numbers(prompt, max_tokens):
    engine = make_engine(blocks=8)
    fits = engine.add_request(prompt_of(99), greedy(29))
    with pytest.raises(RequestTooLong, match=rf"{prompt} tokens.*{8 * PAGE} tokens served"):
        engine.add_request(prompt_of(prompt), greedy(max_tokens))
    assert len(tokens_of(finish(engine)[fits])) == 29


def test_prompt_that_leaves_room_for_one_token_is_answered_with_one():
    engine = make_engine(blocks=8)
    assert len(answer(engine, prompt_of(127), greedy(1))) == 1


def test_missing_max_tokens_means_up_to_what_is_served():
    engine = make_engine(blocks=8)
    request_id = engine.add_request(prompt_of(100), greedy(None))
    updates = finish(engine)[request_id]
    assert len(tokens_of(updates)) == 28
    assert updates[-1].finish_reason == "length"


def test_too_long_a_request_does_not_block_the_next():
    engine = make_engine(blocks=8)
    with pytest.raises(RequestTooLong):
        engine.add_request(prompt_of(10 * PAGE), greedy(1))
    assert answer(engine, prompt_of(5), greedy(4)) == reference_tokens(prompt_of(5), 4)


def test_served_length_above_the_cache_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"max_model_len=200 .* 128 tokens"):
        make_engine(blocks=8, max_model_len=200)


def test_served_length_above_the_model_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"max_model_len=5000 .* 4096 tokens"):
        make_engine(blocks=400, max_model_len=5000)


def test_ceiling_below_one_block_is_refused():
    with pytest.raises(CapacityError, match="below one block"):
        make_engine(cache={"cache_max_bytes": 100})


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), greedy(1), "no tokens"),
        ((5, 128), greedy(1), "token id 128, outside the vocabulary 0 to 127"),
        ((5, -1), greedy(1), "token id -1"),
        ((5,), greedy(1, stop_token_ids=(500,)), "stop_token_ids has token id 500"),
        ((5,), greedy(1, logit_bias={500: 1.0}), "logit_bias has token id 500"),
        ((5,), greedy(1, n=2), "n=2"),
    ],
)
def test_bad_request_is_refused_by_name_and_the_next_one_works(prompt, params, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished()
    assert answer(engine, prompt_of(5), greedy(4)) == reference_tokens(prompt_of(5), 4)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"priority": None}, "priority=None"),
        ({"priority": "high"}, "priority='high'"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_bad_terms_are_refused_and_leave_nothing_behind(terms, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt_of(5), greedy(2), **terms)
    assert not engine.has_unfinished()


def test_token_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(RequestError, match="whole number"):
        make_engine().add_request((5.0, 6.5), greedy(2))


def test_min_tokens_that_can_never_fit_are_refused():
    with pytest.raises(RequestTooLong, match="100 tokens plus 40"):
        make_engine(blocks=8).add_request(prompt_of(100), greedy(None, min_tokens=40))


def test_full_queue_is_refused():
    engine = make_engine(max_waiting=2)
    engine.add_request(prompt_of(5), greedy(2))
    engine.add_request(prompt_of(5), greedy(2))
    with pytest.raises(CapacityError, match="2 requests are waiting"):
        engine.add_request(prompt_of(5), greedy(2))
    assert len(finish(engine)) == 2


def test_one_id_twice_is_refused():
    engine = make_engine()
    engine.add_request(prompt_of(5), greedy(2), request_id="mine")
    with pytest.raises(RequestError, match="'mine'"):
        engine.add_request(prompt_of(5), greedy(2), request_id="mine")


@pytest.mark.parametrize(
    "values",
    [{"max_num_seqs": 0}, {"max_batch_tokens": 4}, {"attention_backend": "gpu"}, {"max_waiting": "many"}, {"num_threads": 0}],
)
def test_wrong_setting_is_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        EngineConfig(**values)


def test_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"max_seqs.*known are.*max_num_seqs"):
        EngineConfig.from_dict({"max_seqs": 3})


# Endings


def test_end_of_sequence_ends_the_answer_unless_ignored():
    model = loaded()
    text = reference_tokens(prompt_of(9), 12)
    eos = text[4]
    engine = make_engine(loaded(eos_token_id=eos))
    ended = engine.add_request(prompt_of(9), SamplingParams(max_tokens=12))
    updates = finish(engine)[ended]
    assert tokens_of(updates) == text[: text.index(eos) + 1]
    assert updates[-1].finish_reason == "stop"
    assert answer(engine, prompt_of(9), greedy(12)) == text
    assert model.spec.eos_token_ids != engine.model.spec.eos_token_ids


def test_stop_token_ends_the_answer_and_is_named():
    engine = make_engine()
    text = reference_tokens(prompt_of(9), 12)
    request_id = engine.add_request(prompt_of(9), greedy(12, stop_token_ids=(text[3],)))
    last = finish(engine)[request_id][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", text[3])


def test_min_tokens_holds_the_end_back():
    engine = make_engine()
    text = reference_tokens(prompt_of(9), 12)
    request_id = engine.add_request(prompt_of(9), greedy(12, stop_token_ids=tuple(set(text)), min_tokens=5))
    assert len(tokens_of(finish(engine)[request_id])) >= 5


def test_streamed_text_equals_the_text_of_all_tokens():
    engine = make_engine()
    request_id = engine.add_request(prompt_of(9), greedy(60))
    updates = finish(engine)[request_id]
    text = engine.model.tokenizer.decode(tokens_of(updates), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(update.delta for update in updates) == text


def test_stop_string_ends_the_answer_and_is_cut_off():
    engine = make_engine()
    whole = "".join(update.delta for update in finish_one(engine, greedy(60)))
    stop = whole[10:13]
    updates = finish_one(engine, greedy(60, stop=(stop,)))
    assert "".join(update.delta for update in updates) == whole[: whole.index(stop)]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", stop)


def finish_one(engine, params):
    request_id = engine.add_request(prompt_of(9), params)
    return finish(engine)[request_id]


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_abort_frees_everything_in_every_phase(steps):
    engine = make_engine(max_batch_tokens=20, max_num_seqs=2)
    ids = [engine.add_request(prompt_of(50, seed), greedy(20)) for seed in range(3)]
    for _ in range(steps):
        engine.step()
    assert [engine.abort(request_id) for request_id in ids] == [True] * 3
    updates = finish(engine)
    assert set(reasons(updates).values()) == {"abort"}
    assert engine.cache.used_bytes == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_abort_while_preempted_frees_everything():
    engine = make_engine()
    request_id = engine.add_request(prompt_of(20), greedy(20))
    engine.step()
    engine._scheduler.preempt(engine._requests[request_id])
    assert engine.abort(request_id)
    finish(engine)
    assert engine.cache.used_bytes == 0


def test_abort_of_what_is_gone_says_so():
    engine = make_engine()
    request_id = engine.add_request(prompt_of(5), greedy(2))
    finish(engine)
    assert not engine.abort(request_id)
    assert engine.stats.finished == {"length": 1}


def test_request_past_its_deadline_ends_with_what_it_has():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    late = engine.add_request(prompt_of(5), greedy(50), timeout_seconds=10)
    calm = engine.add_request(prompt_of(6), greedy(5))
    engine.step()
    clock.now += 11
    updates = finish(engine)
    assert reasons(updates) == {late: "timeout", calm: "length"}
    assert engine.cache.used_bytes == 0


def test_waiting_request_times_out_too():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    engine.add_request(prompt_of(5), greedy(50))
    waiting = engine.add_request(prompt_of(6), greedy(5), timeout_seconds=1)
    engine.step()
    clock.now += 2
    [update] = [update for update in engine.step() if update.request_id == waiting]
    assert update.finish_reason == "timeout"


# Order


def order_of_first_tokens(engine):
    order = []
    while engine.has_unfinished():
        order += [update.request_id for update in engine.step() if update.request_id not in order]
    return order


def test_first_come_first_served():
    engine = make_engine(max_num_seqs=1)
    ids = [engine.add_request(prompt_of(10, seed), greedy(3)) for seed in range(3)]
    assert order_of_first_tokens(engine) == ids


def test_lower_priority_number_runs_first():
    engine = make_engine(max_num_seqs=1)
    slow, urgent = (engine.add_request(prompt_of(10, seed), greedy(3), priority=-seed) for seed in range(2))
    assert order_of_first_tokens(engine) == [urgent, slow]


def test_urgent_request_takes_the_seat_of_a_running_one_and_both_answer_rightly():
    engine = make_engine(max_num_seqs=1)
    slow = engine.add_request(prompt_of(10), greedy(10))
    updates = engine.step()
    urgent = engine.add_request(prompt_of(11), greedy(3), priority=-1)
    updates += [update for own in finish(engine).values() for update in own]
    finished = [update.request_id for update in updates if update.finished]
    assert finished == [urgent, slow]
    assert tokens_of([u for u in updates if u.request_id == slow]) == reference_tokens(prompt_of(10), 10)


def test_running_answers_go_on_while_a_long_prompt_is_read():
    engine = make_engine(max_batch_tokens=20, max_num_seqs=4)
    talking = engine.add_request(prompt_of(5), greedy(30))
    engine.step()
    engine.add_request(prompt_of(200), greedy(1))
    for _ in range(5):
        assert talking in {update.request_id for update in engine.step()}


def test_step_never_computes_more_than_its_budget():
    engine = make_engine(max_batch_tokens=20, max_num_seqs=8)
    for seed in range(8):
        engine.add_request(prompt_of(45, seed), greedy(6))
    while engine.has_unfinished():
        before = engine.stats.prefill_tokens + engine.stats.decode_tokens
        engine.step()
        assert engine.stats.prefill_tokens + engine.stats.decode_tokens - before <= 20


def test_urgent_prompt_is_read_before_a_long_one_goes_on():
    engine = make_engine(max_batch_tokens=16, max_num_seqs=4, blocks=100)
    slow = engine.add_request(prompt_of(600), greedy(1), priority=5)
    engine.step()
    urgent = engine.add_request(prompt_of(20), greedy(1))
    order = order_of_first_tokens(engine)
    assert order == [urgent, slow]
    assert engine.stats.preemptions == 0


def test_nobody_is_preempted_for_a_request_that_would_not_fit_all_the_same():
    engine = make_engine(blocks=10, max_num_seqs=4)
    engine.add_request(prompt_of(6 * PAGE - 5, 1), greedy(30))
    lesser = engine.add_request(prompt_of(20, 2), greedy(60), priority=5)
    engine.step()
    engine.add_request(prompt_of(8 * PAGE, 3), greedy(1))
    engine.step()
    assert engine._requests[lesser].num_preemptions == 0
    assert set(reasons(finish(engine)).values()) == {"length"}


# Prefixes


def test_requests_that_arrive_together_share_their_prefix():
    engine = make_engine(max_batch_tokens=32, blocks=40)
    stem = prompt_of(6 * PAGE)
    ids = [engine.add_request(stem + prompt_of(5, seed), greedy(4)) for seed in range(3)]
    updates = finish(engine)
    cached = [updates[request_id][-1].num_cached_tokens for request_id in ids]
    assert cached[0] == 0
    assert min(cached[1:]) >= 4 * PAGE
    for seed, request_id in enumerate(ids):
        assert tokens_of(updates[request_id]) == reference_tokens(stem + prompt_of(5, seed), 4)


def test_cached_tokens_are_counted_at_admission_not_when_first_looked_up():
    engine = make_engine(blocks=10, max_num_seqs=2)
    stem = prompt_of(8 * PAGE)
    answer(engine, stem, greedy(1))
    assert engine.cache.num_tokens_reusable((*stem, 5)) == 8 * PAGE
    hog = engine.add_request(prompt_of(5 * PAGE, 1), greedy(10))
    engine.step()  # takes the two free blocks and evicts some of the stem
    waiting = engine.add_request((*stem, 5), greedy(3))
    engine.step()
    assert engine.num_waiting == 1
    left = engine.cache.num_tokens_reusable((*stem, 5))
    updates = finish(engine)
    assert 0 < updates[waiting][-1].num_cached_tokens <= left < 8 * PAGE  # the hog takes one block more before it ends
    assert tokens_of(updates[waiting]) == reference_tokens((*stem, 5), 3)
    assert reasons(updates)[hog] == "length"


def test_random_prompts_never_count_as_cached_even_when_preempted():
    engine = make_engine(blocks=8, max_num_seqs=6)
    for seed in range(12):
        engine.add_request(prompt_of(20 + seed, seed), greedy(40))
    updates = finish(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens == 0
    assert {own[-1].num_cached_tokens for own in updates.values()} == {0}
    assert engine.stats.prompt_tokens == sum(20 + seed for seed in range(12))


def test_prefix_reuse_can_be_switched_off():
    engine = make_engine(cache={"prefix_reuse": False})
    answer(engine, prompt_of(40), greedy(2))
    request_id = engine.add_request(prompt_of(40), greedy(2))
    assert finish(engine)[request_id][-1].num_cached_tokens == 0


def test_new_weights_never_meet_the_old_ones_cache():
    model = loaded()
    engine = make_engine(model)
    old = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    before = answer(engine, prompt_of(40), greedy(8))
    new = {name: tensor * 1.5 if "k_proj" in name else tensor for name, tensor in old.items()}
    engine.replace_weights(new)
    fresh = make_engine(loaded_with(new))
    request_id = engine.add_request(prompt_of(40), greedy(8))
    updates = finish(engine)[request_id]
    assert updates[-1].num_cached_tokens == 0
    assert tokens_of(updates) == answer(fresh, prompt_of(40), greedy(8)) != before
    engine.replace_weights(old)
    assert answer(engine, prompt_of(40), greedy(8)) == before


def loaded_with(state):
    model = loaded()
    model.module.load_state_dict(state)
    return model


def test_weights_are_not_replaced_under_a_running_request():
    engine = make_engine(loaded())
    request_id = engine.add_request(prompt_of(20), greedy(8))
    engine.step()
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        engine.replace_weights(engine.model.module.state_dict())
    assert tokens_of(finish(engine)[request_id])


# Log-probabilities


@pytest.mark.parametrize("chunk", [16, 64])
def test_prompt_logprobs_are_complete_and_right_also_the_second_time(chunk):
    from engines import reference_model

    engine = make_engine(max_batch_tokens=chunk)
    prompt = prompt_of(117)
    answer(engine, prompt, greedy(1))  # the prefix is in the cache now
    with torch.inference_mode():
        expected = torch.log_softmax(reference_model()(input_ids=torch.tensor([prompt])).logits[0], -1)
    for _ in range(2):
        request_id = engine.add_request(prompt, greedy(2, prompt_logprobs=3))
        [logprobs] = [u.prompt_logprobs for u in finish(engine)[request_id] if u.prompt_logprobs]
        assert len(logprobs) == 117 and logprobs[0] is None
        for position, entry in enumerate(logprobs[1:], start=1):
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-4)
            assert len(entry.top) == 3
            assert entry.top[0][1] == pytest.approx(expected[position - 1].max().item(), abs=1e-4)


def test_prompt_logprobs_survive_a_preemption():
    engine = make_engine(max_batch_tokens=20, max_num_seqs=1)
    request_id = engine.add_request(prompt_of(50), greedy(2, prompt_logprobs=0))
    engine.step()
    engine.step()
    engine._scheduler.preempt(engine._requests[request_id])
    [logprobs] = [u.prompt_logprobs for u in finish(engine)[request_id] if u.prompt_logprobs]
    assert [entry.token_id for entry in logprobs[1:]] == list(prompt_of(50)[1:])


def test_each_token_brings_its_logprobs():
    engine = make_engine()
    request_id = engine.add_request(prompt_of(9), greedy(5, logprobs=2))
    for update in finish(engine)[request_id]:
        [entry] = update.logprobs
        assert entry.token_id == update.new_token_ids[0] == entry.top[0][0]
        assert entry.logprob == pytest.approx(entry.top[0][1])


# Seeds


def test_seeded_answer_does_not_depend_on_the_batch():
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True)
    alone = answer(make_engine(), prompt_of(9), params)
    engine = make_engine(max_num_seqs=8)
    others = [engine.add_request(prompt_of(20 + seed, seed), greedy(15)) for seed in range(5)]
    request_id = engine.add_request(prompt_of(9), params)
    updates = finish(engine)
    assert tokens_of(updates[request_id]) == alone
    assert len(others) == 5


def test_seeded_answer_survives_a_preemption():
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20, ignore_eos=True)
    alone = answer(make_engine(), prompt_of(9), params)
    engine = make_engine()
    request_id = engine.add_request(prompt_of(9), params)
    updates = [*engine.step(), *engine.step()]
    engine._scheduler.preempt(engine._requests[request_id])
    updates += finish(engine)[request_id]
    assert tokens_of(updates) == alone


def test_unseeded_answers_differ_and_the_engine_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first = [answer(engine, prompt_of(9), params) for engine in [make_engine(seed=1)] for _ in range(2)]
    second = [answer(engine, prompt_of(9), params) for engine in [make_engine(seed=1)] for _ in range(2)]
    assert first == second
    assert first[0] != first[1]


# Failures


def test_failing_model_ends_the_step_s_requests_and_the_engine_serves_on(monkeypatch):
    engine = make_engine()
    request_id = engine.add_request(prompt_of(9), greedy(10))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
        [update] = engine.step()
    assert (update.request_id, update.finish_reason) == (request_id, "error")
    assert "out of luck" in update.error
    assert engine.cache.used_bytes == 0
    assert answer(engine, prompt_of(9), greedy(4)) == reference_tokens(prompt_of(9), 4)


def test_non_finite_logits_fail_the_request_and_never_answer_token_zero():
    model = loaded()
    with torch.no_grad():
        model.module.get_input_embeddings().weight[77] = float("inf")
    engine = make_engine(model)
    broken = engine.add_request((5, 6, 77), greedy(10))
    updates = finish(engine)
    assert reasons(updates) == {broken: "error"}
    assert "not finite" in updates[broken][-1].error
    assert tokens_of(updates[broken]) == []


def overflowing_model():
    """Its first layer's values pass 70,000, far beyond float16, and its answers are those of the plain model."""
    model = loaded()
    attention = model.module.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.mul_(1e6)
        attention.o_proj.weight.div_(1e6)
    return model


def test_values_beyond_float16_pages_fail_the_request_by_name():
    engine = make_engine(overflowing_model(), cache={"page_dtype": "float16", "cache_max_bytes": 2**20})
    request_id = engine.add_request(prompt_of(20), greedy(5))
    last = finish(engine)[request_id][-1]
    assert last.finish_reason == "error"
    assert "page_dtype bfloat16 or float32" in last.error


@pytest.mark.parametrize("page_dtype", ["bfloat16", "float32"])
def test_wider_pages_serve_values_beyond_float16(page_dtype):
    engine = make_engine(overflowing_model(), cache={"page_dtype": page_dtype, "cache_max_bytes": 2**20})
    request_id = engine.add_request(prompt_of(20), greedy(5))
    assert finish(engine)[request_id][-1].finish_reason == "length"


def test_tokenizer_that_breaks_ends_its_request_alone(monkeypatch):
    engine = make_engine()
    broken = engine.add_request(prompt_of(9), greedy(10))
    sound = engine.add_request(prompt_of(10), greedy(10))

    def break_down(*_):
        raise RuntimeError("no such token")

    monkeypatch.setattr(
        engine._requests[broken].text, "_decoded", type("Broken", (), {"push": break_down, "finish": break_down})()
    )
    updates = finish(engine)
    assert reasons(updates) == {broken: "error", sound: "length"}
    assert "no such token" in updates[broken][-1].error
    assert tokens_of(updates[sound]) == reference_tokens(prompt_of(10), 10)
    assert engine.cache.used_bytes == 0


def test_weights_replaced_through_another_engine_end_what_runs_here():
    model = loaded()
    one, other = make_engine(model), make_engine(model)
    answer(one, prompt_of(40), greedy(2))
    running = one.add_request(prompt_of(30), greedy(20))
    one.step()
    other.replace_weights({name: tensor * 1.5 for name, tensor in model.module.state_dict().items()})
    updates = finish(one)
    assert reasons(updates) == {running: "error"}
    request_id = one.add_request(prompt_of(40), greedy(2))
    assert finish(one)[request_id][-1].num_cached_tokens == 0


def test_updates_that_were_due_at_the_end_can_still_be_read():
    engine = make_engine()
    request_id = engine.add_request(prompt_of(9), greedy(10))
    engine.close()
    [update] = engine.step()
    assert (update.request_id, update.finish_reason) == (request_id, "abort")
    assert not engine.has_unfinished()


def test_blocks_of_a_failed_request_are_not_reused(monkeypatch):
    engine = make_engine()
    request_id = engine.add_request(prompt_of(40), greedy(10))
    engine.step()
    assert engine.cache.num_tokens_reusable(prompt_of(40)) == 2 * PAGE
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("out of luck")))
        engine.step()
    assert request_id not in engine._requests
    assert engine.cache.num_tokens_reusable(prompt_of(40)) == 0
    engine.check_invariants()


def test_unknown_environment_variable_is_named(monkeypatch, caplog):
    monkeypatch.setenv("VERA_CACHE_MAX_BYTES", "1000")
    make_engine()
    assert "VERA_CACHE_MAX_BYTES is unknown" in caplog.text


def test_ceiling_holds_while_pages_are_recycled():
    engine = make_engine(blocks=9, max_num_seqs=8)
    address, size = engine.cache.pool.pages.data_ptr(), engine.cache.pool.pages.nbytes
    for seed in range(20):
        engine.add_request(prompt_of(40, seed), greedy(20))
    while engine.has_unfinished():
        engine.step()
        assert engine.cache.used_bytes <= engine.cache.capacity_bytes == size
    assert engine.cache.pool.pages.data_ptr() == address


def test_duplicate_goes_on_like_the_original_with_pages_of_its_own():
    engine = make_engine()
    first = engine.add_request(prompt_of(40), greedy(10))
    engine.step()
    engine.step()
    used = engine.cache.used_bytes
    copy = engine.duplicate(first)
    assert engine.cache.used_bytes == 2 * used
    updates = finish(engine)
    assert tokens_of(updates[copy]) == tokens_of(updates[first]) == reference_tokens(prompt_of(40), 10)[2:]


def test_duplicate_without_a_seat_is_refused():
    engine = make_engine(max_num_seqs=1)
    first = engine.add_request(prompt_of(40), greedy(10))
    engine.step()
    with pytest.raises(CapacityError, match="all 1 seats"):
        engine.duplicate(first)


def test_closed_engine_says_so():
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        engine.add_request(prompt_of(5), greedy(1))


def test_prompt_counts_once_when_it_is_admitted_even_if_no_token_comes_of_it():
    engine = make_engine(max_batch_tokens=16)
    answer(engine, prompt_of(64), greedy(1))
    known = engine.add_request(prompt_of(64) + prompt_of(50, 1), greedy(1))
    engine.step()
    new = engine.add_request(prompt_of(100, 2), greedy(1))
    engine.step()
    assert engine.abort(known)
    engine.step()
    assert engine.abort(new)
    finish(engine)
    assert engine.stats.generated_tokens == 1
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (64 + 114 + 100, 64)
