"""Local recompute: a page that was released comes back with the bytes that it was released with, within the step's budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines import finish, greedy, prompt_of, reference_tokens, tokens_of
from tier_engines import (
    BACKENDS,
    as_numbers,
    assert_nothing_is_held,
    check,
    page_bytes_of,
    release_units,
    run_until,
    step,
    tiered_engine,
    tiered_model,
)
from vera.cache.recompute import BlockOf, Costs, RecomputeTrigger
from vera.engine.engine import Engine

PROMPT = prompt_of(230)
PLACES = {"first": 1, "middle": 7, "last": 12}
"""Of the tiered blocks of `PROMPT`, whose first block and last sealed one stay exact."""


def reading(*, fidelity: str = "bounded", prompt: tuple[int, ...] = PROMPT, **options: Any) -> tuple[Engine, str]:
    """An engine in which one request has read its prompt and begun to answer; read 80 rows at a time, as restores need it."""
    engine = tiered_engine(options.pop("model", None), **options)
    request_id = engine.add_request(prompt, greedy(40), fidelity=fidelity)
    run_until(engine, request_id, 2)
    return engine, request_id


def blocks_of(engine: Engine, request_id: str) -> list[int]:
    return engine.cache._sequences[request_id].block_ids.tolist()


def restore(engine: Engine, request_id: str, index: int, stop: int, *, hot: bool = True) -> None:
    """Restores one block up to layer `stop`, as a hit in layer `stop - 1` would."""
    cache = engine.cache
    target = BlockOf(request_id, index, blocks_of(engine, request_id)[index])
    pages = [(target.block, layer, head) for layer in range(cache.shape.layers) for head in range(cache.shape.kv_heads)]
    for plan in cache.restores([target], stop):
        own = [page for page in pages if plan.first <= page[1] < plan.stop] if hot else []
        engine._restorer._pass(cache.begin_restore(plan), own)
    check(engine)


def assert_same_to_the_bit(before: np.ndarray, after: np.ndarray, page_dtype: str) -> None:
    """In 99.9% of the elements; the rest within one unit in the last place."""
    bits = torch.int32 if page_dtype == "float32" else torch.int16
    old, new = as_numbers(before, bits).long(), as_numbers(after, bits).long()
    same = (old == new).double().mean().item()
    assert same >= 0.999, f"only {same:.4%} of the elements came back as they were"
    assert ((old - new).abs() <= 1).all(), "an element is off by more than one unit in the last place"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_restored_page_has_the_bytes_it_was_released_with(place, window, page_dtype, backend):
    engine, request_id = reading(attention_backend=backend, cache={"page_dtype": page_dtype})
    index = PLACES[place]
    block = blocks_of(engine, request_id)[index]
    before = page_bytes_of(engine, block)
    release_units(engine, [block], [window])
    assert engine.cache.tables.lacks_exact_pages([block]).all()
    restore(engine, request_id, index, stop=2 * window + 2)
    assert_same_to_the_bit(before, page_bytes_of(engine, block), page_dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_every_window_comes_back_whatever_its_length(place, limit, backend):
    engine, request_id = reading(attention_backend=backend, cache={"page_dtype": "float16", "recompute_layer_limit": limit})
    tables, index = engine.cache.tables, PLACES[place]
    block = blocks_of(engine, request_id)[index]
    before = page_bytes_of(engine, block)
    for window in range(tables.num_windows):
        release_units(engine, [block], [window])
        restore(engine, request_id, index, stop=engine.cache.trigger.window_end_of(window))
        assert_same_to_the_bit(before, page_bytes_of(engine, block), "float16")


@pytest.mark.parametrize("hot", [True, False])
def test_page_comes_back_whether_its_context_is_hot_or_warm(hot):
    engine, request_id = reading(attention_backend="cpu", cache={"page_dtype": "float16", "hot_max_share": 1.0})
    tables, index = engine.cache.tables, 9
    blocks = blocks_of(engine, request_id)
    before = page_bytes_of(engine, blocks[index])
    pages = np.array([(block, layer, head) for block in blocks[1:index] for layer in range(4) for head in range(2)])
    change = tables.promote if hot else tables.cool
    change(pages[:, 0], pages[:, 1], pages[:, 2])
    assert tables.hot_pages(blocks[1:index]).all() == hot
    release_units(engine, [blocks[index]], [0, 1])
    restore(engine, request_id, index, stop=2)
    restore(engine, request_id, index, stop=4)
    assert_same_to_the_bit(before, page_bytes_of(engine, blocks[index]), "float16")


@pytest.mark.parametrize("warm_store", ["ram", "file", "none"])
def test_pages_come_back_for_every_kind_of_store(warm_store):
    engine = tiered_engine(attention_backend="cpu", cache={"page_dtype": "float16", "warm_store": warm_store})
    request_id = engine.add_request(PROMPT, greedy(60), fidelity="native")
    run_until(engine, request_id, 1)
    block = blocks_of(engine, request_id)[7]
    before = page_bytes_of(engine, block)
    assert engine.cache.tables.demote(block, np.zeros((4, 2), dtype=bool)) == 0
    engine.cache.set_fidelity(request_id, "bounded")
    release_units(engine, [block], [0, 1])
    check(engine)
    restore(engine, request_id, 7, stop=2)
    restore(engine, request_id, 7, stop=4)
    assert_same_to_the_bit(before, page_bytes_of(engine, block), "float16")


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_checkpoint_the_chain_begins_at_window_0(backend):
    engine, request_id = reading(attention_backend=backend, cache={"page_dtype": "float16"})
    tables, index = engine.cache.tables, 7
    block = blocks_of(engine, request_id)[index]
    before = page_bytes_of(engine, block)
    tables._drop_checkpoints(block)
    assert tables.checkpoint(block, 0) is None
    release_units(engine, [block], [1])
    [plan] = engine.cache.restores([BlockOf(request_id, index, block)], 4)
    assert (plan.first, plan.stop) == (0, 4)
    restore(engine, request_id, index, stop=4)
    assert_same_to_the_bit(before, page_bytes_of(engine, block), "float16")


def test_with_a_checkpoint_only_the_window_is_run():
    engine, request_id = reading(attention_backend="cpu")
    block = blocks_of(engine, request_id)[7]
    [plan] = engine.cache.restores([BlockOf(request_id, 7, block)], 4)
    assert (plan.first, plan.stop) == (2, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_blocks_are_restored_in_one_pass_in_position_order(backend):
    engine, request_id = reading(attention_backend=backend, cache={"page_dtype": "float16", "recompute_budget": 4})
    blocks = blocks_of(engine, request_id)
    chosen = [9, 3, 5, 4]
    before = {index: page_bytes_of(engine, blocks[index]) for index in chosen}
    release_units(engine, [blocks[index] for index in chosen], [0])
    [plan] = engine.cache.restores([BlockOf(request_id, index, blocks[index]) for index in chosen], 2)
    assert [target.index for target in plan.targets] == [3, 4, 5, 9]
    engine._restorer._pass(engine.cache.begin_restore(plan), [])
    check(engine)
    for index in chosen:
        assert_same_to_the_bit(before[index], page_bytes_of(engine, blocks[index]), "float16")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", ["ram", "none"])
def test_closure_over_many_cold_blocks_brings_every_page_back(warm, backend):
    engine, request_id = reading(
        attention_backend=backend, cache={"page_dtype": "float16", "warm_store": "ram", "recompute_budget": 2}
    )
    blocks = blocks_of(engine, request_id)
    tiered = [block for block in blocks if engine.cache.tables.is_tiered([block])[0]]
    assert len(tiered) >= 10
    before = {block: page_bytes_of(engine, block) for block in tiered}
    release_units(engine, tiered, [0, 1])
    if warm == "none":  # nothing can be saved: all that is restored has to be hot
        engine.cache.tables.warm.num_slots = 0
    assert engine._restorer.restore_all(request_id)
    check(engine)
    old = np.stack([before[block] for block in tiered])
    new = np.stack([page_bytes_of(engine, block) for block in tiered])
    if backend == "cpu":
        assert_same_to_the_bit(old, new, "float16")
    else:  # its sums depend on how many rows there are, and what one block is off by the next ones see
        assert torch.allclose(as_numbers(old, torch.float16).float(), as_numbers(new, torch.float16).float(), atol=2e-3)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2", "qwen3", "phi3", "gpt-oss", "mixtral"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_of_every_family_come_back(limit, family):
    """Window borders lie between layers of one type and of another; a layer must not take its neighbour's rope."""
    engine, request_id = reading(
        model=tiered_model(family), attention_backend="cpu", cache={"page_dtype": "float16", "recompute_layer_limit": limit}
    )
    cache = engine.cache
    block = blocks_of(engine, request_id)[7]
    before = page_bytes_of(engine, block)
    full = [layer for layer in range(4) if layer not in cache.shape.windowed_layers]
    for window in range(cache.tables.num_windows):
        release_units(engine, [block], [window])
        restore(engine, request_id, 7, stop=cache.trigger.window_end_of(window))
        assert_same_to_the_bit(before[full], page_bytes_of(engine, block)[full], "float16")


