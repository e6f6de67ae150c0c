"""What other tools do to the file is refused or found, and the first bad event is named."""

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import WHO, tamper, with_versions

from vera.errors import ConfigError, StoreError
from vera.params import ParameterStore


@pytest.fixture
def path(tmp_path):
    """Seven events: three starting points, three versions, an activation."""
    with with_versions(tmp_path / "params.sqlite3") as store:
        assert store.head == 7
    return store.path


def first_problem(path, head=None):
    with ParameterStore(path) as store:
        return next(iter(store.verify(head).problems), None)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET author = 'eve' WHERE seq = 5",
        "DELETE FROM events WHERE seq = 7",
        "REPLACE INTO events SELECT seq, kind, profile, number, 'eve', reason, time, payload, hash FROM events WHERE seq = 7",
        "INSERT INTO events SELECT 99, kind, NULL, NULL, author, reason, time, payload, hash FROM events WHERE seq = 7",
    ],
)
def test_an_honest_tool_cannot_change_what_is_written(path, statement):
    with pytest.raises(sqlite3.IntegrityError):
        tamper(path, statement, drop_triggers=False)
    assert first_problem(path) is None


@pytest.mark.parametrize("column", ["kind", "profile", "number", "author", "reason", "time", "payload", "hash"])
@pytest.mark.parametrize("value", ["'x'", "NULL", "x'00ff'", "7"])
def test_any_changed_column_is_found_and_its_event_named(path, column, value):
    try:
        tamper(path, f"UPDATE events SET {column} = {value} WHERE seq = 5")
    except sqlite3.IntegrityError:
        pytest.skip("the table refuses this even without triggers")
    problem = first_problem(path)
    assert problem is not None and problem.seq == 5


@given(seq=st.integers(1, 7), what=st.sampled_from(["change", "delete", "swap"]))
@settings(max_examples=12, deadline=None)
def test_the_first_bad_event_is_named_wherever_it_is(tmp_path_factory, seq, what):
    with with_versions(tmp_path_factory.mktemp("store") / "params.sqlite3") as store:
        path = store.path
    if what == "change":
        tamper(path, f"UPDATE events SET reason = reason || '.' WHERE seq = {seq}")
    elif what == "delete":
        tamper(path, f"DELETE FROM events WHERE seq = {seq}")
    else:
        other = seq % 7 + 1
        tamper(
            path,
            f"UPDATE events SET seq = 100 WHERE seq = {seq}",
            f"UPDATE events SET seq = {seq} WHERE seq = {other}",
            f"UPDATE events SET seq = {other} WHERE seq = 100",
        )
        seq = min(seq, other)
    assert first_problem(path).seq == seq


def test_settings_changed_together_with_their_hash_are_still_found(path):
    tamper(
        path,
        """UPDATE events SET payload = replace(payload, '"recalibrate_every":101', '"recalibrate_every":999') WHERE seq = 5""",
    )
    assert first_problem(path).seq == 5


def rechain(path, edit):
    """What someone does who knows how hashes are made: `edit` a row, then compute all hashes after it anew."""
    from vera.params.journal import _COLUMNS, _digest

    with sqlite3.connect(path) as connection:
        rows = connection.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq").fetchall()
    connection.close()
    previous, statements = "0" * 64, []
    for row in map(edit, rows):
        contents = row[:-1]
        previous = _digest(previous, contents)
        statements.append(f"UPDATE events SET reason = '{row[5]}', hash = '{previous}' WHERE seq = {row[0]}")
    tamper(path, *statements)


def test_a_chain_that_was_computed_anew_is_found_by_the_second_place(path):
    rechain(path, lambda row: (*row[:5], "because", *row[6:]) if row[0] == 4 else row)
    assert first_problem(path).seq == 4


def test_and_if_the_second_place_was_changed_too_by_a_head_that_was_noted_down(path):
    with ParameterStore(path) as store:
        noted = store.verify().head
    rechain(path, lambda row: (*row[:5], "because", *row[6:]) if row[0] == 4 else row)
    with sqlite3.connect(path) as connection:
        lines = [f"{seq} {digest}\n" for seq, digest in connection.execute("SELECT seq, hash FROM events")]
    connection.close()
    path.with_name("params.sqlite3.heads").write_text("".join(lines))
    assert first_problem(path) is None
    assert "noted down" in first_problem(path, noted).message


@pytest.mark.parametrize("head", ["7", "7:abc", "", "x:" + "0" * 64])
def test_a_head_that_is_none_is_refused(path, head):
    with ParameterStore(path) as store, pytest.raises(ConfigError, match="NUMBER:HASH"):
        store.verify(head)


def test_a_cut_off_end_is_found_and_nothing_is_written_over_it(path):
    tamper(path, "DELETE FROM events WHERE seq > 5")
    with ParameterStore(path) as store:
        problem = store.verify().problems[0]
        assert (problem.seq, problem.message) == (6, "events 6 to 7 are missing from the end")
        with pytest.raises(StoreError, match="events 6 to 7 are missing"):
            store.activate("mine@2", **WHO)


def test_an_end_that_was_replaced_is_not_written_over(path):
    rechain(path, lambda row: (*row[:5], "because", *row[6:]) if row[0] == 7 else row)
    with ParameterStore(path) as store, pytest.raises(StoreError, match="not the one that was written"):
        store.activate("mine@2", **WHO)


def test_a_missing_second_place_is_told_and_written_again_with_the_next_change(path):
    ledger = path.with_name("params.sqlite3.heads")
    ledger.unlink()
    assert "is missing" in first_problem(path).message
    with ParameterStore(path) as store:
        store.activate("mine@2", **WHO)
    assert len(ledger.read_text().splitlines()) == 8 and first_problem(path) is None


def test_a_torn_line_of_the_second_place_does_no_harm(path):
    with path.with_name("params.sqlite3.heads").open("a") as file:
        file.write("8 abc")
    with ParameterStore(path) as store:
        store.activate("mine@2", **WHO)
        found = store.verify()
    assert found.ok and len(found.notes) == 1 and "1 lines that are no entries" in found.notes[0]


def test_missing_triggers_are_found(path):
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TRIGGER no_update")
    connection.close()
    assert "triggers" in first_problem(path).message


def test_a_tampered_store_can_be_looked_at_and_not_changed(path):
    tamper(path, "UPDATE events SET author = 'eve' WHERE seq = 5")
    with ParameterStore(path) as store:
        assert [event.author for event in store.history()][4] == "eve"
        for use in (lambda: store.active("mine"), lambda: store.activate("mine@2", **WHO), store.profiles):
            with pytest.raises(StoreError, match="event 5 was changed"):
                use()


def test_a_version_that_does_not_match_its_hash_is_found_even_in_a_good_chain(path):
    from vera.params.journal import Journal
    from vera.params.store import datetime

    with ParameterStore(path) as store:
        payload = dict(store.history()[4].payload) | {"hash": "0" * 64}
    journal = Journal(path, clock=datetime.now, busy_seconds=1)
    journal.append("create", profile="mine", number=4, author="eve", reason="x", payload=payload)
    journal.close()
    problem = first_problem(path)
    assert problem.seq == 8 and "do not match their hash" in problem.message
