"""What clients should not send, byte by byte: an answer in OpenAI's form or a closed connection, and the next request works."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager

import httpx
import pytest
from servers import HELLO, running, speaking_engine

from vera.server import connections, limits

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"prompt": [5, 6], "max_tokens": 2}).encode()
LONG = json.dumps({"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True}).encode()
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def works_afterwards(request):
    """The next request works, and nothing is left of those before it."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert server.complete([5], max_tokens=1)["usage"]["completion_tokens"] == 1
        server.wait_until_idle()


class RawConnection:
    """A connection that sends bytes as they are."""

    def __init__(self, server):
        address = httpx.URL(server.url)
        self._socket = socket.create_connection((address.host, address.port), timeout=5)
        self._rest = b""

    def send(self, *parts, pause=0.02):
        for part in parts:
            self._socket.sendall(part)
            time.sleep(pause)

    def answer(self):
        """The next one: status, headers, body as JSON (None: it has none)."""
        status, headers, body = self.plain_answer()
        return status, headers, json.loads(body) if body else None

    def plain_answer(self, *, has_body=True):
        head, _, self._rest = self._read_until(lambda received: b"\r\n\r\n" in received).partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0)) if has_body else 0
        body, self._rest = self._read_until(lambda received: len(received) >= length)[:length], self._rest[length:]
        return int(first.split()[1]), headers, body

    def is_closed(self, within):
        """The server has closed it, without more bytes."""
        self._socket.settimeout(within)
        try:
            return self._socket.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def close(self):
        self._socket.close()

    def _read_until(self, complete):
        while not complete(self._rest):
            part = self._socket.recv(65536)
            assert part, f"closed after {self._rest!r}"
            self._rest += part
        return self._rest


@contextmanager
def raw(server):
    connection = RawConnection(server)
    try:
        yield connection
    finally:
        connection.close()


def head_of(length, path=COMPLETE, *lines):
    return "\r\n".join(
        [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *lines,
            "",
            "",
        ]
    ).encode()


def post(body=GOOD, path=COMPLETE, *lines):
    return head_of(len(body), path, *lines) + body


def assert_refused(answer, status, code=None):
    seen, headers, body = answer
    assert seen == status and headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]
    assert code is None or body["error"]["code"] == code


# Bodies


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80abc", b"\xe2\x82"],
    ids=["no UTF-8", "cut", "surrogate", "too high", "continuation", "two of three"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
def test_text_that_is_no_utf8_is_refused(server, path, text):
    body = b'{"prompt": "%b", "tokens": [5], "user": "%b", "messages": [{"role": "user", "content": "%b"}]}' % ((text,) * 3)
    response = server.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused(server, encoding):
    response = server.client.post(COMPLETE, content='{"prompt": "x", "max_tokens": 1}'.encode(encoding), headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
def test_ten_megabytes_are_refused_before_they_are_read(server, path, told):
    content = b"x" * (10 * MEGABYTE) if told else (b"x" * 100_000 for _ in range(100))
    response = server.client.post(path, content=content, headers=JSON)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_largest_body_that_is_taken_is_answered(server):
    """Brackets, quotes and backslashes, which cost most to look through."""
    for filling in ("[" * 32, '\\"', "[1],", "\\\\"):
        body = b'{"messages": "' + (filling * (4 * MEGABYTE // len(filling)))[: 4 * MEGABYTE - 20].encode()
        start = time.monotonic()
        assert server.client.post(CHAT, content=body, headers=JSON).status_code == 400
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 5000, "1e-400", "-0", "1E5"]
)
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "n", "priority", "vera", "min_p", "user"])
def test_odd_numbers_are_refused_or_taken_but_never_fail(server, field, value):
    """Written as they are: 0 and tiny numbers are legal for some fields."""
    defaults = {"messages": HELLO, "max_tokens": 2}
    defaults.pop(field, None)
    body = f'{json.dumps(defaults)[:-1]}, "{field}": {value}}}'
    response = server.client.post(CHAT, content=body, headers=JSON)
    legal = value in ("1e-400", "-0")
    assert response.status_code in ((200, 400) if legal else (400,)), response.text
    assert "error" in response.json() or legal


