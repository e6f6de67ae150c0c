"""Sketches: the bytes as they are documented, and how far what is read lies from what was sketched."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from vera.attention.sketch import (
    SketchFormat,
    pack,
    read_header,
    read_key_steps,
    read_keys,
    read_values,
    sketch_pages,
    unpack,
)

BITS = [2, 4, 8]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def random_pages(fmt: SketchFormat, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 2, fmt.page_size * fmt.head_dim, generator=generator).to(dtype)


def halves_of(pages: Tensor, fmt: SketchFormat) -> tuple[Tensor, Tensor]:
    """Keys `[n, head_dim, page_size]` and values `[n, page_size, head_dim]` in float32."""
    pages = pages.float()
    return pages[:, 0].view(-1, fmt.head_dim, fmt.page_size), pages[:, 1].view(-1, fmt.page_size, fmt.head_dim)


def one_page(fmt: SketchFormat, *, key: float = 0.0, value: float = 0.0) -> Tensor:
    pages = torch.zeros(1, 2, fmt.page_size * fmt.head_dim)
    pages[:, 0], pages[:, 1] = key, value
    return pages


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("summed, vector", [(16, 16), (64, 16), (48, 128)])
def test_levels_come_back_from_their_bytes(bits: int, summed: int, vector: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    levels = torch.randint(2**bits, (3, summed, vector), dtype=torch.uint8, generator=generator)
    packed = pack(levels, bits)
    assert packed.shape == (3, summed * vector * bits // 8)
    assert torch.equal(unpack(packed, summed, vector, bits), levels)


@pytest.mark.parametrize("bits", BITS)
def test_each_level_lies_at_the_documented_bits(bits: int) -> None:
    summed, vector, sharing = 32, 16, 8 // bits
    levels = torch.randint(2**bits, (1, summed, vector), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack(levels, bits)[0].tolist()
    for n in range(summed):
        for v in range(vector):
            plane, j = divmod(n, 4)
            byte = packed[(plane // sharing * vector + v) * 4 + j]
            assert (byte >> (bits * (plane % sharing))) % 2**bits == levels[0, n, v]


def test_4_bit_keys_lie_at_the_documented_bytes() -> None:
    fmt = SketchFormat(page_size=16, head_dim=32, bits=4)
    pages = one_page(fmt)
    keys, _ = halves_of(pages, fmt)
    keys[0] = torch.arange(16)  # 16 tokens on 16 levels: the step is 1, the mid 7.5, the level of a token its number
    keys[0, 12] = 2 * torch.arange(16).flip(0)
    part = sketch_pages(pages, fmt)[0][0].numpy().tobytes()
    assert part[:64] == struct.pack("<ff56x", 0, 0)
    assert struct.unpack("<32e", part[64:128]) == (1,) * 12 + (2,) + (1,) * 19
    assert struct.unpack("<32e", part[128:192]) == (7.5,) * 12 + (15,) + (7.5,) * 19
    levels = part[192:]
    assert len(levels) == 16 * 32 // 2
    assert levels[(0 * 16 + 3) * 4 + 2] == 3 + 16 * 3  # token 3, channels 2 and 6
    assert levels[(1 * 16 + 3) * 4 + 0] == 3 + 16 * 12  # token 3, channels 8 and 12
    assert levels[(3 * 16 + 15) * 4 + 1] == 15 + 16 * 15  # token 15, channels 25 and 29


def test_4_bit_values_lie_at_the_documented_bytes() -> None:
    fmt = SketchFormat(page_size=16, head_dim=32, bits=4)
    pages = one_page(fmt)
    _, values = halves_of(pages, fmt)
    values[0] = torch.arange(32) / 2
    values[0, 13] = 10 * torch.arange(32).flip(0).div(31).mul(15).round()
    part = sketch_pages(pages, fmt)[1][0].numpy().tobytes()
    steps, mids = struct.unpack("<16e", part[:32]), struct.unpack("<16e", part[32:64])
    assert (steps[13], mids[13]) == (10, 75)
    assert steps[0] == pytest.approx(15.5 / 15, rel=1e-3) and mids[0] == 7.75
    levels = part[64:]
    assert len(levels) == 16 * 32 // 2
    assert levels[(1 * 32 + 31) * 4 + 1] == 15 + 16 * 0  # channel 31, tokens 9 and 13
    assert levels[(1 * 32 + 0) * 4 + 1] == 0 + 16 * 15  # channel 0, tokens 9 and 13


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_lies_within_half_a_step(bits: int, dtype: torch.dtype) -> None:
    fmt = SketchFormat(page_size=64, head_dim=48, bits=bits)
    pages = random_pages(fmt, dtype)
    keys, values = halves_of(pages, fmt)
    key_parts, value_parts, unusable = sketch_pages(pages, fmt)
    assert unusable == 0
    ranges = values.amax(-1) - values.amin(-1)
    slack = 1 + (1 << bits) / 2048  # float16 steps
    key_errors = (read_keys(key_parts, fmt) - keys).abs().amax(-1) / read_key_steps(key_parts, fmt)
    value_errors = (read_values(value_parts, fmt) - values).abs().amax(-1) / (ranges / (2**bits - 1))
    assert float(key_errors.max()) <= 0.5 * slack
    assert float(value_errors.max()) <= 0.51 * slack


@pytest.mark.parametrize("bits", BITS)
def test_keys_far_from_zero_stay_within_half_a_step(bits: int) -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=bits)
    pages = random_pages(fmt) * 0.01 + 100.03  # float16 has steps of 0.06 here
    key_parts, _, _ = sketch_pages(pages, fmt)
    errors = (read_keys(key_parts, fmt) - halves_of(pages, fmt)[0]).abs().amax(-1)
    assert float((errors / read_key_steps(key_parts, fmt)).max()) <= 0.5 * (1 + (1 << bits) / 2048)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("constant", [0.0, -1.5, 100.0, 6e-8])
def test_pages_without_spread_read_exactly(bits: int, constant: float) -> None:
    fmt = SketchFormat(page_size=16, head_dim=32, bits=bits)
    pages = one_page(fmt, key=constant, value=constant).half()
    key_parts, value_parts, unusable = sketch_pages(pages, fmt)
    assert unusable == 0
    assert torch.equal(read_key_steps(key_parts, fmt), torch.zeros(1, 32))
    assert torch.equal(read_keys(key_parts, fmt), halves_of(pages, fmt)[0])
    assert torch.equal(read_values(value_parts, fmt), halves_of(pages, fmt)[1])


def test_a_spread_below_the_smallest_float16_reads_as_the_mid() -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=4)
    pages = one_page(fmt, key=1.0, value=1.0)
    pages[0, :, ::2] += 1e-7
    key_parts, value_parts, unusable = sketch_pages(pages, fmt)
    assert unusable == 0
    assert torch.equal(read_keys(key_parts, fmt), torch.ones(1, 16, 16))
    assert not key_parts[0, -fmt.levels_bytes :].any()
    assert torch.equal(read_values(value_parts, fmt), torch.ones(1, 16, 16))


@pytest.mark.parametrize("bits, share", [(2, 0.156), (4, 0.281), (8, 0.531)])
def test_the_sizes_are_those_documented(bits: int, share: float) -> None:
    fmt = SketchFormat(page_size=64, head_dim=64, bits=bits)
    key_parts, value_parts, _ = sketch_pages(random_pages(fmt), fmt)
    assert key_parts.shape == (5, fmt.key_bytes) and value_parts.shape == (5, fmt.value_bytes)
    assert fmt.key_bytes == 64 + 2 * 64 * 2 + 64 * 64 * bits // 8
    assert fmt.value_bytes == 2 * 64 * 2 + 64 * 64 * bits // 8
    exact_bytes = 2 * 64 * 64 * 2
    assert (fmt.page_bytes - 64) / exact_bytes == pytest.approx(share, abs=1e-3)


def test_the_header_holds_the_largest_norm_and_the_variance_of_the_values() -> None:
    fmt = SketchFormat(page_size=16, head_dim=32, bits=4)
    pages = random_pages(fmt, torch.float16)
    key_parts, _, _ = sketch_pages(pages, fmt)
    _, values = halves_of(pages, fmt)
    steps = (values.amax(-1) - values.amin(-1)) / 15
    nu, var_v = read_header(key_parts)
    torch.testing.assert_close(nu, values.norm(dim=-1).amax(-1))
    torch.testing.assert_close(var_v, 32 * (steps**2).mean(-1) / 12, rtol=2e-3, atol=0)


def test_var_v_is_the_expected_square_of_the_error_of_a_value_vector() -> None:
    fmt = SketchFormat(page_size=64, head_dim=64, bits=4)
    pages = random_pages(fmt)
    key_parts, value_parts, _ = sketch_pages(pages, fmt)
    errors = (read_values(value_parts, fmt) - halves_of(pages, fmt)[1]).square().sum(-1).mean(-1)
    torch.testing.assert_close(errors, read_header(key_parts)[1], rtol=0.1, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_with_values_that_are_not_finite_are_counted(dtype: torch.dtype, half: int, broken: float) -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=4)
    pages = random_pages(fmt, dtype)
    pages[1, half, 77] = pages[3, half, 0] = pages[3, half, 1] = broken
    assert sketch_pages(pages, fmt)[2] == 2


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("low, high", [(1e5, 1e5), (-1e6, 1e6), (-3e38, 3e38)], ids=["mid", "step", "both"])
def test_what_float16_cannot_hold_is_counted(half: int, low: float, high: float) -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=4)
    pages = random_pages(fmt)
    pages[2, half, ::2], pages[2, half, 1::2] = low, high
    assert sketch_pages(pages, fmt)[2] == 1


def test_a_broken_page_leaves_the_sketches_of_the_others_alone() -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=4)
    pages = random_pages(fmt)
    expected, _, _ = sketch_pages(pages, fmt)
    pages[2] = float("nan")
    key_parts, _, _ = sketch_pages(pages, fmt)
    kept = torch.tensor([0, 1, 3, 4])
    assert torch.equal(key_parts[kept], expected[kept])


def test_no_pages_make_no_sketches() -> None:
    fmt = SketchFormat(page_size=16, head_dim=16, bits=4)
    key_parts, value_parts, unusable = sketch_pages(torch.zeros(0, 2, 256), fmt)
    assert (key_parts.shape, value_parts.shape, unusable) == ((0, fmt.key_bytes), (0, fmt.value_bytes), 0)


@pytest.mark.parametrize(
    "page_size, head_dim, bits, message",
    [
        (64, 64, 3, "sketch_bits=3"),
        (8, 64, 4, "page_size=8"),
        (64, 72, 4, "head_dim=72.*multiple of 16"),
        (0, 64, 4, "page_size=0"),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused(page_size: int, head_dim: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SketchFormat(page_size, head_dim, bits)
