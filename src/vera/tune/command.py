"""`vera tune`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vera.bench.options import settings_from
from vera.errors import ConfigError, ParamsError
from vera.params.commands import author_or_user, print_json

_INFEASIBLE = 3
"""The exit code where no candidate keeps the limits."""


def tune(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    workload: Annotated[
        str | None, typer.Option("--workload", help="long-document (if nothing is given), multi-turn or short-text.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Sequences decoded together; the workload's if not given.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens of each prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", help="Tokens of each answer: the steps timed.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="What drift is measured on: prose, code, chat, or a file.")] = None,
    cold_share: Annotated[
        float | None, typer.Option("--cold-share", help="The warm store lacks room for this share; 0: it has room for all.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Most candidates; the first is what the search starts from.")] = 16,
    budget_minutes: Annotated[float, typer.Option("--budget-minutes", help="No trial is begun that would end later.")] = 60.0,
    max_kl: Annotated[float, typer.Option("--max-kl", help="Limit: mean KL divergence from native, in nats.")] = 2e-4,
    max_p99_ratio: Annotated[
        float, typer.Option("--max-p99-ratio", help="Limit: P99 of the time between tokens, by native's.")
    ] = 1.0,
    objective: Annotated[str, typer.Option("--objective", help="What is made best: latency, memory or throughput.")] = "latency",
    search: Annotated[str, typer.Option("--search", help="optuna, plain, or auto: Optuna if it is installed.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks for the same candidates.")] = 0,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each cache in a trial, in turns.")] = 1,
    memory_mib: Annotated[
        int | None,
        typer.Option("--memory-mib", min=1, help="What cache_max_size_ratio is a share of; what is free if not given."),
    ] = None,
    cache_set: Annotated[
        list[str] | None, typer.Option("--set", help="A cache setting that stays, such as sketch_bits=8; repeatable.")
    ] = None,
    create: Annotated[
        str | None, typer.Option("--create", help="Write the chosen settings as a new version of this profile; not activated.")
    ] = None,
    store: Annotated[Path | None, typer.Option("--store", help="The store's file; in Vera's home if not given.")] = None,
    author: Annotated[str | None, typer.Option("--author", help="Who creates it; the system's user if not given.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; the figures are added to it.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to compute with; all cores if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")] = False,
) -> None:
    """Find cache settings for this machine, model and work: each candidate is measured beside a native cache.

    Exit codes: 0 settings were chosen, 1 it could not be done, 2 wrong usage, 3 no candidate keeps the limits.
    """
    from vera.params import ParameterStore, differences
    from vera.tune.loop import Stop
    from vera.tune.report import render_tuned
    from vera.tune.run import Tuning, base_settings, create_version, rehearse, run_tuning
    from vera.tune.trial import Limits
    from vera.tune.workloads import workload as workload_of

    if create is None and (store is not None or author is not None or reason is not None):
        raise ConfigError("--store, --author and --reason are for a version that is created; give --create PROFILE too")
    work = workload_of(workload, batch=batch, context=context, new_tokens=new_tokens, text=text, cold_share=cold_share)
    by = author_or_user(author) if create is not None else ""
    with ParameterStore(store) if create is not None else nullcontext() as opened:
        if opened is not None and create is not None:
            rehearse(opened, create, author=by, reason=reason or "tuned")
        base, parent = base_settings(opened, create, work)
        tuned = run_tuning(
            Tuning(
                model=model,
                workload=work,
                base=base,
                given=settings_from(cache_set or []),
                limits=Limits(max_kl, max_p99_ratio),
                objective=_objective(objective),
                trials=trials,
                budget_minutes=budget_minutes,
                search=search,
                seed=seed,
                repeats=repeats,
                memory_bytes=memory_mib * 2**20 if memory_mib is not None else None,
                num_threads=threads,
            )
        )
        console = Console(stderr=as_json)
        console.print(render_tuned(tuned))
        created, refusal = None, None
        if parent is not None and tuned.choice is not None and not differences(parent.settings, tuned.settings):
            console.print(f"nothing created: {parent.ref} has these settings already", highlight=False)
        elif opened is not None and create is not None and tuned.choice is not None:
            try:
                created = create_version(tuned, opened, create, parent=parent, author=by, reason=reason)
                console.print(f"{created.ref} is created, and not active yet", highlight=False)
            except ParamsError as error:  # what was measured is to be seen all the same
                refusal = error
    if as_json:
        print_json({**tuned.to_dict(), "created": created.ref if created is not None else None})
    if refusal is not None:
        raise refusal
    if tuned.course.stop is Stop.INTERRUPTED:
        raise KeyboardInterrupt
    if tuned.choice is None:
        raise typer.Exit(_INFEASIBLE)


def _objective(name: str) -> Any:
    from vera.tune.trial import Objective

    try:
        return Objective(name)
    except ValueError:
        raise ConfigError(f"objective={name!r} is not one of {', '.join(Objective)}") from None
