"""`vera check`: what this machine has and does, and whether an adaptive cache suits it and a model."""

from vera.check.report import draw_report
from vera.check.run import Report, Verdict, run_check

__all__ = ["Report", "Verdict", "draw_report", "run_check"]
