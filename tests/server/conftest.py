"""One server for all tests that leave it as it was; a browser for those of the page."""

import pytest
from dashboard_page import CHROMIUM, browser
from servers import running


@pytest.fixture(scope="session")
def server():
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; install it (apt-get install chromium), or say where it is in CHROMIUM")
    with browser() as started:
        yield started
