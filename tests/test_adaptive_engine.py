"""The engine over an adaptive cache: what is served exactly equals native, ceilings hold, and nothing is lost, whatever comes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engines import PAGE, answer, finish, greedy, loaded, make_engine, prompt_of, reference_tokens, tokens_of
from tier_engines import (
    BACKENDS,
    assert_nothing_is_held,
    check,
    is_native_answer,
    release_units,
    run_until,
    step,
    tiered_engine,
    tiered_model,
)
from tiny_models import tiny_model
from vera.config import CacheConfig
from vera.engine.request import Update
from vera.errors import CapacityError, ConfigError, RequestError, RequestTooLong
from vera.models import LoadedModel

WARM = {
    "ram": {"cache": {"warm_store": "ram"}},
    "file": {"cache": {"warm_store": "file"}},
    "limited": {"warm_blocks": 5.5},
    "tiny": {"warm_blocks": 0.6},
    "none": {"cache": {"warm_store": "none"}},
}


def with_settings(warm: str, **cache: Any) -> dict[str, Any]:
    values = dict(WARM[warm])
    return values | {"cache": {**values.get("cache", {}), **cache}}


# Served exactly


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", WARM)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_exact_and_native_requests_answer_like_transformers(fidelity, warm, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm))
    prompts = [prompt_of(length, seed) for seed, length in enumerate([5, 64, 65, 112, 150, 163])]
    ids = [engine.add_request(prompt, greedy(30), fidelity=fidelity) for prompt in prompts]
    other = engine.add_request(prompt_of(140, 9), greedy(30), fidelity="bounded")
    updates = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(updates[request_id]) == reference_tokens(prompt, 30)
    assert len(tokens_of(updates[other])) == 30
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", ["ram", "file", "limited"])
def test_exact_requests_do_leave_fast_memory(warm, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm))
    request_id = engine.add_request(prompt_of(200), greedy(10), fidelity="exact")
    assert run_until(engine, request_id, 5) == reference_tokens(prompt_of(200), 5)
    assert engine.cache.warm_bytes > 0
    assert engine.cache.tables.is_tiered(engine.cache._sequences[request_id].block_ids).sum() >= 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_prefix_that_waits_warm_is_found_and_gives_the_same_tokens(fidelity, backend):
    engine = tiered_engine(attention_backend=backend)
    prompt = prompt_of(150)
    first = engine.add_request(prompt, greedy(20), fidelity="exact")
    assert tokens_of(finish(engine)[first]) == reference_tokens(prompt, 20)
    for block in engine.cache.blocks.idle:
        engine.cache._keeper.demote_idle(block)
    second = engine.add_request(prompt, greedy(20), fidelity=fidelity)
    updates = finish(engine)[second]
    assert updates[-1].num_cached_tokens == 144
    assert updates[-1].cache_use.cached_tokens["warm"] > 0
    assert tokens_of(updates) == reference_tokens(prompt, 20)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_prefix_with_cold_blocks_is_computed_anew_from_the_first_cold_one(fidelity, backend):
    engine = tiered_engine(attention_backend=backend)
    prompt = prompt_of(150)
    answer_of(engine, prompt, 20, "exact")
    blocks = engine.cache.blocks.find(hashes_of(engine, prompt))
    release_units(engine, blocks[3:5], [0, 1])
    check(engine)
    request_id = engine.add_request(prompt, greedy(20), fidelity=fidelity)
    updates = finish(engine)[request_id]
    assert updates[-1].num_cached_tokens == 3 * PAGE
    assert tokens_of(updates) == reference_tokens(prompt, 20)
    assert engine.cache.num_tokens_reusable(prompt) == 144, "what was computed anew takes the place of what had gone cold"


def answer_of(engine: Any, prompt: tuple[int, ...], count: int, fidelity: str) -> list[int]:
    request_id = engine.add_request(prompt, greedy(count), fidelity=fidelity)
    updates: list[Update] = []
    while engine.has_unfinished():
        updates += step(engine)
    return tokens_of([update for update in updates if update.request_id == request_id])


def hashes_of(engine: Any, tokens: tuple[int, ...]) -> list[bytes]:
    from vera.cache.blocks import extend_hashes

    hashes: list[bytes] = []
    extend_hashes(hashes, engine.cache._salt, tokens, PAGE)
    return hashes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", ["ram", "limited", "none"])
@pytest.mark.parametrize("after", [[1], [15, 16, 17], [20, 21]])
def test_exact_request_that_is_preempted_answers_as_if_nothing_had_happened(after, warm, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm))
    prompt = prompt_of(120)
    request_id = engine.add_request(prompt, greedy(40), fidelity="exact")
    tokens, remaining = [], list(after)
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
        if remaining and len(tokens) == remaining[0]:
            remaining.pop(0)
            engine._scheduler.preempt(engine._requests[request_id])
    assert tokens == reference_tokens(prompt, 40)
    assert engine.stats.preemptions == len(after)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", ["ram", "file"])
def test_with_tolerance_zero_bounded_equals_native(warm, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm, attention_tolerance=0.0))
    prompts = [prompt_of(length, seed) for seed, length in enumerate([50, 65, 130, 200])]
    ids = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    updates = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert tokens_of(updates[request_id]) == reference_tokens(prompt, 40)
    assert engine.cache.tier_stats.hits > 0
    assert engine.cache.tier_stats.uncovered_hits == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_request_s_tolerance_takes_the_place_of_the_cache_s(backend):
    engine = tiered_engine(attention_backend=backend, cache={"attention_tolerance": 1.0})
    prompt = prompt_of(200)
    strict = engine.add_request(prompt, greedy(30), attention_tolerance=0.0)
    loose = engine.add_request(prompt, greedy(30))
    updates = finish(engine)
    assert tokens_of(updates[strict]) == reference_tokens(prompt, 30) != tokens_of(updates[loose])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_request_that_is_served_exactly_never_reuses_what_was_computed_within_bounds(fidelity, backend):
    engine = tiered_engine(attention_backend=backend, cache={"attention_tolerance": 0.2})
    prompt = prompt_of(200)
    tokens = answer_of(engine, prompt, 60, "bounded")
    assert tokens != reference_tokens(prompt, 60), "the bounds are too tight to tell anything"
    longer = (*prompt, *tokens)
    assert answer_of(engine, longer, 30, fidelity) == reference_tokens(longer, 30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_read_over_cold_blocks_is_not_served_to_exact_requests(backend):
    engine = tiered_engine(attention_backend=backend, cache={"attention_tolerance": 1.0})
    stem = prompt_of(112)
    answer_of(engine, stem, 2, "exact")
    release_units(engine, engine.cache.blocks.find(hashes_of(engine, stem))[1:5], [0, 1])
    longer = stem + prompt_of(80, 7)
    answer_of(engine, longer, 2, "bounded")
    assert answer_of(engine, longer, 20, "exact") == reference_tokens(longer, 20)


# Changing a running request


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
@pytest.mark.parametrize("warm", ["ram", "limited", "none"])
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_request_raised_to_exact_service_goes_on_like_native(budget, warm, fidelity, backend):
    """With tolerance 0 nothing has drifted before, so the whole answer has to be native's."""
    engine = tiered_engine(attention_backend=backend, **with_settings(warm, attention_tolerance=0.0, recompute_budget=budget))
    prompt = prompt_of(150)
    request_id = engine.add_request(prompt, greedy(40))
    tokens = run_until(engine, request_id, 5)
    before = tokens + reference_tokens((*prompt, *tokens), 35)
    engine.set_fidelity(request_id, fidelity)
    check(engine)
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
    assert tokens == before
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("warm", ["ram", "none"])
def test_request_raised_to_exact_service_with_cold_blocks_goes_on_like_native(warm, budget, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm, recompute_budget=budget))
    prompt = prompt_of(150)
    request_id = engine.add_request(prompt, greedy(40), attention_tolerance=0.0)
    tokens = run_until(engine, request_id, 1)
    release_units(engine, engine.cache._sequences[request_id].block_ids[1:7], [0, 1])
    engine.set_fidelity(request_id, "exact")
    while engine.has_unfinished():
        tokens += tokens_of(step(engine))
    assert tokens == reference_tokens(prompt, 40)
    assert_nothing_is_held(engine)