@pytest.mark.parametrize("where", ["messages", "vera", "chat_template_kwargs", "unknown", "logit_bias", "stop", "prompt"])
def test_deep_json_is_refused_in_every_field(server, where):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in (33, 500, 100_000):
            nested = opening * depth + ("1" if opening != "[" else "") + closing * depth
            body = f'{{"max_tokens": 1, "{where}": {nested}}}'
            response = server.client.post(CHAT, content=body, headers=JSON)
            assert response.status_code == 400 and response.json()["error"]["code"] == "json_too_deep"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("application/jsonx", 400),
        ("text/json", 400),
        ("multipart/form-data; boundary=x", 400),
        (None, 400),
    ],
)
def test_content_type_is_json_or_refused(server, content_type, status):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = server.client.post(COMPLETE, content=GOOD, headers=headers)
    assert response.status_code == status


def test_compressed_body_is_refused(server):
    response = server.client.post(COMPLETE, content=b"\x1f\x8b\x08\x00", headers={**JSON, "Content-Encoding": "gzip"})
    assert response.status_code == 400 and response.json()["error"]["message"]


# Connections


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (post(b"{"), 400),
        (post(b'{"prompt": "x", "n": 0}'), 400),
        (post(path="/v1/nothing"), 404),
        (post(path="/health"), 405),
        (post(b"x" * (5 * MEGABYTE)), 413),
        (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /v1/models/%ff%00%2e%2e HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_connection_serves_on_after_an_error(server, sent, status):
    with raw(server) as connection:
        for _ in range(2):
            connection.send(sent)
            assert_refused(connection.answer(), status)
            connection.send(post())
            status_of_good, _, answer = connection.answer()
            assert status_of_good == 200 and answer["choices"]


def test_head_request_is_refused_without_a_body(server):
    with raw(server) as connection:
        connection.send(b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers, _ = connection.plain_answer(has_body=False)
        assert (status, headers["allow"]) == (405, "get")
        connection.send(post())
        assert connection.answer()[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"CONNECT other.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_http_is_told_and_cut_off(server, sent):
    with raw(server) as connection:
        connection.send(sent)
        assert_refused(connection.answer(), 400, "invalid_http")
        assert connection.is_closed(within=1)


def test_broken_chunk_in_mid_body_is_told_and_cut_off(server):
    with raw(server) as connection:
        connection.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", b"zz\r\n"
        )
        assert_refused(connection.answer(), 400, "invalid_http")


@pytest.mark.parametrize("line", [b"A: " + b"y" * 100_000 + b"\r\n", b"A: y\r\n" * 20_000], ids=["one", "many"])
def test_huge_head_is_refused(server, line):
    with raw(server) as connection:
        connection.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n", line[:50_000])
        connection.send(line[50_000:])
        assert_refused(connection.answer(), 431, "head_too_large")
    with raw(server) as connection:
        connection.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: " + b"y" * 30_000 + b"\r\n\r\n")
        assert connection.answer()[0] == 200


def test_huge_path_is_refused(server):
    with raw(server) as connection:
        connection.send(b"GET /" + b"x" * 40_000, b"x" * 40_000)
        assert_refused(connection.answer(), 431)


def test_body_larger_than_a_head_may_be_is_no_head(server):
    with raw(server) as connection:
        for _ in range(3):
            connection.send(post(json.dumps({"prompt": "x" * 150_000}).encode()))
            assert_refused(connection.answer(), 400, "context_length_exceeded")


@pytest.mark.parametrize("cut", [None, 30, 200, -5])
def test_offer_of_another_protocol_is_passed_over(server, cut):
    """As Java's client and `curl --http2` send it with a body."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    with raw(server) as connection:
        for _ in range(2):
            whole = post(GOOD, COMPLETE, *offer)
            connection.send(whole[:cut], *([] if cut is None else [whole[cut:]]))
            assert connection.answer()[0] == 200


def test_chunked_body_with_an_offer_is_read(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    with raw(server) as connection:
        connection.send(
            head + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
        )
        assert connection.answer()[0] == 200


@pytest.mark.parametrize("expects", ["Expect: 100-continue", "Expect: 100-Continue"])
def test_client_that_waits_to_be_asked_is_asked(server, expects):
    with raw(server) as connection:
        connection.send(head_of(len(GOOD), COMPLETE, expects))
        assert connection.plain_answer()[0] == 100
        connection.send(GOOD)
        assert connection.answer()[0] == 200


def test_requests_sent_ahead_are_answered_in_order(server):
    with raw(server) as connection:
        connection.send(post() + post(b"{") + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + post())
        assert [connection.answer()[0] for _ in range(4)] == [200, 400, 200, 200]


@pytest.mark.parametrize("ahead", [post(), post()[:-5], post(LONG) * 3])
def test_client_that_sends_ahead_and_leaves_frees_everything(server, ahead):
    with raw(server) as connection:
        connection.send(post(LONG) + ahead)
        assert server.busy()[0] == 1
    server.wait_until_idle(2)


def test_client_that_sends_too_far_ahead_is_cut_off(server):
    for flood in (post() * 40, head_of(10 * MEGABYTE) + b"x" * MEGABYTE):
        with raw(server) as connection:
            connection.send(post(LONG))
            try:
                connection.send(flood)
                assert connection.is_closed(within=1)
            except ConnectionError:
                pass
        server.wait_until_idle(2)


# Slow clients


@pytest.fixture
def hurried(monkeypatch):
    """A server that waits half a second for heads and bodies."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(limits, "_BODY_SECONDS", 0.5)
    with running(lambda: speaking_engine()) as server:
        yield server


def drip(connection, data):
    """Sends a byte every 50 ms until the server cuts it off; the seconds it took."""
    start = time.monotonic()
    for place in range(100):
        try:
            connection.send(data[place % len(data)].to_bytes())
            time.sleep(0.03)
        except ConnectionError:
            break
        if connection.is_closed(within=0.001):
            break
    return time.monotonic() - start


def test_connection_without_a_request_is_closed(hurried):
    with raw(hurried) as connection:
        assert not connection.is_closed(within=0.2) and connection.is_closed(within=1)


@pytest.mark.parametrize("before", [b"", post()])
def test_slow_head_is_cut_off(hurried, before):
    with raw(hurried) as connection:
        connection.send(before)
        if before:
            assert connection.answer()[0] == 200
        assert 0.3 < drip(connection, b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"A: y\r\n" * 99) < 2
    assert hurried.complete([5], max_tokens=1)["choices"]


def test_slow_body_is_told_and_cut_off(hurried):
    with raw(hurried) as connection:
        connection.send(head_of(1000))
        connection.send(b"{")
        assert_refused(connection.answer(), 408, "slow_body")
        assert drip(connection, b"x") < 2
    assert hurried.complete([5], max_tokens=1)["choices"]


def test_body_that_nobody_reads_any_more_is_cut_off(hurried):
    with raw(hurried) as connection:
        connection.send(head_of(10 * MEGABYTE))
        assert_refused(connection.answer(), 413)
        assert 0.3 < drip(connection, b"x") < 2


def test_running_answer_outlasts_the_time_for_a_head(hurried):
    with raw(hurried) as connection:
        connection.send(post(json.dumps({"prompt": [5], "max_tokens": 1200, "ignore_eos": True}).encode()), b"GET /ver")
        status, _, answer = connection.answer()
        assert status == 200 and answer["usage"]["completion_tokens"] == 1200


def test_many_idle_connections_do_not_hold_up_others(server):
    idle = [RawConnection(server) for _ in range(200)]
    for connection in idle:
        connection.send(b"POST /v1/comp", pause=0)
    assert server.complete([5], max_tokens=2)["choices"]
    for connection in idle:
        connection.close()
