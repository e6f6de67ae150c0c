"""Linear layers for a decode step: a few rows, and so bound by reading the weights.

torch's own product reaches half of the memory bandwidth for one row here and a third of the arithmetic for sixteen; see
docs/log.md. The kernel reads the weights where torch has them, in float32, and sums each row in the same order whatever
the number of rows is: up to MAX_ROWS, a sequence's result does not depend on its batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

try:
    from vera._native import linear as _linear
except ImportError:  # there was no compiler when Vera was installed; vera.attention says so
    _KERNEL = None
else:
    _KERNEL = _linear

MAX_ROWS = 64
"""From more rows on torch's product is faster."""


class FewRowsLinear(nn.Linear):
    """`nn.Linear` with another kernel for few rows of float32, in inference only."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        weight, bias = self.weight, self.bias
        # The layer is the caller's too, who may have moved or converted it since.
        if _KERNEL is None or not 0 < rows <= MAX_ROWS or torch.is_grad_enabled() or not _suits(self) or not _fits(input):
            return F.linear(input, weight, bias)
        output = torch.empty(*input.shape[:-1], self.out_features)
        _KERNEL(
            input.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
            rows,
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return output


def speed_up_linear(module: nn.Module) -> int:
    """Gives every plain float32 linear layer on the CPU the kernel, in place; returns how many. Weights and names stay."""
    if _KERNEL is None:
        return 0
    chosen = [layer for layer in module.modules() if type(layer) is nn.Linear and _suits(layer)]
    for layer in chosen:
        layer.__class__ = FewRowsLinear
    return len(chosen)


def _suits(layer: nn.Linear) -> bool:
    return _fits(layer.weight) and (layer.bias is None or _fits(layer.bias))


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()
