"""Versions: made, activated, rolled back, found, and told of."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import WHO, Clock, adaptive, with_versions

from vera.config import CacheConfig
from vera.errors import ConfigError, ParamsError, StoreError, UnknownVersion
from vera.params import ParameterStore, needs_restart


@pytest.fixture
def store(tmp_path):
    with ParameterStore(tmp_path / "params.sqlite3") as store:
        yield store


def test_a_new_store_has_the_starting_points_and_none_is_active(store):
    assert store.profiles() == ["long-document", "multi-turn", "short-text"]
    assert [store.active(profile) for profile in store.profiles()] == [None] * 3
    assert all(store.find(profile).config().mode == "adaptive" for profile in store.profiles())


def test_a_running_service_can_take_any_starting_point(store):
    sets = [store.find(profile).settings for profile in store.profiles()]
    assert [needs_restart(one, other) for one in sets for other in sets] == [[]] * 9


def test_a_version_is_a_full_set_with_author_reason_time_and_parent(tmp_path):
    store = ParameterStore(tmp_path / "params.sqlite3", clock=Clock())
    version = store.create("mine", adaptive(attention_tolerance=0.02), author=" ada ", reason="more room", parent="multi-turn")
    assert (version.ref, version.author, version.reason, version.parent) == ("mine@1", "ada", "more room", "multi-turn@1")
    assert version.time == "2026-01-01T00:00:00.000000Z"
    assert CacheConfig.from_dict(version.settings) == CacheConfig(mode="adaptive", attention_tolerance=0.02)


def test_numbers_grow_within_a_profile_and_the_newest_is_the_parent(store):
    first = store.create("mine", adaptive(min_context=1), **WHO)
    second = store.create("mine", first.with_changes({"min_context": 2}), **WHO)
    assert (second.number, second.parent) == (2, "mine@1") and second.settings["min_context"] == 2


def test_settings_that_a_profile_has_already_are_refused_with_the_version_that_has_them(store):
    with pytest.raises(ParamsError, match="long-document@1 has exactly these settings"):
        store.create("long-document", adaptive(), **WHO)


@pytest.mark.parametrize(
    ("profile", "author", "reason"),
    [
        ("mine", "", "why"),
        ("mine", "ada", "  \n "),
        ("mine", "ada", "x" * 2001),
        ("mine", "ada\x1b[31m", "why"),
        ("mine", "ada", "\ud800"),
        ("Mine", "ada", "why"),
        ("a@b", "ada", "why"),
        ("native", "ada", "why"),
        ("", "ada", "why"),
    ],
)
def test_a_change_without_a_name_an_author_or_a_reason_is_refused_and_changes_nothing(store, profile, author, reason):
    head = store.head
    with pytest.raises(ConfigError):
        store.create(profile, adaptive(), author=author, reason=reason)
    assert store.head == head and "mine" not in store.profiles()


def test_activation_and_rollback_move_through_what_was_active(store):
    for number in range(3):
        store.create("mine", adaptive(min_context=number), **WHO)
    for ref in ("mine@1", "mine@2", "mine@3"):
        store.activate(ref, **WHO)
    assert [store.rollback("mine", **WHO).number for _ in range(2)] == [2, 1]
    with pytest.raises(ParamsError, match="only mine@1 has ever been active"):
        store.rollback("mine", **WHO)
    assert store.active("mine").number == 1


@given(st.lists(st.integers(0, 4), max_size=12))
@settings(max_examples=20, deadline=None)
def test_any_history_has_the_active_version_that_a_list_would_have_and_another_process_sees_it(tmp_path_factory, moves):
    path = tmp_path_factory.mktemp("store") / "params.sqlite3"
    store, expected = with_versions(path, count=4), [1]
    for move in moves:
        if move == 0 and len(expected) > 1:
            expected.pop()
            store.rollback("mine", **WHO)
        elif move and move != expected[-1]:
            expected.append(move)
            store.activate(f"mine@{move}", **WHO)
        else:
            with pytest.raises(ParamsError):
                store.activate(f"mine@{move}", **WHO) if move else store.rollback("mine", **WHO)
    with ParameterStore(path) as other:
        assert other.active("mine").number == store.active("mine").number == expected[-1]
        assert other.verify().ok
    store.close()


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("mine@9", "mine has the versions 1 to 3"),
        ("mine@0", "mine has the versions 1 to 3"),
        ("mne@1", "did you mean mine"),
        ("mine", "such as mine@3"),
        ("ffffffffffff", "no version has a hash"),
        ("mine@x", "no profile"),
        ("", "no profile"),
    ],
)
def test_a_version_that_is_not_there_is_refused_and_the_active_one_stays(tmp_path, ref, says):
    store = with_versions(tmp_path / "params.sqlite3")
    with pytest.raises(UnknownVersion, match=says):
        store.activate(ref, **WHO)
    assert store.active("mine").number == 1


def test_a_version_is_found_by_the_beginning_of_its_hash_unless_several_have_it(store):
    version = store.create("mine", adaptive(min_context=5), **WHO)
    assert store.get(version.hash[:10]).ref == "mine@1"
    store.create("other", adaptive(min_context=5), **WHO)
    with pytest.raises(UnknownVersion, match=r"mine@1, other@1"):
        store.get(version.hash[:10])


def test_head_and_the_active_version_follow_another_process(tmp_path):
    store = with_versions(tmp_path / "params.sqlite3")
    head = store.head
    with ParameterStore(store.path) as other:
        other.activate("mine@2", **WHO)
    assert store.head == head + 1 and store.active("mine").number == 2


def test_events_of_other_subsystems_are_kept_in_order_and_can_be_asked_for(store):
    store.record("rollout.start", {"weight": 5}, **WHO, version=store.get("multi-turn@1"))
    store.record("degrade", {"state": "open"}, **WHO, profile="multi-turn")
    assert [(event.kind, event.ref) for event in store.history("multi-turn", limit=2)] == [
        ("rollout.start", "multi-turn@1"),
        ("degrade", "multi-turn"),
    ]
    assert [event.payload for event in store.history(kind="rollout")] == [{"weight": 5}]


@pytest.mark.parametrize("kind", ["create", "activate", "rollback", "import", "", "Rollout", "a b"])
def test_the_stores_own_kinds_are_not_for_others(store, kind):
    with pytest.raises(ConfigError, match="kind"):
        store.record(kind, {}, **WHO)


@pytest.mark.parametrize("payload", [{"x": float("nan")}, {"x": object()}, {"x": "y" * 70_000}])
def test_a_payload_that_is_no_small_plain_json_is_refused(store, payload):
    with pytest.raises(ConfigError, match="payload"):
        store.record("degrade", payload, **WHO)
    assert store.verify().ok


def test_a_change_of_several_parts_happens_whole_or_not_at_all(store):
    head = store.head
    with pytest.raises(RuntimeError), store.changing():
        version = store.create("mine", adaptive(), **WHO)
        store.activate(version, **WHO)
        raise RuntimeError
    assert store.head == head and "mine" not in store.profiles()
    store.create("mine", adaptive(), **WHO)
    assert store.verify().ok


def test_a_clock_that_jumps_back_changes_no_order_and_is_told(tmp_path):
    clock = Clock()
    store = ParameterStore(tmp_path / "params.sqlite3", clock=clock)
    store.activate("multi-turn@1", **WHO)
    clock.move(-86_400)
    store.create("multi-turn", adaptive(min_context=1), **WHO)
    store.activate("multi-turn@2", **WHO)
    found = store.verify()
    assert store.active("multi-turn").number == 2 and found.ok
    assert "clock had gone back at 1 events, first at 5" in found.notes[0]


def test_threads_and_stores_of_one_file_lose_nothing(tmp_path):
    path = tmp_path / "new" / "params.sqlite3"

    def write(name):
        with ParameterStore(path) as store:
            for number in range(8):
                store.create(name, adaptive(min_context=number), **WHO)

    threads = [threading.Thread(target=write, args=(f"profile-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ParameterStore(path) as store:
        assert [len(store.versions(f"profile-{number}")) for number in range(4)] == [8] * 4
        assert store.verify().ok and store.verify().num_events == 3 + 32


def test_one_store_serves_several_threads(store):
    done = []

    def use(number):
        for step in range(10):
            store.record("degrade", {"step": step}, author=f"thread {number}", reason="a test")
            done.append(store.find("multi-turn").ref)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 40 and store.head == 43 and store.verify().ok


def test_a_version_that_this_release_cannot_take_is_not_activated(store, monkeypatch):
    store.create("mine", adaptive(attention_tolerance=0.5), **WHO)
    monkeypatch.setitem(__import__("vera.config").config._HARD_RANGES, "attention_tolerance", (0.0, 0.1))
    with pytest.raises(ConfigError, match=r"mine@1 does not suit this release of Vera: attention_tolerance=0.5"):
        store.activate("mine@1", **WHO)


def test_a_file_that_was_replaced_while_open_is_not_written_to(store):
    store.path.rename(store.path.with_name("elsewhere"))
    with pytest.raises(StoreError, match="moved or replaced"):
        store.activate("multi-turn@1", **WHO)
