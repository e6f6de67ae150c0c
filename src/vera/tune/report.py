"""What came of tuning, for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vera.tune.frontier import frontier
from vera.tune.loop import Stop
from vera.tune.run import Tuned
from vera.tune.trial import Failed, Figures, Point, Trial


def render_tuned(tuned: Tuned) -> RenderableType:
    """The settings that the search started from, the frontier, and what was taken and why."""
    trials = tuned.course.trials
    shown = frontier(trials)
    if trials and trials[0] not in shown and isinstance(trials[0].result, Figures):
        shown = [trials[0], *shown]
    workload = tuned.tuning.workload
    table = Table(
        title=f"{workload.name}: {workload.batch} x {workload.context} + {workload.new_tokens} tokens ({tuned.model_name}), "
        "by what a native cache takes",
        title_justify="left",
    )
    for heading in ("trial", "memory", "latency", "P99", "KL", "top-1", "recompute"):
        table.add_column(heading, justify="right")
    table.add_column("limits")
    for trial in shown:
        table.add_row(*_cells(tuned, trial), style="bold" if _is_chosen(tuned, trial) else "")
    settings = [f"{trial.number}: {_settings(trial.point)}" for trial in shown]
    return Group(table, *(Text(note) for note in (*settings, *_notes(tuned))))


def _cells(tuned: Tuned, trial: Trial) -> list[str]:
    figures = trial.result
    assert isinstance(figures, Figures)
    missed = [name for name, violation in tuned.tuning.limits.violations(figures).items() if violation > 0]
    return [
        f"{trial.number}{' *' if _is_chosen(tuned, trial) else ''}",
        f"{figures.memory:.3f}",
        f"{figures.latency:.3f}",
        f"{figures.p99:.3f}",
        f"{figures.kl_mean:.1e}",
        f"{figures.top1_agreement:.1%}",
        f"{figures.recompute_share:.1%}",
        "kept" if not missed else f"missed: {', '.join(missed)}",
    ]


def _settings(point: Point) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in point.items())


def _is_chosen(tuned: Tuned, trial: Trial) -> bool:
    return tuned.choice is not None and tuned.choice.trial is trial


def _notes(tuned: Tuned) -> list[str]:
    trials = tuned.course.trials
    failed = [trial for trial in trials if isinstance(trial.result, Failed)]
    notes = [
        "shown: the trials that no other one is better than in memory, latency or drift without being worse in another, and "
        "trial 1, from which the search starts",
        f"{len(trials)} of {tuned.tuning.trials} trials in {tuned.seconds / 60:.1f} minutes by {tuned.search}; "
        f"{tuned.course.stop.value}",
    ]
    notes += [f"not searched: {name}: {why}" for name, why in tuned.space.left_out.items()]
    notes += [f"trial {trial.number} failed: {trial.result.why}" for trial in failed if isinstance(trial.result, Failed)]
    return [*notes, _verdict(tuned)]


def _verdict(tuned: Tuned) -> str:
    if tuned.course.stop is Stop.INTERRUPTED:
        return "nothing taken: interrupted"
    if tuned.choice is None:
        limits = tuned.tuning.limits
        return (
            f"nothing taken: no trial has KL <= {limits.max_kl:g} and P99 <= {limits.max_p99_ratio:g} of native's; serve this "
            "work natively, loosen a limit, or give the search more trials"
        )
    what = f"it sets {_settings(tuned.changes)}" if tuned.changes else "these are the settings that the search started from"
    return f"taken: trial {tuned.choice.trial.number}, {tuned.choice.why}; {what}"
