"""What loading changes in its surroundings for a while: how much transformers says, and how many threads torch uses."""

from __future__ import annotations

import ctypes
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers for the block; what matters in its notes is an error of ours."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def one_thread() -> Iterator[None]:
    """For work that gives several threads little to share; on a busy machine, waiting for each other costs them seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def give_back_freed_memory() -> None:
    """Hands freed memory to the system, where the C library can: it may keep hundreds of megabytes of freed weights for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