# In the course of a step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [1, 2, 30])
def test_cold_pages_that_are_hit_are_restored_in_the_step_that_hits_them(budget, backend):
    """With tolerance 0 everything is hit: with budget enough, the answer is native's although half of the pages were cold."""
    engine = tiered_engine(attention_backend=backend, cache={"recompute_budget": budget, "attention_tolerance": 0.0})
    request_id = engine.add_request(PROMPT, greedy(12))
    tokens = run_until(engine, request_id, 1)
    release_units(engine, blocks_of(engine, request_id)[2:12], [0, 1])
    updates = finish(engine)[request_id]
    tokens += tokens_of(updates)
    use, stats = updates[-1].cache_use, engine.cache.tier_stats
    assert stats.cold_hits > 0 and stats.restored_blocks > 0 and use.recompute_steps > 0
    if budget == 30:
        assert tokens == reference_tokens(PROMPT, 12)
        assert use.uncovered_hits == stats.uncovered_hits == 0
    else:
        assert use.uncovered_hits == stats.uncovered_hits > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_budget_is_never_passed_in_a_step(budget, backend, monkeypatch):
    engine = tiered_engine(attention_backend=backend, cache={"recompute_budget": budget, "attention_tolerance": 0.0})
    ids = [engine.add_request(prompt_of(150, seed), greedy(12)) for seed in range(3)]
    for request_id in ids:
        run_until(engine, request_id, 1)
    restored: list[int] = []
    begin = engine.cache.begin_restore

    def counted(plan: Any) -> Any:
        restored.extend(target.block for target in plan.targets)
        return begin(plan)

    monkeypatch.setattr(engine.cache, "begin_restore", counted)
    for request_id in ids:
        if request_id in engine._requests:
            release_units(engine, blocks_of(engine, request_id)[1:7], [0, 1])
    most = 0
    while engine.has_unfinished():
        restored.clear()
        step(engine)
        assert len(restored) <= budget
        most = max(most, len(restored))
    assert most == budget
    assert engine.cache.tier_stats.uncovered_hits > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm_store", ["ram", "none"])
