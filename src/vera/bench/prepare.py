"""What runs share and no run should pay for: the converted model, the prompt, the half-precision copy for llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vera.bench.gguf_f16 import f16_copy
from vera.bench.workload import document_tokens
from vera.errors import ConfigError
from vera.models import load_model
from vera.models.gguf import converted_folder, embedded_file
from vera.models.load import AUTO, EMBEDDED


def prepare(*, model: str, num_tokens: int, new_tokens: int, seed: int, f16: bool) -> dict[str, Any]:
    """Loads the model once, which converts it if need be, and returns the prompt ("token_ids").

    "folder" is where transformers finds the same weights, to be widened to float32. With `f16`, "f16_path" names a GGUF file of
    them in half precision, or is None if the model does not come from GGUF. A ConfigError says so if prompt and answer are longer
    than the model's context.
    """
    loaded = load_model(model, progress=_tell)
    if num_tokens + new_tokens > loaded.spec.max_context:
        raise ConfigError(
            f"context={num_tokens} and {new_tokens} tokens after it are above the {loaded.spec.max_context} tokens of "
            f"{loaded.spec.name}; lower the context or new_tokens"
        )
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.spec.name} comes without a tokenizer, so the document cannot be its prompt; add the tokenizer"
        )
    source = _gguf_file(model)
    return {
        "token_ids": document_tokens(loaded.tokenizer, num_tokens, seed=seed),
        "folder": str(converted_folder(source, AUTO, _tell) if source else Path(model).expanduser()),
        "f16_path": str(f16_copy(source)) if source and f16 else None,
        "model_name": loaded.spec.name,
    }


def _gguf_file(model: str) -> Path | None:
    """None: the model does not come from a GGUF file."""
    if model == EMBEDDED:
        return embedded_file()
    return Path(model).expanduser() if model.endswith(".gguf") else None


def _tell(line: str) -> None:
    print(f"vera bench: {line}", file=sys.stderr, flush=True)
