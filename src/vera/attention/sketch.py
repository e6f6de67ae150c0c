"""Sketches: low-bit images of sealed pages. The format that the kernel reads, and its making and reading in plain torch.

Keys are rounded per channel over the tokens of the page, values per token over the channels, both to `2**bits` levels between
the smallest and the largest value. A level `u` stands for `mid + (u - (2**bits - 1) / 2) * step`, with `step` and `mid` float16.

A sketch has two parts that may lie apart, so that values need not be touched when only keys are read. With `P` tokens a page,
`D` channels, all numbers little-endian:

    key part     nu float32, var_V float32, 56 bytes of zeros, steps float16 [D], mids float16 [D], levels of keys
    value part   steps float16 [P], mids float16 [P], levels of values

`nu` is the largest norm of a value vector of the (exact) page, `var_V = D * mean over tokens of step^2 / 12`.

Levels are packed for products that sum over four neighbouring bytes at a time (`vpdpbusd`, `maddubs`). Keys sum over channels
and are vectors over tokens; values sum over tokens and are vectors over channels. With `n` the index that is summed over and `v`
the other one, of `V`, four neighbouring `n` are a *plane*: byte `(plane * V + v) * 4 + j` of an unpacked array is the level at
`n = 4 * plane + j`. `8 / bits` neighbouring planes share their bytes, the first one in the lowest bits: for 4 bits, byte
`(m * V + v) * 4 + j` is the level at `n = 8 * m + j` plus 16 times the one at `n = 8 * m + 4 + j`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_HEADER_BYTES = 64
_HEADER_NUMBERS = 2  # nu and var_V, float32
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class SketchFormat:
    """The sizes of one page's sketch. `head_dim` and `page_size` are multiples of 16, `bits` is 2, 4 or 8."""

    page_size: int
    head_dim: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"sketch_bits={self.bits} is not one of 2, 4, 8")
        for name, size in (("page_size", self.page_size), ("head_dim", self.head_dim)):
            if size < 16 or size % 16:
                raise ValueError(f"{name}={size} cannot be sketched: it must be a multiple of 16")

    @property
    def levels_bytes(self) -> int:
        """The packed levels of a page's keys, and of its values."""
        return self.page_size * self.head_dim * self.bits // 8

    @property
    def key_bytes(self) -> int:
        """The key part."""
        return (
            _HEADER_BYTES
            + 2 * self.head_dim * _HALF_BYTES  # steps and mids
            + self.levels_bytes
        )

    @property
    def value_bytes(self) -> int:
        """The value part."""
        return 2 * self.page_size * _HALF_BYTES + self.levels_bytes

    @property
    def page_bytes(self) -> int:
        """Both parts."""
        return self.key_bytes + self.value_bytes


