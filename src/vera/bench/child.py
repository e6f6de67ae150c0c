"""Each measurement has a process of its own, so that memory figures, thread pools and caches are its own.

The protocol: the child (`vera.bench.worker`) reads one JSON job on stdin and writes one JSON object as the last line of its
stdout. What it prints before that, and to stderr, is progress for people. It does not outlive its parent, whose id is its only
argument.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from vera.bench.signals import TERMINATED

_GRACE_SECONDS = 5.0
"""What a child has for clearing up, before it is killed."""


def run_job(
    call: str, arguments: Mapping[str, Any], *, num_threads: int | None = None, timeout_seconds: float = 3600
) -> dict[str, Any]:
    """Calls `call` ("module:function") with `arguments` in a fresh process and returns the dict that it returned.

    To that dict the child adds `process_bytes` and `rss_peak_bytes`. Never raises for what happens in the child: if it
    raises, dies, is killed or takes too long, the result is `{"failed": why}`.
    """
    job = json.dumps({"call": call, "arguments": dict(arguments)})
    child = subprocess.Popen(
        [sys.executable, "-m", "vera.bench.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(num_threads),
    )
    with child:
        try:
            output, _ = child.communicate(job, timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            _stop(child)
            return {"failed": f"took longer than {timeout_seconds:g} s and was stopped"}
        except BaseException:
            _stop(child)
            raise
    return _outcome(child.returncode, output)


def _stop(child: subprocess.Popen[str]) -> None:
    try:
        child.terminate()
        child.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        child.kill()


def _environment(num_threads: int | None) -> dict[str, str]:
    # Every OpenMP runtime that a subject brings reads this when it is loaded, before anyone can call it.
    return os.environ | ({"OMP_NUM_THREADS": str(num_threads)} if num_threads else {})


def _outcome(returncode: int, output: str) -> dict[str, Any]:
    if returncode == -signal.SIGKILL:
        return {"failed": "killed, most likely because memory ran out; take a smaller batch or context"}
    if returncode < 0:
        return {"failed": f"died of {signal.Signals(-returncode).name}"}
    if returncode == TERMINATED:
        return {"failed": "was told to end"}
    if returncode > 0:
        return {"failed": f"left with exit code {returncode}; its messages are on stderr"}
    try:
        outcome = json.loads(output.rstrip("\n").rpartition("\n")[2])
    except json.JSONDecodeError:
        outcome = None
    if not isinstance(outcome, dict):
        return {"failed": "ended without a result; its messages are on stderr"}
    return outcome