def test_fidelity_can_be_raised_without_a_recompute_budget():
    engine = tiered_engine(cache={"recompute_budget": 0})
    request_id = engine.add_request(prompt_of(150), greedy(20))
    run_until(engine, request_id, 3)
    release_units(engine, engine.cache._sequences[request_id].block_ids[1:4], [0])
    engine.set_fidelity(request_id, "native")
    check(engine)
    assert finish(engine)[request_id][-1].finish_reason == "length"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["exact", "native"])
def test_pages_of_cold_units_stay_while_a_request_is_served_exactly(fidelity, backend):
    """Hot pages may be all there is of a cold unit: whoever else reads the block, they must not be cooled."""
    engine = tiered_engine(attention_backend=backend, cache={"warm_store": "none", "attention_tolerance": 0.0})
    prompt = prompt_of(150)
    held = engine.add_request(prompt, greedy(60))
    tokens = run_until(engine, held, 2)
    engine.set_fidelity(held, fidelity)
    sharer = engine.add_request(prompt, greedy(60), fidelity="bounded")
    updates = []
    while engine.has_unfinished():
        updates += step(engine)
    assert tokens + tokens_of([u for u in updates if u.request_id == held]) == reference_tokens(prompt, 60)
    assert len(tokens_of([u for u in updates if u.request_id == sharer])) == 60


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", ["native", "exact"])
def test_request_lowered_to_bounds_is_tiered_from_then_on(start, backend):
    engine = tiered_engine(attention_backend=backend)
    request_id = engine.add_request(prompt_of(200), greedy(60), fidelity=start)
    tokens = run_until(engine, request_id, 3)
    engine.set_fidelity(request_id, "bounded")
    tokens += run_until(engine, request_id, 20)
    state = engine.cache._sequences[request_id]
    assert engine.cache.tables.is_tiered(state.block_ids)[1 : state.sealed - 1].all()
    assert engine.cache.use(request_id).decode_steps > 0
    assert len(tokens) + len(tokens_of(finish(engine)[request_id])) == 60


