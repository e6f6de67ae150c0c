"""Killed processes, full and read-only disks, locks and damage: refused clearly, and the store stays whole."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stores import WHO, adaptive, with_versions

from vera.errors import StoreError
from vera.params import ParameterStore


def python(code, *arguments, wrapper=(), **options):
    words = [*wrapper, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


ACTIVATE_FOR_EVER = """
    import sys
    from itertools import cycle
    from vera.params import ParameterStore
    with ParameterStore(sys.argv[1]) as store:
        for number in cycle((2, 3, 1)):
            store.activate(f"mine@{number}", author="child", reason="a test")
            print(number, flush=True)
"""


def test_a_process_killed_in_the_middle_of_activations_leaves_a_consistent_store(tmp_path):
    path = tmp_path / "params.sqlite3"
    with_versions(path).close()
    for delay in (0.0, 0.003, 0.011, 0.017, 0.0271, 0.041):
        with ParameterStore(path) as store:
            before = len(store.history("mine", kind="activate"))
        with python(ACTIVATE_FOR_EVER, path) as child:
            first = child.stdout.readline()
            time.sleep(delay)
            child.send_signal(signal.SIGKILL)
            told = [int(number) for number in (first + child.stdout.read()).split()]
        with ParameterStore(path) as store:
            found = store.verify()
            assert found.ok, found.problems
            done = [event.number for event in store.history("mine", kind="activate")][before:]
            # Whoever was told that it is done finds it done; the last one may be done and not told.
            assert done[: len(told)] == told and len(done) - len(told) in (0, 1)
            assert store.active("mine").number == done[-1]
            if done[-1] != 1:
                store.activate("mine@1", **WHO)


HOLD_THE_LOCK = """
    import sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_locked_store_can_be_read_and_refuses_changes_after_its_time(tmp_path):
    path = tmp_path / "params.sqlite3"
    with_versions(path).close()
    with python(HOLD_THE_LOCK, path, stdin=subprocess.PIPE) as child:
        child.stdout.readline()
        with ParameterStore(path, busy_seconds=0.1) as store:
            assert store.active("mine").number == 1
            with pytest.raises(StoreError, match=r"locked by another process for 0.1 s; nothing was changed; try again"):
                store.activate("mine@2", **WHO)
            child.stdin.close()
            child.wait()
            assert store.activate("mine@2", **WHO).number == 2


LIMITED = """
    import resource, signal, sys
    from vera.errors import StoreError
    from vera.params import ParameterStore
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with ParameterStore(sys.argv[1]) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
        try:
            for number in range(1000):
                store.create("mine", {"mode": "adaptive", "min_context": number}, author="child", reason="x" * 2000)
        except StoreError as error:
            print(error)
            print(number, store.active("mine").ref, len(store.versions("mine")))
"""


def test_a_disk_that_takes_no_more_refuses_the_change_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "params.sqlite3"
    with_versions(path).close()
    with python(LIMITED, path, 120_000) as child:
        out, errors = child.communicate(timeout=60)
    assert "nothing was changed" in out, (out, errors)
    done, active, versions = out.splitlines()[-1].split()
    assert (active, int(versions)) == ("mine@1", 3 + int(done))
    with ParameterStore(path) as store:
        assert store.verify().ok and store.active("mine").number == 1
        store.activate("mine@2", **WHO)


def in_namespace(*mounts):
    """A command prefix that runs with mounts of its own; skips where the system allows none."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    script = " && ".join([*mounts, 'exec "$@"'])
    words = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-c", script, "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no mounts in a namespace")
    return words


READ_AND_CHANGE = """
    import sys
    from vera.errors import VeraError
    from vera.params import ParameterStore
    try:
        with ParameterStore(sys.argv[1]) as store:
            print(store.active("mine").ref, store.is_writable, store.verify().ok)
            store.activate("mine@2", author="child", reason="a test")
    except VeraError as error:
        print(type(error).__name__, error)
"""


def test_on_a_read_only_disk_a_store_can_be_read_and_not_changed(tmp_path):
    path = tmp_path / "params.sqlite3"
    with_versions(path).close()
    wrapper = in_namespace(f"mount --bind {tmp_path} {tmp_path}", f"mount -o remount,bind,ro {tmp_path}")
    with python(READ_AND_CHANGE, path, wrapper=wrapper) as child:
        out, errors = child.communicate(timeout=60)
    assert out.splitlines()[0] == "mine@1 False True", (out, errors)
    assert "StoreError" in out and "read-only" in out


def test_on_a_read_only_disk_no_store_is_made(tmp_path):
    wrapper = in_namespace(f"mount --bind {tmp_path} {tmp_path}", f"mount -o remount,bind,ro {tmp_path}")
    with python(READ_AND_CHANGE, tmp_path / "folder" / "params.sqlite3", wrapper=wrapper) as child:
        out, errors = child.communicate(timeout=60)
    assert out.startswith("StoreError") and "name another store" in out, (out, errors)


FILL = """
    import sys
    from vera.errors import StoreError
    from vera.params import ParameterStore
    from pathlib import Path
    with ParameterStore(sys.argv[1]) as store:
        try:
            for number in range(2000):
                store.create("mine", {"mode": "adaptive", "min_context": number}, author="child", reason="x" * 2000)
        except StoreError as error:
            print(error)
        print(number, len(store.versions("mine")), store.verify().ok)
"""


def test_on_a_full_disk_the_change_is_refused_and_the_store_stays_whole(tmp_path):
    wrapper = in_namespace(f"mount -t tmpfs -o size=600k tmpfs {tmp_path}")
    with python(FILL, tmp_path / "params.sqlite3", wrapper=wrapper) as child:
        out, errors = child.communicate(timeout=60)
    assert "nothing was changed; make room" in out or "check the disk, its room" in out, (out, errors)
    done, versions, ok = out.splitlines()[-1].split()
    assert done == versions and int(done) > 10 and ok == "True"


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "params.sqlite3"
    path.write_text("vera_parameters: 1\n" * 100)
    with pytest.raises(StoreError, match="is damaged or no store"):
        ParameterStore(path)
    assert path.read_text().startswith("vera_parameters")


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="no store of parameter versions; name another file"):
        ParameterStore(path)
    assert path.read_bytes() == before


def test_a_store_of_a_later_format_is_refused(tmp_path):
    path = tmp_path / "params.sqlite3"
    with_versions(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(StoreError, match="has format 9, and this release of Vera reads 1"):
        ParameterStore(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is not a file"):
        ParameterStore(tmp_path)


def test_damaged_pages_are_found(tmp_path):
    path = tmp_path / "params.sqlite3"
    store = with_versions(path)
    for number in range(30):
        store.create("more", adaptive(min_context=number), author="ada", reason="x" * 1000)
    store.close()
    raw = bytearray(path.read_bytes())
    for offset in range(8 * 4096, len(raw) - 4096, 4096):
        raw[offset : offset + 64] = b"\xff" * 64
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"damaged|cannot be trusted|cannot be used"), ParameterStore(path) as store:
        assert store.verify().ok, "damage was overlooked"
        store.profiles()


def test_a_store_that_was_made_but_never_filled_is_filled(tmp_path):
    path = Path(tmp_path / "params.sqlite3")
    path.touch()
    with ParameterStore(path) as store:
        assert store.head == 3