def test_without_a_budget_everything_runs_and_uncovered_hits_are_counted(warm_store, backend):
    engine = tiered_engine(
        attention_backend=backend, cache={"recompute_budget": 0, "warm_store": warm_store, "attention_tolerance": 0.0}
    )
    ids = [engine.add_request(prompt_of(150, seed), greedy(20)) for seed in range(3)]
    run_until(engine, ids[0], 2)
    release_units(engine, blocks_of(engine, ids[0])[1:7], [0])
    updates = finish(engine)
    stats = engine.cache.tier_stats
    assert {own[-1].finish_reason for own in updates.values()} == {"length"}
    assert stats.uncovered_hits == sum(own[-1].cache_use.uncovered_hits for own in updates.values()) > 0
    assert (stats.restored_blocks, stats.recompute_steps) == (0, 0)


def test_blocks_that_the_budget_turned_away_are_restored_before_the_next_step(monkeypatch):
    # A read that the system delays would make restored units not worth their memory.
    monkeypatch.setattr(Costs, "measured_read", lambda *_: None)
    engine = tiered_engine(attention_backend="cpu", cache={"recompute_budget": 3, "attention_tolerance": 0.0})
    request_id = engine.add_request(PROMPT, greedy(30))
    run_until(engine, request_id, 1)
    blocks = blocks_of(engine, request_id)
    release_units(engine, blocks[2:12], [0])
    for _ in range(5):
        before = int(engine.cache.tables.lacks_exact_pages(blocks).sum())
        step(engine)
        after = int(engine.cache.tables.lacks_exact_pages(blocks).sum())
        assert after <= max(0, before - 2)
    assert not engine.cache.tables.lacks_exact_pages(blocks).any()


def test_restored_units_that_find_no_warm_room_make_their_hit_pages_hot():
    engine = tiered_engine(
        attention_backend="cpu", cache={"recompute_budget": 2, "attention_tolerance": 0.0, "warm_store": "none"}
    )
    request_id = engine.add_request(PROMPT, greedy(20))
    run_until(engine, request_id, 1)
    blocks = np.array(blocks_of(engine, request_id))
    tiered = blocks[engine.cache.tables.is_tiered(blocks)]
    hot = int(engine.cache.tables.hot_pages(tiered).sum())
    step(engine)
    assert int(engine.cache.tables.hot_pages(tiered).sum()) > hot
    finish(engine)
    assert_nothing_is_held(engine)


