"""Tiered attention in plain torch: what it serves, what it estimates, what it reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tier_batches import LAYER, TierCase, make_tier_case
from vera.attention.protocol import NO_PAGE, LayerAttention, TierReport
from vera.attention.reference import ReferenceAttention
from vera.attention.sketch import read_header, read_key_steps, sketch_pages

BACKEND = ReferenceAttention()
HUGE = 1e6
"""A tolerance that nothing exceeds."""

EXACT, BY_SKETCH, LEFT_OUT, COLD_HITS = range(4)
"""Places in `TierReport.pages_read`."""


def rows_of(case: TierCase, sequence: int) -> slice:
    return slice(*case.batch.query_starts[sequence : sequence + 2].tolist())


def assert_equal(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


def assert_nothing_reported(report: TierReport, *, but_attention: bool = False) -> None:
    assert not report.hits and not report.errors.any() and not report.pages_read.any()
    if not but_attention:
        assert not report.masses.any() and not report.frequencies.any()


def true_errors(case: TierCase, output: Tensor) -> Tensor:
    """How far each sequence's one new token with one head is from exact attention, in units of `N`."""
    return torch.cat([(output[row] - case.dense(row)).norm() / case.norm(row) for row in range(len(output))])


# What is served


@pytest.mark.parametrize("tolerance", [0.0, 0.02, HUGE])
def test_with_all_pages_hot_the_output_is_native_and_the_error_zero(tolerance: float) -> None:
    case = make_tier_case([(200, 1, tolerance), (131, 1, tolerance)], hot_share=1.0)
    output, report = case.run(BACKEND)
    assert_equal(output, case.native(BACKEND))
    assert report.errors.tolist() == [[0.0, 0.0, 6.0]] * 2
    assert report.pages_read.tolist() == [(13 + 9) * 2, 0, 0, 0] and not report.hits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_with_a_huge_tolerance_the_output_is_that_of_what_the_sketches_say(dtype: torch.dtype, bits: int) -> None:
    case = make_tier_case([(200, 1, HUGE), (131, 1, HUGE)], dtype=dtype, bits=bits, head_dim=32)
    output, report = case.run(BACKEND)
    assert_equal(output, torch.cat([case.dense(sequence, case.by_sketch(sequence)) for sequence in range(2)]))
    assert not torch.allclose(output, case.native(BACKEND), atol=1e-4)
    sketched = sum(int(case.by_sketch(sequence).sum()) for sequence in range(2))
    assert report.pages_read[BY_SKETCH] == sketched and not report.hits


