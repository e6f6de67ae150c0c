"""The native kernel against the plain-torch reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_batches import LAYER, Case, make_case
from vera.attention.protocol import NO_PAGE, LayerAttention
from vera.attention.reference import ReferenceAttention

cpu = pytest.importorskip("vera.attention.cpu", reason="the native kernel is not built")

ISAS = cpu.available_isas()
BACKENDS = {isa: cpu.CpuAttention(isa) for isa in ISAS}
REFERENCE = ReferenceAttention()
# Both read the same rounded pages and compute in float32: only the order of the sums differs.
TOLERANCE = 2e-5


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_equals_reference(case: Case, isa: str) -> None:
    output, pages = case.run(BACKENDS[isa])
    expected, expected_pages = case.run(REFERENCE)
    torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(pages, expected_pages, atol=0, rtol=0, equal_nan=True)


def options(head_dim: int, heads: int, kind: str) -> LayerAttention:
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(3))
    return {
        "plain": LayerAttention(scale=head_dim**-0.5),
        "window": LayerAttention(scale=head_dim**-0.5, window=21),
        "softcap": LayerAttention(scale=1.0, softcap=2.5),
        "sinks": LayerAttention(scale=head_dim**-0.5, sinks=sinks),
        "all": LayerAttention(scale=0.7, window=37, softcap=5.0, sinks=sinks),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256])
def test_every_head_dim_and_page_dtype_equals_the_reference(isa: str, head_dim: int, dtype: torch.dtype) -> None:
    assert_equals_reference(make_case([(65, 1), (40, 11), (17, 1)], head_dim=head_dim, dtype=dtype), isa)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 64])
def test_every_group_size_equals_the_reference(isa: str, group: int) -> None:
    case = make_case([(50, 1), (33, 9)], group=group, head_dim=24, options=options(24, 2 * group, "sinks"))
    assert_equals_reference(case, isa)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("new_tokens", [1, 2], ids=["decode", "prefill"])
def test_contexts_around_page_and_span_borders_equal_the_reference(isa: str, page_size: int, new_tokens: int) -> None:
    lengths = [2, page_size - 1, page_size, page_size + 1, 2 * page_size, 511, 512, 513, 1025, 1100]
    assert_equals_reference(make_case([(length, new_tokens) for length in lengths], page_size=page_size), isa)


@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_option_equals_the_reference_in_a_mixed_batch(isa: str, kind: str, dtype: torch.dtype) -> None:
    sequences = [(1, 1), (600, 1), (90, 90), (300, 45), (17, 1), (64, 2), (21, 1), (22, 1)]
    assert_equals_reference(make_case(sequences, dtype=dtype, options=options(16, 6, kind)), isa)


def test_a_prompt_longer_than_a_tile_of_queries_equals_the_reference(isa: str) -> None:
    assert_equals_reference(make_case([(400, 400), (333, 200)], page_size=64, head_dim=64, kv_heads=1), isa)


def test_sequences_without_new_tokens_and_empty_batches_are_left_alone(isa: str) -> None:
    assert_equals_reference(make_case([(20, 0), (33, 1), (5, 0)]), isa)
    output, _ = make_case([(20, 0)]).run(BACKENDS[isa])
    assert output.shape == (0, 6, 16)


def test_strided_queries_keys_and_values_are_read_where_they_lie(isa: str) -> None:
    case = make_case([(40, 1), (30, 7)])
    strided = replace(
        case,
        query=case.query.transpose(0, 1).contiguous().transpose(0, 1),
        key=torch.cat([case.key, case.key + 1], dim=2)[:, :, : case.batch.head_dim],
        value=case.value.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert torch.equal(strided.run(BACKENDS[isa])[0], case.run(BACKENDS[isa])[0])


def test_large_logits_neither_overflow_nor_lose_precision(isa: str) -> None:
    case = make_case([(100, 1), (50, 20)], options=LayerAttention(scale=30.0))
    output, expected = case.run(BACKENDS[isa])[0], case.run(REFERENCE)[0]
    # Logits of several hundred: their own rounding error of 1e-5 is that of the weights.
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=0)


def test_a_nan_query_poisons_its_own_rows_only(isa: str) -> None:
    case = make_case([(100, 1), (50, 20)])
    case.query[0] = float("nan")
    case.query[5] = float("nan")
    output, _ = case.run(BACKENDS[isa])
    assert output[0].isnan().all() and output[5].isnan().all()
    assert output.isfinite().all(dim=(1, 2)).sum() == 19


AROUND_FLOAT16 = [65504.0, 65519.9, 65520.0, -1e9, 6e-8, 2.9e-8, 3.1e-8, 6.1e-5, 1 + 2**-11, 1 + 3 * 2**-11, 0.1]
AROUND_BFLOAT16 = [3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, -0.1, 7.7, 1e30, 3.3, 2.0, -3.0, 5.5]


@pytest.mark.parametrize(
    "dtype, values", [(torch.float16, AROUND_FLOAT16), (torch.bfloat16, AROUND_BFLOAT16)], ids=["float16", "bfloat16"]
)
def test_written_pages_are_rounded_to_nearest_even_like_torch(isa: str, dtype: torch.dtype, values: list[float]) -> None:
    case = make_case([(1, 1)], dtype=dtype, kv_heads=1)
    row = torch.tensor([*values, float("nan"), float("inf"), -float("inf"), 0.0, -0.0]).view(1, 1, 16)
    case = replace(case, key=row, value=-row)
    _, pages = case.run(BACKENDS[isa])
    _, expected = case.run(REFERENCE)
    torch.testing.assert_close(pages, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_a_sequence_gives_the_same_bits_alone_and_in_any_batch(isa: str, kind: str) -> None:
    case = make_case([(700, 1), (90, 40), (65, 1), (300, 7), (1500, 1)], page_size=64, head_dim=64, options=options(64, 6, kind))
    together, _ = case.run(BACKENDS[isa])
    for sequence in range(5):
        start, end = case.batch.query_starts[sequence : sequence + 2].tolist()
        alone, _ = case.only(sequence).run(BACKENDS[isa])
        assert torch.equal(alone, together[start:end])


def test_the_number_of_threads_does_not_change_a_bit(isa: str) -> None:
    case = make_case([(700, 1), (90, 40), (1300, 1)])
    with_two, _ = case.run(BACKENDS[isa])
    torch.set_num_threads(1)
    assert torch.equal(case.run(BACKENDS[isa])[0], with_two)


def test_prompt_chunks_of_any_size_above_one_give_the_same_bits(isa: str) -> None:
    case = make_case([(150, 150)], options=options(16, 6, "all"))
    whole, _ = case.run(BACKENDS[isa])
    batch = replace(case.batch, pages=case.batch.pages.clone())
    start = 0
    for size in (2, 97, 3, 48):
        end = start + size
        chunk = replace(
            batch,
            query_starts=torch.tensor([0, size], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
        )
        rows = slice(start, end)
        output = BACKENDS[isa].attend(chunk, LAYER, case.query[rows], case.key[rows], case.value[rows], case.options)
        assert torch.equal(output, whole[rows])
        start = end


@pytest.mark.parametrize("new_tokens", [1, 11, 3], ids=["decode", "whole prompt", "chunk"])
def test_a_window_of_four_sees_itself_and_three_tokens_before(isa: str, new_tokens: int) -> None:
    case = make_case([(11, new_tokens)], options=LayerAttention(scale=0.25, window=4))
    before = case.run(BACKENDS[isa])[0][-1]

    def after_change_of(position: int) -> torch.Tensor:
        changed = replace(case, key=case.key.clone(), value=case.value.clone())
        new = position - (11 - new_tokens)
        if new >= 0:
            changed.key[new] += 1
            changed.value[new] += 1
        else:
            slots = case.batch.page_table[case.batch.block_tables[0, 0], LAYER].long()
            pages = case.batch.pages.clone()
            pages[:, 0].view(-1, 16, 16)[slots, :, position] += 1
            pages[:, 1].view(-1, 16, 16)[slots, position] += 1
            changed = replace(changed, batch=replace(case.batch, pages=pages))
        return changed.run(BACKENDS[isa])[0][-1]

    assert torch.equal(after_change_of(6), before)
    assert not torch.equal(after_change_of(7), before)


def test_pages_below_the_window_may_be_gone(isa: str) -> None:
    case = make_case([(100, 1), (70, 5)], options=LayerAttention(scale=0.25, window=16))
    expected, _ = case.run(BACKENDS[isa])
    table = case.batch.page_table.clone()
    table[case.batch.block_tables[0, :5].long()] = NO_PAGE
    table[case.batch.block_tables[1, :3].long()] = NO_PAGE
    without = replace(case, batch=replace(case.batch, page_table=table))
    assert torch.equal(without.run(BACKENDS[isa])[0], expected)
    assert torch.equal(without.run(REFERENCE)[0], case.run(REFERENCE)[0])


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 320), st.integers(0, 40)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 10),
    head_dim=st.sampled_from([8, 24, 40, 64]),
    page_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    window=st.none() | st.integers(1, 330),
    softcap=st.none() | st.floats(0.5, 50),
    with_sinks=st.booleans(),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 1000),
)
def test_random_batches_equal_the_reference(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    isa: str,
    seed: int,
) -> None:
    sinks = torch.linspace(-2, 2, kv_heads * group) if with_sinks else None
    case = make_case(
        [(length, min(new, length)) for length, new in lengths],
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        options=LayerAttention(scale=head_dim**-0.5, window=window, softcap=softcap, sinks=sinks),
        seed=seed,
    )
    assert_equals_reference(case, isa)


def test_decode_calls_are_timed_and_their_bytes_counted() -> None:
    backend = cpu.CpuAttention()
    make_case([(100, 1), (50, 1)], dtype=torch.float16).run(backend)
    assert backend.decode_bytes_read == 150 * 2 * 2 * 16 * 2  # tokens, kv heads, keys and values, head_dim, bytes
    assert 0 < backend.decode_seconds == backend.seconds
    make_case([(100, 1), (50, 2)]).run(backend)
    assert backend.decode_bytes_read == 150 * 2 * 2 * 16 * 2
    assert backend.decode_seconds < backend.seconds


def test_plain_sum_reads_every_word_on_any_number_of_threads() -> None:
    buffer = torch.arange(3_000_001, dtype=torch.int64)
    for threads in (1, 2, 3):
        assert cpu.plain_sum(buffer, threads) == 3_000_000 * 3_000_001 // 2


def test_the_kernel_runs_on_torchs_own_threads() -> None:
    if not torch.backends.openmp.is_available():
        pytest.skip("this torch has no OpenMP runtime")
    assert "omp" in cpu.threads_runtime()


def test_without_an_openmp_runtime_a_pool_of_our_own_serves() -> None:
    script = (
        "import importlib.machinery, importlib.util, ctypes, sys\n"
        "loader = importlib.machinery.ExtensionFileLoader('vera._native', sys.argv[1])\n"
        "native = importlib.util.module_from_spec(importlib.util.spec_from_loader('vera._native', loader))\n"
        "loader.exec_module(native)\n"
        "words = (ctypes.c_int64 * 1_000_000)(*range(1_000_000))\n"
        "for threads in (1, 2, 4, 3):\n"
        "    assert native.plain_sum(ctypes.addressof(words), ctypes.sizeof(words), threads) == 499_999_500_000\n"
        "print(native.threads_runtime())\n"
    )
    from vera import _native

    result = subprocess.run([sys.executable, "-c", script, _native.__file__], capture_output=True, text=True, timeout=60)
    assert result.stdout == "std::thread\n", result.stderr


@pytest.mark.parametrize("wanted", ISAS)
def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("VERA_CPU_ISA", wanted)
    assert cpu.CpuAttention().isa == wanted
