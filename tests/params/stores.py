"""What the tests of the store share."""

import sqlite3
from datetime import UTC, datetime, timedelta

from vera.params import ParameterStore

WHO = {"author": "ada", "reason": "a test"}


class Clock:
    """UTC that a test moves."""

    def __init__(self):
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        return self.now

    def move(self, seconds):
        self.now += timedelta(seconds=seconds)


def adaptive(**changes):
    return {"mode": "adaptive", **changes}


def with_versions(path, count=3, profile="mine"):
    """A store with versions 1 to `count` of a profile, the first one active."""
    store = ParameterStore(path)
    for number in range(count):
        store.create(profile, adaptive(recalibrate_every=100 + number), **WHO)
    store.activate(f"{profile}@1", **WHO)
    return store


def tamper(path, *statements, drop_triggers=True):
    """Changes the file as another tool would."""
    with sqlite3.connect(path, isolation_level=None) as connection:
        if drop_triggers:
            triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for name, _ in triggers:
                connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(statement)
        if drop_triggers:
            for _, sql in triggers:
                connection.execute(sql)
    connection.close()
