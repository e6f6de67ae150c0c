"""`vera bench serve`: load for any server that speaks OpenAI's protocol, and what its users would feel.

Flags and result keys are those of `vllm bench serve`. The pieces: `workload` (what is asked when), `client` (one request, timed),
`drive` (arrivals, concurrency, turns), `figures` (arithmetic), `report` (tables), and `run`, which puts them together.
"""

from vera.bench.serve.report import render_serve
from vera.bench.serve.run import run_serve, save_result, summary
from vera.bench.serve.settings import BACKENDS, DATASETS, MADE_UP, METRICS, ServeBench, Target, Workload, parse_goodput

__all__ = [
    "BACKENDS",
    "DATASETS",
    "MADE_UP",
    "METRICS",
    "ServeBench",
    "Target",
    "Workload",
    "parse_goodput",
    "render_serve",
    "run_serve",
    "save_result",
    "summary",
]
