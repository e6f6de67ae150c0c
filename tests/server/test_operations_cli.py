"""`vera rollout` and `vera degrade` against a running service, as a script uses them; how a followed profile starts."""

from __future__ import annotations

import json
import sys

import pytest
from test_operations import PROFILE, operated, served, until, version

from vera.cli import main
from vera.errors import ConfigError, UnknownVersion
from vera.params import ParameterStore
from vera.server.following import follow_nothing, follow_profile

SIGNED = ("--reason", "a test", "--author", "ann")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def store(home):
    with ParameterStore(home / "params.sqlite3") as opened:
        yield opened


@pytest.fixture(scope="module")
def server(store):
    with operated(store) as started:
        yield started


@pytest.fixture
def vera(server, monkeypatch, capfd):
    """Runs a command; gives exit code, stdout and stderr."""
    monkeypatch.setenv("VERA_ADMIN_KEY", "admin")
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments, url=server.url):
        monkeypatch.setattr(sys, "argv", ["vera", *arguments, "--url", url])
        try:
            main()
        except SystemExit as done:
            return done.code or 0, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return run


def told(done):
    code, out, errors = done
    assert code == 0, errors
    return json.loads(out.splitlines()[-1])


def test_rollout_from_start_to_promotion(vera, store, server):
    ref = version(store)
    begun = told(vera("rollout", "start", ref, "--plan", "25:600:1,100:600:1", "--limit", "itl_ratio=none", *SIGNED, "--json"))
    assert (begun["rollout"]["candidate"], begun["rollout"]["weight"]) == (ref, 25)
    assert begun["rollout"]["limits"]["itl_ratio"] is None
    code, out, _ = vera("rollout", "status")
    assert code == 0
    assert all(word in out for word in (ref, "native", "25%", "running", "requests"))
    assert told(vera("rollout", "hold", *SIGNED, "--json"))["rollout"]["state"] == "paused"
    assert told(vera("rollout", "resume", *SIGNED, "--json"))["rollout"]["state"] == "running"
    assert told(vera("rollout", "promote", "--step", *SIGNED, "--json"))["rollout"]["weight"] == 100
    assert told(vera("rollout", "promote", *SIGNED, "--json"))["rollout"]["state"] == "promoted"
    assert served(server)["params_version"] == ref


def test_switch_is_thrown_and_let_go(vera, server):
    code, out, _ = vera("degrade", "on", *SIGNED)
    assert code == 0 and "native: degraded (by hand)" in out and "running requests moved: 0" in out
    assert served(server)["arm"] == "degraded"
    assert told(vera("degrade", "status", "--json"))["override"] == "open"
    assert told(vera("degrade", "off", *SIGNED, "--json"))["state"] == "closed"
    assert told(vera("degrade", "auto", *SIGNED, "--json"))["override"] == "none"
    until(lambda: served(server)["arm"] is None)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("rollout", "start", f"{PROFILE}@99", *SIGNED), 1, "404"),
        (("rollout", "start", f"{PROFILE}@1", "--limit", "itl_ratio", *SIGNED), 2, "NAME=NUMBER"),
        (("rollout", "start", f"{PROFILE}@1", "--limit", "itl=2", *SIGNED), 1, "unknown limit itl"),
        (("rollout", "abort", *SIGNED), 1, "no rollout of long-document is running"),
        (("degrade", "on"), 2, "--reason"),
        (("degrade", "onn", *SIGNED), 2, "onn"),
    ],
)
def test_refusal_says_why_and_how_to_go_on(vera, arguments, code, message):
    found, _, errors = vera(*arguments)
    assert found == code
    assert message in errors


def test_service_that_is_not_there_is_named(vera):
    code, _, errors = vera("degrade", "status", url="http://127.0.0.1:9")
    assert code == 1 and "http://127.0.0.1:9" in errors and "--url" in errors
    assert vera("degrade", "status", url="ftp://127.0.0.1")[0] == 2


def test_admin_key_is_asked_for_by_its_variable(vera, monkeypatch):
    monkeypatch.delenv("VERA_ADMIN_KEY")
    code, _, errors = vera("rollout", "status")
    assert code == 2 and "VERA_ADMIN_KEY" in errors


# -- how a service that follows a profile starts -----------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    return tmp_path / "params.sqlite3"


def follow(path, given=(), profile=PROFILE):
    config, oversight = follow_profile(profile, dict(given), store=path, shadow_share=0.0)
    oversight.close()
    return config, oversight


def test_profile_without_an_active_version_is_served_natively_over_an_adaptive_cache(path):
    config, _ = follow(path)
    assert (config.mode, config.fidelity) == ("adaptive", "native")
    assert follow(path, {"mode": "adaptive"})[0].fidelity == "bounded"


def test_active_version_is_what_the_service_starts_with_and_its_own_options_stand_above_it(path):
    with ParameterStore(path) as store:
        ref = version(store, attention_tolerance=0.03, sketch_bits=8)
        store.activate(ref, author="ann", reason="a test")
    config, oversight = follow(path, {"cache_max_bytes": 10**8})
    assert (config.attention_tolerance, config.sketch_bits, config.cache_max_bytes) == (0.03, 8, 10**8)
    assert oversight.pinned == {"cache_max_bytes"}


def test_settings_that_a_version_says_are_refused_as_options(path):
    with pytest.raises(ConfigError, match=r"attention_tolerance [^`]*`vera params create"):
        follow(path, {"attention_tolerance": 0.1})
    with pytest.raises(ConfigError, match="native"):
        follow(path, {"mode": "native"})


def test_unknown_profile_is_refused(path):
    with pytest.raises(UnknownVersion, match="long-documents"):
        follow(path, profile="long-documents")


@pytest.mark.parametrize("option", ["--params-store", "--shadow-share"])
def test_what_a_profile_needs_is_refused_without_one(monkeypatch, capfd, path, option):
    value = str(path) if option == "--params-store" else "0.5"
    monkeypatch.setattr(sys, "argv", ["vera", "serve", option, value])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2 and "--profile" in capfd.readouterr()[1]


def test_native_service_without_a_profile_has_no_switch():
    from vera.config import CacheConfig

    assert follow_nothing(CacheConfig(), shadow_share=0.0) is None
    oversight = follow_nothing(CacheConfig(mode="adaptive"), shadow_share=0.0)
    assert oversight is not None and not oversight.keeps
    oversight.close()
    assert not oversight.store.path.exists()
