"""What docs/parameters.md says is what the code does."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from vera.cli import main
from vera.params import ParameterStore, change_of, setting_names
from vera.params.settings import reason_of
from vera.params.starters import STARTERS
from vera.rollout import BreakerSettings, Limits, Plan

DOC = (Path(__file__).parents[2] / "docs" / "parameters.md").read_text()


def test_the_table_of_settings_is_the_codes():
    rows = [f"| `{name}` | {change_of(name).value} | {reason_of(name)} |" for name in setting_names()]
    assert "\n".join(rows) in DOC


def test_the_walk_through_runs_as_it_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("VERA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (vera params .*)$", DOC, re.M)
    assert len(commands) == 11
    for command in commands:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as done:
            main()
        assert not done.value.code, (command, capfd.readouterr())
    with ParameterStore() as store:
        assert store.path.parent == tmp_path and store.active("long-document").ref == "long-document@1"


def test_the_starting_points_are_the_codes():
    for starter in STARTERS:
        row = next(line for line in DOC.splitlines() if line.startswith(f"| `{starter.profile}` |"))
        changes = {name: value for name, value in starter.changes.items() if name != "mode"}
        assert starter.changes["mode"] == "adaptive"
        assert all(f"`{name}` {value}" in row for name, value in changes.items()) and (changes or "nothing" in row)


def test_the_default_plan_limits_and_bounds_are_the_codes():
    assert Plan.parse("5:60:50,25:60:50,50:60:50,100:60:50") == Plan() and "`5:60:50,25:60:50,50:60:50,100:60:50`" in DOC
    limits, breaker = Limits(), BreakerSettings()
    assert Plan().patience_seconds == 3600
    assert (limits.error_increase, limits.ttft_ratio, limits.itl_ratio, limits.latency_slack_seconds) == (0.01, 1.25, 1.25, 0.005)
    assert (limits.recompute_share, limits.audit_error, limits.audit_ratio, limits.hard_factor) == (0.2, 0.05, 1.5, 10)
    assert (limits.shadow_kl, limits.shadow_agreement) == (0.002, 0.97)
    assert (limits.min_latencies, limits.min_audits, limits.min_shadow_tokens) == (100, 5, 200)
    for signal, bounds in (("true error of audits", breaker.audit_error), ("uncovered", breaker.uncovered_per_step)):
        assert re.search(rf"\| [^|]*{signal}[^|]* \| {bounds.trip:g} \| {bounds.clear:g} \|", DOC)
    assert re.search(rf"\| share of memory in use \| {breaker.memory_share.trip:g} \| {breaker.memory_share.clear:g} \|", DOC)
    assert breaker.itl_p99_seconds is None
    assert (breaker.confirm, breaker.cool_down_seconds, breaker.growth, breaker.max_cool_down_seconds) == (2, 60, 2, 3600)
    assert (breaker.half_open_share, breaker.half_open_seconds, breaker.half_open_requests) == (0.1, 60, 20)
    assert breaker.forget_seconds == 3600
