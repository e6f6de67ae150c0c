"""From a name to a model that passed the gate: a Hugging Face folder, a .gguf file, the embedded default, a module in memory."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vera.attention.protocol import PAGE_DTYPES
from vera.errors import ConfigError, ModelNotFound
from vera.models.decoder import speed_up_layers
from vera.models.dense import DenseAttention
from vera.models.folder import CONFIG_FILE, lie_in_files, read_module, read_tokenizer
from vera.models.gate import check_class, check_config
from vera.models.gguf import GGUF_SUFFIX, conversions_home, converted_folder, embedded_file
from vera.models.linear import speed_up_linear
from vera.models.loaded import LoadedModel
from vera.models.narrow import compute_dtype, narrow, widen
from vera.models.probe import probe
from vera.models.spec import ModelSpec, weight_bytes, weights_revision
from vera.models.surroundings import give_back_freed_memory, one_thread, quiet_transformers

EMBEDDED = "embedded"
AUTO = "auto"
"""Compute in float32, and hold weights in the narrowest form that holds them exactly."""

_TRIAL_TOKENS = 5

Progress = Callable[[str], None]


def load_model(source: str | Path = EMBEDDED, *, dtype: str = AUTO, progress: Progress | None = None) -> LoadedModel:
    """The model at `source`, ready to run: a Hugging Face folder, a `.gguf` file, or `embedded`. Nothing is downloaded.

    With `dtype` "auto" the model computes in float32, and weights that float16 or bfloat16 hold exactly are held so: as a rule
    those of a half-precision checkpoint. With another `dtype` it computes in that, and all weights are held in it. `progress` is
    told in a line what takes long.

    A `.gguf` file is converted once into `vera.config.cache_home()`. With "auto" its matrices are written in half precision:
    exactly if it holds them, else rounded to float16, by at most 2^-11 of a value or 2^-25: a quantised value, a small integer
    times a scale, may have more digits. With "float32" nothing is rounded. Raises ModelNotFound, BrokenModel or UnsupportedModel.
    """
    if dtype != AUTO and dtype not in PAGE_DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join((AUTO, *PAGE_DTYPES))}")
    tell = progress or (lambda _: None)
    with quiet_transformers():
        name, folder = _locate(source, dtype, tell)
        tell(f"loading {name}")
        computes_in = torch.float32 if dtype == AUTO else PAGE_DTYPES[dtype]
        model = _admit(read_module(folder, name, computes_in), read_tokenizer(folder), name)
    if dtype == AUTO:
        _hold_narrow(model)
        if folder.is_relative_to(conversions_home()):  # files that nobody overwrites in place while a model reads them
            lie_in_files(model.module, folder)
        give_back_freed_memory()
    return model


def adopt_model(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str = "in-memory"
) -> LoadedModel:
    """A transformers model that is already in memory, put through the same gate. Vera owns `module` from then on.

    The module is set to evaluation mode and to Vera's attention, in place; its parameters stay as they are. Raises
    UnsupportedModel or BrokenModel.
    """
    with quiet_transformers():
        check_config(module.config, name)
        check_class(type(module), name)
        return _admit(module.train(False), tokenizer, name)


def _locate(source: str | Path, dtype: str, tell: Progress) -> tuple[str, Path]:
    """The model's name and the folder with its safetensors."""
    if str(source) == EMBEDDED:
        file = embedded_file()
        return file.name.split(".")[0], converted_folder(file, dtype, tell)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return path.stem, converted_folder(path, dtype, tell)
    if (path / CONFIG_FILE).is_file():
        return path.resolve().name, path
    raise ModelNotFound(
        f"no model at {str(source)!r}: {_what_is_there(path)}. "
        f"Give a Hugging Face folder, a {GGUF_SUFFIX} file, or {EMBEDDED!r}; nothing is downloaded"
    )


def _what_is_there(path: Path) -> str:
    """Why the path will not do, with the nearest thing that would."""
    if path.is_file():
        hint = f"; did you mean its folder, {str(path.parent)!r}?" if (path.parent / CONFIG_FILE).is_file() else ""
        return f"it is a file, but not a {GGUF_SUFFIX} file{hint}"
    if path.is_dir():
        entries = sorted(path.iterdir())
        models = [entry for entry in entries if entry.suffix == GGUF_SUFFIX or (entry / CONFIG_FILE).is_file()]
        hint = f"; did you mean {str(models[0])!r}?" if models else ""
        return f"the folder has no {CONFIG_FILE}{hint}" if entries else "the folder is empty"
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*siblings, EMBEDDED], n=1)
    hint = f"; did you mean {near[0] if near[0] == EMBEDDED else str(path.parent / near[0])!r}?" if near else ""
    return f"no such file or folder{hint}"


def _admit(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> LoadedModel:
    """The probe, and what it and the config say about the model."""
    speed_up_linear(module)
    speed_up_layers(module)
    geometry = probe(module, name)
    config = module.config
    spec = ModelSpec(
        name=name,
        architecture=type(module).__name__,
        num_layers=len(geometry.layers),
        num_query_heads=geometry.num_query_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        dtype=str(compute_dtype(module)).removeprefix("torch."),
        windows=tuple(layer.window for layer in geometry.layers),
        eos_token_ids=_eos_token_ids(module, tokenizer),
        bos_token_id=config.bos_token_id,
        weights_revision=weights_revision(module),
        weight_bytes=weight_bytes(module),
    )
    return LoadedModel(module, tokenizer, spec, geometry.layers)


def _hold_narrow(model: LoadedModel) -> None:
    """Narrows the weights, unless the model then computes something else: its code may look at what a weight is held in."""
    before = _trial(model)
    narrow(model.module)
    try:
        same = torch.equal(_trial(model), before)
    except RuntimeError:  # operands of two dtypes
        same = False
    if not same:
        widen(model.module)
    model.spec = replace(model.spec, weight_bytes=weight_bytes(model.module))


def _trial(model: LoadedModel) -> Tensor:
    """Logits of a few tokens."""
    tokens = torch.arange(_TRIAL_TOKENS) % model.spec.vocab_size
    with one_thread():
        return model.forward(tokens, torch.arange(_TRIAL_TOKENS), torch.arange(_TRIAL_TOKENS), DenseAttention([_TRIAL_TOKENS]))


def _eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What the generation config, the config or the tokenizer calls an end; often only one knows the end of a chat turn."""
    ids: set[int] = set()
    for owner in (module.generation_config, module.config, tokenizer):
        stated = getattr(owner, "eos_token_id", None)
        ids.update([stated] if isinstance(stated, int) else stated or ())
    return frozenset(token for token in ids if 0 <= token < module.config.vocab_size)
