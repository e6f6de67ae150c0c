"""Every tensor accounted for: what a checkpoint has too few or too many of is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vera.errors import BrokenModel
from vera.models.surroundings import one_thread

_NAMED_FAULTS = 8


def check_tensors(module: PreTrainedModel, found: Mapping[str, Any], source: Path) -> None:
    """`found` is what `from_pretrained(..., output_loading_info=True)` reports. Raises BrokenModel that names the tensors.

    transformers leaves out of its report what is known to be no parameter, such as rotary `inv_freq` buffers of old checkpoints.
    """
    _refuse(
        str(source),
        module,
        [
            *(f"{name} is missing" for name in sorted(found["missing_keys"])),
            *(f"{name} is not part of it" for name in sorted(found["unexpected_keys"])),
            *(_shape_fault(name, stored, needed) for name, stored, needed in sorted(found["mismatched_keys"])),
            *_untied(module),
        ],
    )
    _refuse(str(source), module, _not_finite(module.named_parameters()))


def check_state_dict(module: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> None:
    """The same for tensors in memory, before any is copied into `module`."""
    needed = module.state_dict()
    tied = module.all_tied_weights_keys
    _refuse(
        "the new weights",
        module,
        [
            *(f"{name} is missing" for name in sorted(needed.keys() - state_dict.keys() - tied.keys())),
            *(f"{name} is not part of it" for name in sorted(state_dict.keys() - needed.keys())),
            *(
                _shape_fault(name, tensor.shape, needed[name].shape)
                for name, tensor in state_dict.items()
                if name in needed and tensor.shape != needed[name].shape
            ),
            *(
                _tying_fault(target, source)
                for target, source in tied.items()
                if target in state_dict and source in state_dict and not torch.equal(state_dict[target], state_dict[source])
            ),
            *_not_finite(state_dict.items()),
        ],
    )


def _refuse(source: str, module: PreTrainedModel, faults: Iterable[str]) -> None:
    if found := list(faults):
        more = f"; and {len(found) - _NAMED_FAULTS} more" if len(found) > _NAMED_FAULTS else ""
        raise BrokenModel(
            f"{source}: the tensors are not those of {type(module).__name__}: {'; '.join(found[:_NAMED_FAULTS])}{more}"
        )


def _untied(module: PreTrainedModel) -> Iterator[str]:
    """transformers leaves a head untied that differs from the embedding it should equal; one of the two is wrong."""
    if not (module.config.tie_word_embeddings and module._tied_weights_keys):
        return
    for target, source in module._tied_weights_keys.items():
        if module.get_parameter(target) is not module.get_parameter(source):
            yield _tying_fault(target, source)


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """A sum is not finite as soon as one of its terms is not; it is quick, but may also overflow, so a suspect is looked at."""
    with one_thread():
        for name, tensor in tensors:
            if tensor.is_floating_point() and not torch.isfinite(tensor.detach().sum()) and not torch.isfinite(tensor).all():
                yield f"{name} holds values that are not finite"


def _shape_fault(name: str, stored: Iterable[int], needed: Iterable[int]) -> str:
    return f"{name} has shape {tuple(stored)}, not {tuple(needed)}"


def _tying_fault(target: str, source: str) -> str:
    return f"{target} differs from {source}, although the config ties them (tie_word_embeddings)"