# Failures


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, at_layer: int | None = None) -> None:
    """From now on every restore fails: at once, or when it comes to a layer."""
    model = engine.model
    run = type(model).run_layers

    def broken(self: Any, token_ids: Any, positions: Any, attend: Any, **options: Any) -> None:
        if at_layer is None:
            raise RuntimeError("out of luck")

        def attend_and_fail(layer: int, *arguments: Any) -> Any:
            if layer == at_layer:
                raise RuntimeError("out of luck")
            return attend(layer, *arguments)

        run(self, token_ids, positions, attend_and_fail, **options)

    monkeypatch.setattr(type(model), "run_layers", broken)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at_layer", [None, 0, 1])
def test_failing_restore_ends_its_step_s_requests_and_leaves_the_tables_right(at_layer, backend, monkeypatch):
    engine = tiered_engine(attention_backend=backend, cache={"attention_tolerance": 0.0})
    hit = engine.add_request(PROMPT, greedy(20))
    run_until(engine, hit, 1)
    release_units(engine, blocks_of(engine, hit)[2:5], [0])
    waiting = engine.add_request(prompt_of(150, 5), greedy(3), fidelity="exact")
    with monkeypatch.context() as patch:
        failing(engine, patch, at_layer=at_layer)
        updates = []
        while hit in engine._requests:
            updates += step(engine)
    end = next(update for update in updates if update.request_id == hit and update.finished)
    assert end.finish_reason == "error" and "out of luck" in end.error
    assert not engine._restorer.running
    rest = finish(engine)
    after = engine.add_request(PROMPT, greedy(10), fidelity="exact")
    assert tokens_of(finish(engine)[after]) == reference_tokens(PROMPT, 10)
    if waiting in rest and rest[waiting][-1].finish_reason == "length":
        assert tokens_of(rest[waiting]) == reference_tokens(prompt_of(150, 5), 3)
    layers = engine.model.module.model.layers
    assert len(layers) == 4 and not any(layer._forward_pre_hooks for layer in layers), "the model was left in pieces"
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("at_layer", [None, 1])
def test_failing_closure_ends_no_other_request_and_leaves_the_tables_right(at_layer, monkeypatch):
    engine, request_id = reading(attention_backend="cpu")
    other = engine.add_request(prompt_of(150, 3), greedy(30), fidelity="exact")
    others_tokens = run_until(engine, other, 2)
    release_units(engine, blocks_of(engine, request_id)[2:5], [0, 1])
    with monkeypatch.context() as patch:
        failing(engine, patch, at_layer=at_layer)
        try:
            engine.set_fidelity(request_id, "exact")
        except RuntimeError as error:
            assert "out of luck" in str(error)
        check(engine)
    updates = finish(engine)
    assert others_tokens + tokens_of(updates[other]) == reference_tokens(prompt_of(150, 3), 30)
    assert_nothing_is_held(engine)


def test_restore_for_a_request_that_is_gone_is_forgotten():
    engine = tiered_engine(attention_backend="cpu", cache={"recompute_budget": 1, "attention_tolerance": 0.0})
    request_id = engine.add_request(PROMPT, greedy(30))
    other = engine.add_request(prompt_of(150, 3), greedy(10), fidelity="exact")
    run_until(engine, other, 1)
    release_units(engine, blocks_of(engine, request_id)[2:9], [0])
    step(engine)
    assert engine.cache.trigger._pending
    engine.abort(request_id)
    assert not engine.cache.trigger._pending
    updates = finish(engine)
    assert updates[request_id][-1].finish_reason == "abort"
    assert_nothing_is_held(engine)


def test_preempted_request_leaves_no_restore_behind():
    engine = tiered_engine(attention_backend="cpu", cache={"recompute_budget": 1, "attention_tolerance": 0.0})
    request_id = engine.add_request(PROMPT, greedy(30))
    run_until(engine, request_id, 1)
    release_units(engine, blocks_of(engine, request_id)[2:9], [0])
    step(engine)
    engine._scheduler.preempt(engine._requests[request_id])
    assert len(tokens_of(finish(engine)[request_id])) == 28
    assert_nothing_is_held(engine)


# The trigger alone


def block_of(index: int) -> BlockOf:
    return BlockOf("a", index, 100 + index)


def test_oldest_blocks_are_chosen_first_and_each_once():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=4)
    trigger.begin_step(can_keep=True)
    assert trigger.choose([block_of(5), block_of(1), block_of(5), block_of(3)], 0) == [block_of(1), block_of(3)]
    assert trigger.begin_step(can_keep=True) == [(block_of(5), 0)]


