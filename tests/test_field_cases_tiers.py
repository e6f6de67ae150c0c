"""Faults that tiered caches have had in the field, one test a kind. Each was a wrong answer or a dead server somewhere."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engines import PAGE, finish, greedy, loaded, prompt_of, reference_tokens, tokens_of
from tier_engines import (
    BACKENDS,
    assert_nothing_is_held,
    check,
    is_native_answer,
    page_bytes_of,
    release_units,
    run_until,
    step,
    tiered_engine,
    tiered_model,
)
from vera.attention.moves import bytes_at
from vera.cache.blocks import extend_hashes
from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.errors import RequestTooLong


def served(engine: Engine, prompt: tuple[int, ...], count: int, **terms: Any) -> list[Update]:
    request_id = engine.add_request(prompt, greedy(count), **terms)
    updates: list[Update] = []
    while engine.has_unfinished():
        updates += step(engine)
    return [update for update in updates if update.request_id == request_id]


def known_blocks(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    hashes: list[bytes] = []
    extend_hashes(hashes, engine.cache._salt, prompt, PAGE)
    return engine.cache.blocks.find(hashes)


def blocks_of(engine: Engine, request_id: str) -> list[int]:
    return engine.cache._sequences[request_id].block_ids.tolist()


def strict(**options: Any) -> Engine:
    """Served within a tolerance of 0: every sketched page is hit, so answers are native's if hits are served rightly."""
    cache = {"attention_tolerance": 0.0, **options.pop("cache", {})}
    return tiered_engine(attention_backend="cpu", cache=cache, **options)


# Preemption and resume


@pytest.mark.parametrize("fidelity", ["bounded", "exact"])
@pytest.mark.parametrize("after", [[1], [PAGE - 1], [PAGE], [PAGE + 1], [20], [5, 20]])
@pytest.mark.parametrize("length", [60, 5 * PAGE])
def test_resumed_request_has_its_own_history_and_no_token_twice(length, after, fidelity):
    engine = strict()
    prompt = prompt_of(length)
    request_id = engine.add_request(prompt, greedy(40), fidelity=fidelity)
    tokens, remaining = [], list(after)
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
        if remaining and len(tokens) == remaining[0]:
            remaining.pop(0)
            engine._scheduler.preempt(engine._requests[request_id])
    assert tokens == reference_tokens(prompt, 40)


def test_cached_tokens_are_those_there_at_admission_not_at_an_earlier_try():
    engine = tiered_engine(frames=20, max_num_seqs=2, attention_backend="cpu")
    stem = prompt_of(8 * PAGE)
    served(engine, stem, 1, fidelity="exact")
    hog = engine.add_request(prompt_of(200, 1), greedy(20), fidelity="native")
    step(engine)
    waiting = engine.add_request((*stem, 5), greedy(3), fidelity="native")
    step(engine)
    assert engine.num_waiting == 1, "the first try was to fail"
    assert len(known_blocks(engine, stem)) == 8
    while len(known_blocks(engine, stem)) > 3:  # others' work while it waits
        assert engine.cache._evict(parked=True) or engine.cache._evict()
    updates = finish(engine)
    assert updates[waiting][-1].num_cached_tokens == 3 * PAGE
    assert sum(updates[waiting][-1].cache_use.cached_tokens.values()) == 3 * PAGE
    assert tokens_of(updates[waiting]) == reference_tokens((*stem, 5), 3)
    assert updates[hog][-1].finish_reason == "length"


def test_block_that_two_requests_share_is_restored_once_for_both(monkeypatch):
    engine = strict(cache={"recompute_budget": 8})
    prompt = prompt_of(9 * PAGE)
    first = engine.add_request(prompt, greedy(12))
    run_until(engine, first, 1)
    second = engine.add_request(prompt, greedy(12))
    others = [engine.add_request(prompt_of(100, seed), greedy(12)) for seed in (1, 2)]
    run_until(engine, others[1], 1)
    shared = set(blocks_of(engine, first)) & set(blocks_of(engine, second))
    block = blocks_of(engine, first)[3]
    assert block in shared
    release_units(engine, [block], [0])
    restored: list[int] = []
    begin = engine.cache.begin_restore
    monkeypatch.setattr(
        engine.cache, "begin_restore", lambda plan: restored.extend(target.block for target in plan.targets) or begin(plan)
    )
    updates = finish(engine)
    assert restored == [block]
    for request_id, own in ((first, prompt), (second, prompt), (others[0], prompt_of(100, 1)), (others[1], prompt_of(100, 2))):
        answered = tokens_of(updates[request_id])
        assert answered == reference_tokens(own, 12)[-len(answered) :]
    assert engine.cache.tier_stats.uncovered_hits == 0


