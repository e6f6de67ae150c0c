"""The adaptive cache without a model: whatever happens to pages, each holds the bytes that were written for its tokens."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tier_engines import ceiling_of, warm_block_bytes
from vera.attention.moves import bytes_at
from vera.attention.sketch import read_header, read_keys, read_values
from vera.cache import AdaptiveCache, CacheShape, Span
from vera.cache.recompute import BlockOf
from vera.config import CacheConfig

PAGE = 16
SHAPE = CacheShape(layers=4, kv_heads=2, head_dim=16, hidden_size=8)
WINDOWED = CacheShape(layers=4, kv_heads=2, head_dim=16, hidden_size=8, windowed_layers=(1,))
MAX_TOKENS = 320


def make_cache(
    *,
    frames: int = 24,
    warm_blocks: float | None = None,
    shape: CacheShape = SHAPE,
    can_recompute: bool = True,
    identity: str = "weights-1",
    **values: Any,
) -> AdaptiveCache:
    """A cache with `frames` frames of one exact block each, two windows of layers, and all freed bytes NaN."""
    config = {
        "mode": "adaptive",
        "page_size": PAGE,
        "page_dtype": "float32",
        "poison": True,
        "min_context": 64,
        "recompute_layer_limit": 2,
        "warm_store": "ram",
        "cold_drop_step": 4,
        "recalibrate_every": 4,
        **values,
    }
    if warm_blocks is not None:
        config["warm_bytes"] = int(warm_blocks * warm_block_bytes(shape, CacheConfig(**config)))
    config["cache_max_bytes"] = ceiling_of(shape, CacheConfig(**config), frames, 8, MAX_TOKENS)
    return AdaptiveCache(
        shape, CacheConfig(**config), identity=identity, max_sequences=8, max_tokens=MAX_TOKENS, can_recompute=can_recompute
    )


# What is written for a token, in each layer, follows from the tokens up to it alone.


def chain(tokens: list[int]) -> list[bytes]:
    digests, digest = [], b""
    for token in tokens:
        digest = hashlib.sha256(digest + token.to_bytes(4, "little")).digest()
        digests.append(digest)
    return digests


@lru_cache(maxsize=20_000)
def token_content(digest: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[layers, kv_heads, 2, head_dim]`, and what flows into the layers, `[layers, hidden]`."""
    random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    pages = random.standard_normal((SHAPE.layers, SHAPE.kv_heads, 2, SHAPE.head_dim), dtype=np.float32)
    return pages, random.standard_normal((SHAPE.layers, SHAPE.hidden_size), dtype=np.float32)


@lru_cache(maxsize=2_000)
def block_content(digests: tuple[bytes, ...]) -> torch.Tensor:
    """The pages of a full block, `[layers, kv_heads, 2, page_size * head_dim]`."""
    tokens = np.stack([token_content(digest)[0] for digest in digests])  # [tokens, layers, heads, 2, head_dim]
    keys = tokens[:, :, :, 0].transpose(1, 2, 3, 0).reshape(SHAPE.layers, SHAPE.kv_heads, -1)
    values = tokens[:, :, :, 1].transpose(1, 2, 0, 3).reshape(SHAPE.layers, SHAPE.kv_heads, -1)
    return torch.from_numpy(np.stack([keys, values], axis=2).copy())


