"""`vera bench workloads`: kinds of traffic through the service, native and adaptive in turns under one memory ceiling.

The pieces: `scenarios` (what is asked), `facts` (what the model makes of it), `budget` (the ceiling), `service` and `launch`
(`vera serve` as a child), `figures` (arithmetic and the verdict), `report` (tables), and `run`, which puts them together.
"""

from vera.bench.workloads.report import markdown, render_workloads
from vera.bench.workloads.run import run_workloads, save_workloads
from vera.bench.workloads.scenarios import SCENARIOS, Scenario
from vera.bench.workloads.settings import WorkloadsBench

__all__ = [
    "SCENARIOS",
    "Scenario",
    "WorkloadsBench",
    "markdown",
    "render_workloads",
    "run_workloads",
    "save_workloads",
]
