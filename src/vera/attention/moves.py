"""Pages by address: copying them and making their sketches, natively where that is built, else in plain torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vera.attention.sketch import SketchFormat, sketch_pages

Addresses = NDArray[np.int64]


def copy_bytes(sources: Addresses, targets: Addresses, size: int) -> None:
    """Copies `size` bytes from each source to the target at the same place; both `[n]`. They must not overlap."""
    if (native := _native()) is not None:
        native.copy_bytes(torch.from_numpy(np.ascontiguousarray(sources)), torch.from_numpy(np.ascontiguousarray(targets)), size)
        return
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def sketch_to(
    pages: Addresses, key_parts: Addresses, value_parts: Addresses, sketch_format: SketchFormat, dtype: torch.dtype
) -> int:
    """Writes the sketches of exact pages to where their two parts shall lie; all `[n]`.

    Returns the number of pages that hold a value that is not finite; their sketches are of no use.
    """
    if (native := _native()) is not None:
        addresses = (torch.from_numpy(np.ascontiguousarray(array)) for array in (pages, key_parts, value_parts))
        return int(native.sketch_pages(*addresses, sketch_format, dtype))
    count = 2 * sketch_format.page_size * sketch_format.head_dim
    exact = torch.stack([bytes_at(page, count * dtype.itemsize).view(dtype) for page in pages.tolist()])
    keys, values, broken = sketch_pages(exact.view(len(pages), 2, -1), sketch_format)
    for rows, targets in ((keys, key_parts), (values, value_parts)):
        for row, target in zip(rows, targets.tolist(), strict=True):
            bytes_at(target, rows.shape[1]).copy_(row)
    return broken


def bytes_at(address: int, size: int) -> Tensor:
    """`[size]` uint8 over memory that somebody else keeps alive."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _native() -> Any:
    try:
        from vera.attention import cpu
    except ImportError:
        return None
    return cpu
