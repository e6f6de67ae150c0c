"""Weights held in the narrowest form that holds them exactly, and widened to float32 on use.

Checkpoints are mostly stored in half precision. Computing in float32 needs no float32 copy of them: a decode step is bound by
reading weights, and half as many bytes hold the same numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn
from transformers import PreTrainedModel

from vera.models.decoder import LayerInTwoCalls
from vera.models.linear import KernelLinear

_FORMATS = (torch.float16, torch.bfloat16)
_CHUNK = 1 << 20
"""Elements compared at a time: a weight that does not fit is mostly found out by its first chunk."""


class NarrowEmbedding(nn.Embedding):
    """`nn.Embedding` whose rows come out in float32, whatever they are held in."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight, self.padding_idx).float()


def compute_dtype(module: PreTrainedModel) -> torch.dtype:
    """What the module computes in; `module.dtype` is what its first parameter is held in."""
    embedding = module.get_input_embeddings()
    return torch.float32 if isinstance(embedding, NarrowEmbedding) else module.dtype


def narrow(module: nn.Module) -> int:
    """Holds what weights it can in half precision, in place, without changing a value; returns how many.

    Candidates are float32 weights of linear layers that have the kernel and of plain embeddings, tied or not. The weights of a
    decoder layer that runs in two calls go together, as the calls read one format. Of two formats that would do, a group takes
    the one that more weights of the module fit.
    """
    fitting = {weight: {dtype for dtype in _FORMATS if holds_exactly(weight.data, dtype)} for weight in _candidates(module)}
    votes = Counter(dtype for dtypes in fitting.values() for dtype in dtypes)
    chosen: dict[Tensor, torch.dtype] = {}
    for group in _groups(module, fitting):
        if dtypes := set(_FORMATS).intersection(*(fitting.get(weight, set()) for weight in group)):
            chosen |= dict.fromkeys(group, max(dtypes, key=lambda dtype: (votes[dtype], dtype is torch.float16)))
    for layer in module.modules():
        if type(layer) is nn.Embedding and layer.weight in chosen:
            layer.__class__ = NarrowEmbedding
    for weight, dtype in chosen.items():
        weight.data = weight.data.to(dtype)
    return len(chosen)


def widen(module: nn.Module) -> int:
    """Holds in float32 again what `narrow` has narrowed; returns how many."""
    narrowed = {layer.weight for layer in module.modules() if isinstance(layer, KernelLinear | NarrowEmbedding)}
    narrowed = {weight for weight in narrowed if weight.dtype in _FORMATS}
    for weight in narrowed:
        weight.data = weight.data.float()
    return len(narrowed)


def holds_exactly(weight: Tensor, dtype: torch.dtype) -> bool:
    """Every value of the float32 `weight` is the same in `dtype`: none is rounded, overflows or is too small for it."""
    return all(torch.equal(chunk.to(dtype).float(), chunk) for chunk in torch.split(weight.reshape(-1), _CHUNK))


def round_to_half(module: nn.Module) -> None:
    """Puts the float32 weights of linear layers and embeddings into half precision, in place.

    A weight that neither format holds exactly is rounded to float16, if that is not too small for its largest value.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    for weight in {layer.weight for layer in layers if layer.weight.dtype is torch.float32}:
        exact = next((dtype for dtype in _FORMATS if holds_exactly(weight.data, dtype)), None)
        if exact is not None or weight.abs().max() <= torch.finfo(torch.float16).max:
            weight.data = weight.data.to(exact or torch.float16)


def _candidates(module: nn.Module) -> Iterator[Tensor]:
    """Weights that only layers use which can widen them; a tied one is given once."""
    users: defaultdict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            users[parameter].append((layer, name))
    for weight, places in users.items():
        if weight.dtype is torch.float32 and weight.is_cpu and all(_can_widen(*place) for place in places):
            yield weight


def _groups(module: nn.Module, candidates: Collection[Tensor]) -> list[list[Tensor]]:
    """Which of the candidates must be held alike; with other weights of their layer that are none."""
    layers = [layer for layer in module.modules() if isinstance(layer, LayerInTwoCalls)]
    groups = [[part.weight for part in layer.modules() if isinstance(part, KernelLinear)] for layer in layers]
    grouped = {weight for group in groups for weight in group}
    return groups + [[weight] for weight in candidates if weight not in grouped]


def _can_widen(layer: nn.Module, name: str) -> bool:
    if isinstance(layer, nn.Embedding) and type(layer) in (nn.Embedding, NarrowEmbedding):
        return layer.max_norm is None
    return type(layer) is KernelLinear and name == "weight"
