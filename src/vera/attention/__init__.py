"""Attention over paged keys and values: the contract (`protocol`), the truth (`reference`), the native kernel (`cpu`)."""

from __future__ import annotations

import warnings

from torch import Tensor

from vera.attention.moves import copy_bytes, sketch_to
from vera.attention.protocol import AttentionBackend
from vera.attention.reference import ReferenceAttention
from vera.errors import ConfigError

__all__ = ["advise_hugepages", "copy_bytes", "make_backend", "sketch_to"]

_HOW_TO_GET_IT = "install a C++17 compiler (GCC 11 or newer; Debian: apt install g++ python3-dev) and install Vera again"


MAX_KERNEL_GROUP = 64
"""Most query heads that may share a KV head in the native kernel."""


def make_backend(name: str, *, group: int = 1) -> AttentionBackend:
    """The backend called `cpu` or `reference`; `auto` is `cpu` where that can serve, else `reference` with a warning.

    `group` is the number of query heads that share a KV head. Raises ConfigError for another name, for `cpu` where there is no
    native kernel or the group is too large for it, and for a VERA_CPU_ISA that this CPU cannot run.
    """
    if name not in ("auto", "cpu", "reference"):
        raise ConfigError(f"attention_backend={name!r} is not one of auto, cpu, reference")
    if name == "reference":
        return ReferenceAttention()
    if why := _why_no_kernel(group):
        if name == "cpu":
            raise ConfigError(f"attention_backend='cpu' cannot be: {why}")
        warnings.warn(f"Attention runs in plain torch, several times slower: {why}", stacklevel=2)
        return ReferenceAttention()
    from vera.attention.cpu import CpuAttention

    try:
        return CpuAttention()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _why_no_kernel(group: int) -> str | None:
    try:
        import vera.attention.cpu  # noqa: F401
    except ImportError as error:
        return f"the native kernel is not there ({error}); to get it, {_HOW_TO_GET_IT}"
    if group > MAX_KERNEL_GROUP:
        return f"{group} query heads share a KV head, and the native kernel takes at most {MAX_KERNEL_GROUP}"
    return None


def advise_hugepages(buffer: Tensor) -> bool:
    """Asks for huge pages behind a large buffer, before it is first written. False: refused, or no native part; no harm done."""
    try:
        from vera.attention import cpu
    except ImportError:
        return False
    return cpu.advise_hugepages(buffer)