@pytest.mark.parametrize("window_layers", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_with_tolerance_zero_every_page_is_hit_and_the_output_is_exact(dtype: torch.dtype, window_layers: int) -> None:
    case = make_tier_case([(200, 1, 0.0)], cold_share=0.0, dtype=dtype, window_layers=window_layers)
    output, report = case.run(BACKEND)
    assert_equal(output, case.native(BACKEND))
    hit = report.frequencies[case.tiers.report_rows[0], LAYER, :, :13].T
    assert hit[case.by_sketch(0)].all() and hit.any()
    # Hot pages would have been hit as well, those of blocks that have sketches.
    blocks = case.batch.block_tables[0, :13].long()
    assert torch.equal(hit, (case.tiers.sketch_keys[blocks] >= 0)[:, None].expand_as(hit).float())
    assert report.errors.tolist() == [[0.0, 0.0, 6.0]]


@pytest.mark.parametrize("options", [LayerAttention(0.25, softcap=3.0), LayerAttention(0.25, sinks=torch.arange(6.0))])
def test_softcap_and_sinks_act_on_tiered_pages_too(options: LayerAttention) -> None:
    case = make_tier_case([(200, 1, 0.0)], cold_share=0.0).with_options(options)
    output, report = case.run(BACKEND)
    assert_equal(output, case.native(BACKEND))
    assert report.pages_read.tolist() == [26, 0, 0, 0]


def test_a_sink_takes_its_share_from_the_masses() -> None:
    case = make_tier_case([(200, 1, HUGE)], kv_heads=1, group=1)
    row = case.tiers.report_rows[0]
    without = case.run(BACKEND)[1].masses[row, LAYER, 0]
    keys, _ = case.keys_and_values(0, case.by_sketch(0))
    total = (case.query[0] @ keys[0].T * case.options.scale).exp().sum()
    sink = 4.0
    report = case.with_options(replace(case.options, sinks=torch.tensor([sink]))).run(BACKEND)[1]
    torch.testing.assert_close(report.masses[row, LAYER, 0], without * total / (total + torch.tensor(sink).exp()))


def test_a_negative_tolerance_reads_warm_pages_to_the_last_bit() -> None:
    case = make_tier_case([(200, 1, -1.0), (131, 1, -1.0), (90, 7, -1.0)], cold_share=0.0)
    output, report = case.run(BACKEND)
    assert torch.equal(output, case.native(BACKEND))
    assert_nothing_reported(report)


def test_a_sequence_without_sketches_is_served_exactly_whatever_its_tolerance() -> None:
    case = make_tier_case([(200, 1, HUGE)], cold_share=0.0)
    nothing = torch.full_like(case.tiers.sketch_keys, NO_PAGE)
    output, report = case.with_tiers(sketch_keys=nothing, sketch_values=nothing).run(BACKEND)
    assert torch.equal(output, case.native(BACKEND))
    assert_nothing_reported(report)


def test_a_layer_with_a_window_is_served_exactly_whatever_the_tolerance() -> None:
    case = make_tier_case([(200, 1, HUGE)], cold_share=0.0).with_options(LayerAttention(0.25, window=100))
    output, report = case.run(BACKEND)
    assert torch.equal(output, case.native(BACKEND))
    assert_nothing_reported(report)


@pytest.mark.parametrize("new", [2, 16, 40])
def test_a_part_of_a_prompt_is_served_exactly_whatever_the_tolerance(new: int) -> None:
    case = make_tier_case([(200, new, HUGE)], cold_share=0.0)
    output, report = case.run(BACKEND)
    assert torch.equal(output, case.native(BACKEND))
    assert_nothing_reported(report)


def test_a_part_of_a_prompt_reads_cold_pages_through_their_sketch() -> None:
    case = make_tier_case([(200, 5, HUGE)], cold_share=0.5)
    assert case.cold(0).any()
    output, report = case.run(BACKEND)
    assert_equal(output, case.dense(0, case.cold(0)))
    assert_nothing_reported(report)


@pytest.mark.parametrize("tolerance", [0.0, HUGE])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 49])
def test_page_borders(length: int, tolerance: float) -> None:
    case = make_tier_case([(length, 1, tolerance)], hot_share=0.0, cold_share=0.0, first_exact=0, last_exact=0)
    output, report = case.run(BACKEND)
    sealed = (length - 1) // 16
    assert_equal(output, case.dense(0, case.by_sketch(0) if tolerance else None))
    pages = -(-length // 16) * 2
    by_sketch = sealed * 2 if tolerance else 0
    assert report.pages_read.tolist() == ([pages - by_sketch, by_sketch, 0, 0] if sealed else [0, 0, 0, 0])


def test_sequences_of_all_kinds_are_served_as_if_they_were_alone() -> None:
    case = make_tier_case([(200, 1, 0.01), (60, 9, 0.01), (90, 1, 0.0), (131, 1, HUGE), (20, 20, 0.05)], probes=[0, 3, 0, 0, 0])
    output, report = case.run(BACKEND)
    for sequence in range(5):
        alone, its_report = case.only(sequence).run(BACKEND)
        assert torch.equal(output[rows_of(case, sequence)], alone)
        row = case.tiers.report_rows[sequence]
        assert torch.equal(report.masses[row], its_report.masses[row])
        assert torch.equal(report.errors[sequence], its_report.errors[0])


def test_nothing_unwritten_is_ever_read() -> None:
    case = make_tier_case([(200, 1, 0.01), (17, 1, 0.01), (90, 6, 0.01)], probes=[0, 0, 6])
    output, report = case.run(BACKEND)
    assert output.isfinite().all() and report.masses.isfinite().all() and report.errors.isfinite().all()


# How far off it is


@pytest.mark.parametrize("bits, concentration", [(2, 4.0), (4, 0.0), (4, 6.0), (4, 12.0), (8, 6.0)])
def test_the_estimated_error_is_near_the_true_one(bits: int, concentration: float) -> None:
    case = make_tier_case(
        [(300, 1, HUGE)] * 64, head_dim=32, kv_heads=1, group=1, bits=bits, concentration=concentration, seed=bits
    )
    output, report = case.run(BACKEND)
    ratios = report.errors[:, 0] / true_errors(case, output)
    assert 1.0 <= float(ratios.median()) <= 2.0
    assert float((ratios < 1 / 3).double().mean()) <= 0.03
    assert float((ratios > 5).double().mean()) <= 0.03


@pytest.mark.parametrize("tolerance", [0.003, 0.01])
def test_after_hits_the_estimated_error_is_within_the_tolerance(tolerance: float) -> None:
    case = make_tier_case([(300, 1, tolerance)] * 16, cold_share=0.0)
    _, report = case.run(BACKEND)
    assert report.hits
    assert (report.errors[:, 1] <= tolerance * (1 + 1e-6)).all() and (report.errors[:, 1] > 0).any()


def test_a_tolerance_leaves_an_error_of_its_size_at_most() -> None:
    tolerance = 0.005
    case = make_tier_case([(300, 1, tolerance)] * 64, cold_share=0.0, kv_heads=1, group=1, concentration=8.0)
    output, _ = case.run(BACKEND)
    errors = true_errors(case, output)
    assert float((errors > tolerance).double().mean()) <= 0.03 and float(errors.max()) <= 3 * tolerance


def test_the_pages_with_the_largest_errors_are_hit_until_half_the_tolerance_is_left() -> None:
    case = make_tier_case([(600, 1, HUGE)], cold_share=1.0, hot_share=0.0, kv_heads=1, group=1)
    blocks = case.blocks(0)
    sketched = case.by_sketch(0)[:, 0]
    keys, _ = case.keys_and_values(0, case.by_sketch(0))
    query = case.query[0, 0] * case.options.scale
    squares = torch.softmax(keys[0] @ query, dim=0).square().split(16)
    errors = {}
    for block in sketched.nonzero().flatten().tolist():
        key_part, _, _ = sketch_pages(case.exact[blocks[block]], case.format)
        nu, var_v = read_header(key_part)
        var_k = (query * read_key_steps(key_part, case.format)).square().sum() / 12
        errors[block] = float(squares[block].sum() * (var_k * nu**2 + var_v))
    estimate = sum(errors.values()) ** 0.5
    _, report = case.run(BACKEND)
    assert float(report.errors[0, 0]) == pytest.approx(estimate / float(case.norm(0)), rel=1e-4)

    tolerance = estimate / float(case.norm(0)) * 0.7
    _, report = case.with_tolerance(tolerance).run(BACKEND)
    hit = torch.cat(report.hits)[:, 3].tolist()
    largest = sorted(errors, key=errors.__getitem__, reverse=True)
    assert sorted(hit) == sorted(largest[: len(hit)])
    allowed = (0.35 * estimate) ** 2
    assert sum(errors[block] for block in largest[len(hit) :]) <= allowed
    assert sum(errors[block] for block in largest[len(hit) - 1 :]) > allowed


def test_a_page_is_exact_for_all_heads_of_its_group_once_one_of_them_hits_it() -> None:
    case = make_tier_case([(300, 1, 0.006)], cold_share=0.0, concentration=8.0)
    output, report = case.run(BACKEND)
    hits = torch.cat(report.hits)
    assert len(hits.unique(dim=0)) == len(hits)
    by_sketch = case.by_sketch(0)
    by_sketch[hits[:, 3].long(), hits[:, 2].long()] = False
    assert by_sketch.any()
    assert_equal(output, case.dense(0, by_sketch))


def test_a_head_within_its_tolerance_hits_nothing() -> None:
    case = make_tier_case([(300, 1, HUGE)], hot_share=0.0, cold_share=1.0, kv_heads=1, group=2)
    loud, calm = 4 * case.query[:, :1], case.query[:, 1:]
    estimate = float(replace(case, query=calm.repeat(1, 2, 1)).run(BACKEND)[1].errors[0, 1])
    case = case.with_tolerance(estimate * 1.2)
    _, of_both = replace(case, query=torch.cat([loud, calm], dim=1)).run(BACKEND)
    _, of_loud = replace(case, query=loud.repeat(1, 2, 1)).run(BACKEND)
    assert torch.equal(torch.cat(of_both.hits), torch.cat(of_loud.hits))


# Cold pages


def test_cold_pages_that_are_hit_are_reported_and_stay_sketched() -> None:
    case = make_tier_case([(200, 1, 0.0), (131, 1, 0.0)], cold_share=0.5)
    output, report = case.run(BACKEND)
    cold = [case.cold(sequence) for sequence in range(2)]
    assert_equal(output, torch.cat([case.dense(sequence, cold[sequence]) for sequence in range(2)]))
    assert len(report.hits) == 1 and report.hits[0].dtype == torch.int32
    listed = {tuple(hit) for hit in report.hits[0].tolist()}
    expected = {
        (sequence, LAYER, head, block, int(cold[sequence][block, head]))
        for sequence in range(2)
        for block, head in case.by_sketch(sequence).nonzero().tolist()
    }
    assert listed == expected and len(report.hits[0]) == len(listed)
    assert report.pages_read[COLD_HITS] == report.pages_read[BY_SKETCH] == cold[0].sum() + cold[1].sum() > 0


def test_the_reported_error_counts_cold_pages_that_were_hit() -> None:
    case = make_tier_case([(200, 1, 0.001)], cold_share=1.0, hot_share=0.0)
    _, report = case.run(BACKEND)
    _, by_sketch = case.with_tolerance(HUGE).run(BACKEND)
    assert report.pages_read[COLD_HITS] > 0
    assert torch.equal(report.errors, by_sketch.errors) and float(report.errors[0, 1]) > 0.001


def test_a_cold_page_that_was_hit_makes_no_other_page_be_hit() -> None:
    case = make_tier_case([(300, 1, HUGE)], hot_share=0.0, cold_share=0.0, kv_heads=1, group=1, aligned_share=0.0)
    case = replace(case, query=10 * case.query)
    _, by_sketch = case.run(BACKEND)
    masses = by_sketch.masses[case.tiers.report_rows[0], LAYER, 0]
    block, estimate = int(masses.argmax()), float(by_sketch.errors[0, 0])
    assert float(masses[block]) > 0.7  # and so has nearly all of the error
    warm = case.tiers.warm.clone()
    warm[case.blocks(0)[block]] = 0
    _, report = case.with_tiers(warm=warm).with_tolerance(estimate * 0.8).run(BACKEND)
    assert torch.cat(report.hits).tolist() == [[0, LAYER, 0, block, 1]]
    assert float(report.errors[0, 0]) == estimate


@pytest.mark.parametrize("new", [1, 4])
def test_a_cold_page_of_a_sequence_that_is_served_exactly_is_refused(new: int) -> None:
    case = make_tier_case([(40, 1, 0.1), (200, new, -1.0)], cold_share=0.5)
    before = case.tiers.arena.clone()
    with pytest.raises(IndexError, match=rf"sequence 1, layer {LAYER}: block \d+, KV head \d is NO_PAGE.*cold.*restore it first"):
        BACKEND.attend(case.batch, LAYER, case.query, case.key, case.value, case.options)
    assert torch.equal(case.tiers.arena, before)


def test_a_cold_page_is_refused_inside_a_window_and_not_needed_before_it() -> None:
    case = make_tier_case([(200, 1, HUGE)], cold_share=0.0, hot_share=0.0).with_options(LayerAttention(0.25, window=40))
    for block, refused in ((9, False), (10, True)):  # the window begins at token 160
        warm = case.tiers.warm.clone()
        warm[case.blocks(0)[block]] = 0
        released = case.with_tiers(warm=warm)
        if refused:
            with pytest.raises(IndexError, match=r"block 10, KV head 0.*cold"):
                released.run(BACKEND)
        else:
            assert torch.equal(released.run(BACKEND)[0], case.native(BACKEND))


@pytest.mark.parametrize("tolerance", [HUGE, -1.0])
def test_a_page_that_is_nowhere_is_refused(tolerance: float) -> None:
    case = make_tier_case([(200, 1, tolerance)], cold_share=0.0, hot_share=0.0)
    block = case.blocks(0)[4]
    changed = {name: getattr(case.tiers, name).clone() for name in ("warm", "sketch_keys", "sketch_values")}
    for name, nothing in (("warm", 0), ("sketch_keys", NO_PAGE), ("sketch_values", NO_PAGE)):
        changed[name][block] = nothing
    with pytest.raises(IndexError, match="block 4, KV head 0 is NO_PAGE"):
        case.with_tiers(**changed).run(BACKEND)


@pytest.mark.parametrize("tolerance", [HUGE, -1.0])
def test_a_page_that_is_written_needs_a_slot(tolerance: float) -> None:
    case = make_tier_case([(200, 1, tolerance)], cold_share=0.0)
    page_table, warm = case.batch.page_table.clone(), case.tiers.warm.clone()
    page_table[case.blocks(0)[-1], LAYER, 1] = NO_PAGE
    warm[case.blocks(0)[-1]] = case.warm.data_ptr()
    case = case.with_tiers(warm=warm)
    case = replace(case, batch=replace(case.batch, page_table=page_table))
    with pytest.raises(IndexError, match="block 12, KV head 1 is NO_PAGE in page_table, but the block is needed"):
        case.run(BACKEND)


def test_warm_pages_without_a_sketch_are_read_where_they_lie() -> None:
    case = make_tier_case([(200, 1, HUGE)], cold_share=0.0, hot_share=0.0)
    tables = {name: getattr(case.tiers, name).clone() for name in ("sketch_keys", "sketch_values")}
    for table in tables.values():
        table[case.blocks(0)[:6]] = NO_PAGE
    case = case.with_tiers(**tables)
    output, report = case.run(BACKEND)
    assert_equal(output, case.dense(0, case.by_sketch(0)))
    assert report.pages_read.tolist() == [7 * 2, 6 * 2, 0, 0]


# Values that are left out


def test_values_left_out_cost_no_more_than_their_budget() -> None:
    tolerance, share = 0.1, 0.5
    case = make_tier_case([(600, 1, tolerance)], concentration=10.0, cold_share=0.0)
    complete, full_report = case.run(BACKEND)
    output, report = case.with_tiers(skip_share=share).run(BACKEND)
    assert full_report.pages_read[LEFT_OUT] == 0 < report.pages_read[LEFT_OUT]
    lost = (output - complete).norm(dim=-1).view(2, 3) / case.norm(0)[:, None]
    assert 0 < float(lost.max()) <= tolerance * share * 1.02  # the values of a sketch may be a little longer than nu
    grown = report.errors[0, 0] - full_report.errors[0, 0]
    assert float(lost.sum()) <= float(grown) <= 6 * tolerance * share
    assert torch.equal(report.masses, full_report.masses)


def test_the_cheapest_pages_are_left_out_for_all_heads_of_a_group() -> None:
    case = make_tier_case([(600, 1, 0.1)], concentration=10.0, cold_share=0.0, hot_share=0.0, group=1, kv_heads=1)
    _, report = case.with_tiers(skip_share=0.5).run(BACKEND)
    masses = report.masses[case.tiers.report_rows[0], LAYER, 0, :38].double()
    nu = case.exact[case.blocks(0), 0, 1].float().view(-1, 16, 16).norm(dim=-1).amax(-1).double()
    costs = (masses * nu)[case.tiers.sketch_keys[case.blocks(0)] != NO_PAGE].sort().values
    assert report.pages_read[LEFT_OUT] == (costs.cumsum(0) <= 0.05 * float(case.norm(0))).sum()


def test_the_values_of_pages_that_are_left_out_are_not_read() -> None:
    case = make_tier_case([(600, 1, 0.1)], concentration=10.0, hot_share=0.0, group=1, kv_heads=1)
    case = case.with_tiers(skip_share=0.5)
    output, report = case.run(BACKEND)
    masses = report.masses[case.tiers.report_rows[0], LAYER, 0, : len(case.blocks(0))]
    sketched = case.tiers.sketch_keys[case.blocks(0)] != NO_PAGE
    least = case.blocks(0)[masses.masked_fill(~sketched, 1).argmin()]
    start = int(case.tiers.sketch_values[least]) + LAYER * case.tiers.sketch_stride
    case.tiers.arena[start : start + case.format.value_bytes] = 0xFF
    assert torch.equal(case.run(BACKEND)[0], output)


def test_values_of_pages_without_a_sketch_are_never_left_out() -> None:
    case = make_tier_case([(200, 1, 10.0)], hot_share=0.5, hot_sketches=False).with_tiers(skip_share=1.0)
    _, report = case.run(BACKEND)
    sketched = case.tiers.sketch_keys[case.blocks(0)] != NO_PAGE
    assert report.pages_read[LEFT_OUT] == 2 * sketched.sum()


# The report


def test_masses_are_what_the_pages_weigh() -> None:
    case = make_tier_case([(200, 1, HUGE), (131, 1, HUGE)], kv_heads=1, group=3)
    _, report = case.run(BACKEND)
    for sequence, query in enumerate(case.query):
        keys, _ = case.keys_and_values(sequence, case.by_sketch(sequence))
        weights = torch.softmax(query @ keys[0].T * case.options.scale, dim=-1)
        expected = [page.sum(dim=1).max() for page in weights.split(16, dim=1)]
        masses = report.masses[case.tiers.report_rows[sequence], LAYER, 0]
        assert_equal(masses[: len(expected)], torch.stack(expected))
        assert not masses[len(expected) :].any()
    unused = set(range(3)) - set(case.tiers.report_rows.tolist())
    assert not report.masses[list(unused)].any() and not report.masses[:, :LAYER].any()


def test_reports_of_several_layers_add_up() -> None:
    case = make_tier_case([(200, 1, 0.003)])
    _, once = case.run(BACKEND)
    report = case.tiers.report
    for _ in range(2):
        BACKEND.attend(case.batch, LAYER, case.query, case.key, case.value, case.options)
    assert torch.equal(report.masses, 2 * once.masses) and torch.equal(report.frequencies, 2 * once.frequencies)
    assert torch.equal(report.pages_read, 2 * once.pages_read) and len(report.hits) == 2
    assert report.errors[0].tolist() == [2 * once.errors[0, 0], once.errors[0, 1], 12]


def test_run_again_a_layer_reports_nothing() -> None:
    case = make_tier_case([(200, 1, 0.003), (90, 5, 0.003)], probes=[0, 5])
    output, report = case.run(BACKEND)
    again, nothing = case.run(BACKEND, again=True)
    assert report.hits and torch.equal(again, output)
    assert_nothing_reported(nothing)


def test_run_again_after_its_cold_pages_were_restored_a_layer_is_within_bounds() -> None:
    case = make_tier_case([(300, 1, 0.003)], cold_share=0.4, kv_heads=1, group=1, seed=2)
    _, report = case.run(BACKEND)
    cold = torch.cat(report.hits)
    cold = case.blocks(0)[cold[cold[:, 4] == 1, 3].long()]
    restored = case.exact[cold].contiguous()
    warm = case.tiers.warm.clone()
    warm[cold, LAYER // 2] = restored.data_ptr() + torch.arange(len(cold)) * restored[0].nbytes - restored[0].nbytes
    _, after = case.with_tiers(warm=warm).run(BACKEND)
    assert len(cold) and float(after.errors[0, 1]) <= 0.003 < float(report.errors[0, 1])


# Probes


def test_probes_leave_the_output_alone_and_list_no_hits() -> None:
    case = make_tier_case([(200, 9, 0.003), (90, 4, 0.003)], cold_share=0.3)
    output, nothing = case.run(BACKEND)
    probed, report = case.with_tiers(probes=torch.tensor([4, 64], dtype=torch.int32)).run(BACKEND)
    assert torch.equal(probed, output)
    assert_nothing_reported(nothing)
    assert_nothing_reported(report, but_attention=True)
    assert report.frequencies.any()


@pytest.mark.parametrize("tolerance", [0.003, HUGE])
def test_a_probe_records_what_a_decode_row_would(tolerance: float) -> None:
    case = make_tier_case([(206, 4, tolerance)], hot_share=0.0, cold_share=0.3, probes=[1])
    _, probed = case.run(BACKEND)
    BACKEND.attend(case.batch, LAYER, case.query, case.key, case.value, case.options)  # writes the other new tokens
    batch = replace(case.batch, query_starts=torch.tensor([0, 1], dtype=torch.int32))
    last = replace(case, batch=batch, query=case.query[-1:], key=case.key[-1:], value=case.value[-1:])
    _, decoded = last.run(BACKEND)
    torch.testing.assert_close(probed.masses, decoded.masses)
    assert torch.equal(probed.frequencies, decoded.frequencies)
    assert probed.masses.any() and probed.frequencies.any() == (tolerance < HUGE)


def test_probes_treat_hot_pages_as_sketched() -> None:
    case = make_tier_case([(200, 3, 0.0)], hot_share=1.0, probes=[3])
    _, report = case.run(BACKEND)
    frequencies = report.frequencies[case.tiers.report_rows[0], LAYER, :, :13]
    sketched = case.tiers.sketch_keys[case.blocks(0)] != NO_PAGE
    assert torch.equal(frequencies, 3.0 * sketched.expand(2, -1))


def test_a_probe_sees_no_token_after_its_own() -> None:
    case = make_tier_case([(56, 24, HUGE)], first_exact=0, kv_heads=1, group=1, probes=[24])
    _, report = case.run(BACKEND)
    masses = report.masses[case.tiers.report_rows[0], LAYER, 0]
    assert float(masses.sum()) == pytest.approx(24, rel=1e-5)
    visible = torch.arange(56) <= torch.arange(32, 56)[:, None]
    keys, _ = case.keys_and_values(0, (case.tiers.sketch_keys[case.blocks(0)] != NO_PAGE)[:, None])
    logits = case.query[:, 0] @ keys[0].T * case.options.scale
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1)
    assert_equal(masses[:4], torch.stack([page.sum() for page in weights.split(16, dim=1)]))


@pytest.mark.parametrize("tolerance, window", [(-1.0, None), (0.01, 200)], ids=["negative tolerance", "window"])
def test_there_are_no_probes_where_all_is_served_exactly(tolerance: float, window: int | None) -> None:
    case = make_tier_case([(200, 5, tolerance)], cold_share=0.0, probes=[5])
    _, report = case.with_options(LayerAttention(0.25, window=window)).run(BACKEND)
    assert_nothing_reported(report)


# What is refused


def int64(*values: int) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"arena": torch.zeros(1 << 20, dtype=torch.uint8)}, "pages are not a view of the arena of 1048576 bytes"),
        ({"arena": torch.zeros(64)}, "arena is torch.float32"),
        ({"sketch_bits": 3}, "sketch_bits=3 is not one of 2, 4, 8"),
        ({"sketch_keys": int64(1, 2)}, r"sketch_keys is torch.int64 of shape \[2\]"),
        ({"sketch_keys": torch.zeros(9, dtype=torch.int32)}, "sketch_keys is torch.int32.*contiguous int64"),
        (
            {"sketch_keys": torch.full((9,), -2), "sketch_values": torch.zeros(9, dtype=torch.int64)},
            "sketch_keys lie from byte -2",
        ),
        ({"sketch_values": torch.full((9,), NO_PAGE)}, "not NO_PAGE for the same blocks"),
        ({"sketch_stride": 16}, "sketch_stride=16 is below"),
        ({"sketch_stride": 2**40}, "sketch_keys lie from byte .* must be NO_PAGE or from 0 to"),
        ({"warm": torch.zeros(9, 2, dtype=torch.int64)}, r"warm is torch.int64 of shape \[9, 2\].*\[9, 3\]"),
        ({"window_layers": 0}, "window_layers=0 must be at least 1"),
        ({"tolerances": torch.zeros(2, dtype=torch.float64)}, "tolerances is torch.float64"),
        ({"tolerances": torch.tensor([0.1, float("nan")])}, "tolerances are .*nan.* must be finite"),
        ({"skip_share": -0.1}, "skip_share=-0.1"),
        ({"probes": torch.tensor([1, -1], dtype=torch.int32)}, "probes are .*-1"),
        ({"probes": int64(1, 1)}, "probes is torch.int64"),
        ({"report_rows": torch.tensor([0, 3], dtype=torch.int32)}, r"report_rows are \[0, 3\].* from 0 to 2"),
    ],
)
def test_tiers_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    case = make_tier_case([(60, 1, 0.1), (48, 2, 0.1)]).with_tiers(**changes)
    with pytest.raises(ValueError, match=message):
        BACKEND.attend(case.batch, LAYER, case.query, case.key, case.value, case.options)


