"""Keys: default-deny, and an admin surface of its own."""

from __future__ import annotations

import pytest
from servers import HELLO, running

from vera.errors import ConfigError
from vera.server.settings import ServerSettings, read_admin_key, read_keys

SECURED = {"api_keys": ("first-key", "second-key"), "admin_key": "admin-key"}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def secured():
    with running(**SECURED) as started:
        yield started


def routes(server):
    document = server.client.get("/openapi.json", headers=bearer("first-key")).json()
    return [(method, path.replace("{model}", "tiny")) for path, methods in document["paths"].items() for method in methods]


def test_every_route_but_the_probes_needs_a_key(secured):
    seen = routes(secured)
    assert len(seen) >= 11
    for method, path in [*seen, ("get", "/openapi.json"), ("get", "/nothing"), ("get", "//health"), ("get", "/health/")]:
        status = secured.client.request(method, path).status_code
        assert status == (200 if path in ("/health", "/ready") else 401), path


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer first-key2", "Bearer first-ke", "Bearer", "first-key", "Basic first-key", "Bearer é", ""],
)
def test_wrong_key_is_refused_with_openais_body(secured, header):
    response = secured.client.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "first-key" not in response.text


@pytest.mark.parametrize("key", ["first-key", "second-key", "admin-key"])
def test_every_key_opens_the_api(secured, key):
    body = {"messages": HELLO, "max_tokens": 1}
    assert secured.client.post("/v1/chat/completions", json=body, headers=bearer(key)).status_code == 200


def test_only_the_admin_key_opens_the_admin_routes(secured):
    for path in ("/admin/stats", "/admin", "/admin/nothing"):
        assert secured.client.get(path).status_code == 401
        assert secured.client.get(path, headers=bearer("first-key")).status_code == 403
    assert secured.client.get("/admin/stats", headers=bearer("admin-key")).status_code == 200
    assert secured.client.get("/admin/nothing", headers=bearer("admin-key")).status_code == 404


def test_admin_routes_are_shut_without_an_admin_key(server):
    for headers in ({}, bearer("anything")):
        assert server.client.get("/admin/stats", headers=headers).status_code == 403


def test_keys_are_shown_nowhere(secured):
    stats = secured.client.get("/admin/stats", headers=bearer("admin-key")).text
    assert "first-key" not in stats and "admin-key" not in stats
    assert "first-key" not in repr(secured.service.settings) and "admin-key" not in repr(secured.service.settings)


def test_body_is_not_read_before_the_key_is(secured):
    response = secured.client.post("/v1/completions", content=b"x" * 5_000_000)
    assert response.status_code == 401


def test_no_other_origin_is_let_in(secured):
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    response = secured.client.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 401
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.5", "example.org"])
def test_listening_beyond_loopback_needs_a_key(host):
    with pytest.raises(ConfigError, match="VERA_API_KEY"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_keys=("key",)).host == host
    assert ServerSettings(host=host, allow_no_key=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_none(host):
    assert ServerSettings(host=host).api_keys == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": "80"},
        {"max_body_bytes": 0},
        {"max_n": 65},
        {"request_timeout_seconds": 0},
        {"request_timeout_seconds": float("nan")},
        {"grace_seconds": -1},
        {"tls_key": "x"},
        {"tls_certificate": "nowhere", "tls_key": "nowhere"},
        {"api_keys": ("",)},
        {"api_keys": ("same",), "admin_key": "same"},
    ],
)
def test_wrong_setting_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("api_keys", "key")):
        ServerSettings(**wrong)


def test_keys_come_from_the_environment_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VERA_API_KEY", "one, two,")
    (tmp_path / "keys").write_text("three\n\ntwo\n")
    assert read_keys(tmp_path / "keys") == ("one", "two", "three")
    with pytest.raises(ConfigError, match="nowhere"):
        read_keys(tmp_path / "nowhere")


def test_a_source_of_keys_that_has_none_is_refused(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("\n  \n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(tmp_path / "keys")
    monkeypatch.setenv("VERA_API_KEY", " ,")
    with pytest.raises(ConfigError, match="VERA_API_KEY has no key"):
        read_keys(None)
    monkeypatch.setenv("VERA_ADMIN_KEY", " ")
    with pytest.raises(ConfigError, match="VERA_ADMIN_KEY"):
        read_admin_key()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "::1@x"])
def test_keyless_server_is_not_reached_by_a_foreign_name(server, host):
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/health")):
        refused = server.client.request(method, path, headers={"Host": host})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "foreign_host"
        assert "VERA_API_KEY" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9", "localhost", "LocalHost:80", "[::1]:80", "[::1]", "10.0.0.5:80", ""]
)
def test_keyless_server_is_reached_by_address_and_as_localhost(server, host):
    assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_any_name_is_good_with_a_key_or_where_none_is_wanted(secured):
    headers = {"Host": "service.example", **bearer("first-key")}
    assert secured.client.get("/v1/models", headers=headers).status_code == 200
    with running(allow_no_key=True) as server:
        assert server.client.get("/v1/models", headers={"Host": "service.example"}).status_code == 200
