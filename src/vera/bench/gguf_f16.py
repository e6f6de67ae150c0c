"""A half-precision copy of a GGUF file, for baselines that are to run the same weights unquantised."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from vera.config import cache_home

_LAYOUT_VERSION = 1
# The container's own counters, and what GGUFWriter writes by itself.
_NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def f16_copy(source: Path) -> Path:
    """The same model with its matrices as F16 and its vectors as F32; all other metadata is copied.

    Made once and kept under `cache_home()`, keyed by the content of `source`; appears there complete or not at all.
    """
    with source.open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:24]
    target = cache_home() / "gguf-f16" / f"{key}-v{_LAYOUT_VERSION}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
        os.close(handle)
        try:
            _write_f16(source, Path(name))
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    return target


def _write_f16(source: Path, target: Path) -> None:
    import gguf  # an extra

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for field in reader.fields.values():
        if not field.name.startswith(_NOT_COPIED):
            value_type = field.types[0]
            item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), value_type, sub_type=item_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
