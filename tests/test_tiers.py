"""The tables of tiers: every move keeps the bytes, says what it did, and changes nothing where there is no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vera.attention.moves import bytes_at
from vera.attention.protocol import NO_PAGE
from vera.attention.sketch import read_keys, read_values
from vera.cache.frames import Role
from vera.cache.pool import CacheShape, PagePool
from vera.cache.tiers import TierTables, warm_bytes_per_block
from vera.config import CacheConfig
from vera.errors import CapacityError

PAGE = 16
SHAPE = CacheShape(layers=5, kv_heads=2, head_dim=16, hidden_size=24)
"""Windows of 2 layers: the last one has a single layer."""
NOTHING_HOT = np.zeros((5, 2), dtype=bool)
ALL_HOT = np.ones((5, 2), dtype=bool)


def make_tables(
    tmp_path: Path,
    *,
    frames: int = 12,
    warm_blocks: float = 8,
    shape: CacheShape = SHAPE,
    checkpoints: bool = True,
    staging: int = 0,
    **values: Any,
) -> TierTables:
    settings = {"page_size": PAGE, "page_dtype": "float16", "poison": True, "recompute_layer_limit": 2, "warm_store": "ram"}
    settings |= {"mode": "adaptive", **values}
    ceiling = 1024 + frames * (shape.block_bytes(CacheConfig(**settings)) + 4096)
    config = CacheConfig(**settings, cache_max_bytes=ceiling)
    pool = PagePool(shape, config)
    spare = pool.frames.num_frames - frames
    pool.frames.take(Role.EXACT, max(0, spare) * pool.frame_blocks)  # out of the way
    return TierTables(
        pool,
        config,
        warm_dir=tmp_path,
        warm_bytes=int(warm_blocks * warm_bytes_per_block(shape, config)),
        checkpoints=checkpoints,
        staging_pages=staging,
    )


def fill(tables: TierTables, block: int, seed: int = 0) -> torch.Tensor:
    """An exact block of random content; `[layers, kv_heads, 2, page_size * head_dim]`."""
    assert tables.make_exact([block])
    content = torch.randn(5, 2, 2, PAGE * 16, generator=torch.Generator().manual_seed(seed)).to(tables.pool.pages.dtype)
    tables.pool.pages[tables.pool.page_table[block].long()] = content
    return content


def exact(tables: TierTables, block: int, layer: int, head: int) -> torch.Tensor | None:
    address = int(tables.exact_addresses(np.array([block]), layer)[0, head])
    if not address:
        return None
    return bytes_at(address, tables.pool.page_bytes).view(tables.pool.pages.dtype).view(2, -1).clone()


def assert_holds(tables: TierTables, block: int, content: torch.Tensor) -> None:
    for layer in range(5):
        for head in range(2):
            page = exact(tables, block, layer, head)
            assert page is not None and torch.equal(page, content[layer, head]), f"layer {layer}, head {head}"


def pages_of(block: int, layers: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pages = np.array([(block, layer, head) for layer in layers for head in range(2)])
    return pages[:, 0], pages[:, 1], pages[:, 2]


@pytest.fixture(params=["ram", "file"])
def tables(request, tmp_path):
    made = make_tables(tmp_path, warm_store=request.param)
    yield made
    made.close()


def test_demoted_block_is_warm_with_the_bytes_it_had(tables):
    content = fill(tables, 0)
    assert tables.demote(0, NOTHING_HOT) == 0
    assert_holds(tables, 0, content)
    assert not tables.hot_pages([0]).any() and not tables.lacks_exact_pages([0])[0]
    assert tables.device_bytes([0])[0] == tables.pool.sketch_bytes
    assert tables.pool.frames.num_used(Role.SKETCH) == 1
    tables._dtype  # noqa: B018 - the pages' own
    tables.pool.frames.check_invariants()


def test_pages_that_stay_hot_are_copied_and_those_of_the_rest_are_not(tables):
    content = fill(tables, 0)
    hot = NOTHING_HOT.copy()
    hot[1, 0] = hot[4, 1] = True
    assert tables.demote(0, hot) == 0
    assert (tables.hot_pages([0])[0] == hot).all()
    assert_holds(tables, 0, content)
    assert tables.device_bytes([0])[0] == tables.pool.sketch_bytes + 2 * tables.pool.page_bytes


def test_sketch_follows_its_block_through_compaction_and_copies(tables):
    contents = {block: fill(tables, block, block) for block in range(6)}
    for block in range(6):
        assert tables.demote(block, ALL_HOT if block % 2 else NOTHING_HOT) == 0
    tables.free([0, 1, 3])
    for role in Role:
        tables.compact(role)
    assert tables.copy(4, 9) and tables.copy(5, 10)
    contents |= {9: contents[4], 10: contents[5]}
    fmt = tables.pool.sketch_format
    for block in (2, 4, 5, 9, 10):
        assert_holds(tables, block, contents[block])
        places = tables.pool.sketch_addresses(int(tables.sketch_unit[block]))
        keys, values = (
            torch.stack([bytes_at(address, size) for address in addresses.tolist()])
            for addresses, size in zip(places, (fmt.key_bytes, fmt.value_bytes), strict=True)
        )
        pages = contents[block].float().view(10, 2, -1)
        assert (read_keys(keys, fmt) - pages[:, 0].view(10, 16, PAGE)).abs().max() < 0.3
        assert (read_values(values, fmt) - pages[:, 1].view(10, PAGE, 16)).abs().max() < 0.3
        assert int(tables.pool.sketch_keys[block]) >= 0


def test_promoted_page_is_hot_and_cooled_page_is_warm_again(tables):
    content = fill(tables, 0)
    tables.demote(0, NOTHING_HOT)
    assert tables.promote(*pages_of(0, range(1, 3))) == 4
    assert tables.hot_pages([0])[0].sum() == 4
    assert_holds(tables, 0, content)
    assert tables.promote(*pages_of(0, range(1, 3))) == 0, "what is hot is passed over"
    assert tables.cool(*pages_of(0, range(5))) == 4
    assert tables.cool(*pages_of(0, range(5))) == 0
    assert_holds(tables, 0, content)


def test_released_unit_is_cold_and_its_neighbours_are_not(tables):
    content = fill(tables, 0)
    tables.demote(0, NOTHING_HOT)
    tables.release_unit(0, 1)
    assert (tables.cold_units([0])[0] == [False, True, False]).all()
    for layer in range(5):
        page = exact(tables, 0, layer, 1)
        assert (page is None) == (layer in (2, 3))
        assert page is None or torch.equal(page, content[layer, 1])
    assert tables.promote(*pages_of(0, range(5))) == 6, "cold pages are passed over"
    assert tables.lacks_exact_pages([0])[0]


def test_unit_whose_pages_are_all_hot_may_be_released_and_lacks_nothing(tables):
    content = fill(tables, 0)
    tables.demote(0, ALL_HOT)
    for window in range(3):
        tables.release_unit(0, window)
    assert tables.cold_units([0]).all() and not tables.lacks_exact_pages([0])[0]
    assert_holds(tables, 0, content)


def test_saved_unit_is_warm_again_with_the_bytes_of_its_sources(tables):
    content = fill(tables, 0)
    twin = fill(tables, 1)
    assert torch.equal(content, twin)
    tables.demote(0, NOTHING_HOT)
    tables.release_unit(0, 2)  # the short window
    sources = tables.pool.slot_addresses(tables.pool.exact_slots([tables.exact_unit[1]])[0])[4:5]
    assert tables.save_unit(0, 2, sources)
    assert_holds(tables, 0, content)


def test_full_pool_demotes_nothing_and_changes_nothing(tmp_path):
    tables = make_tables(tmp_path, frames=3)
    contents = [fill(tables, block, block) for block in range(3)]
    assert tables.pool.frames.num_free_frames == 0
    assert tables.demote(1, NOTHING_HOT) is None
    assert not tables.make_exact([5])
    assert not tables.copy(0, 5)
    for block, content in enumerate(contents):
        assert_holds(tables, block, content)
    assert tables.warm_bytes == 0 and tables.is_exact([0, 1, 2]).all()


def test_pool_with_room_for_the_sketch_but_not_for_the_hot_pages_changes_nothing(tmp_path):
    tables = make_tables(tmp_path, frames=3)
    content = fill(tables, 0)
    fill(tables, 1)
    assert tables.demote(0, ALL_HOT) is None
    assert_holds(tables, 0, content)
    assert tables.pool.frames.num_used(Role.SKETCH) == tables.pool.frames.num_used(Role.PAGE) == 0
    assert tables.pool.frames.num_free_frames == 1


@pytest.mark.parametrize(("room", "warm"), [(0, 0), (1, 1), (2, 2), (3, 3), (5, 3)])
def test_full_warm_store_leaves_the_rest_of_a_block_cold(room, warm, tmp_path):
    tables = make_tables(tmp_path)
    tables.warm.num_slots = room
    content = fill(tables, 0)
    assert tables.demote(0, NOTHING_HOT) == 0
    assert (tables.warm_slot[0] >= 0).sum() == warm
    for layer in range(min(5, 2 * warm)):
        assert torch.equal(exact(tables, 0, layer, 0), content[layer, 0])
    if room < 3:
        assert not tables.has_warm_room
        assert not tables.save_unit(0, 2, np.zeros((1, 2), dtype=np.int64))


def test_windowed_layers_stay_hot_whatever_is_asked(tmp_path):
    shape = CacheShape(layers=5, kv_heads=2, head_dim=16, hidden_size=24, windowed_layers=(0, 3))
    tables = make_tables(tmp_path, shape=shape)
    content = fill(tables, 0)
    assert tables.demote(0, NOTHING_HOT) == 0
    assert (tables.hot_pages([0])[0].all(axis=1) == [True, False, False, True, False]).all()
    assert tables.cool(*pages_of(0, range(5))) == 0
    assert_holds(tables, 0, content)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", [0, 1])
def test_block_with_a_number_that_is_not_finite_stays_exact(half, value, tables):
    content = fill(tables, 0)
    slot = int(tables.pool.page_table[0, 3, 1])
    tables.pool.pages[slot, half, 7] = value
    content[3, 1, half, 7] = value
    assert tables.demote(0, ALL_HOT) == 1
    assert tables.is_exact([0])[0] and tables.warm_bytes == 0
    assert tables.pool.frames.num_used(Role.SKETCH) == tables.pool.frames.num_used(Role.PAGE) == 0
    page = exact(tables, 0, 3, 1)
    assert torch.equal(page.nan_to_num(0, 1, 2), content[3, 1].nan_to_num(0, 1, 2))


def test_what_is_given_back_is_poisoned(tables):
    fill(tables, 0)
    slots = tables.pool.page_table[0].long().clone()
    tables.demote(0, ALL_HOT)
    assert tables.pool.pages[slots].isnan().all(), "the exact block's old place"
    hot = tables.pool.page_table[0].long().clone()
    key_at, _ = tables.pool.sketch_addresses(int(tables.sketch_unit[0]))
    tables.free([0])
    assert tables.pool.pages[hot].isnan().all(), "the hot pages' slots"
    assert bytes_at(int(key_at[0]), 8).view(torch.float32).isnan().all(), "the sketch's side data"
    assert tables.warm_bytes == 0


def test_fresh_block_is_poisoned(tables):
    assert tables.make_exact([0])
    assert tables.pool.pages[tables.pool.page_table[0].long()].isnan().all()


def test_freed_block_is_in_no_table(tables):
    fill(tables, 0)
    tables.demote(0, ALL_HOT)
    tables.keep_checkpoint(0, 0, 0, torch.ones(PAGE, 24))
    tables.free([0])
    assert (tables.pool.page_table[0] == NO_PAGE).all()
    assert int(tables.pool.sketch_keys[0]) == int(tables.pool.sketch_values[0]) == NO_PAGE
    assert not tables.warm_address[0].any() and (tables.warm_slot[0] < 0).all()
    assert (tables.checkpoint_slot[0] < 0).all() and tables.checkpoint(0, 0) is None
    tables.free([0])  # what is empty stays so


def test_slots_that_are_lent_come_back(tmp_path):
    tables = make_tables(tmp_path, staging=8)
    content = fill(tables, 0)
    hot = NOTHING_HOT.copy()
    hot[2, 1] = True
    tables.demote(0, hot)
    before = tables.pool.page_table.clone()
    lent = tables.lend_slots(0, 2, 4, tables.staging[:4].reshape(2, 2))
    assert (tables.slots(0, 2, 4) == tables.staging[:4].reshape(2, 2)).all()
    tables.return_slots(0, 2, 4, lent)
    assert torch.equal(tables.pool.page_table, before)
    assert_holds(tables, 0, content)


def test_staging_survives_compaction(tmp_path):
    tables = make_tables(tmp_path, staging=3)
    for block in range(4):
        fill(tables, block, block)
        tables.demote(block, ALL_HOT)
    tables.free([0, 1, 2])
    tables.compact(Role.PAGE)
    assert len(set(tables.staging.tolist())) == 3
    assert not set(tables.staging.tolist()) & set(tables.pool.page_table[3].reshape(-1).tolist())


def test_staging_beyond_the_ceiling_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(CapacityError, match=r"no room to restore 2 blocks at a time.*recompute_budget"):
        make_tables(tmp_path, frames=2, staging=10_000)


def test_adopted_page_is_a_copy_of_its_slot(tmp_path):
    tables = make_tables(tmp_path, staging=2)
    content = fill(tables, 0)
    tables.demote(0, NOTHING_HOT)
    tables.release_unit(0, 0)
    tables.pool.pages[int(tables.staging[1])] = content[1, 0]
    assert tables.adopt_page(0, 1, 0, int(tables.staging[1]))
    tables.pool.pages[int(tables.staging[1])] = 0
    assert torch.equal(exact(tables, 0, 1, 0), content[1, 0])


def test_checkpoint_is_of_use_once_all_its_tokens_are_there_in_order(tables):
    rows = torch.randn(PAGE, 24)
    tables.keep_checkpoint(0, 1, 3, rows[3:])  # not from the beginning: no use
    assert tables.checkpoint(0, 1) is None and tables.warm_bytes == 0
    tables.keep_checkpoint(0, 1, 0, rows[:5])
    tables.keep_checkpoint(0, 1, 9, rows[9:])  # a gap
    assert tables.checkpoint(0, 1) is None
    tables.keep_checkpoint(0, 1, 5, rows[5:])
    assert torch.equal(tables.checkpoint(0, 1), rows)
    assert tables.checkpoint(0, 0) is None and tables.checkpoint(0, 2) is None


def test_checkpoints_are_copied_with_their_block(tables):
    rows = torch.randn(PAGE, 24)
    fill(tables, 0)
    tables.keep_checkpoint(0, 0, 0, rows)
    tables.keep_checkpoint(0, 1, 0, rows[:4])
    assert tables.copy(0, 1)
    tables.free([0])
    assert torch.equal(tables.checkpoint(1, 0), rows)
    tables.keep_checkpoint(1, 1, 4, rows[4:])
    assert torch.equal(tables.checkpoint(1, 1), rows)


@pytest.mark.parametrize("warm_blocks", [0.4, 0.7, 1, 1.5, 3.3, 8])
@pytest.mark.parametrize("kind", ["ram", "file"])
def test_units_and_checkpoints_together_stay_within_the_limit(kind, warm_blocks, tmp_path):
    tables = make_tables(tmp_path, warm_blocks=warm_blocks, warm_store=kind, frames=14)
    limit = int(warm_blocks * warm_bytes_per_block(SHAPE, CacheConfig(mode="adaptive", page_size=PAGE, recompute_layer_limit=2)))
    for block in range(12):
        fill(tables, block, block)
        for boundary in range(2):
            tables.keep_checkpoint(block, boundary, 0, torch.ones(PAGE, 24))
        assert tables.demote(block, NOTHING_HOT) == 0
        assert tables.warm_bytes <= limit
    assert tables.warm_bytes > 0.4 * limit
    tables.free(list(range(12)))
    assert tables.warm_bytes == 0
    tables.close()


def test_checkpoint_rows_of_many_blocks_are_those_of_each(tables):
    rows = torch.randn(2 * PAGE, 24, generator=torch.Generator().manual_seed(0))
    for offset in range(PAGE):
        # Block 1 missed its first token, block 2 begins in the middle of the step's rows.
        blocks = np.array([0, 2] if offset == 0 else [0, 1, 2])
        at = np.array([0, PAGE + offset] if offset == 0 else [offset, 1, PAGE + offset])
        tables.keep_checkpoint_rows(blocks, 0, np.full(len(blocks), offset), rows, at)
    assert torch.equal(tables.checkpoint(0, 0), rows[:PAGE])
    assert tables.checkpoint(1, 0) is None
    assert torch.equal(tables.checkpoint(2, 0), rows[PAGE:])


def test_memory_touched_ahead_holds_nothing_yet(tmp_path):
    tables = make_tables(tmp_path, frames=12)
    content = fill(tables, 0)
    used = tables.pool.frames.num_used_frames
    beyond = tables.pool.arena.view(-1, tables.pool.frame_bytes)[tables.pool.frames.num_touched :]
    beyond.fill_(1)
    for _ in range(20):
        tables.reserve(1, limit=2)
    touched = (beyond[:, 0] == 0).sum()
    assert 0 < touched <= 2, "no more than for the limit, and of free frames"
    assert tables.pool.frames.num_used_frames == used
    assert_holds(tables, 0, content)
    tables.pool.frames.check_invariants()


def test_many_blocks_are_freed_at_once_whatever_they_are(tables):
    frames = tables.pool.frames
    used = {role: frames.num_used(role) for role in Role}
    for block in range(6):
        fill(tables, block, seed=block)
    for block in (1, 2, 4):
        tables.demote(block, ALL_HOT if block == 2 else ~ALL_HOT)
    tables.keep_checkpoint(4, 0, 0, torch.ones(PAGE, 24))
    kept = exact(tables, 5, 0, 0)
    tables.free([0, 1, 2, 3, 4])
    assert torch.equal(exact(tables, 5, 0, 0), kept)
    tables.free([5])
    frames.check_invariants()
    assert {role: frames.num_used(role) for role in Role} == used
    assert tables.warm.num_used == tables.checkpoints.num_used == 0
    assert (tables.pool.page_table < 0).all() and not tables.num_hot.any() and not tables.warm_address.any()
    assert (tables.pool.sketch_keys < 0).all() and not tables.checkpoint_rows.any()
