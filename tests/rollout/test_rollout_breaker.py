"""The degrade breaker: trips, cools down, comes back with care, does not flap, and obeys a person."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vera.errors import ConfigError
from vera.rollout import Bounds, Breaker, BreakerSettings, BreakerState, Override, Signals
from vera.rollout.breaker import cool_down, look, overridden

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SETTINGS = BreakerSettings(itl_p99_seconds=Bounds(0.2, 0.1), half_open_requests=5)
BAD = Signals(audit_error=0.06)
MIDDLING = Signals(audit_error=0.04, adaptive_requests=10)
WELL = Signals(audit_error=0.01, adaptive_requests=10)
NOTHING = Signals()


def run(*looks, breaker=None, every=1.0, start=0.0):
    """The breaker after these looks, each `every` seconds after the one before."""
    breaker = breaker or Breaker()
    for number, signals in enumerate(looks, 1):
        breaker = look(breaker, signals, start + number * every, SETTINGS)
    return breaker


@pytest.mark.parametrize(
    ("signals", "says"),
    [
        (Signals(audit_error=0.05), "audit_error 0.05 has reached 0.05"),
        (Signals(uncovered_per_step=0.7), "uncovered_per_step 0.7 has reached 0.5"),
        (Signals(itl_p99_seconds=0.3), "itl_p99_seconds 0.3 has reached 0.2"),
        (Signals(memory_share=0.97), "memory_share 0.97 has reached 0.95"),
        (Signals(audit_error=math.nan), "audit_error nan has reached 0.05"),
    ],
)
def test_each_signal_trips_when_two_looks_find_it_and_says_which(signals, says):
    assert run(signals).state is CLOSED
    tripped = run(signals, signals)
    assert (tripped.state, tripped.reason, tripped.trips) == (OPEN, says, 1)


def test_values_that_are_not_finite_trip_at_once():
    assert run(Signals(nonfinite=1)).state is OPEN


def test_a_look_that_finds_all_well_clears_a_suspicion_and_one_in_between_does_not():
    assert run(BAD, WELL, BAD).state is CLOSED
    assert run(BAD, MIDDLING, BAD).state is OPEN


def test_a_signal_that_is_off_or_silent_never_trips():
    off = BreakerSettings()
    breaker = look(look(Breaker(), Signals(itl_p99_seconds=99), 1, off), Signals(itl_p99_seconds=99), 2, off)
    assert breaker.state is CLOSED and run(NOTHING, NOTHING, NOTHING).state is CLOSED


def test_it_stays_open_for_its_cool_down_and_then_lets_a_share_through():
    opened = run(BAD, BAD)
    assert run(NOTHING, breaker=opened, start=58).state is OPEN
    half = run(NOTHING, breaker=opened, start=61)
    assert half.state is HALF_OPEN and "10% of new requests" in half.reason


def test_it_stays_open_while_memory_is_short():
    opened = run(BAD, BAD)
    assert run(Signals(memory_share=0.92), breaker=opened, start=100).state is OPEN
    assert run(Signals(memory_share=0.80), breaker=opened, start=100).state is HALF_OPEN


def half_open(at=100.0):
    half = run(NOTHING, breaker=run(BAD, BAD), start=at - 1)
    assert half.state is HALF_OPEN
    return half


def test_it_closes_after_a_time_and_requests_that_were_well():
    half = half_open()
    assert run(WELL, breaker=half, start=150).state is HALF_OPEN
    assert run(WELL, breaker=half, start=160).state is CLOSED


def test_half_open_without_adaptive_traffic_proves_nothing():
    assert run(*[Signals(audit_error=None)] * 50, breaker=half_open(), start=100, every=10).state is HALF_OPEN


def test_middling_values_begin_the_time_anew():
    half = run(MIDDLING, breaker=half_open(), start=150)
    assert run(WELL, breaker=half, start=180).state is HALF_OPEN
    assert run(WELL, breaker=half, start=215).state is CLOSED


def test_half_open_one_bad_look_opens_it_for_twice_the_time():
    again = run(BAD, breaker=half_open(), start=120)
    assert (again.state, again.trips, cool_down(again, SETTINGS)) == (OPEN, 2, 120.0)


@given(trips=st.integers(0, 10**6), growth=st.floats(1, 1e6))
@settings(deadline=None)
def test_the_cool_down_grows_with_trips_up_to_its_limit(trips, growth):
    few = BreakerSettings(growth=growth)
    seconds, longer = (cool_down(Breaker(trips=count), few) for count in (trips, trips + 1))
    assert 60 <= seconds <= longer <= 3600


def test_after_a_long_time_closed_earlier_trips_are_forgotten():
    closed = run(WELL, breaker=half_open(), start=160)
    assert (closed.trips, run(WELL, breaker=closed, start=300).trips, run(WELL, breaker=closed, start=4000).trips) == (1, 1, 0)


@pytest.mark.parametrize("override", [Override.OPEN, Override.CLOSED])
def test_a_person_decides_whatever_the_signals_say(override):
    breaker = overridden(Breaker(), override, "by hand", 1.0)
    for signals in (BAD, WELL, Signals(nonfinite=3)):
        breaker = run(*[signals] * 20, breaker=breaker, every=1000)
    assert (breaker.state.value, breaker.reason) == (override.value, "by hand")


def test_ending_a_persons_override_comes_back_with_care():
    opened = overridden(Breaker(), Override.OPEN, "by hand", 1.0)
    assert overridden(opened, Override.NONE, "enough", 2.0).state is HALF_OPEN
    closed = overridden(Breaker(), Override.CLOSED, "by hand", 1.0)
    assert overridden(closed, Override.NONE, "enough", 2.0).state is CLOSED


signals = st.builds(
    Signals,
    audit_error=st.none() | st.sampled_from([0.0, 0.03, 0.04, 0.05, 0.5, math.nan]),
    memory_share=st.none() | st.sampled_from([0.5, 0.9, 0.93, 0.99]),
    nonfinite=st.sampled_from([0, 0, 0, 1]),
    adaptive_requests=st.integers(0, 20),
)


@given(st.lists(st.tuples(signals, st.floats(0, 200)), max_size=80))
@settings(deadline=None)
def test_whatever_comes_it_does_not_flap(looks):
    """Between two openings lies a cool-down, and between opening and closing another healthy while."""
    breaker, now, flips = Breaker(), 0.0, []
    for seen, seconds in looks:
        now += seconds
        after = look(breaker, seen, now, SETTINGS)
        if after.state is not breaker.state:
            flips.append((now, breaker.state, after.state, after.trips))
        breaker = after
    for (then, _, opened, trips), (soon, source, target, _) in pairwise(flips):
        if opened is OPEN:
            assert target is HALF_OPEN and soon - then >= cool_down(Breaker(trips=trips), SETTINGS) - 1e-6
        if source is HALF_OPEN and target is CLOSED:
            assert soon - then >= SETTINGS.half_open_seconds - 1e-6
        assert (source, target) != (OPEN, CLOSED)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"confirm": 0}, "confirm=0"),
        ({"growth": 0.5}, "growth=0.5"),
        ({"half_open_share": 1}, "half_open_share=1"),
        ({"cool_down_seconds": 0}, "cool_down_seconds=0"),
        ({"cool_down_seconds": 7200.0}, "max_cool_down_seconds=3600.0 is below"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        BreakerSettings(**values)


def test_bounds_have_room_between_them():
    with pytest.raises(ConfigError, match="clear must be from 0 up and below trip"):
        Bounds(0.1, 0.1)