def write(cache: AdaptiveCache, sequence: str, digests: list[bytes], start: int, stop: int) -> None:
    """Does what a step of a model does: keys and values of new tokens go to their pages, and checkpoints are kept."""
    blocks = cache._sequences[sequence].blocks
    for position in range(start, stop):
        pages, _ = token_content(digests[position])
        slots = cache.pool.page_table[blocks[position // PAGE]].long()
        assert (slots >= 0).all(), "a page that is to be written has no slot"
        offset = position % PAGE
        cache.pool.pages[:, 0].view(-1, SHAPE.head_dim, PAGE)[slots, :, offset] = torch.from_numpy(pages[:, :, 0])
        cache.pool.pages[:, 1].view(-1, PAGE, SHAPE.head_dim)[slots, offset] = torch.from_numpy(pages[:, :, 1])
    for layer in cache.checkpoint_layers:
        hidden = np.stack([token_content(digest)[1][layer] for digest in digests[start:stop]])
        cache.keep_checkpoints([Span(sequence, start, stop)], layer, torch.from_numpy(hidden))


def exact_page(cache: AdaptiveCache, block: int, layer: int, head: int) -> torch.Tensor | None:
    address = cache.tables.exact_addresses(np.array([block]), layer)[0, head]
    if not address:
        return None
    return bytes_at(int(address), cache.pool.page_bytes).view(torch.float32).view(2, -1)


def check_block(cache: AdaptiveCache, block: int, digests: tuple[bytes, ...]) -> None:
    """Every exact page, every sketch and every checkpoint of a full block is what its tokens make it."""
    expected = block_content(digests)
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.kv_heads):
            page = exact_page(cache, block, layer, head)
            assert page is None or torch.equal(page, expected[layer, head]), f"block {block}, layer {layer}, head {head}"
    if cache.tables.sketch_unit[block] >= 0:
        check_sketch(cache, block, expected.view(-1, 2, PAGE * SHAPE.head_dim))
    for boundary, layer in enumerate(cache.checkpoint_layers):
        checkpoint = cache.tables.checkpoint(block, boundary)
        if checkpoint is not None:
            hidden = np.stack([token_content(digest)[1][layer] for digest in digests])
            assert torch.equal(checkpoint, torch.from_numpy(hidden)), f"checkpoint of block {block}"


def check_sketch(cache: AdaptiveCache, block: int, pages: torch.Tensor) -> None:
    """`pages` is `[layers * kv_heads, 2, page_size * head_dim]`: each number lies within half a step, and `nu` is right."""
    fmt = cache.pool.sketch_format
    places = cache.pool.sketch_addresses(int(cache.tables.sketch_unit[block]))
    key_parts, value_parts = (
        torch.stack([bytes_at(address, size) for address in addresses.tolist()])
        for addresses, size in zip(places, (fmt.key_bytes, fmt.value_bytes), strict=True)
    )
    keys, values = pages[:, 0].view(-1, SHAPE.head_dim, PAGE), pages[:, 1].view(-1, PAGE, SHAPE.head_dim)
    for read, exact, dim in ((read_keys(key_parts, fmt), keys, 2), (read_values(value_parts, fmt), values, 2)):
        step = (exact.amax(dim=dim, keepdim=True) - exact.amin(dim=dim, keepdim=True)) / (2**fmt.bits - 1)
        assert ((read - exact).abs() <= step * 0.51 + 0.01).all(), f"sketch of block {block}"
    assert torch.allclose(read_header(key_parts)[0], values.norm(dim=-1).amax(dim=-1), rtol=1e-4)


class Life(RuleBasedStateMachine):
    """Sequences come, grow, share, are copied, change fidelity, lose pages, get them back, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: AdaptiveCache | None = None
        self.tokens: dict[str, list[int]] = {}
        self.digests: dict[str, list[bytes]] = {}
        self.computed: dict[str, int] = {}
        self.known: dict[int, tuple[bytes, ...]] = {}
        """What each sealed block holds, as far as it was seen."""
        self.count = 0

    @precondition(lambda self: self.cache is None)
    @rule(
        frames=st.sampled_from([14, 20, 40]),
        warm_blocks=st.sampled_from([None, 0.6, 1.3, 4, 9, 30]),
        store=st.sampled_from(["ram", "ram", "file", "none"]),
        budget=st.sampled_from([0, 1, 2]),
        hot=st.sampled_from([0.0, 0.1, 0.6]),
        bits=st.sampled_from([2, 4, 8]),
        shape=st.sampled_from([SHAPE, SHAPE, WINDOWED]),
    )
    def begin(
        self, frames: int, warm_blocks: float | None, store: str, budget: int, hot: float, bits: int, shape: CacheShape
    ) -> None:
        self.cache = make_cache(
            shape=shape,
            frames=frames,
            warm_blocks=None if store == "none" else warm_blocks,
            warm_store=store,
            recompute_budget=budget,
            hot_max_share=hot,
            sketch_bits=bits,
        )

    @precondition(lambda self: self.cache is not None and len(self.tokens) < 6)
    @rule(
        stem=st.integers(0, 1),
        shared=st.sampled_from([0, 15, 48, 112, 160]),
        own=st.sampled_from([1, 16, 40]),
        seed=st.integers(0, 3),
        fidelity=st.sampled_from(["bounded", "bounded", "native", "exact"]),
        reuse=st.sampled_from([True, True, True, False]),
        headroom=st.integers(0, 2),
    )
    def admit(self, stem: int, shared: int, own: int, seed: int, fidelity: str, reuse: bool, headroom: int) -> None:
        tokens = [stem * 1000 + i for i in range(shared)] + [5000 + seed * 100 + i for i in range(own)]
        name = f"s{self.count}"
        before = set(self.cache._sequences)
        expected = self.cache.num_tokens_reusable(tokens) if reuse else 0
        cached = self.cache.admit(name, tokens, headroom=headroom, reuse=reuse, fidelity=fidelity)
        if cached is None:
            assert set(self.cache._sequences) == before
            return
        self.count += 1
        assert cached % PAGE == 0 and cached < len(tokens)
        assert cached <= max(expected, cached if fidelity == "bounded" else expected)
        assert sum(self.cache.use(name).cached_tokens.values()) == cached
        self.tokens[name], self.digests[name], self.computed[name] = tokens, chain(tokens), cached

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data(), chunk=st.sampled_from([1, 7, 16, 64]), times=st.integers(1, 20), seed=st.integers(0, 99))
    def grow(self, data: st.DataObject, chunk: int, times: int, seed: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, max_size=4, unique=True))
        random = np.random.default_rng(seed)
        for _ in range(times):
            self._step([name for name in names if name in self.tokens], chunk, random)

    def _step(self, names: list[str], chunk: int, random: np.random.Generator) -> None:
        spans = []
        for name in names:
            tokens, computed = self.tokens[name], self.computed[name]
            if computed == len(tokens):
                if len(tokens) >= MAX_TOKENS - 1:
                    continue
                tokens.append(9000 + int(random.integers(2)))
                self.digests[name] = chain(tokens)
            stop = min(len(tokens), computed + chunk)
            if not self.cache.reserve(name, stop):
                self._end(name)
                continue
            spans.append(Span(name, computed, stop))
        if not spans:
            return
        batch = self.cache.batch(spans)
        for span in spans:
            write(self.cache, span.sequence, self.digests[span.sequence], span.start, span.stop)
        if batch.tiers is not None:
            self._report(batch, spans, random)
        self.cache.observe()
        for span in spans:
            self.computed[span.sequence] = span.stop
            self._learn(span.sequence)
            self.cache.commit(span.sequence, self.tokens[span.sequence], span.stop)
        self.cache.settle()

    def _report(self, batch: Any, spans: list[Span], random: np.random.Generator) -> None:
        """Attention that finds some pages heavy and hits some that are not in fast memory."""
        report, rows = batch.tiers.report, batch.tiers.report_rows.tolist()
        for index, span in enumerate(spans):
            state = self.cache._sequences[span.sequence]
            if batch.tiers.tolerances[index] < 0 or span.stop - span.start > 1:
                continue
            count = len(state.blocks)
            report.masses[rows[index], :, :, :count] += torch.from_numpy(random.random((4, 2, count), dtype=np.float32) ** 4)
            report.errors[index, 2] += 1
            away = np.argwhere(~self.cache.tables.hot_pages(state.block_ids))
            chosen = away[random.random(len(away)) < 0.1]
            if len(chosen):
                warm = self.cache.tables.warm_slot[state.block_ids[chosen[:, 0]], chosen[:, 1] // 2] >= 0
                hits = np.column_stack([np.full(len(chosen), index), chosen[:, 1], chosen[:, 2], chosen[:, 0], ~warm])
                report.frequencies[rows[index]].numpy()[chosen[:, 1], chosen[:, 2], chosen[:, 0]] += 1
                for layer in np.unique(hits[:, 1]):
                    report.hits.append(torch.from_numpy(hits[hits[:, 1] == layer].astype(np.int32)))

    def _learn(self, name: str) -> None:
        state, digests = self.cache._sequences[name], self.digests[name]
        for index in range(self.computed[name] // PAGE):
            self.known[state.blocks[index]] = tuple(digests[index * PAGE : (index + 1) * PAGE])

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data(), discard=st.sampled_from([False, False, True]))
    def release(self, data: st.DataObject, discard: bool) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.tokens))), discard=discard)

    def _end(self, name: str, *, discard: bool = False) -> None:
        self.cache.release(name, discard=discard)
        del self.tokens[name], self.digests[name], self.computed[name]

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def duplicate(self, data: st.DataObject) -> None:
        source, copy = data.draw(st.sampled_from(sorted(self.tokens))), f"s{self.count}"
        if self.cache.duplicate(source, copy):
            self.count += 1
            self.tokens[copy], self.computed[copy] = list(self.tokens[source]), self.computed[source]
            self.digests[copy] = list(self.digests[source])

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data(), fidelity=st.sampled_from(["native", "bounded", "exact"]))
    def set_fidelity(self, data: st.DataObject, fidelity: str) -> None:
        self.cache.set_fidelity(data.draw(st.sampled_from(sorted(self.tokens))), fidelity)

    @precondition(lambda self: bool(self.tokens) and self.cache.config.recompute_budget > 0)
    @rule(data=st.data(), fails=st.booleans(), hot_share=st.sampled_from([0.0, 0.3, 1.0]))
    def restore(self, data: st.DataObject, fails: bool, hot_share: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        cold = self.cache.cold_blocks(name)
        if not cold:
            return
        targets = data.draw(st.lists(st.sampled_from(cold), min_size=1, max_size=3, unique_by=lambda target: target.index))
        stop = data.draw(st.integers(1, SHAPE.layers))
        for plan in self.cache.restores(targets, stop):
            self._pass(plan, fails, hot_share)

    def _pass(self, plan: Any, fails: bool, hot_share: float) -> None:
        tables, before = self.cache.tables, self.cache.pool.page_table.clone()
        restore = self.cache.begin_restore(plan)
        if plan.first:
            parts = [
                np.stack([token_content(digest)[1][plan.first] for digest in self._digests_of(target)]) for target in plan.targets
            ]
            assert torch.equal(restore.hidden, torch.from_numpy(np.concatenate(parts)))
        if fails:
            self.cache.abandon_restore(restore)
            assert torch.equal(self.cache.pool.page_table, before), "lent slots were not given back"
            return
        hot = []
        for target in plan.targets:
            slots = torch.from_numpy(tables.slots(target.block, plan.first, plan.stop))
            self.cache.pool.pages[slots] = block_content(self._digests_of(target))[plan.first : plan.stop]
            pages = [(target.block, layer, head) for layer in range(plan.first, plan.stop) for head in range(SHAPE.kv_heads)]
            hot += pages[: int(hot_share * len(pages))]
        self.cache.finish_restore(restore, hot=hot)

    def _digests_of(self, target: BlockOf) -> tuple[bytes, ...]:
        return tuple(self.digests[target.sequence][target.index * PAGE : (target.index + 1) * PAGE])

    @precondition(lambda self: self.cache is not None and not self.tokens)
    @rule()
    def forget(self) -> None:
        self.cache.forget("weights-2")
        self._all_is_free()

    @invariant()
    def every_page_holds_its_tokens(self) -> None:
        if self.cache is None:
            return
        cache = self.cache
        cache.check_invariants()
        limit = cache.config.warm_bytes
        assert limit is None or cache.warm_bytes <= limit
        assert 0 <= cache.used_bytes <= cache.pool.used_bytes <= cache.pool.capacity_bytes <= cache.config.cache_max_bytes
        for name in self.tokens:
            self._learn(name)
            for index in range(self.computed[name] // PAGE):
                block = cache._sequences[name].blocks[index]
                check_block(cache, block, self.known[block])
        for block in cache.blocks.idle:
            check_block(cache, block, self.known[block])

    def teardown(self) -> None:
        if self.cache is None:
            return
        for name in list(self.tokens):
            self._end(name)
        self.cache.check_invariants()
        self.cache.forget("weights-2")
        self._all_is_free()
        self.cache.close()

    def _all_is_free(self) -> None:
        cache = self.cache
        cache.check_invariants()
        assert cache.blocks.num_free == cache.blocks.num_blocks
        assert cache.warm_bytes == 0
        held = -(-len(cache.tables.staging) // cache.pool.frame_pages)
        assert cache.pool.frames.num_free_frames == cache.pool.frames.num_frames - held


def live(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_whatever_happens_pages_hold_their_tokens_and_the_books_balance():
    live(examples=25, steps=30)


@pytest.mark.soak
def test_whatever_happens_for_long_pages_hold_their_tokens_and_the_books_balance():
    live(examples=250, steps=60)


# What the machine above would take long to find


def read_prompt(cache: AdaptiveCache, name: str, tokens: list[int], *, fidelity: str = "bounded") -> int:
    """Admits a sequence and computes its prompt in chunks of 64 tokens; how many tokens were found."""
    cached = cache.admit(name, tokens, fidelity=fidelity)
    assert cached is not None
    digests = chain(tokens)
    for start in range(cached, len(tokens), 64):
        stop = min(start + 64, len(tokens))
        assert cache.reserve(name, stop)
        cache.batch([Span(name, start, stop)])
        write(cache, name, digests, start, stop)
        cache.commit(name, tokens, stop)
        cache.settle()
        cache.check_invariants()
    return cached


@pytest.mark.parametrize("fidelity", ["native", "exact", "bounded"])
def test_prefix_found_by_an_admission_is_not_released_to_make_room_for_it(fidelity):
    cache = make_cache(frames=18, warm_blocks=8.2)
    stem = list(range(8 * PAGE))
    read_prompt(cache, "a", [*stem, 1], fidelity="exact")
    cache.release("a")
    for block in cache.blocks.idle:
        cache._keeper.demote_idle(block)
    assert not cache.tables.lacks_exact_pages(cache.blocks.idle).any()
    read_prompt(cache, "b", [5000 + i for i in range(9 * PAGE)], fidelity="native")
    cache.release("b")
    found = cache.num_tokens_reusable([*stem, 1])
    assert found > 0
    cached = cache.admit("c", [*stem, *range(7000, 7100)], fidelity=fidelity)
    cache.check_invariants()
    assert cached is not None
    assert not cache.tables.lacks_exact_pages(cache._sequences["c"].block_ids).any()


@pytest.mark.parametrize("exact_reader", ["exact", "native"])
def test_block_that_somebody_reads_exactly_does_not_go_cold_with_another_reader(exact_reader):
    cache = make_cache(frames=40, warm_blocks=3.1)
    stem = list(range(8 * PAGE))
    read_prompt(cache, "exactly", [*stem, 1], fidelity=exact_reader)
    read_prompt(cache, "bounded", [*stem, 2])
    for number in range(3):  # more than the warm store has room for
        read_prompt(cache, f"other-{number}", [9000 + 100 * number + i for i in range(7 * PAGE)])
        cache.settle()
    assert not cache.tables.lacks_exact_pages(cache._sequences["exactly"].block_ids).any()


def test_what_waits_idle_gives_way_before_anything_that_runs():
    cache = make_cache(frames=24, warm_store="none", min_context=1000)
    read_prompt(cache, "idle", list(range(10 * PAGE)))
    cache.release("idle")
    read_prompt(cache, "running", list(range(1000, 1000 + 10 * PAGE)))
    read_prompt(cache, "new", list(range(2000, 2000 + 8 * PAGE)))
    assert cache.num_tokens_reusable(list(range(10 * PAGE + 1))) < 10 * PAGE
    for name in ("running", "new"):
        assert cache.tables.is_exact(cache._sequences[name].block_ids).all()


def test_failed_admission_leaves_no_owner_and_no_change_of_tiers():
    cache = make_cache(frames=14, warm_store="none", min_context=1000)
    read_prompt(cache, "a", list(range(6 * PAGE)))
    before = (cache.blocks.owners.copy(), cache.pool.page_table.clone())
    assert cache.admit("b", list(range(14 * PAGE))) is None
    assert (cache.blocks.owners == before[0]).all() and torch.equal(cache.pool.page_table, before[1])
    assert "b" not in cache._sequences
    cache.check_invariants()


def test_would_fit_says_what_admit_does():
    random = np.random.default_rng(0)
    for number in range(60):
        cache = make_cache(frames=int(random.integers(14, 30)), warm_blocks=float(random.choice([2.1, 20])))
        lengths = [int(length) for length in random.integers(1, 130, size=3)]
        names = []
        for index, length in enumerate(lengths):
            tokens = [1000 * index + i for i in range(length)]
            if cache.would_fit(tokens, without=[], fidelity="bounded"):
                read_prompt(cache, f"s{index}", tokens)
                names.append(f"s{index}")
            else:
                assert cache.admit(f"s{index}", tokens, fidelity="bounded") is None
        wanted = [9000 + i for i in range(int(random.integers(1, 200)))]
        without = names[: int(random.integers(0, len(names) + 1))]
        fits = cache.would_fit(wanted, without=without, fidelity="native")
        for name in without:
            cache.release(name)
        assert (cache.admit("wanted", wanted, fidelity="native") is not None) == fits, f"case {number}"
        cache.check_invariants()


def test_hot_pages_stay_within_their_share():
    cache = make_cache(frames=60, hot_max_share=0.1)
    tokens = list(range(12 * PAGE))
    read_prompt(cache, "a", tokens)
    digests, random = chain(tokens), np.random.default_rng(0)
    for _ in range(60):
        tokens.append(int(random.integers(1000)))
        digests = chain(tokens)
        assert cache.reserve("a", len(tokens))
        batch = cache.batch([Span("a", len(tokens) - 1, len(tokens))])
        write(cache, "a", digests, len(tokens) - 1, len(tokens))
        state = cache._sequences["a"]
        batch.tiers.report.errors[0, 2] += 1
        warm = np.argwhere(~cache.tables.hot_pages(state.block_ids))
        chosen = warm[random.random(len(warm)) < 0.1]
        hits = np.column_stack([np.zeros(len(chosen)), chosen[:, 1], chosen[:, 2], chosen[:, 0], np.zeros(len(chosen))])
        batch.tiers.report.frequencies[state.row].numpy()[chosen[:, 1], chosen[:, 2], chosen[:, 0]] += 1
        batch.tiers.report.hits.append(torch.from_numpy(hits.astype(np.int32)))
        cache.observe()
        cache.commit("a", tokens, len(tokens))
        cache.settle()
        tiered = state.block_ids[cache.tables.is_tiered(state.block_ids)]
        assert cache.tables.hot_pages(tiered).sum() <= 0.1 * len(tiered) * 8
    assert cache.tier_stats.hit_promotions > 0


# Room at a full ceiling


STILL = {"recalibrate_every": 1000, "cold_drop_step": 1000}
"""Nothing but hits makes pages hot."""


def hit_everything(cache: AdaptiveCache, names: list[str], texts: dict[str, list[int]], *, steps: int = 1) -> None:
    """Decode steps of each sequence in which attention hits all pages that are not in fast memory."""
    for _ in range(steps):
        for name in names:
            texts[name].append(1)
            assert cache.reserve(name, len(texts[name]))
        spans = [Span(name, len(texts[name]) - 1, len(texts[name])) for name in names]
        batch = cache.batch(spans)
        for index, span in enumerate(spans):
            write(cache, span.sequence, chain(texts[span.sequence]), span.start, span.stop)
            away = np.argwhere(~cache.tables.hot_pages(cache._sequences[span.sequence].block_ids))
            hits = np.column_stack([np.full(len(away), index), away[:, 1], away[:, 2], away[:, 0], np.zeros(len(away))])
            batch.tiers.report.hits.append(torch.from_numpy(hits.astype(np.int32)))
            batch.tiers.report.errors[index, 2] += 1
        cache.observe()
        for span in spans:
            cache.commit(span.sequence, texts[span.sequence], span.stop)
        cache.settle()
        cache.check_invariants()


def hot_share(cache: AdaptiveCache, name: str) -> float:
    """Of the pages of a sequence's tiered blocks."""
    blocks = cache._sequences[name].block_ids
    return float(cache.tables.hot_pages(blocks[cache.tables.is_tiered(blocks)]).mean())


def filled_with_copies(cache: AdaptiveCache) -> dict[str, list[int]]:
    tokens = list(range(15 * PAGE))
    read_prompt(cache, "a", tokens)
    names = ["a"]
    while len(names) < 8 and cache.duplicate("a", f"copy-{len(names)}"):
        names.append(f"copy-{len(names)}")
    assert 1 < len(names) < 8, "the ceiling was to be the limit"
    return {name: list(tokens) for name in names}


def test_copies_are_refused_while_there_is_room_for_all_hot_pages():
    cache = make_cache(frames=60, hot_max_share=0.25, **STILL)
    texts = filled_with_copies(cache)
    hit_everything(cache, sorted(texts), texts, steps=8)
    for name in texts:
        assert 0.2 < hot_share(cache, name) <= 0.25


def test_hot_pages_are_not_shed_below_half_their_share_to_keep_one_more_running():
    cache = make_cache(frames=60, hot_max_share=0.25, **STILL)
    texts = filled_with_copies(cache)
    hit_everything(cache, sorted(texts), texts, steps=8)
    assert cache.admit("native", [7000 + i for i in range(16)], fidelity="native") is not None
    length = 16
    while cache.reserve("native", length + 16):
        length += 16
    assert length < MAX_TOKENS, "the ceiling was to be the limit"
    shares = [hot_share(cache, name) for name in texts]
    assert 0.1 < sum(shares) / len(shares) < 0.2


def test_sequence_that_runs_alone_gives_all_its_hot_pages_to_go_on():
    cache = make_cache(frames=24, hot_max_share=0.6, **STILL)
    tokens = list(range(12 * PAGE))
    read_prompt(cache, "a", tokens)
    texts = {"a": tokens}
    hit_everything(cache, ["a"], texts, steps=12)
    before = hot_share(cache, "a")
    blocks = -(-len(tokens) // PAGE)
    while cache.reserve("a", (blocks + 1) * PAGE):
        blocks += 1
    assert before > 0.4
    assert hot_share(cache, "a") == 0.0


def test_idle_blocks_give_way_to_hot_pages():
    cache = make_cache(frames=40, hot_max_share=0.5, **STILL)
    for number in range(12):
        read_prompt(cache, "idle", [1000 * number + i for i in range(4 * PAGE)])
        cache.release("idle")
    assert cache.pool.frames.num_free_frames == 0
    texts = {"a": [9000 + i for i in range(12 * PAGE)]}
    read_prompt(cache, "a", texts["a"])
    hit_everything(cache, ["a"], texts, steps=12)
    assert hot_share(cache, "a") > 0.45


# Idle blocks


@pytest.mark.parametrize("fidelity", ["native", "exact", "bounded"])
@pytest.mark.parametrize("before", ["exact", "tiered"])
@pytest.mark.parametrize("shape", [SHAPE, WINDOWED])
def test_parked_blocks_take_no_fast_memory_and_come_back_as_they_were(fidelity, before, shape):
    cache = make_cache(frames=20, shape=shape)
    tokens = list(range(9 * PAGE + 1))
    read_prompt(cache, "a", tokens, fidelity="native" if before == "exact" else "exact")
    blocks = list(cache._sequences["a"].blocks[:9])
    cache.release("a")
    read_prompt(cache, "b", [5000 + i for i in range(18 * PAGE)], fidelity="native")
    assert cache.tables.device_bytes(blocks[4:]).sum() == 0
    cache.release("b")
    assert cache.admit("c", tokens, fidelity=fidelity) == 9 * PAGE
    assert (
        sum(cache.use("c").cached_tokens.values()) == cache.use("c").cached_tokens["warm"] + cache.use("c").cached_tokens["hot"]
    )
    assert cache.use("c").cached_tokens["warm"] >= 5 * PAGE
    assert cache._sequences["c"].blocks[:9].tolist() == blocks
    for index, block in enumerate(blocks):
        check_block(cache, block, tuple(chain(tokens)[index * PAGE : (index + 1) * PAGE]))
    cache.check_invariants()


def with_parked_blocks(warm_blocks: float) -> AdaptiveCache:
    cache = make_cache(frames=20, warm_blocks=warm_blocks)
    read_prompt(cache, "a", list(range(9 * PAGE)), fidelity="native")
    cache.release("a")
    read_prompt(cache, "b", [5000 + i for i in range(18 * PAGE)], fidelity="native")
    cache.release("b")
    return cache


def test_parked_blocks_give_way_to_what_runs():
    cache = with_parked_blocks(8.5)
    assert sum(cache.blocks.is_parked(block) for block in cache.blocks.idle) >= 7
    read_prompt(cache, "c", [7000 + i for i in range(9 * PAGE)], fidelity="exact")
    assert cache.is_tiered("c").sum() >= 6
    assert not cache.tables.lacks_exact_pages(cache._sequences["c"].block_ids).any()


def test_parked_blocks_give_way_to_what_is_restored():
    cache = with_parked_blocks(9)
    while cache.tables.has_warm_room:
        cache._keeper.park(cache.blocks.next_idle)
    assert cache.make_room_for_restored()
    cache.check_invariants()


def test_pages_that_are_parked_and_come_back_are_counted():
    cache = make_cache(frames=20)
    pages = SHAPE.layers * SHAPE.kv_heads
    tokens = list(range(9 * PAGE + 1))
    read_prompt(cache, "a", tokens, fidelity="native")
    cache.release("a")
    read_prompt(cache, "b", [5000 + i for i in range(18 * PAGE)], fidelity="native")
    cache.release("b")
    parked = sum(cache.blocks.is_parked(block) for block in cache.blocks.idle)
    assert cache.tier_stats.parked_pages == parked * pages > 0
    assert cache.admit("c", tokens, fidelity="native") == 9 * PAGE
    assert 0 < cache.tier_stats.fetched_pages == parked * pages


def test_sequences_served_exactly_are_promised_no_hot_pages():
    copies = {}
    for fidelity in ("bounded", "exact"):
        cache = make_cache(frames=60, hot_max_share=0.5, **STILL)
        read_prompt(cache, "a", list(range(15 * PAGE)), fidelity=fidelity)
        copies[fidelity] = 0
        while copies[fidelity] < 7 and cache.duplicate("a", f"copy-{copies[fidelity]}"):
            copies[fidelity] += 1
    assert copies["exact"] > copies["bounded"] > 0


def test_hot_pages_of_a_shared_prefix_are_promised_once():
    cache = make_cache(frames=40, hot_max_share=0.5, **STILL)
    prefix = list(range(15 * PAGE))
    for number in range(7):
        read_prompt(cache, f"reader-{number}", [*prefix, 9000 + number])
    cache.check_invariants()


def test_refused_admission_does_not_count_as_reuse():
    cache = make_cache(frames=20)
    text = list(range(3 * PAGE + 1))
    serve_short(cache, text)
    before = cache.blocks.reuse.share
    for _ in range(3):
        assert cache.admit("long", text + [9000 + i for i in range(MAX_TOKENS - len(text))], fidelity="native") is None
    assert cache.blocks.reuse.share == before < 1


def serve_short(cache: AdaptiveCache, tokens: list[int]) -> int:
    found = read_prompt(cache, "short", tokens)
    cache.release("short")
    return found


def test_short_texts_that_nobody_asks_for_again_are_soon_not_kept():
    cache = make_cache(frames=20)
    texts = [[1000 * number + i for i in range(3 * PAGE + 1)] for number in range(45)]
    for text in texts:
        serve_short(cache, text)
    kept = [text for text in texts[29:39] if cache.num_tokens_reusable(text)]
    assert len(kept) <= 1, "one of sixteen is kept, to see whether somebody asks for it"


def test_conversations_are_kept_though_their_first_turns_are_short():
    cache = make_cache(frames=20)
    texts = {number: [1000 * number + i for i in range(2 * PAGE + 1)] for number in range(12)}
    for turn in range(2):
        for number, text in texts.items():
            found = serve_short(cache, text)
            assert found == 2 * PAGE * turn, f"turn {turn} of conversation {number}"
            text.append(turn)


def test_keeping_is_taken_up_again_when_blocks_are_asked_for():
    cache = make_cache(frames=20)
    for number in range(30):
        serve_short(cache, [1000 * number + i for i in range(4 * PAGE)])
    assert cache.blocks.reuse.share < 0.1
    for number in range(40):
        texts = [[100_000 * (1 + number) + 1000 * k + i for i in range(2 * PAGE + 1)] for k in range(2)]
        for text in [*texts, *texts]:
            serve_short(cache, text)
    assert cache.blocks.reuse.share > 0.1
    text = list(range(2 * PAGE + 1))
    serve_short(cache, text)
    for number in range(6):
        serve_short(cache, [900_000 + 1000 * number + i for i in range(4 * PAGE)])
    assert serve_short(cache, text) == 2 * PAGE
