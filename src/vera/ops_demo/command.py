"""`vera demo-ops`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console


def demo_ops(
    model: Annotated[str, typer.Option("--model", "-m", help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Serve on until Ctrl-C; if not given: where stdout is a terminal."),
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to compute with; all cores if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")] = False,
) -> None:
    """Operate a service: a rollout that is promoted, one that the guard rolls back, the degrade switch, and where to look."""
    from vera.bench.signals import ends_on_sigterm
    from vera.ops_demo.settings import OpsDemo
    from vera.ops_demo.story import run_ops_demo

    demo = OpsDemo(model=model)
    if threads is not None:
        demo = replace(demo, serve_options=(*demo.serve_options, "--threads", str(threads)))
    console = Console(stderr=as_json)
    with ends_on_sigterm():
        result = run_ops_demo(demo, console, keep=sys.stdout.isatty() and not as_json if keep is None else keep)
    if as_json:
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
