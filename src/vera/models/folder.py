"""A Hugging Face folder: config, weights and tokenizer, read from disk only and without running code from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vera.errors import BrokenModel, UnsupportedModel
from vera.models.gate import check_class, check_config
from vera.models.weights import check_tensors

CONFIG_FILE = "config.json"
_CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def read_module(folder: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode with every tensor accounted for; refuses by config and class before reading weights."""
    config = _read_config(folder / CONFIG_FILE, name)
    model_class = _model_class(config, name)
    check_config(config, name)
    check_class(model_class, name)
    check_weight_files(folder)
    try:
        loaded: Any = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            # Both make faults part of the report, where they get a name, instead of an exception that has none.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise BrokenModel(f"{folder}: the weights do not load into {model_class.__name__}: {error}") from error
    module: PreTrainedModel = loaded[0]
    check_tensors(module, loaded[1], folder)
    return module


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """None: the folder has no tokenizer."""
    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BrokenModel(f"the tokenizer in {folder} cannot be read: {error}") from error
    return tokenizer


def check_weight_files(folder: Path) -> None:
    """Every weight file is there and whole; a BrokenModel names the first that is not. Reads only headers."""
    for file in _weight_files(folder):
        if not file.is_file():
            raise BrokenModel(f"{file} is missing, but the index beside it lists it; copy it again")
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise BrokenModel(f"{file} is damaged or cut short ({error}); copy it again") from None


def lie_in_files(module: PreTrainedModel, folder: Path) -> int:
    """Lets half-precision weights that the folder's files hold bit for bit lie there, mapped, and not in memory of their own.

    The system reads them in when they are used and may drop them when memory is short. Whoever overwrites such a file in place
    changes the model, so the files must be ours. Returns how many; a weight that they have under another name, or in another
    form, stays in memory.
    """
    weights = {name: weight for name, weight in module.named_parameters() if weight.dtype is not torch.float32}
    mapped = 0
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in weights.keys() & tensors.keys():
                weight, stored = weights[name], tensors.get_tensor(name)
                if stored.dtype is weight.dtype and stored.shape == weight.shape and torch.equal(stored, weight.data):
                    weight.data = stored
                    mapped += 1
    return mapped


def _read_config(file: Path, name: str) -> PreTrainedConfig:
    try:
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{file} cannot be read: {error}") from None
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise BrokenModel(f"{file} names no model_type, so it is not a transformers config")
    if model_type not in CONFIG_MAPPING:
        architecture = ", ".join(raw.get("architectures") or ()) or model_type
        own_code = "; it brings its own code, which Vera does not run" if raw.get("auto_map") else ""
        raise UnsupportedModel(
            f"{name} ({architecture}) is not supported: transformers has no model_type {model_type!r}{own_code}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise BrokenModel(f"{file} is not a valid {model_type} config: {error}") from error
    return config


def _model_class(config: PreTrainedConfig, name: str) -> type[PreTrainedModel]:
    """The transformers class that the config asks for, if it is a causal language model."""
    stated = config.architectures[0] if config.architectures else None
    if stated is not None and not stated.endswith(_CAUSAL_LM_SUFFIXES):
        raise UnsupportedModel(f"{name} ({stated}) is not supported: Vera serves causal language models (...ForCausalLM)")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{name} ({stated or config.model_type}) is not supported: transformers has no causal language model of this type"
        )
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def _weight_files(folder: Path) -> list[Path]:
    """One file, or the shards that the index lists; the same order of preference as transformers'."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise BrokenModel(
            f"{folder} has no weights: model.safetensors, or model.safetensors.index.json with its shards, is needed"
        )
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(f"{index} cannot be read: {error!r}") from None
    return [folder / name for name in names]
