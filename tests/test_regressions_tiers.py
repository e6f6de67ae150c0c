"""Faults that a review of the adaptive cache found, so that none of them comes back."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines import PAGE, finish, greedy, prompt_of, reference_tokens, tokens_of
from tier_engines import (
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
from vera.cache.recompute import BlockOf
from vera.cache.warm import FileStore, write_pieces
from vera.config import CacheConfig
from vera.engine.engine import Engine
from vera.errors import ConfigError, RequestTooLong


def blocks_of(engine: Engine, request_id: str) -> list[int]:
    return engine.cache._sequences[request_id].block_ids.tolist()


# Chunks


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunk_stays_within_its_blocks_when_a_preemption_frees_budget_in_the_same_pass(chunk, monkeypatch):
    """Beside a decoding request a chunk is 64 tokens, four blocks; once that one has given way there is budget for a 65th."""
    engine = tiered_engine(attention_backend="cpu", max_num_seqs=2, max_batch_tokens=4 * PAGE + 1)
    prompts = {engine.add_request(prompt_of(20), greedy(30), priority=5): prompt_of(20)}
    (decoding,) = prompts
    answered = {decoding: run_until(engine, decoding, 1)}
    long = engine.add_request(prompt_of(200), greedy(3))
    prompts[long], answered[long] = prompt_of(200), []
    calls, reserve = [], engine.cache.reserve

    def short_of_room_once(sequence: str, num_tokens: int) -> bool:
        calls.append(sequence)
        refused = sequence == long and calls.count(long) == chunk
        return not refused and reserve(sequence, num_tokens)

    monkeypatch.setattr(engine.cache, "reserve", short_of_room_once)
    while engine.has_unfinished():
        for update in step(engine):
            assert update.error is None
            answered[update.request_id] += update.new_token_ids
    assert engine._scheduler.num_preemptions == 1
    for request_id, prompt in prompts.items():
        assert answered[request_id] == reference_tokens(prompt, len(answered[request_id]))


# Restores over a context that is not exact


def restored_over_a_cold_block() -> tuple[Engine, str, list[int]]:
    """A bounded request after its prompt of twelve blocks: block 5 was restored while block 3, before it, was still cold."""
    engine = tiered_engine(attention_backend="cpu", cache={"attention_tolerance": 0.0})
    request_id = engine.add_request(prompt_of(200), greedy(20))
    tokens = run_until(engine, request_id, 1)
    blocks = blocks_of(engine, request_id)
    release_units(engine, [blocks[3], blocks[5]], [0, 1])
    restore(engine, BlockOf(request_id, 5, blocks[5]))
    return engine, request_id, tokens


def restore(engine: Engine, target: BlockOf) -> None:
    for window in engine.cache.cold_windows(target):
        for plan in engine.cache.restores([target], engine.cache.trigger.window_end_of(window)):
            engine._restorer._pass(engine.cache.begin_restore(plan), [])
    assert not engine.cache.tables.lacks_exact_pages([target.block]).any()
    check(engine)


def test_what_was_restored_over_cold_pages_is_not_claimed_exact():
    engine, request_id, _ = restored_over_a_cold_block()
    restore(engine, BlockOf(request_id, 3, blocks_of(engine, request_id)[3]))
    assert engine.cache.num_exact_tokens(request_id) == 5 * PAGE
    engine.abort(request_id)
    other = engine.add_request(prompt_of(200), greedy(5), fidelity="exact")
    updates = finish(engine)[other]
    assert updates[-1].num_cached_tokens == 5 * PAGE
    assert tokens_of(updates) == reference_tokens(prompt_of(200), 5)


def test_what_was_restored_over_restored_pages_is_claimed_exact():
    engine = tiered_engine(attention_backend="cpu")
    request_id = engine.add_request(prompt_of(200), greedy(20))
    run_until(engine, request_id, 1)
    blocks = blocks_of(engine, request_id)
    release_units(engine, [blocks[3], blocks[5]], [0, 1])
    for index in (3, 5):
        restore(engine, BlockOf(request_id, index, blocks[index]))
    assert engine.cache.num_exact_tokens(request_id) == 200


@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_request_raised_to_exact_service_computes_again_what_was_restored_over_cold_pages(fidelity):
    engine, request_id, tokens = restored_over_a_cold_block()
    native = tiered_engine(attention_backend="cpu")
    native_id = native.add_request(prompt_of(200), greedy(20), fidelity="native")
    run_until(native, native_id, 3)
    engine.set_fidelity(request_id, fidelity)
    tokens += run_until(engine, request_id, 3)
    pages, expected = (
        page_bytes_of(*place).view(np.float32)
        for place in ((engine, blocks_of(engine, request_id)[5]), (native, blocks_of(native, native_id)[5]))
    )
    assert np.abs(pages - expected).max() < 1e-5
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
    assert is_native_answer(prompt_of(200), tokens)


# A disk that turns out to be full


def full_after(room: int) -> Any:
    """Writes until the file has `room` bytes."""

    def write(descriptor: int, offset: int, pieces: Any) -> None:
        if offset + pieces[:, 1].sum() > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_pieces(descriptor, offset, pieces)

    return write


@pytest.mark.parametrize("fidelity", ["exact", "bounded"])
@pytest.mark.parametrize("num_slots", [0, 1, 6, 7])
def test_block_whose_units_a_full_disk_cannot_all_take_stays_exact(num_slots, fidelity, tmp_path: Path):
    """A block is two units here: with room for an odd number of them the first one of a block is saved and the second is not."""
    settings = {"warm_store": "file", "warm_dir": str(tmp_path), "attention_tolerance": 0.0}
    engine = tiered_engine(attention_backend="cpu", cache=settings)
    warm = engine.cache.tables.warm
    assert isinstance(warm, FileStore)
    warm._write = full_after(num_slots * warm.slot_bytes)
    request_id = engine.add_request(prompt_of(200), greedy(6), fidelity=fidelity)
    tokens = run_until(engine, request_id, 1)
    blocks = blocks_of(engine, request_id)
    tiered = engine.cache.tables.is_tiered(blocks)
    assert tiered.sum() == num_slots // 2
    assert engine.cache.tables.is_exact(np.array(blocks)[~tiered]).all()
    assert warm.num_used == num_slots // 2 * 2
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
    assert tokens == reference_tokens(prompt_of(200), 6)
    assert_nothing_is_held(engine)


# Requests that can never fit


def roomy_within_bounds_only() -> tuple[Engine, int]:
    """An engine, and one token more than its cache holds natively."""
    engine = tiered_engine(tiered_model(context=1024), frames=50, max_num_seqs=1, attention_backend="cpu")
    length = engine.cache.longest_sequence("native") + 1
    assert length <= engine.max_model_len
    return engine, length


@pytest.mark.parametrize("by_default", [False, True])
def test_request_that_can_never_fit_at_its_fidelity_is_refused_when_it_is_added(by_default):
    engine, length = roomy_within_bounds_only()
    terms: dict[str, Any] = {"fidelity": "native"}
    if by_default:
        engine = tiered_engine(
            tiered_model(context=1024), frames=50, max_num_seqs=1, attention_backend="cpu", cache={"fidelity": "native"}
        )
        terms = {}
    with pytest.raises(RequestTooLong, match=rf"above the {length - 1} "):
        engine.add_request(prompt_of(length - 1), greedy(1), **terms)
    assert not engine.has_unfinished()


def test_request_that_can_never_fit_exactly_is_not_raised_to_that_and_goes_on():
    engine, length = roomy_within_bounds_only()
    request_id = engine.add_request(prompt_of(length - 3), greedy(3))
    tokens = run_until(engine, request_id, 1)
    with pytest.raises(RequestTooLong, match=rf"{length} tokens at fidelity 'native' are above the {length - 1} "):
        engine.set_fidelity(request_id, "native")
    check(engine)
    assert engine._requests[request_id].fidelity is None
    assert engine.cache._sequences[request_id].bounded
    assert len(tokens + tokens_of(finish(engine)[request_id])) == 3


def test_answer_of_no_given_length_ends_before_it_outgrows_what_its_fidelity_has_room_for():
    engine, length = roomy_within_bounds_only()
    request_id = engine.add_request(prompt_of(length - 10), greedy(None), fidelity="native")
    updates = finish(engine)[request_id]
    assert (len(tokens_of(updates)), updates[-1].finish_reason) == (9, "length")


# Restores before a step


class Watch:
    """Counts an engine's restores, before its steps and within them, on a clock by which a step takes 4 s and a block 1 s."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.before, self.within = 0, 0
        self._between = False
        monkeypatch.setattr("vera.engine.restore.time", SimpleNamespace(perf_counter=lambda: self.now))
        model, restorer, begin_restore = type(engine.model), engine._restorer, engine.cache.begin_restore
        forward, begin_step = model.forward, restorer.begin_step

        def stepping(*arguments: Any, **options: Any) -> Any:
            self.now += 4.0
            return forward(*arguments, **options)

        def beginning() -> None:
            self.before, self.within, self._between = 0, 0, True
            begin_step()
            self._between = False

        def restoring(plan: Any) -> Any:
            self.now += len(plan.targets)
            self.before += len(plan.targets) * self._between
            self.within += len(plan.targets) * (not self._between)
            return begin_restore(plan)

        monkeypatch.setattr(model, "forward", stepping)
        monkeypatch.setattr(restorer, "begin_step", beginning)
        monkeypatch.setattr(engine.cache, "begin_restore", restoring)