def test_waiting_request_takes_its_new_fidelity_along():
    engine = tiered_engine(max_num_seqs=1)
    engine.add_request(prompt_of(70), greedy(4))
    waiting = engine.add_request(prompt_of(150, 1), greedy(20))
    step(engine)
    engine.set_fidelity(waiting, "exact")
    updates = finish(engine)[waiting]
    assert tokens_of(updates) == reference_tokens(prompt_of(150, 1), 20)
    assert updates[-1].cache_use.decode_steps == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", ["ram", "limited"])
def test_copy_of_an_exact_request_is_served_exactly_even_after_a_preemption(warm, backend):
    engine = tiered_engine(attention_backend=backend, **with_settings(warm))
    prompt = prompt_of(150)
    source = engine.add_request(prompt, greedy(40), fidelity="exact")
    tokens = run_until(engine, source, 3)
    try:
        copy = engine.duplicate(source)
    except CapacityError:
        assert warm == "limited"
        return
    check(engine)
    step(engine)
    engine._scheduler.preempt(engine._requests[copy])
    updates = finish(engine)
    assert tokens_of(updates[source])[-36:] == reference_tokens(prompt, 40)[4:]
    assert (tokens + tokens_of(updates[copy]))[-36:] == reference_tokens(prompt, 40)[4:]
    assert updates[copy][-1].cache_use.decode_steps == 0


def test_every_decode_step_is_counted_the_last_one_too():
    engine = tiered_engine(attention_backend="cpu")
    request_id = engine.add_request(prompt_of(150), greedy(12))
    use = finish(engine)[request_id][-1].cache_use
    stats = engine.cache.tier_stats
    assert (use.decode_steps, stats.decode_steps) == (11, 11)
    assert use.hits == stats.hits > 0


def test_copy_keeps_its_own_account():
    engine = tiered_engine()
    source = engine.add_request(prompt_of(150), greedy(30), attention_tolerance=0.0)
    run_until(engine, source, 3)
    copy = engine.duplicate(source)
    assert finish(engine)[copy][-1].cache_use.decode_steps == 27


# A random life


