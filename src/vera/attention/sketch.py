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

_HEADER_BYTES = 64
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class SketchFormat:
    """The sizes of one page's sketch. `head_dim` and `page_size` are multiples of 16, `bits` is 2, 4 or 8."""

    page_size: int
    head_dim: int
    bits: int

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
