"""Versions as YAML: what goes out comes back in, and nothing is overwritten."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import WHO, adaptive, with_versions

from vera.errors import ConfigError, UnknownVersion
from vera.params import ParameterStore, export_yaml, import_yaml


@pytest.fixture
def store(tmp_path):
    with with_versions(tmp_path / "params.sqlite3") as store:
        yield store


@pytest.fixture
def other(tmp_path):
    with ParameterStore(tmp_path / "other.sqlite3") as store:
        yield store


def document(**entry):
    values = {"author": "ada", "reason": "because", "settings": {"mode": "adaptive", "min_context": 7}, **entry}
    kept = {name: value for name, value in values.items() if value is not None}
    return yaml.safe_dump({"vera_parameters": 1, "profiles": {"mine": [kept]}})


def test_an_export_brings_the_same_versions_with_their_authors_reasons_times_and_parents(store, other):
    done = import_yaml(other, export_yaml(store), author="bob", reason="moving")
    assert [version.ref for version in done.added] == ["mine@1", "mine@2", "mine@3"]
    assert [version.ref for version in done.present] == ["long-document@1", "multi-turn@1", "short-text@1"]
    for mine, its in zip(store.versions("mine"), other.versions("mine"), strict=True):
        assert (its.hash, its.author, its.reason, its.time, its.parent) == (
            mine.hash, mine.author, mine.reason, mine.time, mine.parent,
        )  # fmt: skip
    assert other.history("mine")[0].author == "bob" and other.active("mine") is None and other.verify().ok


def test_importing_twice_adds_nothing(store, other):
    import_yaml(other, export_yaml(store), **WHO)
    head = other.head
    assert import_yaml(other, export_yaml(store), **WHO).added == () and other.head == head


def test_an_import_goes_behind_what_is_there_and_parents_follow(store, other):
    other.create("mine", adaptive(min_context=1), **WHO)
    done = import_yaml(other, export_yaml(store, ["mine"]), **WHO)
    assert [(version.ref, version.parent) for version in done.added] == [
        ("mine@2", None),
        ("mine@3", "mine@2"),
        ("mine@4", "mine@3"),
    ]
    assert other.get("mine@1").settings["min_context"] == 1


def test_one_bad_entry_keeps_all_others_out(store, other):
    text = export_yaml(store, ["mine"]).replace("recalibrate_every: 102", "recalibrate_every: 0")
    head = other.head
    with pytest.raises(ConfigError, match="mine, entry 3: recalibrate_every=0"):
        import_yaml(other, text, **WHO)
    assert other.head == head


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (document(settings={"min_contxt": 7}), "mine, entry 1: unknown setting min_contxt; did you mean min_context"),
        (document(author=None), "author is missing"),
        (document(reason="  "), "entry 1: reason is empty"),
        (document(time="yesterday"), "no ISO 8601 time"),
        (document(hash="0" * 64), "not those that were exported"),
        (document(colour="red"), "unknown colour"),
        (document(author=7), "author=7 is not a text"),
        (document().replace("mine", "Not A Name"), "profile 'Not A Name'"),
        (document() + "extra: 1\n", "unknown extra"),
        (document().replace("mode: adaptive", "mode: adaptive\n      mode: native"), "mode is given twice"),
        ("vera_parameters: 2\nprofiles: {}\n", "must begin with"),
        ("vera_parameters: 1\nprofiles: [1]\n", "map names to lists"),
        ("vera_parameters: 1\nprofiles: {mine: [3]}\n", "entry 1 is not a mapping"),
        ("a: &x [1]\nb: *x\n", "aliases are not taken"),
        ("!!python/object/apply:os.system ['true']", "not the YAML"),
        ("{" * 1500, "not the YAML"),
        ("a: [", "not the YAML"),
        ("", "no export"),
        ("x" * (4 * 2**20 + 1), "at most 4194304 are read"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_the_place(other, text, says):
    head = other.head
    with pytest.raises(ConfigError, match=says):
        import_yaml(other, text, **WHO)
    assert other.head == head


def test_a_file_written_by_hand_needs_little_and_may_write_numbers_as_people_do(other):
    text = document().replace("min_context: 7", "attention_tolerance: 1e-3\n      min_context: 7.0")
    version = import_yaml(other, text, **WHO).added[0]
    assert (version.settings["attention_tolerance"], version.settings["min_context"], version.author) == (1e-3, 7, "ada")


def test_exporting_a_profile_that_is_not_there_is_refused(store):
    with pytest.raises(UnknownVersion, match="did you mean mine"):
        export_yaml(store, ["mime"])


@given(st.text(min_size=1, max_size=80).filter(lambda text: text.strip() and all(letter.isprintable() for letter in text)))
@settings(max_examples=20, deadline=None)
def test_any_reason_survives_the_journey(tmp_path_factory, reason):
    folder = tmp_path_factory.mktemp("stores")
    with ParameterStore(folder / "a.sqlite3") as store, ParameterStore(folder / "b.sqlite3") as other:
        store.create("mine", adaptive(), author="ada", reason=reason)
        import_yaml(other, export_yaml(store, ["mine"]), **WHO)
        assert other.get("mine@1").reason == reason.strip()
