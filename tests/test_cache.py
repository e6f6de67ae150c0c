"""The cache's door: what is found again, and what must not be."""

import numpy as np
import psutil
import pytest

from vera.cache import AdaptiveCache, CacheShape, Span
from vera.cache.memory import available_bytes
from vera.config import CacheConfig
from vera.errors import CapacityError

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=8)
TOKENS = list(range(100))


def make_cache(identity="weights-1", *, blocks=16, shape=SHAPE, **settings):
    settings = {"page_size": 16, "page_dtype": "float32", **settings}
    config = CacheConfig(**settings)
    return AdaptiveCache(shape, CacheConfig(**settings, cache_max_bytes=blocks * shape.block_bytes(config)), identity=identity)


def fill(cache, sequence="a", tokens=TOKENS):
    cached = cache.admit(sequence, tokens)
    cache.commit(sequence, tokens, len(tokens))
    return cached


def test_salt_differs_with_everything_that_makes_keys_and_values_differ():
    variants = [
        {},
        {"identity": "weights-2"},
        {"page_dtype": "float16"},
        {"page_dtype": "bfloat16"},
        {"page_size": 32},
    ]
    assert len({make_cache(**variant)._salt for variant in variants}) == len(variants)
    assert make_cache()._salt == make_cache()._salt


def test_new_identity_finds_nothing_of_the_old_one():
    cache = make_cache()
    fill(cache)
    cache.release("a")
    assert cache.num_tokens_reusable(TOKENS) == 96
    cache.forget("weights-2")
    assert fill(cache, "b") == 0
    cache.check_invariants()


def test_blocks_are_found_only_once_they_are_computed():
    cache = make_cache()
    cache.admit("owner", TOKENS)
    cache.commit("owner", TOKENS, 40)
    assert cache.admit("sharer", TOKENS) == 32  # two full blocks are computed; the third is not
    cache.check_invariants()


def test_admission_without_room_changes_nothing():
    cache = make_cache(blocks=8)
    fill(cache, "a", TOKENS[:64])
    before = cache.used_bytes
    assert cache.admit("b", [*TOKENS[:64], *range(200, 300)]) is None
    assert cache.used_bytes == before
    cache.check_invariants()


def test_look_up_is_pinned_before_room_is_made():
    cache = make_cache(blocks=6)
    fill(cache, "a", TOKENS[:64])
    cache.release("a")
    fill(cache, "b", list(range(200, 232)))  # takes the two free blocks
    assert cache.admit("c", [*TOKENS[:33], *range(300, 330)]) == 32  # needs two more: evicts only what it did not find
    cache.check_invariants()


@pytest.mark.parametrize(("num_blocks", "fits"), [(6, True), (7, False)])
def test_blocks_that_would_be_shared_are_not_counted_as_room(num_blocks, fits):
    cache = make_cache(blocks=6)
    stem = TOKENS[:64]
    fill(cache, "a", stem)
    cache.release("a")  # four idle blocks, all of which are found again
    fill(cache, "b", list(range(200, 232)))
    tokens = [*stem, *range(300, 300 + 16 * (num_blocks - 4))]
    assert cache.would_fit(tokens, without=["b"]) == fits
    cache.release("b")
    assert (cache.admit("c", tokens) is not None) == fits


def test_reserve_takes_a_block_exactly_at_its_border():
    cache = make_cache()
    cache.admit("a", TOKENS[:16])
    before = cache.used_bytes
    assert cache.reserve("a", 16) and cache.used_bytes == before
    assert cache.reserve("a", 17) and cache.used_bytes == before + SHAPE.block_bytes(cache.config)


def test_batch_names_the_blocks_and_lengths_of_each_span():
    cache = make_cache()
    cache.admit("a", TOKENS[:40])
    cache.admit("b", TOKENS[:10])
    batch = cache.batch([Span("a", 30, 40), Span("b", 0, 10)])
    assert batch.query_starts.tolist() == [0, 10, 20]
    assert batch.context_lens.tolist() == [40, 10]
    assert batch.tokens == 20
    used = [*batch.block_tables[0, :3].tolist(), batch.block_tables[1, 0].item()]
    assert len(set(used)) == 4


def test_no_two_blocks_share_a_page():
    cache = make_cache()
    assert cache.admit("a", list(range(16 * 16))) == 0
    table = cache.pool.page_table.numpy()
    assert np.array_equal(np.sort(table.flatten()), np.arange(table.size))


def test_discarded_sequence_is_not_found_even_if_it_was_shared():
    cache = make_cache()
    fill(cache, "a")
    fill(cache, "b")
    cache.release("a", discard=True)
    assert cache.num_tokens_reusable(TOKENS) == 0
    cache.release("b")
    cache.check_invariants()
    assert cache.used_bytes == cache.idle_bytes == 0


def container(tmp_path, *, limit, used, droppable):
    group = tmp_path / "fs" / "outer" / "inner"
    group.mkdir(parents=True)
    (group.parent / "memory.max").write_text(f"{limit}\n")
    (group.parent / "memory.current").write_text(f"{used}\n")
    (group.parent / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")
    (group / "memory.max").write_text("max\n")
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    return {"cgroups": tmp_path / "fs", "membership": tmp_path / "membership"}


def test_ceiling_counts_a_container_s_limit(tmp_path):
    assert available_bytes(**container(tmp_path, limit=1000, used=700, droppable=100)) == 400


def test_container_without_a_limit_has_the_machine_s_memory(tmp_path):
    paths = container(tmp_path, limit="max", used=700, droppable=100)
    assert available_bytes(**paths) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_machine_without_control_groups_has_its_memory(tmp_path):
    assert available_bytes(cgroups=tmp_path, membership=tmp_path / "none") > 10**8


def test_idle_bytes_are_not_used_bytes():
    cache = make_cache()
    fill(cache)
    cache.release("a")
    assert cache.used_bytes == 0
    assert cache.idle_bytes == 6 * SHAPE.block_bytes(cache.config)


def test_ceiling_that_cannot_be_had_is_a_clear_error():
    shape = CacheShape(layers=1, kv_heads=1, head_dim=256)
    with pytest.raises(CapacityError, match="cannot be had; lower"):
        AdaptiveCache(shape, CacheConfig(cache_max_bytes=2**55), identity="x")
