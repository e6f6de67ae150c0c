"""A rollout from its start to promotion or the way back, across restarts, hands and processes."""

import sqlite3
import threading
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vera.config import CacheConfig
from vera.errors import ConfigError, ParamsError, StoreError
from vera.params import ParameterStore
from vera.rollout import Arm, Audit, Cause, Decision, Limits, Outcome, Plan, Rollouts, State

WHO = {"author": "ada", "reason": "a test"}
LIMITS = Limits(shadow_kl=None, shadow_agreement=None, min_latencies=10, min_audits=1)
PLAN = Plan.parse("5:60:10,50:60:10,100:60:10")
GOOD = Outcome(ttft_seconds=0.5, itl_seconds=(0.02,) * 5)
SLOW = Outcome(ttft_seconds=2.0, itl_seconds=(0.02,) * 5)


class Clock:
    """Seconds that a test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def store(tmp_path):
    with ParameterStore(tmp_path / "params.sqlite3") as store:
        for number in range(3):
            store.create("mine", {"mode": "adaptive", "recalibrate_every": 100 + number}, **WHO)
        store.activate("mine@1", **WHO)
        yield store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rollouts(store, clock):
    return Rollouts(store, "mine", clock=clock)


def start(rollouts, candidate="mine@2", **options):
    return rollouts.start(candidate, **{"plan": PLAN, "limits": LIMITS, "salt": "salt", **WHO, **options})


def serve(rollouts, requests=400, *, candidate=GOOD, stable=GOOD):
    """Requests of as many keys, each with the outcome of its arm."""
    for number in range(requests):
        choice = rollouts.choose(f"user-{number}")
        rollouts.observe(choice, candidate if choice.arm is Arm.CANDIDATE else stable)


def shares(rollouts, keys=1000):
    """Share of keys that each version serves."""
    refs = [choice.version.ref if choice.version else "native" for choice in map(rollouts.choose, map(str, range(keys)))]
    return {ref: refs.count(ref) / keys for ref in set(refs)}


def step(rollouts, clock, **outcomes):
    """A pause with traffic, and the analysis after it."""
    serve(rollouts, **outcomes)
    clock.now += 61
    return rollouts.tick()


def test_without_a_rollout_all_requests_are_served_with_the_active_version(store, rollouts):
    assert shares(rollouts) == {"mine@1": 1.0} and rollouts.tick() is None
    store.activate("mine@3", **WHO)
    rollouts.refresh()
    assert shares(rollouts) == {"mine@3": 1.0}


def test_a_good_candidate_goes_from_step_to_step_and_becomes_the_active_version(store, rollouts, clock):
    start(rollouts)
    weights = []
    while rollouts.current:
        weights.append(rollouts.current.weight)
        assert step(rollouts, clock).decision is Decision.PASS
    assert weights == [5, 50, 100] and rollouts.latest.state is State.PROMOTED
    assert store.active("mine").ref == "mine@2" and shares(rollouts) == {"mine@2": 1.0}
    assert [event.kind for event in store.history("mine", limit=5)] == [
        "rollout.start", "rollout.step", "rollout.step", "rollout.promote", "activate",
    ]  # fmt: skip
    assert store.verify().ok and store.history("mine")[-1].author == "guard"


def test_a_rollout_can_begin_natively(store, clock):
    rollouts = Rollouts(store, "multi-turn", clock=clock)
    rollouts.start("multi-turn@1", plan=PLAN, limits=LIMITS, **WHO)
    assert set(shares(rollouts)) == {"native", "multi-turn@1"} and 0.02 < shares(rollouts)["multi-turn@1"] < 0.09
    rollouts.abort(**WHO)
    assert shares(rollouts) == {"native": 1.0}


def test_natively_by_wish_although_a_version_is_active(rollouts):
    start(rollouts, native=True)
    assert set(shares(rollouts)) == {"native", "mine@2"}
    rollouts.abort(**WHO)
    assert shares(rollouts) == {"mine@1": 1.0}


def test_a_slow_candidate_is_held_and_rolled_back_when_new_samples_confirm_it(store, rollouts, clock):
    start(rollouts)
    assert step(rollouts, clock, candidate=SLOW).decision is Decision.HOLD
    held = rollouts.current
    assert (held.state, held.held, held.weight) == (State.PAUSED, {Cause.BREACH}, 5)
    assert rollouts.tick().decision is Decision.WAIT, "the same samples must not count twice"
    assert step(rollouts, clock, candidate=SLOW).decision is Decision.ROLLBACK
    assert rollouts.latest.state is State.ABORTED and "ttft_p99 2 of" in rollouts.latest.reason
    assert shares(rollouts) == {"mine@1": 1.0} and store.active("mine").ref == "mine@1"


def test_a_breach_that_new_samples_do_not_confirm_lets_it_go_on(rollouts, clock):
    start(rollouts)
    step(rollouts, clock, candidate=SLOW)
    assert step(rollouts, clock).decision is Decision.PASS
    assert (rollouts.current.state, rollouts.current.weight) == (State.RUNNING, 50)


def test_a_hard_breach_does_not_wait_for_the_pause(rollouts):
    start(rollouts)
    serve(rollouts, candidate=Outcome(failed=True))
    assert rollouts.tick().decision is Decision.ROLLBACK
    assert "error_rate" in rollouts.latest.reason and shares(rollouts) == {"mine@1": 1.0}


def test_audits_far_beyond_the_limit_end_it_at_once(rollouts):
    start(rollouts)
    choice = next(choice for choice in map(rollouts.choose, map(str, range(1000))) if choice.arm is Arm.CANDIDATE)
    rollouts.observe(choice, Audit(true_error=0.8, estimated_error=0.8))
    assert rollouts.tick().decision is Decision.ROLLBACK and "audit_error" in rollouts.latest.reason


def test_without_traffic_it_waits_then_is_held_and_goes_on_when_traffic_comes(rollouts, clock):
    start(rollouts)
    clock.now += 61
    verdict = rollouts.tick()
    assert verdict.decision is Decision.WAIT and dict(verdict.missing)["requests of the candidate"] == 10
    clock.now += 3601
    rollouts.tick()
    assert rollouts.current.held == {Cause.PATIENCE} and "too few samples" in rollouts.current.reason
    head = rollouts.latest.seq
    rollouts.tick()
    assert rollouts.latest.seq == head, "a hold is recorded once"
    assert step(rollouts, clock).decision is Decision.PASS and rollouts.current.weight == 50


def test_a_pause_lasts_its_time_whatever_the_clock_does(rollouts, clock):
    start(rollouts)
    serve(rollouts)
    clock.now -= 500
    assert rollouts.tick().decision is Decision.WAIT
    clock.now += 559
    assert rollouts.tick().decision is Decision.WAIT
    clock.now += 2
    assert rollouts.tick().decision is Decision.PASS


def test_two_rollouts_at_once_are_refused(rollouts, store):
    start(rollouts)
    with pytest.raises(ParamsError, match=r"rollout of mine@2 is running at 5%: promote or abort it"):
        start(rollouts, "mine@3")
    with pytest.raises(ParamsError, match="running at 5%"):
        start(Rollouts(store, "mine"), "mine@3")


@pytest.mark.parametrize(
    ("candidate", "says"),
    [("mine@1", "active already"), ("mine@9", "versions 1 to 3"), ("multi-turn@1", "is no version of mine")],
)
def test_a_candidate_that_cannot_be_is_refused_and_nothing_changes(rollouts, store, candidate, says):
    head = store.head
    with pytest.raises(ParamsError, match=says):
        start(rollouts, candidate)
    assert store.head == head and rollouts.current is None


def test_a_candidate_that_needs_a_restart_is_refused_with_the_settings(store, clock):
    store.create("mine", {"mode": "adaptive", "page_size": 32, "recompute_budget": 4}, **WHO)
    rollouts = Rollouts(store, "mine", started_with=CacheConfig(mode="adaptive"), clock=clock)
    with pytest.raises(ParamsError, match=r"page_size \(64 to 32\), recompute_budget \(2 to 4\) changes only at a restart"):
        start(rollouts, "mine@4")


def test_an_activation_that_needs_a_restart_leaves_the_service_with_what_it_had(store, clock):
    store.create("mine", {"mode": "adaptive", "page_size": 32}, **WHO)
    rollouts = Rollouts(store, "mine", started_with=CacheConfig(mode="adaptive"), clock=clock)
    store.activate("mine@4", **WHO)
    rollouts.refresh()
    assert shares(rollouts) == {"mine@1": 1.0}
    assert rollouts.refusal.startswith("mine@4 is active, but requests are served with mine@1: page_size (64 to 32)")
    store.activate("mine@2", **WHO)
    rollouts.refresh()
    assert shares(rollouts) == {"mine@2": 1.0} and rollouts.refusal is None


def test_a_candidate_that_this_service_cannot_serve_is_taken_back_whoever_started_it(store, clock):
    store.create("mine", {"mode": "adaptive", "recompute_budget": 9}, **WHO)
    rollouts = Rollouts(store, "mine", started_with=CacheConfig(mode="adaptive", recompute_budget=4), clock=clock)
    limitless = Rollouts(store, "mine", started_with=CacheConfig(mode="adaptive", recompute_budget=9))
    start(limitless, "mine@4", plan=Plan.parse("50"))
    rollouts.refresh()
    assert shares(rollouts) == {"mine@1": 1.0}
    assert rollouts.tick().decision is Decision.ROLLBACK
    assert "recompute_budget (4 to 9) changes only at a restart" in rollouts.latest.reason


def test_held_by_hand_the_weight_stays_until_it_is_resumed(rollouts, clock):
    start(rollouts)
    rollouts.hold(author="ada", reason="lunch")
    with pytest.raises(ParamsError, match="held already"):
        rollouts.hold(**WHO)
    assert step(rollouts, clock).decision is Decision.PASS and rollouts.current.weight == 5
    rollouts.resume(**WHO)
    with pytest.raises(ParamsError, match="not held"):
        rollouts.resume(**WHO)
    assert rollouts.tick().decision is Decision.PASS and rollouts.current.weight == 50


def test_held_by_hand_the_guard_still_goes_back(rollouts):
    start(rollouts)
    rollouts.hold(**WHO)
    serve(rollouts, candidate=Outcome(failed=True))
    rollouts.tick()
    assert rollouts.latest.state is State.ABORTED


def test_promotion_by_hand_goes_one_step_or_all_the_way(store, rollouts):
    start(rollouts)
    assert rollouts.promote(**WHO, full=False).weight == 50
    assert rollouts.promote(author="ada", reason="enough seen").state is State.PROMOTED
    assert store.active("mine").ref == "mine@2"
    assert store.history("mine")[-1].reason.endswith("promoted: enough seen")
    for action in (rollouts.promote, rollouts.abort, rollouts.hold, rollouts.resume):
        with pytest.raises(ParamsError, match="no rollout of mine is running"):
            action(**WHO)


@pytest.mark.parametrize("who", [{"author": "", "reason": "x"}, {"author": "ada", "reason": ""}])
def test_without_an_author_or_a_reason_nothing_happens(rollouts, who):
    with pytest.raises(ConfigError):
        rollouts.start("mine@2", **who)
    start(rollouts)
    with pytest.raises(ConfigError):
        rollouts.abort(**who)
    assert rollouts.current.weight == 5


def test_a_restart_finds_the_rollout_at_its_step_and_counts_anew(store, rollouts, clock):
    start(rollouts)
    step(rollouts, clock)
    serve(rollouts)
    again = Rollouts(store, "mine", clock=clock)
    assert again.current == rollouts.current and again.current.weight == 50
    keys = [f"user-{number}" for number in range(200)]
    assert [again.choose(key).arm for key in keys] == [rollouts.choose(key).arm for key in keys]
    clock.now += 61
    assert again.tick().decision is Decision.WAIT, "what was seen before the restart is gone"
    assert step(again, clock).decision is Decision.PASS


def test_another_process_can_abort_and_the_service_follows(store, rollouts):
    start(rollouts)
    with ParameterStore(store.path) as other:
        Rollouts(other, "mine").abort(author="bob", reason="complaints")
    assert rollouts.tick() is None
    assert rollouts.latest.reason == "complaints" and shares(rollouts) == {"mine@1": 1.0}


def test_an_abort_between_the_verdict_and_its_event_has_the_last_word(store):
    clock = Clock()
    rollouts = Rollouts(store, "mine", clock=lambda: clock())
    start(rollouts)
    serve(rollouts)
    clock.now += 61
    other = ParameterStore(store.path)

    class Meddling:
        def __call__(self):
            if not other.history("mine", kind="rollout.abort"):
                Rollouts(other, "mine").abort(author="bob", reason="complaints")
            return 2000.0

    clock = Meddling()
    assert rollouts.tick().decision is Decision.PASS
    assert (rollouts.latest.state, store.history("mine")[-1].kind) == (State.ABORTED, "rollout.abort")
    other.close()


def test_a_process_that_has_not_looked_yet_can_abort_what_another_started(store, rollouts):
    stale = Rollouts(store, "mine")
    start(rollouts)
    assert stale.current is None
    assert stale.abort(**WHO).state is State.ABORTED


def test_many_switches_under_load_lose_no_request_and_mix_no_versions(store, rollouts):
    served, stop = [], threading.Event()

    def serve_for_ever():
        while not stop.is_set():
            version = rollouts.choose("user").version
            served.append((version.number, version.settings["recalibrate_every"]))

    thread = threading.Thread(target=serve_for_ever)
    thread.start()
    for number in range(200):
        store.activate(f"mine@{2 - number % 2}", **WHO)
        rollouts.refresh()
        assert rollouts.choose("user").version.number == 2 - number % 2
    stop.set()
    thread.join()
    assert set(served) == {(1, 100), (2, 101)} and len(served) > 200
    assert store.verify().ok and len(store.history("mine", kind="activate")) == 201


def test_activating_another_version_ends_the_rollout(store, rollouts):
    start(rollouts)
    store.activate("mine@3", author="bob", reason="urgent")
    assert rollouts.tick() is None
    assert (rollouts.latest.state, rollouts.latest.reason) == (State.ABORTED, "urgent")
    assert shares(rollouts) == {"mine@3": 1.0}


def test_samples_of_a_rollout_that_is_over_are_not_counted_for_the_next(rollouts):
    start(rollouts)
    old = [rollouts.choose(str(number)) for number in range(100)]
    rollouts.abort(**WHO)
    start(rollouts, "mine@3")
    for choice in old:
        rollouts.observe(choice, Outcome(failed=True))
    assert rollouts.status()["arms"]["stable"]["requests"] == rollouts.status()["arms"]["candidate"]["requests"] == 0


def test_while_the_store_is_locked_requests_are_served_as_before(store, clock):
    with ParameterStore(store.path, busy_seconds=0.05) as impatient:
        rollouts = Rollouts(impatient, "mine", clock=clock)
        start(rollouts)
        serve(rollouts)
        clock.now += 61
        blocker = sqlite3.connect(store.path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            rollouts.tick()
        assert rollouts.current.weight == 5 and set(shares(rollouts)) == {"mine@1", "mine@2"}
        blocker.execute("ROLLBACK")
        blocker.close()
        assert rollouts.tick().decision is Decision.PASS and rollouts.current.weight == 50


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_has_to_stop_stops_at_once_even_if_the_store_cannot_be_told(store, clock, by_hand):
    with ParameterStore(store.path, busy_seconds=0.05) as impatient:
        rollouts = Rollouts(impatient, "mine", clock=clock)
        start(rollouts)
        blocker = sqlite3.connect(store.path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        serve(rollouts, candidate=Outcome(failed=True))
        with pytest.raises(StoreError, match="locked"):
            rollouts.abort(author="ada", reason="errors") if by_hand else rollouts.tick()
        assert shares(rollouts) == {"mine@1": 1.0}
        blocker.execute("ROLLBACK")
        blocker.close()
        rollouts.tick()
        assert rollouts.latest.state is State.ABORTED
        assert ("aborted by ada: errors" if by_hand else "error_rate") in rollouts.latest.reason


def test_the_status_says_where_it_stands_and_why(rollouts, clock):
    assert rollouts.status() == {"rollout": None}
    start(rollouts)
    serve(rollouts, 10)
    clock.now += 61
    rollouts.tick()
    status = rollouts.status()
    assert (status["rollout"]["weight"], status["rollout"]["baseline"], status["step_seconds"]) == (5, "mine@1", 61)
    assert status["verdict"]["decision"] == "wait" and status["verdict"]["missing"]
    assert status["arms"]["stable"]["requests"] + status["arms"]["candidate"]["requests"] == 10


class RolloutLife(RuleBasedStateMachine):
    """Any sequence of hands, traffic, time and restarts: the replay is the live state, arms are sticky, the books are right."""

    @initialize()
    def begin(self):
        self.folder = TemporaryDirectory()
        self.store = ParameterStore(f"{self.folder.name}/params.sqlite3")
        for number in range(3):
            self.store.create("mine", {"mode": "adaptive", "min_context": number}, **WHO)
        self.clock = Clock()
        self.rollouts = Rollouts(self.store, "mine", clock=self.clock)
        self.candidates, self.of = set(), None

    def tried(self, action, *arguments, **options):
        try:
            action(*arguments, **{**WHO, **options})
        except ParamsError as refusal:
            assert not isinstance(refusal, StoreError)

    @rule(candidate=st.sampled_from(["mine@1", "mine@2", "mine@3"]), native=st.booleans())
    def start(self, candidate, native):
        self.tried(self.rollouts.start, candidate, plan=PLAN, limits=LIMITS, native=native)

    @rule(name=st.sampled_from(["hold", "resume", "abort"]))
    def steer(self, name):
        self.tried(getattr(self.rollouts, name))

    @rule(full=st.booleans())
    def promote(self, full):
        self.tried(self.rollouts.promote, full=full)

    @rule(number=st.integers(1, 3))
    def activate_elsewhere(self, number):
        self.tried(self.store.activate, f"mine@{number}")

    @rule(outcome=st.sampled_from([GOOD, SLOW, Outcome(failed=True)]))
    def pass_time(self, outcome):
        step(self.rollouts, self.clock, requests=300, candidate=outcome)

    @rule()
    def restart(self):
        self.rollouts = Rollouts(self.store, "mine", clock=self.clock)

    @invariant()
    def replay_is_live(self):
        self.rollouts.refresh()
        again = Rollouts(self.store, "mine", clock=self.clock)
        assert again.latest == self.rollouts.latest
        assert shares(again, 50) == shares(self.rollouts, 50)

    @invariant()
    def arms_are_sticky(self):
        current = self.rollouts.current
        if current is None or current.id != self.of:
            self.candidates, self.of = set(), current.id if current else None
        chosen = {key for key in map(str, range(100)) if self.rollouts.choose(key).arm is Arm.CANDIDATE}
        assert self.candidates <= chosen
        self.candidates = chosen

    @invariant()
    def what_was_promoted_is_active(self):
        latest = self.rollouts.latest
        if latest and latest.state is State.PROMOTED:
            follow = [event for event in self.store.history("mine", kind="activate") if event.seq > latest.seq]
            assert self.store.active("mine").ref == (follow[-1].ref if follow else latest.candidate)

    def teardown(self):
        if hasattr(self, "store"):
            assert self.store.verify().ok
            self.store.close()
            self.folder.cleanup()


RolloutLife.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestRolloutLife = RolloutLife.TestCase