def test_sharer_never_reads_what_a_failed_restore_left(monkeypatch):
    engine = strict()
    prompt = prompt_of(9 * PAGE)
    first, second = (engine.add_request(prompt, greedy(12)) for _ in range(2))
    run_until(engine, second, 1)
    other = engine.add_request(prompt_of(100, 1), greedy(12), fidelity="exact")
    release_units(engine, blocks_of(engine, first)[3:4], [0])
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "run_layers", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of luck")))
        updates = step(engine)
    assert {update.request_id for update in updates if update.finish_reason == "error"} >= {first, second}
    third = engine.add_request(prompt, greedy(12), fidelity="exact")
    rest = finish(engine)
    assert tokens_of(rest[third]) == reference_tokens(prompt, 12)
    assert rest.get(other, updates)[-1].finish_reason in ("length", "error")
    assert_nothing_is_held(engine)


# Between tiers


def test_prefix_found_is_pinned_before_anything_gives_way_for_it():
    """The warm store is full of what is found, and the pool is full, so that admitting it moves other blocks to the store."""
    engine = tiered_engine(frames=18, warm_blocks=8.2, max_num_seqs=2, attention_backend="cpu")
    stem = prompt_of(8 * PAGE)
    served(engine, stem, 1, fidelity="exact")
    for block in known_blocks(engine, stem):
        engine.cache._keeper.demote_idle(block)
    served(engine, prompt_of(140, 2), 1, fidelity="native")  # idle and hot: gives way
    for fidelity in ("native", "exact"):
        longer = stem + prompt_of(100, 3)
        updates = served(engine, longer, 5, fidelity=fidelity)
        assert updates[-1].finish_reason == "length", updates[-1].error
        assert tokens_of(updates) == reference_tokens(longer, 5)


@pytest.mark.soak
def test_warm_store_that_is_always_full_serves_a_thousand_requests():
    engine = tiered_engine(frames=20, warm_blocks=4.1, attention_backend="cpu")
    draw = random.Random(5)
    stems = [prompt_of(96, seed) for seed in range(6)]
    expected: dict[str, tuple[int, ...]] = {}
    answered: dict[str, list[int]] = {}
    while len(expected) < 1000 or engine.has_unfinished():
        if len(expected) < 1000 and engine.num_waiting < 3:
            prompt = draw.choice(stems)[: draw.choice([64, 80, 96])] + prompt_of(draw.choice([1, 30]), draw.randrange(4))
            expected[engine.add_request(prompt, greedy(2), fidelity=draw.choice(["native", "exact"]))] = prompt
        for update in step(engine):
            assert update.finish_reason in (None, "length"), update.error
            answered.setdefault(update.request_id, []).extend(update.new_token_ids)
    assert all(is_native_answer(prompt, answered[request_id]) for request_id, prompt in expected.items())
    assert_nothing_is_held(engine)


def test_memory_of_an_aborted_request_is_handed_out_only_once():
    engine = strict(frames=18, max_num_seqs=2)
    gone = engine.add_request(prompt_of(150), greedy(30))
    run_until(engine, gone, 3)
    release_units(engine, blocks_of(engine, gone)[2:6], [0])
    engine.abort(gone)
    check(engine)
    updates = served(engine, prompt_of(200, 1), 10)
    assert tokens_of(updates) == reference_tokens(prompt_of(200, 1), 10)
    assert_nothing_is_held(engine)


def sketch_bytes_of(engine: Engine, block: int) -> bytes:
    pool = engine.cache.pool
    keys, values = pool.sketch_addresses(int(engine.cache.tables.sketch_unit[block]))
    sizes = (pool.sketch_format.key_bytes, pool.sketch_format.value_bytes)
    return b"".join(
        bytes(bytes_at(address, size).tolist())
        for addresses, size in zip((keys, values), sizes, strict=True)
        for address in addresses.tolist()
    )