def live(seed: int, steps: int, backend: str, *, most_requests: int = 8) -> dict[str, int]:
    """Arrivals, lengths, fidelities, shared prefixes, aborts, preemptions and changes of mind at random; what happened."""
    draw = random.Random(seed)
    store = draw.choice(["ram", "file", "none"])
    engine = tiered_engine(
        frames=draw.choice([16, 24, 40]),
        warm_blocks=draw.choice([None, 0.6, 2, 6, 12, 30]) if store != "none" else None,
        max_num_seqs=draw.choice([1, 3, 4]),
        attention_backend=backend,
        cache={
            "warm_store": store,
            "recompute_budget": draw.choice([0, 1, 2]),
            "attention_tolerance": draw.choice([0.0, 0.02, 0.02, 0.2]),
            "fidelity": draw.choice(["bounded", "bounded", "exact", "native"]),
            "hot_max_share": draw.choice([0.0, 0.1, 0.5]),
            "sketch_bits": draw.choice([2, 4, 8]),
        },
    )
    engine.auditor.every_step = draw.random() < 0.3
    stems = [prompt_of(112, stem) for stem in range(2)]
    prompts: dict[str, tuple[int, ...]] = {}
    fidelities: dict[str, set[str]] = {}
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Update] = {}

    def note(updates: list[Update]) -> None:
        for update in updates:
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finished:
                ends[update.request_id] = update
                if update.finish_reason == "length" and draw.random() < 0.5:  # whoever comes next may go on from this answer
                    stems.append((*prompts[update.request_id], *tokens[update.request_id])[:180])
                    del stems[2:-3]

    def arrive() -> None:
        prompt = draw.choice(stems)[: draw.choice([0, 20, 64, 80, 112, 180])] + prompt_of(
            draw.choice([1, 15, 40]), draw.randrange(6)
        )
        fidelity = draw.choice([None, "native", "bounded", "exact"])
        try:
            request_id = engine.add_request(
                prompt, greedy(draw.choice([1, 8, 30])), priority=draw.randrange(3), fidelity=fidelity
            )
        except RequestTooLong:
            return
        prompts[request_id] = prompt
        fidelities[request_id] = {fidelity or engine.config.cache.fidelity}

    for _ in range(steps):
        if draw.random() < 0.25 and len(prompts) - len(ends) < most_requests:
            arrive()
        unfinished = list(engine._requests)
        if unfinished and draw.random() < 0.04:
            engine.abort(draw.choice(unfinished))
        if engine._scheduler.running and draw.random() < 0.05:
            engine._scheduler.preempt(draw.choice(engine._scheduler.running))
        unfinished = list(engine._requests)
        if unfinished and draw.random() < 0.06:
            request_id, fidelity = draw.choice(unfinished), draw.choice(["native", "bounded", "exact"])
            fidelities[request_id].add(fidelity)
            engine.set_fidelity(request_id, fidelity)
            check(engine)
        note(step(engine))
    for _ in range(5000):
        if not engine.has_unfinished():
            break
        note(step(engine))
    assert not engine.has_unfinished(), "some request never ends"
    for request_id, end in ends.items():
        assert end.finish_reason in ("length", "abort"), f"{request_id}: {end.error}"
        use = end.cache_use
        assert sum(use.cached_tokens.values()) == end.num_cached_tokens <= len(prompts[request_id])
        if "bounded" not in fidelities[request_id]:
            answered = tokens[request_id]
            assert is_native_answer(prompts[request_id], answered), (
                f"{request_id}, {fidelities[request_id]}, {end.num_cached_tokens} cached"
            )
    stats = engine.cache.tier_stats
    assert_nothing_is_held(engine)
    happened = {
        "demoted": stats.demoted_blocks,
        "released": stats.released_units,
        "cold hits": stats.cold_hits,
        "restored": stats.restored_blocks,
        "uncovered": stats.uncovered_hits,
        "preempted": engine.stats.preemptions,
        "answered": len(ends),
    }
    engine.close()
    return happened


@pytest.mark.parametrize("seed", range(5))
def test_ceilings_books_and_answers_hold_in_a_random_life(seed):
    assert live(seed, 80, "cpu")["answered"] > 5


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_ceilings_books_and_answers_hold_over_thousands_of_steps(backend):
    happened = [live(100 + seed, 150 if backend == "cpu" else 60, backend) for seed in range(24)]
    for what in happened[0]:
        assert sum(own[what] for own in happened) > 0, f"nothing was {what}"


@pytest.mark.soak
def test_ceilings_books_and_answers_hold_in_one_long_life():
    live(4, 1500, "cpu")


