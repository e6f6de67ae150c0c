"""`vera params`, run as a person or a script would."""

import json
import os
import subprocess
import sys

import pytest
from stores import tamper

from vera.cli import main


@pytest.fixture
def vera(tmp_path, monkeypatch, capfd):
    """Runs a command against a store of its own; gives exit code, stdout and stderr."""

    monkeypatch.setenv("VERA_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vera", "params", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0, *capfd.readouterr()

    return run


def parsed(done):
    code, out, errors = done
    assert code == 0, errors
    return json.loads(out.splitlines()[-1])


def test_a_change_from_making_it_to_taking_it_back(vera, tmp_path):
    made = parsed(
        vera("create", "long-document", "--set", "attention_tolerance=0.02", "--reason", "faster", "--author", "ada", "--json")
    )
    assert (made["ref"], made["author"], made["parent"], made["active"]) == ("long-document@2", "ada", "long-document@1", False)
    parsed(vera("activate", "long-document@1", "--reason", "baseline", "--json"))
    switch = parsed(vera("activate", "long-document@2", "--reason", "try it", "--json"))
    assert switch == {"before": "long-document@1", "active": "long-document@2", "hash": made["hash"], "needs_restart": []}
    assert parsed(vera("rollback", "long-document", "--reason", "too coarse", "--json"))["active"] == "long-document@1"
    events = parsed(vera("history", "long-document", "--json"))["events"]
    assert [event["kind"] for event in events] == ["create", "create", "activate", "activate", "rollback"]
    found = parsed(vera("verify", "--json"))
    assert found["ok"] and found["num_events"] == 7 and found["store"] == str(tmp_path / "params.sqlite3")


def test_every_command_has_a_table_for_people(vera):
    vera("create", "mine", "--set", "page_size=32", "--reason", "small pages", "--activate", "--author", "ada")
    shown = {
        ("list",): ("long-document", "mine", "small pages"),
        ("list", "mine"): ("1 (active)", "ada"),
        ("show", "mine"): ("mine@1 (active)", "restart", "by ada"),
        ("diff", "multi-turn", "mine"): ("page_size", "at restart", "recalibrate_every", "live"),
        ("diff", "native", "multi-turn@1"): ("mode",),
        ("diff", "mine", "mine@1"): ("have the same settings",),
        ("history",): ("activate", "mine@1"),
        ("verify",): ("5 events, 4 versions: all as written", "head 5:"),
        ("export", "mine"): ("vera_parameters: 1", "page_size: 32"),
    }
    for arguments, words in shown.items():
        code, out, errors = vera(*arguments)
        assert code == 0 and not errors and all(word in out for word in words), (arguments, out, errors)


def test_an_export_can_be_imported_elsewhere(vera, tmp_path):
    vera("create", "mine", "--set", "min_context=1", "--reason", "a")
    assert vera("export", "--output", str(tmp_path / "all.yaml"))[0] == 0
    elsewhere = ["--store", str(tmp_path / "folder" / "other.sqlite3")]
    done = parsed(vera("import", str(tmp_path / "all.yaml"), "--reason", "moving", *elsewhere, "--json"))
    assert done == {"added": ["mine@1"], "present": ["long-document@1", "multi-turn@1", "short-text@1"]}
    assert parsed(vera("list", *elsewhere, "--json"))["profiles"]["mine"]["active"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["create", "mine", "--set", "atention_tolerance=1", "--reason", "x"], 2, "did you mean attention_tolerance?"),
        (
            ["create", "mine", "--set", "attention_tolerance=7", "--reason", "x"],
            2,
            "attention_tolerance=7.0 is outside 0.0 to 1.0",
        ),
        (["create", "mine", "--set", "attention_tolerance", "--reason", "x"], 2, "name=value"),
        (["create", "mine", "--set", "min_context=1", "--set", "min_context=2", "--reason", "x"], 2, "given twice"),
        (["create", "mine"], 2, "--reason"),
        (["create", "mine", "--reason", " "], 2, "reason is empty"),
        (["create", "multi-turn", "--reason", "x"], 1, "multi-turn@1 has exactly these settings"),
        (["activate", "multi-tun@1", "--reason", "x"], 1, "did you mean multi-turn?"),
        (["activate", "multi-turn@5", "--reason", "x"], 1, "multi-turn has the versions 1 to 1"),
        (["activate", "multi-turn", "--reason", "x"], 1, "say which version, such as multi-turn@1"),
        (["rollback", "multi-turn", "--reason", "x"], 1, "no version has ever been active"),
        (["show", "nothing"], 1, "known are long-document"),
        (["import", "/nothing/here.yaml", "--reason", "x"], 1, "cannot be read: No such file"),
        (["verify", "--head", "7"], 2, "NUMBER:HASH"),
        (["activat"], 2, "activate"),
        (["list", "--store", "/proc/nothing/params.sqlite3"], 1, "name another store"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_way_out(vera, arguments, code, says):
    done = vera(*arguments)
    assert done[0] == code and says in done[2] and "Traceback" not in done[2], done


def test_verify_fails_on_a_store_that_was_tampered_with(vera, tmp_path):
    vera("activate", "multi-turn@1", "--reason", "x")
    tamper(tmp_path / "params.sqlite3", "UPDATE events SET author = 'eve' WHERE seq = 2")
    code, out, errors = vera("verify", "--json")
    assert code == 1 and "event 2 was changed" in errors
    found = json.loads(out)
    assert not found["ok"] and found["problems"][0]["seq"] == 2
    assert "bad: event 2 was changed" in vera("verify")[1]
    assert vera("history")[0] == 0 and "cannot be trusted" in vera("list")[2]


def test_the_author_is_the_systems_user_unless_one_is_named(vera, monkeypatch):
    monkeypatch.setenv("LOGNAME", "carol")
    assert parsed(vera("create", "mine", "--reason", "x", "--json"))["author"] == "carol"


def test_the_command_needs_neither_the_engine_nor_the_server(tmp_path):
    code = "import sys; from vera.cli import main; sys.argv[1:] = ['params', 'list', '--json']\ntry: main()\n"
    code += "finally: print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    environment = {**os.environ, "VERA_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