@pytest.mark.parametrize("name", ["sketch_keys", "sketch_values"])
def test_a_sketch_that_ends_behind_the_arena_is_refused(name: str) -> None:
    case = make_tier_case([(60, 1, 0.1)])
    starts = getattr(case.tiers, name).clone()
    sketched = starts != NO_PAGE
    part = case.format.key_bytes if name == "sketch_keys" else case.format.value_bytes
    last = (5 * 2 - 1) * case.tiers.sketch_stride  # of five layers, two KV heads
    starts[sketched] = case.tiers.arena.nbytes - last - part
    case.with_tiers(**{name: starts}).run(BACKEND)
    starts[sketched] += 1
    with pytest.raises(ValueError, match=f"{name} lie from byte"):
        case.with_tiers(**{name: starts}).run(BACKEND)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"masses": torch.zeros(3, 5, 2, 4)}, "report.masses has room for 4 blocks; block_tables holds 5"),
        ({"masses": torch.zeros(3, 5, 1, 5)}, "report.masses is"),
        ({"frequencies": torch.zeros(2, 5, 2, 5)}, "report.frequencies is"),
        ({"errors": torch.zeros(2, 3)}, "report.errors is torch.float32"),
        ({"errors": torch.zeros(1, 3, dtype=torch.float64)}, "report.errors"),
        ({"pages_read": torch.zeros(3, dtype=torch.int64)}, "report.pages_read"),
    ],
)
def test_a_report_that_does_not_fit_is_refused(changes: dict[str, Tensor], message: str) -> None:
    case = make_tier_case([(60, 1, 0.1), (48, 2, 0.1)])
    case = case.with_tiers(report=replace(case.tiers.report, **changes))
    with pytest.raises(ValueError, match=message):
        BACKEND.attend(case.batch, LAYER, case.query, case.key, case.value, case.options)