@pytest.mark.parametrize("fidelity", ["bounded", "exact", "native"])
@pytest.mark.parametrize("warm", WARM)
@pytest.mark.parametrize("frames", [13, 50])
def test_longest_request_that_is_accepted_ends(frames, warm, fidelity):
    """Alone in the engine, a request of exactly the length that is served is answered without starting over for ever."""
    engine = tiered_engine(
        tiered_model(context=1024),
        frames=frames,
        max_num_seqs=1,
        attention_backend="cpu",
        **with_settings(warm, fidelity=fidelity),
    )
    length = engine.max_model_len
    request_id = engine.add_request(prompt_of(length - 24), greedy(None))
    updates = finish(engine, most_steps=1500)[request_id]
    assert updates[-1].finish_reason == "length"
    assert len(tokens_of(updates)) == 24
    assert engine.stats.preemptions == 0


def test_bounded_requests_hold_more_than_exact_ones_in_the_same_memory():
    engine = tiered_engine(tiered_model(context=1024), frames=50, max_num_seqs=1)
    assert engine.cache.longest_sequence("bounded") > engine.cache.longest_sequence("native")


# Layers with windows, shapes, settings


def family_tokens(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    reference = tiny_model(family, max_position_embeddings=512)
    reference.set_attn_implementation("eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss", "qwen2-window", "qwen3"])
def test_models_with_some_windowed_layers_are_tiered_in_the_others(family, backend):
    engine = tiered_engine(tiered_model(family), attention_backend=backend, cache={"attention_tolerance": 0.0})
    prompt = prompt_of(150)
    ids = [engine.add_request(prompt, greedy(20), fidelity=fidelity) for fidelity in ("exact", "bounded")]
    updates: list[Update] = []
    while len(updates) < 20:
        updates += step(engine)
    state = engine.cache._sequences[ids[0]]
    tiered = state.block_ids[engine.cache.tables.is_tiered(state.block_ids)]
    windowed = list(engine.cache.shape.windowed_layers)
    assert len(tiered) and engine.cache.tables.hot_pages(tiered)[:, windowed].all(), "a page of a windowed layer is not hot"
    while engine.has_unfinished():
        updates += step(engine)
    expected = family_tokens(family, prompt, 20)
    for request_id in ids:
        assert tokens_of([update for update in updates if update.request_id == request_id]) == expected


def test_model_of_windowed_layers_alone_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"every layer has a sliding window.*'native'"):
        tiered_engine(tiered_model("mistral"))


def test_head_size_that_cannot_be_sketched_is_refused_with_the_way_out():
    model = loaded("llama", head_dim=24, max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"multiple of 16, and this model's is 24.*'native'"):
        make_engine(model, blocks=200, cache={"mode": "adaptive"})
    assert answer(make_engine(model), prompt_of(20), greedy(3))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("cache_max_size_ratio", 0.0, "0.01 to 0.95"),
        ("cache_max_size_ratio", 0.96, "0.01 to 0.95"),
        ("hot_score_threshold", -0.1, "0.0 to 1.0"),
        ("hot_score_threshold", 1.5, "0.0 to 1.0"),
        ("attention_tolerance", -0.01, "0.0 to 1.0"),
        ("attention_tolerance", 2, "0.0 to 1.0"),
        ("attention_tolerance", float("nan"), "0.0 to 1.0"),
        ("attention_tolerance", True, "0.0 to 1.0"),
        ("hot_max_share", 1.01, "0.0 to 1.0"),
        ("skip_share", -1, "0.0 to 1.0"),
        ("cold_drop_step", 0, "from 1 up"),
        ("cold_drop_step", 2.5, "from 1 up"),
        ("recompute_layer_limit", 0, "from 1 up"),
        ("recalibrate_every", 0, "from 1 up"),
        ("min_context", -1, "from 0 up"),
        ("recompute_budget", -1, "from 0 up"),
        ("warm_bytes", -1, "from 0 up"),
        ("sketch_bits", 3, "2, 4, 8"),
        ("warm_store", "disk", "file, ram, none"),
        ("fidelity", "fast", "native, bounded, exact"),
        ("recompute_target", (0.15, 0.08), r"lower one first"),
        ("recompute_target", (0.1,), r"two shares"),
        ("page_size", 48, "16, 32, 64, 128"),
    ],
)
def test_setting_outside_its_hard_range_is_refused_with_name_value_and_range(name, value, allowed):
    with pytest.raises(ConfigError, match=f"{name}=.*{allowed}") as refusal:
        CacheConfig(mode="adaptive", **{name: value})
    assert str(value) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "risk"),
    [
        ("cache_max_size_ratio", 0.9, "out of memory"),
        ("hot_score_threshold", 0.9, "more hits and recomputes"),
        ("hot_score_threshold", 0.1, "more memory"),
        ("cold_drop_step", 64, "scans themselves"),
        ("cold_drop_step", 4096, "host memory fills up"),
        ("recompute_layer_limit", 32, "P99"),
        ("recompute_layer_limit", 2, "checkpoints"),
        ("attention_tolerance", 0.5, "answers drift"),
        ("attention_tolerance", 0.0, "read exactly"),
    ],
)
def test_setting_outside_its_recommended_range_states_its_risk(name, value, risk):
    [line] = CacheConfig(mode="adaptive", **{name: value}).risks()
    assert f"{name}={value}" in line and risk in line
    assert CacheConfig(mode="adaptive").risks() == []


