"""What the rest of the engine has to know about a model: numbers, and an identity for its weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vera.models.narrow import compute_dtype

_MAX_HASH_THREADS = 8
_NOT_IDENTITY = frozenset({"transformers_version", "architectures", "dtype", "use_cache"})
"""Entries of a config that can change while every key and value stays the same (those with an underscore, too)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts of one loaded model. Two models with the same `weights_revision` compute the same keys and values."""

    name: str
    """What the model is called in lists and messages: the folder's or the file's name."""
    architecture: str
    """The transformers class, such as `LlamaForCausalLM`."""
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the output head."""
    max_context: int
    """Most tokens of one sequence that the model was made for."""
    dtype: str
    """What the model computes in: float32, bfloat16 or float16. Weights may be held narrower (see `narrow`)."""
    windows: tuple[int | None, ...]
    """The sliding window of each layer in tokens, the current one counted; None: all tokens."""
    eos_token_ids: frozenset[int]
    """Any of these ends an answer."""
    bos_token_id: int | None
    weights_revision: str
    """Hex digest over the weights, the rope tables, the dtype and the config; the same in every process, whatever holds them."""
    weight_bytes: int
    """Bytes of the parameters as they are held, tied ones counted once."""


def weights_revision(module: PreTrainedModel) -> str:
    """Digest of everything that shapes a model's keys and values. Reads every weight once (about 1 s for 2 GB on two cores)."""
    tensors = sorted(_named_tensors(module))
    digest = hashlib.sha256(_config_identity(module).encode())
    computes_in = compute_dtype(module)
    dtypes = [_used_as(tensor, computes_in) for _, tensor in tensors]
    with ThreadPoolExecutor(min(_MAX_HASH_THREADS, os.cpu_count() or 1)) as threads:
        contents = threads.map(_content_digest, (tensor for _, tensor in tensors), dtypes)
        for (name, tensor), dtype, content in zip(tensors, dtypes, contents, strict=True):
            digest.update(f"{name} {dtype} {tuple(tensor.shape)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def weight_bytes(module: PreTrainedModel) -> int:
    """Bytes of the parameters; tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _named_tensors(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers (the rope tables are buffers)."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _used_as(tensor: Tensor, computes_in: torch.dtype) -> torch.dtype:
    """Half weights of a module that computes in float32 are widened on use."""
    is_widened = computes_in is torch.float32 and tensor.dtype in (torch.float16, torch.bfloat16)
    return computes_in if is_widened else tensor.dtype


def _config_identity(module: PreTrainedModel) -> str:
    config = module.config.to_dict()
    kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY and not key.startswith("_")}
    return json.dumps(kept, sort_keys=True, default=_plain)


def _plain(value: object) -> object:
    """What JSON does not know; never the `repr` of just any object, which may hold an address and so differ between processes."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def _content_digest(tensor: Tensor, dtype: torch.dtype) -> bytes:
    raw = (
        tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )
    return hashlib.sha256(raw.cpu().numpy().data).digest()
