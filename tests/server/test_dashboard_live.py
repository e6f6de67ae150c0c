"""The page in a browser against a live service under load: the buttons and the rollouts that operators live by."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from dashboard_page import DashboardPage
from test_operations import LONG, OPEN_LIMITS, adaptive_engine, admin, operated, served, start_rollout, until, version

from vera.params import ParameterStore

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path):
    with ParameterStore(tmp_path / "params.sqlite3") as opened:
        yield opened


@contextmanager
def load_on(server, tokens=60, workers=3):
    """Clients with ever new keys, one answer after the other, until the block ends."""
    ends, users = threading.Event(), itertools.count()

    def ask_on():
        while not ends.is_set():
            server.complete(LONG, max_tokens=tokens, ignore_eos=True, user=f"user-{next(users)}")

    with ThreadPoolExecutor(workers) as pool:
        asking = [pool.submit(ask_on) for _ in range(workers)]
        try:
            yield
        finally:
            ends.set()
        for worker in asking:
            worker.result(60)


def test_every_panel_has_data_and_the_button_degrades_what_runs(chromium, store):
    with operated(store) as server, load_on(server, tokens=1200):
        page = DashboardPage(chromium, server.url).open("admin")
        page.tab.locator("#requests-table button").first.click()
        for shown in (lambda: page.rows("#requests-table"), lambda: page.pixels("#heat-map"), lambda: page.rows("#modes-table")):
            until(shown)
        for chart in ("throughput", "ttft", "itl", "hits", "recompute", "errors"):
            until(lambda chart=chart: page.pixels(f"#chart-{chart} canvas"))
        until(lambda: page.text("#tiers-bars") and page.rows("#audit-table"))
        page.wait_for_serving("closed")
        page.degrade(author="mei", reason="a test of the button")
        page.wait_for_serving("open")
        assert served(server)["arm"] == "degraded"
        until(lambda: {job["fidelity"] for job in admin(server, "stats")["requests"]} == {"native"})
        page.wait_for_text("body", "a test of the button")
        assert page.problems == []
        page.close()


def test_good_rollout_is_watched_from_five_percent_to_promotion(chromium, store):
    ref = version(store)
    with operated(store) as server, load_on(server, tokens=8):
        page = DashboardPage(chromium, server.url).open("admin")
        start_rollout(server, ref, plan="5:4:1,50:0:2,100:0:2")
        seen = set()

        def promoted():
            seen.add(page.text("#rollout-steps li.current") if page.tab.locator("#rollout-steps li.current").count() else "")
            return admin(server, "rollout")["rollout"]["state"] == "promoted"

        until(promoted, 60)
        page.wait_for_text("body", ref)
        until(lambda: "promote" in page.rollout()["state"].lower(), 10)
        assert any("5%" in text for text in seen)
        assert page.problems == []
        page.close()


def test_bad_candidate_is_seen_to_be_rolled_back(chromium, store):
    ref = version(store, attention_tolerance=1.0, hot_max_share=0.0)
    limits = {**OPEN_LIMITS, "shadow_kl": 1e-9, "min_shadow_tokens": 10}

    def load():
        return adaptive_engine(sketch_bits=2)

    with operated(store, load, shadow_share=1.0) as server, load_on(server, tokens=16):
        page = DashboardPage(chromium, server.url).open("admin")
        start_rollout(server, ref, plan="50:0:1,100:0:1", limits=limits)
        until(lambda: admin(server, "rollout")["rollout"]["state"] == "aborted", 60)
        until(lambda: "abort" in page.rollout()["state"].lower() or "rolled back" in page.rollout()["state"].lower(), 10)
        page.wait_for_text("body", "shadow")
        assert page.problems == []
        page.close()
    assert store.active("long-document") is None