def test_risks_are_logged_when_the_engine_starts(caplog):
    tiered_engine(cache={"attention_tolerance": 0.5})
    assert "attention_tolerance=0.5 is outside the recommended" in caplog.text


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_directory_for_warm_pages_that_cannot_be_used_is_refused_by_name(kind, tmp_path):
    place = tmp_path / "warm"
    if kind == "file":
        place.write_text("no directory")
    with pytest.raises(ConfigError, match=str(place)):
        tiered_engine(cache={"warm_store": "file", "warm_dir": str(place)})


@pytest.mark.parametrize("warm_bytes", [1, 100, 10_000])
def test_warm_store_too_small_for_anything_is_a_clear_error(warm_bytes):
    with pytest.raises(CapacityError, match=rf"warm.*{warm_bytes}|{warm_bytes}.*warm|{warm_bytes} bytes"):
        tiered_engine(cache={"warm_bytes": warm_bytes})


@pytest.mark.parametrize("backend", BACKENDS)
def test_warm_store_of_no_bytes_means_none(backend):
    engine = tiered_engine(attention_backend=backend, cache={"warm_bytes": 0})
    assert engine.cache.tables.warm is None
    prompt = prompt_of(120)
    assert answer_of(engine, prompt, 20, "exact") == reference_tokens(prompt, 20)
    assert len(answer_of(engine, prompt_of(120, 1), 20, "bounded")) == 20
    assert engine.cache.warm_bytes == 0, "what may take no host memory takes some"


def test_warm_store_that_fills_up_is_no_room_and_never_an_error():
    engine = tiered_engine(frames=64, warm_blocks=3.2, attention_backend="cpu")
    ids = [engine.add_request(prompt_of(150, seed), greedy(40)) for seed in range(6)]
    updates = finish(engine)
    assert {updates[request_id][-1].finish_reason for request_id in ids} == {"length"}
    assert engine.cache.warm_bytes <= engine.config.cache.warm_bytes
    assert engine.cache.tables.warm.num_used >= 4


# Requests that cannot be honoured


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"fidelity": "bounded"}, "fidelity='bounded' needs an adaptive cache"),
        ({"fidelity": "exact"}, "fidelity='exact' needs an adaptive cache"),
        ({"attention_tolerance": 0.1}, "attention_tolerance=0.1 needs an adaptive cache"),
        ({"fidelity": "native", "attention_tolerance": 0.1}, "attention_tolerance=0.1 needs"),
        ({"fidelity": "perfect"}, "fidelity='perfect' is not one of native, bounded, exact"),
    ],
)
def test_native_engine_refuses_what_only_an_adaptive_one_can_do(terms, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt_of(9), greedy(2), **terms)
    assert not engine.has_unfinished()
    request_id = engine.add_request(prompt_of(9), greedy(2), fidelity="native")
    assert tokens_of(finish(engine)[request_id]) == reference_tokens(prompt_of(9), 2)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"fidelity": "perfect"}, "'perfect' is not one of native, bounded, exact"),
        ({"attention_tolerance": -0.1}, r"attention_tolerance=-0.1 is outside 0 to 1"),
        ({"attention_tolerance": 1.5}, r"attention_tolerance=1.5 is outside 0 to 1"),
        ({"attention_tolerance": float("nan")}, r"attention_tolerance=nan is outside 0 to 1"),
        ({"attention_tolerance": "low"}, r"attention_tolerance='low' is outside 0 to 1"),
    ],
)
def test_adaptive_engine_refuses_unknown_fidelities_and_tolerances(terms, message):
    engine = tiered_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt_of(9), greedy(2), **terms)
    assert not engine.has_unfinished()