@pytest.mark.parametrize("round_trip", ["promoted and cooled", "idle", "restored"])
def test_side_data_of_a_page_is_the_same_after_a_round_trip(round_trip):
    engine = tiered_engine(attention_backend="cpu", cache={"page_dtype": "float16"})
    prompt = prompt_of(150)
    request_id = engine.add_request(prompt, greedy(20))
    run_until(engine, request_id, 2)
    cache, blocks = engine.cache, blocks_of(engine, request_id)
    block = blocks[4]
    before, pages = sketch_bytes_of(engine, block), page_bytes_of(engine, block)
    places = np.array([(block, layer, head) for layer in range(4) for head in range(2)])
    if round_trip == "promoted and cooled":
        cache.tables.promote(places[:, 0], places[:, 1], places[:, 2])
        cache.tables.cool(places[:, 0], places[:, 1], places[:, 2])
    elif round_trip == "idle":
        engine.abort(request_id)
        served(engine, prompt_of(200, 7), 5)  # overwrites what was given back
        again = engine.add_request(prompt, greedy(5))
        run_until(engine, again, 1)
        assert blocks_of(engine, again)[4] == block
    else:
        release_units(engine, [block], [0, 1])
        assert engine._restorer.restore_all(request_id)
    check(engine)
    assert sketch_bytes_of(engine, block) == before
    assert (page_bytes_of(engine, block) == pages).all()


@pytest.mark.parametrize("round_trip", ["idle", "restored"])
def test_what_is_hit_is_the_same_after_a_round_trip(round_trip):
    """A bounded decode row chooses its hits by side data: the same row hits the same pages before and after."""

    def hits_after(change: str | None) -> set[tuple[int, int, int]]:
        engine = tiered_engine(attention_backend="cpu", cache={"page_dtype": "float16", "hot_max_share": 0.0})
        prompt = prompt_of(150)
        request_id = engine.add_request(prompt, greedy(20))
        run_until(engine, request_id, 1)
        if change == "idle":
            engine.abort(request_id)
            served(engine, prompt_of(200, 7), 5)
            request_id = engine.add_request(prompt, greedy(20))
            run_until(engine, request_id, 1)
        tiered = engine.cache.tables.is_tiered(blocks_of(engine, request_id))
        places = np.argwhere(engine.cache.tables.hot_pages(blocks_of(engine, request_id)))
        ids = np.array(blocks_of(engine, request_id))
        engine.cache.tables.cool(ids[places[:, 0]], places[:, 1], places[:, 2])
        if change == "restored":
            release_units(engine, ids[tiered].tolist(), [0, 1])
            engine._restorer.restore_all(request_id)
            engine.cache.tables.cool(ids[places[:, 0]], places[:, 1], places[:, 2])
            all_places = np.array([(block, layer, head) for block in ids[tiered] for layer in range(4) for head in range(2)])
            engine.cache.tables.cool(all_places[:, 0], all_places[:, 1], all_places[:, 2])
        found: set[tuple[int, int, int]] = set()
        settle = engine.cache.settle

        def watch() -> None:
            batch = engine.cache._step[1]
            for hits in batch.tiers.report.hits if batch is not None and batch.tiers is not None else []:
                found.update((layer, head, block) for _, layer, head, block, _ in hits.tolist() if block < 8)
            settle()

        engine.cache.settle = watch  # type: ignore[method-assign]
        step(engine)
        return found

    before = hits_after(None)
    assert before
    if round_trip == "restored":
        assert hits_after(round_trip) == before
    else:  # of what waited idle more is tiered than of what runs: those pages may be hit besides
        assert hits_after(round_trip) >= {page for page in before if 1 <= page[2] <= 7}


# Whose pages they are


@pytest.mark.parametrize("state", ["hot", "warm", "cold"])
def test_pages_of_other_weights_are_never_served_from_any_tier(state):
    model = loaded("llama", max_position_embeddings=512)
    old = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    new = {name: tensor * 1.5 if "k_proj" in name else tensor for name, tensor in old.items()}
    engine = tiered_engine(model, attention_backend="cpu")
    prompt = prompt_of(10 * PAGE)
    before = tokens_of(served(engine, prompt, 8, fidelity="exact"))
    assert before == reference_tokens(prompt, 8)
    assert served(engine, prompt, 2, fidelity="exact")[-1].num_cached_tokens == 9 * PAGE
    if state != "hot":
        for block in engine.cache.blocks.idle:
            engine.cache._keeper.demote_idle(block)
    if state == "cold":
        release_units(engine, known_blocks(engine, prompt)[2:], [0, 1])
    engine.replace_weights(new)
    assert engine.cache.warm_bytes == 0
    updates = served(engine, prompt, 8, fidelity="bounded", attention_tolerance=0.0)
    assert updates[-1].num_cached_tokens == 0
    fresh_model = loaded("llama", max_position_embeddings=512)
    fresh_model.module.load_state_dict(new)
    assert tokens_of(updates) == tokens_of(
        served(tiered_engine(fresh_model, attention_backend="cpu"), prompt, 8, fidelity="native")
    )
    engine.replace_weights(old)
    updates = served(engine, prompt, 8, fidelity="exact")
    assert updates[-1].num_cached_tokens == 0 and tokens_of(updates) == before


