"""The degrade switch: every flip is recorded, survives a restart, and happens even where the store fails."""

import sqlite3

import pytest

from vera.errors import ConfigError
from vera.params import ParameterStore
from vera.rollout import BreakerSettings, BreakerState, DegradeSwitch, Override, Signals

BROKEN = Signals(nonfinite=2)
WELL = Signals(audit_error=0.01, adaptive_requests=50)


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path):
    with ParameterStore(tmp_path / "params.sqlite3", busy_seconds=0.05) as store:
        yield store


@pytest.fixture
def switch(store, clock):
    return DegradeSwitch(store, "multi-turn", clock=clock)


def adaptive_share(switch):
    return sum(switch.adaptive(f"user-{number}") for number in range(1000)) / 1000


def flips(store):
    return [(event.payload["state"], event.author, event.reason) for event in store.history("multi-turn", kind="degrade")]


def test_a_whole_round_is_recorded_with_its_reasons(switch, store, clock):
    assert adaptive_share(switch) == 1
    flip = switch.look(BROKEN)
    assert (flip.before, flip.after, flip.author) == (BreakerState.CLOSED, BreakerState.OPEN, "breaker")
    assert adaptive_share(switch) == 0
    clock.now += 60
    switch.look(Signals())
    assert 0.06 < adaptive_share(switch) < 0.14
    clock.now += 60
    switch.look(WELL)
    assert adaptive_share(switch) == 1
    assert flips(store) == [
        ("open", "breaker", "2 values are not finite"),
        ("half-open", "breaker", "after 60 s of native serving 10% of new requests are adaptive again"),
        ("closed", "breaker", "all well for 60 s and 50 adaptive requests"),
    ]
    assert store.verify().ok


def test_looks_that_change_nothing_write_nothing(switch, store):
    head = store.head
    assert all(switch.look(WELL) is None for _ in range(10)) and store.head == head


def test_a_restart_finds_it_as_it_was_with_its_waiting_time_begun_anew(switch, store, clock):
    switch.look(BROKEN)
    clock.now += 59
    again = DegradeSwitch(store, "multi-turn", clock=clock)
    assert (again.breaker.state, again.breaker.trips) == (BreakerState.OPEN, 1) and adaptive_share(again) == 0
    clock.now += 59
    assert again.look(Signals()) is None
    clock.now += 2
    assert again.look(Signals()).after is BreakerState.HALF_OPEN


def test_a_person_flips_it_with_a_name_and_a_reason(switch, store, clock):
    flip = switch.override(Override.OPEN, author="ada", reason="looks odd")
    assert (flip.after, flip.author) == (BreakerState.OPEN, "ada") and flips(store) == [("open", "ada", "looks odd")]
    clock.now += 10_000
    assert switch.look(WELL) is None and adaptive_share(switch) == 0
    assert DegradeSwitch(store, "multi-turn", clock=clock).breaker.override is Override.OPEN
    assert switch.override(Override.NONE, author="ada", reason="fine again").after is BreakerState.HALF_OPEN


@pytest.mark.parametrize(("author", "reason"), [("", "x"), ("ada", " "), ("a" * 201, "x"), ("ada", "\x07")])
def test_without_them_nothing_happens(switch, store, author, reason):
    with pytest.raises(ConfigError):
        switch.override(Override.OPEN, author=author, reason=reason)
    assert adaptive_share(switch) == 1 and flips(store) == [] and switch.num_unrecorded == 0


def test_where_the_store_fails_it_flips_all_the_same_and_records_it_later(switch, store):
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    assert switch.look(BROKEN).after is BreakerState.OPEN
    assert adaptive_share(switch) == 0 and switch.num_unrecorded == 1 and "locked" in switch.status()["failure"]
    blocker.execute("ROLLBACK")
    blocker.close()
    switch.look(BROKEN)
    assert (switch.num_unrecorded, switch.failure) == (0, None) and [state for state, *_ in flips(store)] == ["open"]


def test_a_flip_by_another_process_is_taken_over(switch, store):
    with ParameterStore(store.path) as other:
        DegradeSwitch(other, "multi-turn").override(Override.OPEN, author="bob", reason="from the command line")
    flip = switch.look(WELL)
    assert (flip.after, flip.author, flip.reason) == (BreakerState.OPEN, "another process", "from the command line")
    assert len(flips(store)) == 1


def test_another_process_that_was_faster_has_the_last_word(switch, store, clock):
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    switch.look(BROKEN)
    blocker.execute("ROLLBACK")
    blocker.close()
    with ParameterStore(store.path) as other:
        DegradeSwitch(other, "multi-turn").override(Override.CLOSED, author="bob", reason="known, harmless")
    switch.look(BROKEN)
    assert switch.breaker.override is Override.CLOSED and adaptive_share(switch) == 1
    assert [event.kind for event in store.history("multi-turn", kind="degrade")] == ["degrade", "degrade.late"]
    assert DegradeSwitch(store, "multi-turn", clock=clock).breaker.override is Override.CLOSED


def test_profiles_have_switches_of_their_own(switch, store):
    switch.look(BROKEN)
    assert DegradeSwitch(store, "short-text").breaker.state is BreakerState.CLOSED


def test_a_clock_that_goes_back_shortens_nothing(store, clock):
    switch = DegradeSwitch(store, "multi-turn", BreakerSettings(confirm=1), clock=clock)
    switch.look(BROKEN)
    clock.now -= 1000
    assert switch.look(Signals()) is None
    clock.now += 1061
    assert switch.look(Signals()).after is BreakerState.HALF_OPEN