def test_fidelity_of_a_running_request_is_checked_before_anything_changes():
    engine = tiered_engine()
    request_id = engine.add_request(prompt_of(120), greedy(10), fidelity="exact")
    step(engine)
    with pytest.raises(RequestError, match="'perfect'"):
        engine.set_fidelity(request_id, "perfect")
    with pytest.raises(RequestError, match="no request 'nobody'"):
        engine.set_fidelity("nobody", "exact")
    assert engine._requests[request_id].fidelity == "exact"
    check(engine)


def test_request_that_fits_within_bounds_only_is_refused_when_asked_to_be_native():
    engine = tiered_engine(tiered_model(context=1024), frames=50, max_num_seqs=1)
    length = engine.cache.longest_sequence("native") + 1
    assert length <= engine.max_model_len
    with pytest.raises(RequestTooLong, match=rf"{length} tokens at fidelity 'native'.*{length - 1}"):
        engine.add_request(prompt_of(length - 1), greedy(1), fidelity="native")


# Numbers that are not finite


def overflowing(factor: float = 1e6) -> LoadedModel:
    """Values of its layer 0 are `factor` times as large as usual; the answers stay those of the plain model."""
    model = loaded("llama", max_position_embeddings=512)
    attention = model.module.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.mul_(factor)
        attention.o_proj.weight.div_(factor)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fidelity", ["bounded", "exact", "native"])
def test_values_beyond_float16_fail_the_request_with_a_reason_and_leave_nothing(fidelity, backend):
    engine = tiered_engine(overflowing(), attention_backend=backend, cache={"page_dtype": "float16"})
    request_id = engine.add_request(prompt_of(150), greedy(5), fidelity=fidelity)
    last = finish(engine)[request_id][-1]
    assert last.finish_reason == "error"
    assert "page_dtype bfloat16 or float32" in last.error
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16"])
def test_pages_that_cannot_be_sketched_stay_exact_and_are_counted(page_dtype, backend):
    engine = tiered_engine(overflowing(), attention_backend=backend, cache={"page_dtype": page_dtype})
    prompt = prompt_of(150)
    request_id = engine.add_request(prompt, greedy(20))
    tokens = run_until(engine, request_id, 10)
    state = engine.cache._sequences[request_id]
    assert engine.cache.tables.is_exact(state.block_ids).all()
    assert engine.cache.tier_stats.broken_pages > 0
    assert engine.cache.tier_stats.demoted_blocks == 0
    tokens += tokens_of(finish(engine)[request_id])
    if page_dtype == "float32":
        expected = answer(make_engine(overflowing()), prompt, greedy(20))
        assert tokens == expected


def test_idle_pages_that_cannot_be_sketched_wait_warm_and_come_back_exact():
    engine = tiered_engine(overflowing(), frames=16, attention_backend="cpu")
    prompt = prompt_of(120)
    for seed in range(4):
        assert len(answer_of(engine, prompt_of(120, seed), 3, "native")) == 3
    assert engine.cache.num_tokens_reusable(prompt) == 7 * PAGE
    request_id = engine.add_request(prompt, greedy(3), fidelity="bounded")
    run_until(engine, request_id, 2)
    assert not engine.cache.is_tiered(request_id).any()
    counted = engine.cache.tier_stats.broken_pages
    assert 0 < counted <= 8 * 2, "one page is counted again and again"
    last = finish(engine)[request_id][-1]
    assert last.num_cached_tokens == last.cache_use.cached_tokens["warm"] == 7 * PAGE
    assert engine.cache.tier_stats.demoted_blocks == 0
    assert_nothing_is_held(engine)


def test_broken_weights_fail_a_tiered_request_and_spare_the_next():
    model = loaded("llama", max_position_embeddings=512)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[77] = float("nan")
    engine = tiered_engine(model, attention_backend="cpu")
    broken = engine.add_request((*prompt_of(120), 77), greedy(5))
    sound = engine.add_request(tuple(token for token in prompt_of(130, 1) if token != 77), greedy(5))
    updates = finish(engine)
    assert updates[broken][-1].finish_reason == "error"
    assert "not finite" in updates[broken][-1].error
    assert updates[sound][-1].finish_reason == "length"
    assert_nothing_is_held(engine)
