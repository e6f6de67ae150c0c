"""Attention over paged keys and values: the contract (`protocol`), the truth (`reference`), the native kernel (`cpu`)."""

from __future__ import annotations

import warnings

from torch import Tensor

from vera.attention.protocol import AttentionBackend
from vera.attention.reference import ReferenceAttention
from vera.errors import ConfigError

__all__ = ["advise_hugepages", "make_backend"]

_HOW_TO_GET_IT = "install a C++17 compiler (Debian: apt install g++ python3-dev) and install Vera again"


def make_backend(name: str) -> AttentionBackend:
    """The backend called `cpu` or `reference`; `auto` is `cpu` where the native kernel was built, else `reference` and a warning.

    Raises ConfigError for another name, for `cpu` without a native kernel, and for a VERA_CPU_ISA that this CPU cannot run.
    """
    if name not in ("auto", "cpu", "reference"):
        raise ConfigError(f"attention_backend={name!r} is not one of auto, cpu, reference")
    if name == "reference":
        return ReferenceAttention()
    try:
        from vera.attention.cpu import CpuAttention
    except ImportError as error:
        if name == "cpu":
            raise ConfigError(
                f"attention_backend='cpu' needs the native kernel, which is not there ({error}); {_HOW_TO_GET_IT}"
            ) from error
        warnings.warn(
            f"The native attention kernel is not there ({error}); attention runs in plain torch, several times slower. "
            f"To get the kernel, {_HOW_TO_GET_IT}.",
            stacklevel=2,
        )
        return ReferenceAttention()
    try:
        return CpuAttention()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def advise_hugepages(buffer: Tensor) -> bool:
    """Asks for huge pages behind a large buffer, before it is first written. False: refused, or no native part; no harm done."""
    try:
        from vera.attention import cpu
    except ImportError:
        return False
    return cpu.advise_hugepages(buffer)
