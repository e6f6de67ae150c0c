"""One server for all tests that leave it as it was."""

import pytest
from servers import running


@pytest.fixture(scope="session")
def server():
    with running() as started:
        yield started
