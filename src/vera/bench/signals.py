"""How the processes of a measurement end, so that nothing of them is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that was told to end, and cleared up before it did."""
_PR_SET_PDEATHSIG = 1


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """A SIGTERM becomes a SystemExit: children are stopped and temporary folders removed on the way out.

    Leaves the signal to whoever handles it already, and to the main thread, which alone may.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not break off the clearing up
    sys.exit(TERMINATED)


def end_with(parent: int) -> None:
    """The kernel kills this process when `parent` ends, even by SIGKILL; it exits at once if that is no longer its parent.

    What counts is the thread of `parent` that started this process. Linux only; raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(TERMINATED)
