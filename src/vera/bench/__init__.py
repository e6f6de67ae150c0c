"""Measurements against baselines, each in the same run and in a process of its own."""

from vera.bench.report import render
from vera.bench.runs import run_decode, run_prefill
from vera.bench.settings import BASELINES, CACHES, DecodeBench, PrefillBench

__all__ = ["BASELINES", "CACHES", "DecodeBench", "PrefillBench", "render", "run_decode", "run_prefill"]
