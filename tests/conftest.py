"""One thread for tiny models: on a busy machine OpenMP's waiting costs them ten times what they compute."""

import os

import pytest

import vera  # noqa: F401  # isort: skip - before torch: it sets how the threads of torch wait
import torch  # isort: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests of the embedded model, and what they set up, get all cores; nobody's choice reaches the next test."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if item.get_closest_marker("embedded") else 1)
