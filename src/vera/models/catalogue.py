"""What `vera models` lists: the families that are tried in tests, and the models on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from vera.errors import ModelNotFound
from vera.models.folder import CONFIG_FILE
from vera.models.gguf import conversions_home, embedded_file
from vera.models.load import EMBEDDED

_TRIED_FAMILIES = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Mixtral",
    "Phi-3",
    "Gemma 2",
    "Gemma 3 (text)",
    "GPT-OSS",
    "GPT-NeoX",
    "GPT-2",
    "OPT",
)


def supported_families() -> tuple[str, ...]:
    """Families whose logits the tests compare with transformers' own; others are served when they pass the gate."""
    return _TRIED_FAMILIES


def local_models() -> list[dict[str, str | int]]:
    """Models on this machine, JSON-ready; whether one passes the gate is known once it is loaded.

    Each has `name`, `path` (what `load_model` takes), `kind` and `size_bytes`. Kinds are `embedded`, `converted` (a .gguf file
    that was loaded before) and `hub` (a snapshot in the Hugging Face cache).
    """
    return [*_embedded(), *_converted(), *_from_hub_cache()]


def _embedded() -> Iterator[dict[str, str | int]]:
    try:
        file = embedded_file()
    except ModelNotFound:
        return
    yield _entry(file.name, EMBEDDED, "embedded", [file])


def _converted() -> Iterator[dict[str, str | int]]:
    for config in sorted(conversions_home().glob(f"[!.]*/{CONFIG_FILE}")):
        yield _folder_model(config.parent, config.parent.name, "converted")


def _from_hub_cache() -> Iterator[dict[str, str | int]]:
    """Folders are named `models--OWNER--NAME/snapshots/REVISION`."""
    for config in sorted(Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/{CONFIG_FILE}")):
        owner_and_name = config.parents[2].name.split("--")[1:]
        if any(config.parent.glob("*.safetensors")):
            yield _folder_model(config.parent, "/".join(owner_and_name), "hub")


def _folder_model(folder: Path, name: str, kind: str) -> dict[str, str | int]:
    return _entry(name, str(folder), kind, folder.glob("*.safetensors"))


def _entry(name: str, path: str, kind: str, files: Iterable[Path]) -> dict[str, str | int]:
    return {"name": name, "path": path, "kind": kind, "size_bytes": sum(file.stat().st_size for file in files)}
