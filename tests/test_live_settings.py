"""Cache settings that change while an engine runs: whom they concern, and what cannot change."""

from dataclasses import fields, replace

import pytest

from engines import prompt_of
from tier_engines import tiered_engine
from vera.config import LIVE_SETTINGS, STORE_SETTINGS, CacheConfig
from vera.errors import ConfigError
from vera.sampling_params import SamplingParams


def ask(engine, prompt, tokens=8, **terms):
    return engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), **terms)


def finished(engine):
    answers = {}
    while engine.has_unfinished():
        for update in engine.step():
            answers.setdefault(update.request_id, []).extend(update.new_token_ids)
        engine.check_invariants()
    return answers


def test_requests_that_run_keep_their_settings_when_others_are_set():
    engine = tiered_engine(cache={"attention_tolerance": 0.0})
    before = engine.cache.config
    first = ask(engine, prompt_of(120, seed=1))
    engine.step()
    engine.set_cache_settings(replace(before, attention_tolerance=0.5, min_context=200))
    second = ask(engine, prompt_of(120, seed=2))
    engine.step()
    states = engine.cache._sequences
    assert (states[first].tolerance, states[first].tiered) == (0.0, True)
    assert (states[second].tolerance, states[second].tiered) == (0.5, False)
    assert {len(answer) for answer in finished(engine).values()} <= {8, 7}


def test_a_request_that_waits_is_served_with_the_settings_that_it_came_under():
    engine = tiered_engine(max_num_seqs=1)
    before = engine.cache.config
    ask(engine, prompt_of(100, seed=1))
    engine.step()
    waiting = ask(engine, prompt_of(100, seed=2))
    engine.set_cache_settings(replace(before, attention_tolerance=0.77))
    while waiting not in engine.cache._sequences:
        engine.step()
    assert engine.cache._sequences[waiting].settings is before


def test_one_request_may_bring_settings_of_its_own():
    engine = tiered_engine()
    own = replace(engine.cache.config, fidelity="exact", hot_max_share=0.5, recalibrate_every=3)
    request = ask(engine, prompt_of(120), cache_settings=own)
    other = ask(engine, prompt_of(120, seed=4))
    while other not in engine.cache._sequences:
        engine.step()
    assert engine.cache._sequences[request].settings is own
    assert engine.cache._sequences[request].fidelity == "exact"
    assert engine.cache._sequences[other].fidelity == "bounded"
    finished(engine)


@pytest.mark.parametrize("change", [{"skip_share": 0.5}, {"cold_drop_step": 77}, {"recompute_time_share": 0.3}])
def test_one_request_cannot_bring_what_concerns_all(change):
    engine = tiered_engine()
    with pytest.raises(ConfigError, match=next(iter(change))):
        ask(engine, prompt_of(100), cache_settings=replace(engine.cache.config, **change))
    assert not engine.has_unfinished()


def test_what_concerns_the_whole_cache_changes_at_once():
    engine = tiered_engine()
    config = replace(engine.cache.config, cold_drop_step=77, recompute_target=(0.2, 0.3), recompute_budget=1)
    engine.set_cache_settings(config)
    assert engine.cache.config is config
    assert engine.cache.trigger._budget == 1
    assert engine.cache._keeper.controller._cold_drop_step == 77


@pytest.mark.parametrize("change", [{"page_size": 32}, {"sketch_bits": 8}, {"warm_store": "none"}, {"recompute_budget": 99}])
def test_what_a_running_cache_cannot_change_is_refused_by_name_and_changes_nothing(change):
    engine = tiered_engine()
    before = engine.cache.config
    wanted = replace(before, attention_tolerance=0.3, **change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        engine.set_cache_settings(wanted)
    with pytest.raises(ConfigError, match=next(iter(change))):
        ask(engine, prompt_of(100), cache_settings=wanted)
    assert engine.cache.config is before and not engine.has_unfinished()


def test_many_changes_under_way_lose_no_token():
    engine = tiered_engine(cache={"attention_tolerance": 0.02})
    base = engine.cache.config
    wanted = {}
    for turn in range(60):
        engine.set_cache_settings(
            replace(base, attention_tolerance=turn % 7 / 100, hot_max_share=turn % 5 / 10, min_context=40 + turn % 3 * 60)
        )
        if turn % 6 == 0:
            wanted[ask(engine, prompt_of(70 + turn, seed=turn), tokens=12)] = 12
        for update in engine.step():
            if update.request_id in wanted:
                wanted[update.request_id] -= len(update.new_token_ids)
        engine.check_invariants()
    for request, got in finished(engine).items():
        wanted[request] -= len(got)
    assert set(wanted.values()) == {0}


def test_every_live_setting_is_one_and_those_of_the_store_are_among_them():
    assert STORE_SETTINGS <= LIVE_SETTINGS <= {setting.name for setting in fields(CacheConfig)}