def with_cold_hits(monkeypatch: pytest.MonkeyPatch, **cache: Any) -> tuple[Engine, Watch]:
    """Requests that have read their prompts, and then lost all that may be lost; every page is hit in every step."""
    engine = tiered_engine(attention_backend="cpu", cache={"attention_tolerance": 0.0, **cache})
    ids = [engine.add_request(prompt_of(200, seed), greedy(60)) for seed in range(3)]
    for request_id in ids:
        run_until(engine, request_id, 1)
    for request_id in ids:
        release_units(engine, blocks_of(engine, request_id)[1:10], [0, 1])
    return engine, Watch(engine, monkeypatch)


def test_restores_before_a_step_count_towards_its_budget(monkeypatch):
    engine, watch = with_cold_hits(monkeypatch, recompute_budget=2)
    before, restored = 0, 0
    while engine.has_unfinished():
        step(engine)
        assert watch.before + watch.within <= 2
        before, restored = before + watch.before, restored + watch.before + watch.within
    assert before > 0
    assert engine.cache.tier_stats.restored_blocks == restored


def test_restores_before_a_step_count_towards_the_share_of_time(monkeypatch):
    engine, watch = with_cold_hits(monkeypatch, recompute_budget=2, recompute_time_share=0.1)
    before, restored = 0, 0
    while engine.has_unfinished():
        step(engine)
        before, restored = before + watch.before, restored + watch.before + watch.within
        assert engine.cache.tier_stats.restore_seconds == restored
        assert engine.step_times.restore == watch.before + watch.within
        assert restored <= 0.1 * watch.now + 2  # a restore may overdraw what is there
    assert before > 0 and restored > 4


# Settings


@pytest.mark.parametrize("setting", [{"attention_tolerance": 0.1}, {"warm_store": "ram"}, {"recompute_target": [0.1, 0.2]}])
def test_adaptive_setting_of_a_native_cache_is_refused_by_name(setting):
    with pytest.raises(ConfigError, match=f"a native cache has no use for {next(iter(setting))}; take mode='adaptive'"):
        CacheConfig(mode="native", **setting)


def test_settings_of_a_native_cache_can_be_read_back():
    config = CacheConfig(mode="native", page_dtype="float32")
    assert CacheConfig.from_dict(config.to_dict()) == config