def sketch_pages(pages: Tensor, fmt: SketchFormat) -> tuple[Tensor, Tensor, int]:
    """The sketches of exact pages.

    `pages` is `[n, 2, page_size * head_dim]` in any dtype of pages. Returns the key parts, uint8 `[n, key_bytes]`, the value
    parts, uint8 `[n, value_bytes]`, and how many pages cannot be sketched, because a value is not finite or float16 cannot hold
    a step or a mid; the sketches of those are not to be used.
    """
    exact = pages.float()
    keys = exact[:, 0].view(-1, fmt.head_dim, fmt.page_size)
    values = exact[:, 1].view(-1, fmt.page_size, fmt.head_dim)
    key_levels, key_steps, key_mids = _round(keys, fmt.bits)
    value_levels, value_steps, value_mids = _round(values, fmt.bits)
    nu = values.norm(dim=-1).amax(dim=-1)
    var_v = fmt.head_dim * value_steps.float().square().mean(dim=-1) / 12
    header = torch.zeros((len(pages), _HEADER_BYTES // 4), dtype=torch.float32)
    header[:, 0], header[:, 1] = nu, var_v
    numbers = torch.cat([key_steps, key_mids, value_steps, value_mids, header], dim=1)
    return (
        torch.cat([_bytes(header), _bytes(key_steps), _bytes(key_mids), pack(key_levels, fmt.bits)], dim=1),
        torch.cat([_bytes(value_steps), _bytes(value_mids), pack(value_levels, fmt.bits)], dim=1),
        int((~numbers.isfinite()).any(dim=1).sum()),
    )


def read_header(key_parts: Tensor) -> tuple[Tensor, Tensor]:
    """`nu` and `var_V` of each page, float32 `[n]`, from uint8 `[n, key_bytes]`."""
    numbers = key_parts[:, : 4 * _HEADER_NUMBERS].contiguous().view(torch.float32)
    return numbers[:, 0], numbers[:, 1]


def read_key_steps(key_parts: Tensor, fmt: SketchFormat) -> Tensor:
    """The rounding step of each key channel, float32 `[n, head_dim]`."""
    return _halves(key_parts, _HEADER_BYTES, fmt.head_dim)


def read_keys(key_parts: Tensor, fmt: SketchFormat) -> Tensor:
    """What the sketches say of the keys, float32 `[n, head_dim, page_size]`, from uint8 `[n, key_bytes]`."""
    mids_at = _HEADER_BYTES + fmt.head_dim * _HALF_BYTES
    levels = unpack(key_parts[:, -fmt.levels_bytes :], fmt.head_dim, fmt.page_size, fmt.bits)
    return _stand_for(levels, read_key_steps(key_parts, fmt), _halves(key_parts, mids_at, fmt.head_dim), fmt.bits)


def read_values(value_parts: Tensor, fmt: SketchFormat) -> Tensor:
    """What the sketches say of the values, float32 `[n, page_size, head_dim]`, from uint8 `[n, value_bytes]`."""
    mids_at = fmt.page_size * _HALF_BYTES
    levels = unpack(value_parts[:, -fmt.levels_bytes :], fmt.page_size, fmt.head_dim, fmt.bits)
    return _stand_for(levels, _halves(value_parts, 0, fmt.page_size), _halves(value_parts, mids_at, fmt.page_size), fmt.bits)


def pack(levels: Tensor, bits: int) -> Tensor:
    """`levels` is uint8 `[n, N, V]`, summed over `N`; returns uint8 `[n, N * V * bits / 8]` in the order described above."""
    pages, summed, vector = levels.shape
    sharing = 8 // bits
    planes = levels.view(pages, summed // (4 * sharing), sharing, 4, vector).transpose(3, 4)
    packed = planes[:, :, 0].clone()
    for place in range(1, sharing):
        packed |= planes[:, :, place] << (bits * place)
    return packed.flatten(1)


def unpack(packed: Tensor, summed: int, vector: int, bits: int) -> Tensor:
    """The reverse of `pack`: uint8 `[n, summed, vector]`."""
    sharing = 8 // bits
    shared = packed.reshape(-1, summed // (4 * sharing), vector, 4)
    planes = [(shared >> (bits * place)) & _top(bits) for place in range(sharing)]
    return torch.stack(planes, dim=2).transpose(3, 4).reshape(-1, summed, vector)


def _round(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, uint8, of float32 `[n, rows, length]`, and the step and the mid of each row, float16 `[n, rows]`.

    The step spans what lies farthest from the *rounded* mid. So no value lies notably farther than half a step from what its
    level stands for, even where the row's spread is small beside its mid. A step of 0 reads as the mid, whatever the levels.
    """
    top = _top(bits)
    low, high = rows.aminmax(dim=-1, keepdim=True)
    half_mid = ((low + high) / 2).half()
    mid = half_mid.float()
    half_step = (torch.maximum(high - mid, mid - low) * (2 / top)).half()
    step = half_step.float()
    levels = ((rows - mid) / step + top / 2).round().clamp(0, top)
    levels = torch.where((step > 0) & levels.isfinite(), levels, 0.0).to(torch.uint8)
    return levels, half_step.squeeze(-1), half_mid.squeeze(-1)


def _stand_for(levels: Tensor, steps: Tensor, mids: Tensor, bits: int) -> Tensor:
    """What levels `[n, rows, length]` mean in rows with these steps and mids, `[n, rows]`."""
    centred = levels.float() - _top(bits) / 2
    return mids[..., None] + centred * steps[..., None]


def _top(bits: int) -> int:
    """The highest level."""
    return (1 << bits) - 1


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _halves(parts: Tensor, start: int, count: int) -> Tensor:
    """`count` float16 of each part from byte `start` on, as float32."""
    return parts[:, start : start + count * _HALF_BYTES].contiguous().view(torch.float16).float()