def test_budget_is_one_for_all_layers_of_a_step():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=4)
    trigger.begin_step(can_keep=True)
    assert trigger.choose([block_of(1)], 0) == [block_of(1)]
    assert trigger.choose([block_of(2), block_of(3)], 1) == [block_of(2)]
    assert trigger.choose([block_of(4)], 2) == []
    assert trigger.begin_step(can_keep=True) == [(block_of(3), 1), (block_of(4), 2)]


def test_without_a_budget_nothing_is_chosen_or_remembered():
    trigger = RecomputeTrigger(0, window_layers=2, num_layers=4)
    trigger.begin_step(can_keep=True)
    assert trigger.choose([block_of(1)], 0) == []
    assert trigger.begin_step(can_keep=True) == []


def test_passes_begin_at_the_nearest_checkpoint_and_fit_the_budget():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=7)
    with_checkpoint = {(101, 1), (102, 1), (103, 0)}
    plans = trigger.passes([block_of(i) for i in (3, 2, 1, 4)], 6, lambda block, boundary: (block, boundary) in with_checkpoint)
    assert [(plan.first, [target.index for target in plan.targets]) for plan in plans] == [(0, [4]), (2, [3]), (4, [1, 2])]
    assert all(plan.stop == 6 for plan in plans)
    assert [trigger.window_end(layer) for layer in (0, 1, 2, 6)] == [2, 2, 4, 7]


def stepped(trigger: RecomputeTrigger, *, seconds: float, hits: list[BlockOf], block_seconds: float) -> list[BlockOf]:
    """One step in which `hits` were hit in layer 0, and each restore took `block_seconds`; returns what was restored."""
    before = [target for target, _ in trigger.begin_step(can_keep=True)]
    within = trigger.choose(hits, 0)
    restored = before + within
    trigger.end_step(seconds=seconds, restore_seconds=len(restored) * block_seconds, blocks=len(restored))
    return restored


def test_restores_take_their_share_of_all_time_and_no_more():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=4, time_share=0.2)
    hits = iter(range(10_000))
    restored = sum(
        len(stepped(trigger, seconds=0.1, hits=[block_of(next(hits)), block_of(next(hits))], block_seconds=0.05))
        for _ in range(400)
    )
    assert 0.17 <= restored * 0.05 / (400 * 0.1) <= 0.2


def test_no_share_of_time_restores_nothing():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=4, time_share=0.0)
    assert [stepped(trigger, seconds=1.0, hits=[block_of(i)], block_seconds=0.05) for i in range(5)] == [[]] * 5


def test_saved_time_is_worth_at_most_the_budget_of_a_step():
    trigger = RecomputeTrigger(2, window_layers=2, num_layers=4, time_share=0.1)
    stepped(trigger, seconds=1.0, hits=[block_of(0)], block_seconds=0.05)
    for _ in range(100):
        stepped(trigger, seconds=1.0, hits=[], block_seconds=0.05)
    assert len(stepped(trigger, seconds=0.1, hits=[block_of(i) for i in range(1, 9)], block_seconds=0.05)) == 2
    assert len(stepped(trigger, seconds=0.1, hits=[], block_seconds=0.05)) == 1  # what is left of it: one may overdraw
    assert stepped(trigger, seconds=0.1, hits=[], block_seconds=0.05) == []


def test_blocks_that_wait_come_in_the_order_of_how_often_they_were_hit():
    trigger = RecomputeTrigger(1, window_layers=2, num_layers=4)
    trigger.begin_step(can_keep=True)
    trigger.choose([block_of(0)], 0)
    for layer in range(3):
        trigger.choose([block_of(7)], layer)
    trigger.choose([block_of(2)], 0)
    assert trigger.begin_step(can_keep=True) == [(block_of(7), 2)]
    assert trigger.begin_step(can_keep=True) == [(block_of(2), 0)]


def test_block_that_is_not_hit_again_stops_waiting():
    trigger = RecomputeTrigger(1, window_layers=2, num_layers=4, time_share=0.0)
    stepped(trigger, seconds=1.0, hits=[block_of(0)], block_seconds=0.05)
    stepped(trigger, seconds=1.0, hits=[block_of(1)], block_seconds=0.05)
    for _ in range(17):
        trigger.begin_step(can_keep=True)
    trigger._saved_seconds = 1.0
    assert trigger.begin_step(can_keep=True) == []


def test_nothing_waits_where_it_could_not_be_kept():
    trigger = RecomputeTrigger(1, window_layers=2, num_layers=4)
    trigger.begin_step(can_keep=True)
    trigger.choose([block_of(0), block_of(1)], 0)
    assert trigger.begin_step(can_keep=False) == []
    assert trigger.begin_step(can_keep=True) == []
