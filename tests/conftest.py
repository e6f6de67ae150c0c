"""One thread for tiny models: on a busy machine OpenMP's waiting costs them ten times what they compute."""

import os

import pytest

import vera  # noqa: F401  # isort: skip - before torch: it sets how the threads of torch wait
import torch  # isort: skip

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def threads_as_they_were(request):
    """Tests of the embedded model get all cores; nobody's choice reaches the next test."""
    if request.node.get_closest_marker("embedded"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(1)