@pytest.mark.parametrize("fidelity", ["exact", "bounded"])
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("length", [64, 65, 79, 80, 81, 96])
def test_second_time_around_at_every_page_border(length, preempted, fidelity):
    engine = strict()
    prompt = prompt_of(length)
    first = engine.add_request(prompt, greedy(PAGE + 3), fidelity=fidelity)
    run_until(engine, first, 2)
    if preempted:
        engine._scheduler.preempt(engine._requests[first])
    finish(engine)
    for block in engine.cache.blocks.idle:
        engine.cache._keeper.demote_idle(block)
    updates = served(engine, prompt, PAGE + 3, fidelity=fidelity)
    assert tokens_of(updates) == reference_tokens(prompt, PAGE + 3)
    assert updates[-1].num_cached_tokens == (length - 1) // PAGE * PAGE
    assert sum(updates[-1].cache_use.cached_tokens.values()) == updates[-1].num_cached_tokens


# Positions and selection


def test_next_position_is_the_number_of_tokens_not_of_kept_pages(monkeypatch):
    engine = tiered_engine(attention_backend="cpu")
    request_id = engine.add_request(prompt_of(290), greedy(30))
    run_until(engine, request_id, 1)
    release_units(engine, blocks_of(engine, request_id)[1:15], [0, 1])
    seen: list[int] = []
    forward = type(engine.model).forward

    def watched(self: Any, token_ids: torch.Tensor, positions: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.extend(positions.tolist())
        return forward(self, token_ids, positions, *arguments, **options)

    monkeypatch.setattr(type(engine.model), "forward", watched)
    finish(engine)
    assert seen == list(range(290, 319))


def test_first_and_latest_blocks_are_never_demoted_while_a_request_runs():
    engine = tiered_engine(attention_backend="cpu", cache={"warm_store": "ram", "hot_max_share": 0.0, "hot_score_threshold": 1.0})
    request_id = engine.add_request(prompt_of(150), greedy(60))
    while engine.has_unfinished():
        step(engine)
        if request_id in engine._requests and engine._requests[request_id].num_computed:
            state = engine.cache._sequences[request_id]
            hot = engine.cache.tables.hot_pages(state.block_ids)
            assert hot[0].all() and hot[max(0, state.sealed - 1) :].all()


def test_first_block_is_hot_again_when_a_prefix_comes_back_from_the_warm_store():
    engine = tiered_engine(attention_backend="cpu", cache={"hot_max_share": 0.1})
    prompt = prompt_of(150)
    served(engine, prompt, 2)
    for block in engine.cache.blocks.idle:
        engine.cache._keeper.demote_idle(block)
    request_id = engine.add_request(prompt, greedy(20))
    run_until(engine, request_id, 3)
    state = engine.cache._sequences[request_id]
    hot = engine.cache.tables.hot_pages(state.block_ids)
    assert hot[state.sealed :].all()
    assert hot[0].all(), "the sink is read through its sketch"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
def test_nothing_is_dropped_where_everything_fits(length):
    engine = tiered_engine(attention_backend="cpu", cache={"attention_tolerance": 1.0, "hot_max_share": 0.0})
    updates = served(engine, prompt_of(length), min(20, 65 - length))
    assert tokens_of(updates) == reference_tokens(prompt_of(length), min(20, 65 - length))
    use = updates[-1].cache_use
    assert (use.decode_steps, use.hits, use.error_max) == (0, 0, 0.0)
    assert engine.cache.tier_stats.demoted_blocks == 0


def test_estimated_error_is_zero_where_every_page_is_read():
    engine = tiered_engine(attention_backend="cpu", cache={"attention_tolerance": 0.0, "skip_share": 0.0})
    use = served(engine, prompt_of(150), 20)[-1].cache_use
    assert use.hits > 0 and use.error_count > 0
    assert use.error_max == 0.0 and use.error_mean == 0.0


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize(
    "extreme",
    [
        {"hot_max_share": 0.0, "hot_score_threshold": 1.0, "attention_tolerance": 1.0, "skip_share": 1.0},
        {"hot_max_share": 1.0, "hot_score_threshold": 0.0, "attention_tolerance": 0.0, "skip_share": 0.0},
        {"warm_store": "none", "recompute_budget": 0, "attention_tolerance": 1.0, "skip_share": 1.0, "hot_max_share": 0.0},
    ],
    ids=["all sketched", "all exact", "nothing kept"],
)
def test_shortest_contexts_have_something_to_attend_to_under_the_harshest_settings(length, bits, extreme):
    engine = tiered_engine(attention_backend="cpu", cache={"min_context": 0, "sketch_bits": bits, **extreme})
    updates = served(engine, prompt_of(length), 40)
    assert updates[-1].finish_reason == "length", updates[-1].error
    assert len(tokens_of(updates)) == 40
    assert tokens_of(updates)[0] == reference_tokens(prompt_of(length), 1)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_recycled_pages_of_every_kind_never_reach_a_result(backend):
    """The pool is just large enough, and all that comes back to it is filled with NaN, side data too."""
    engine = tiered_engine(frames=22, warm_blocks=14, attention_backend=backend, cache={"attention_tolerance": 0.0})
    prompts = [prompt_of(length, seed) for seed in range(3) for length in (1, 15, 16, 17, 66, 80, 81, 150)]
    ids = [
        engine.add_request(prompt, greedy(40), fidelity=("exact", "bounded", "native")[number % 3])
        for number, prompt in enumerate(prompts)
    ]
    updates = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert updates[request_id][-1].finish_reason == "length"
        if engine.cache.tier_stats.uncovered_hits == 0 or request_id not in ids[1::3]:
            assert is_native_answer(prompt, tokens_of(updates[request_id]))
    assert engine.cache.tier_stats.demoted_blocks > 10
    assert (engine.stats.prefill_tokens + engine.stats.decode_tokens) // PAGE >= 5 * 22
    assert_nothing_is_held(engine)


# Noise or fault?


@pytest.mark.parametrize("others", [0, 1, 7])
def test_exact_answer_does_not_depend_on_the_batch(others):
    engine = tiered_engine(tiered_model(context=1024), frames=120, max_num_seqs=8, attention_backend="cpu", max_batch_tokens=96)
    lengths = [5, 70, 33, 130, 64, 100, 17]
    prompts = [(prompt_of(150), "exact")]
    prompts += [(prompt_of(lengths[i], i + 1), ("bounded", "native", "exact")[i % 3]) for i in range(others)]
    random.Random(others).shuffle(prompts)
    ids = {engine.add_request(prompt, greedy(20), fidelity=fidelity): (prompt, fidelity) for prompt, fidelity in prompts}
    updates = finish(engine)
    for request_id, (prompt, fidelity) in ids.items():
        if fidelity != "bounded":
            assert tokens_of(updates[request_id]) == reference_tokens(prompt, 20)


@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.2])
def test_true_error_of_bounded_attention_stays_within_its_bounds(tolerance):
    """Measured in every step on the same queries, so that no drift of the text is taken for an error of the cache."""
    engine = tiered_engine(attention_backend="cpu", cache={"attention_tolerance": tolerance})
    engine.auditor.every_step = True
    served(engine, prompt_of(300), 100)
    errors = sorted(result.true_error for result in engine.auditor.results)
    assert len(errors) > 80
    assert errors[len(errors) // 2] <= tolerance
    assert errors[-1] <= 3 * tolerance


# Host memory, admission, accounts


@pytest.mark.parametrize("fidelity", ["native", "exact"])
def test_without_host_memory_everything_runs_and_pages_go_from_hot_to_cold(fidelity):
    engine = tiered_engine(attention_backend="cpu", cache={"warm_store": "none"})
    within_bounds = engine.add_request(prompt_of(200), greedy(30))
    exactly = engine.add_request(prompt_of(150, 1), greedy(30), fidelity=fidelity)
    run_until(engine, within_bounds, 5)
    assert engine.cache.tables.warm is None and engine.cache.cold_share > 0
    updates = finish(engine)
    assert updates[within_bounds][-1].finish_reason == "length"
    assert tokens_of(updates[exactly])[-20:] == reference_tokens(prompt_of(150, 1), 30)[-20:]
    assert engine.cache.tier_stats.cold_hits > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("fidelity", ["native", "exact", "bounded"])
@pytest.mark.parametrize("warm_store", ["ram", "none"])
def test_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody(warm_store, fidelity):
    engine = tiered_engine(frames=10, max_num_seqs=2, attention_backend="cpu", cache={"warm_store": warm_store})
    longest = engine.cache.longest_sequence(fidelity)
    with pytest.raises(RequestTooLong):
        engine.add_request(prompt_of(longest), greedy(1), fidelity=fidelity)
    assert tokens_of(served(engine, prompt_of(10, 1), 4)) == reference_tokens(prompt_of(10, 1), 4)


@pytest.mark.parametrize("fidelity", ["native", "exact", "bounded"])
@pytest.mark.parametrize("warm_blocks", [None, 3, 0.6])
def test_requests_that_fill_the_pool_between_them_all_end(warm_blocks, fidelity):
    """Each fits alone, not together: no endless taking turns."""
    engine = tiered_engine(frames=14, warm_blocks=warm_blocks, max_num_seqs=3, attention_backend="cpu")
    longest = min(engine.max_model_len, engine.cache.longest_sequence(fidelity))
    ids = [engine.add_request(prompt_of(longest - 40, seed), greedy(40), fidelity=fidelity) for seed in range(3)]
    updates = finish(engine, most_steps=2000)
    for seed, request_id in enumerate(ids):
        assert updates[request_id][-1].finish_reason == "length"
        if fidelity != "bounded":
            assert is_native_answer(prompt_of(longest - 40, seed), tokens_of(updates[request_id]))


def test_random_prompts_never_count_as_cached_in_any_tier():
    engine = tiered_engine(frames=16, max_num_seqs=4, attention_backend="cpu")
    draw = random.Random(3)
    ids = [engine.add_request(prompt_of(60 + seed, seed), greedy(20)) for seed in range(20)]
    updates: dict[str, Update] = {}
    while engine.has_unfinished():
        for update in step(engine):
            updates[update.request_id] = update
        if engine._scheduler.running and draw.random() < 0.2:
            engine._scheduler.preempt(draw.choice(engine._scheduler.running))
    assert engine.stats.preemptions > 5
    assert all(updates[request_id].num_cached_tokens == 0 for request_id in ids)
    assert all(not any(updates[request_id].cache_use.cached_tokens.values()) for request_id in ids)


@pytest.mark.parametrize("state", ["hot", "warm", "cold"])
def test_cached_tokens_are_told_by_tier_and_add_up(state):
    engine = tiered_engine(attention_backend="cpu", cache={"min_context": 200 if state == "hot" else 64})
    prompt = prompt_of(117)
    served(engine, prompt, 2)
    blocks = known_blocks(engine, prompt)
    if state != "hot":
        for block in blocks:
            engine.cache._keeper.demote_idle(block)
    if state == "cold":
        release_units(engine, blocks, [0])
    use = served(engine, prompt, 2)[-1].cache_use
    assert use.cached_tokens == {"hot": 0, "warm": 0, "cold": 0} | {state: 7 * PAGE}


def test_counters_never_fall_when_more_is_cached_at_a_resume_than_at_first():
    engine = strict(frames=40)
    prompt = prompt_of(150)
    request_id = engine.add_request(prompt, greedy(40))
    use = engine._requests[request_id].cache_use
    before: tuple[float, ...] = ()
    tokens = []
    for number in range(200):
        if not engine.has_unfinished():
            break
        tokens += tokens_of(step(engine))
        now = (
            *use.cached_tokens.values(),
            use.decode_steps,
            use.hits,
            use.recompute_steps,
            use.uncovered_hits,
            use.error_sum,
            use.error_count,
            use.error_max,
        )
        assert all(new >= old for new, old in zip(now, before or now, strict=True))
        assert sum(use.cached_tokens.values()) <= len(prompt)
        before = now
        if number % 9 == 8 and engine._scheduler.running:
            engine._scheduler.preempt(engine._requests[request_id])
    assert tokens == reference_tokens(prompt, 40)
    assert engine.stats.preemptions >= 3
    assert engine.stats.cached_tokens == 0
