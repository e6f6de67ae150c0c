"""Linear layers with a kernel of our own, above all for a decode step: a few rows, and so bound by reading the weights.

torch's own product reaches half of the memory bandwidth for one row here and a third of the arithmetic for sixteen; see
docs/log.md. The kernel reads the weights where torch has them, in float32 or in a half format that it widens as it reads, and
sums each row in the same order whatever the number of rows and the format are: where it is used, a sequence's result does not
depend on its batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from vera.errors import ConfigError

try:
    from vera import _native
except ImportError:  # there was no compiler when Vera was installed; vera.attention says so
    _KERNEL = None
else:
    _KERNEL = _native.linear

MAX_ROWS = 64
"""Up to so many rows the kernel takes every weight."""
MAX_CACHED_BYTES = 4 * 2**20
"""Up to this size of a weight it takes any number of rows: the weight stays in the caches between them, and it is faster than
torch's product (1.0 to 2.9 times, from 65 to 512 rows; docs/log.md). Larger ones were not measured."""

WEIGHT_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The kernels' numbers for what weights can be held in."""


def takes(rows: int, weight_bytes: int) -> bool:
    """Whether the kernel is the one to multiply so many rows with a weight of this size."""
    return rows <= MAX_ROWS or (weight_bytes <= MAX_CACHED_BYTES and _native.isa() != "portable")


class KernelLinear(nn.Linear):
    """`nn.Linear` with another kernel for rows of float32, in inference only.

    Its weight may be held in float16 or bfloat16 (see `narrow`): inputs of float32 see it widened, which is exact.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if _KERNEL is None or torch.is_grad_enabled() or not _suits(weight, bias) or not _are_rows(input, weight):
            wide = weight.to(input.dtype) if input.dtype is torch.float32 else weight
            return F.linear(input, wide, bias)
        outputs, inputs = weight.shape
        input = input.contiguous()
        output = input.new_empty((*input.shape[:-1], outputs))
        _KERNEL(
            input.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
            input.numel() // inputs,
            inputs,
            outputs,
            torch.get_num_threads(),
            WEIGHT_FORMATS[weight.dtype],
        )
        return output


def speed_up_linear(module: nn.Module) -> int:
    """Gives every plain float32 linear layer on the CPU the kernel, in place; returns how many. Weights and names stay."""
    if _KERNEL is None:
        return 0
    try:
        _native.isa()
    except ValueError as error:  # what VERA_CPU_ISA asks for
        raise ConfigError(str(error)) from error
    chosen = [layer for layer in module.modules() if type(layer) is nn.Linear and _is_plain_float32(layer)]
    for layer in chosen:
        layer.__class__ = KernelLinear
    return len(chosen)


def _is_plain_float32(layer: nn.Linear) -> bool:
    return layer.weight.dtype is torch.float32 and _suits(layer.weight, layer.bias)


def _suits(weight: Tensor, bias: Tensor | None) -> bool:
    """Looked at in every call: the layer is its caller's too, who may have moved, converted or replaced its parameters."""
    is_held_right = weight.dtype in WEIGHT_FORMATS and weight.is_cpu and weight.is_contiguous()
    fits = is_held_right and weight.dim() == 2 and weight.shape[1] > 0
    return fits and (bias is None or (_is_float32(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()))


def _are_rows(input: Tensor, weight: Tensor) -> bool:
    """Rows of float32, as many as the kernel takes."""
    inputs = weight.shape[1]
    if not (_is_float32(input) and input.dim() > 0 and input.shape[-1] == inputs and input.numel() > 0):
        return False
    return takes(input.numel() // inputs, weight.nbytes)


def _is_float32(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu
