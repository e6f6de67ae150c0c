"""The child's side of `vera.bench.child`: reads one job on stdin, does it, writes its result as the last line of stdout."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from vera.bench.memory import MemoryMeter, process_memory
from vera.bench.signals import end_with, ends_on_sigterm
from vera.errors import VeraError


@ends_on_sigterm()
def main() -> None:
    end_with(int(sys.argv[1]))
    _be_the_first_to_go()
    _settle_allocator()
    job = json.loads(sys.stdin.read())
    with MemoryMeter() as meter:
        outcome = _do(job["call"], job["arguments"])
    outcome |= {"process_bytes": meter.peak_private_bytes, "rss_peak_bytes": process_memory().rss_peak_bytes}
    print(json.dumps(outcome), flush=True)


def _be_the_first_to_go() -> None:
    """If memory runs out, the kernel shall kill this measurement and not the program that reports on it."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def _settle_allocator() -> None:
    """Brings glibc's malloc to where it is in a process that has run for a while.

    It gives freed blocks of megabytes back to the system, and pays page faults for the next ones, until the first time that
    it frees one as large (up to 32 MiB). Whether a subject happens to have done so by its first step must not decide its speed.
    """
    bytearray(31 * 2**20)


def _do(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    module, _, name = call.partition(":")
    try:
        work = getattr(importlib.import_module(module), name)
        gc.collect()
        gc.freeze()  # as a server does: see vera.server.run.set_aside_after
        outcome: dict[str, Any] = work(**arguments)
    except VeraError as error:
        return {"failed": str(error), "error": type(error).__name__}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    return outcome


if __name__ == "__main__":
    main()
