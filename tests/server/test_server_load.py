"""Many clients at once: nothing fails, nothing is left behind, and a signal in the midst of it ends every stream properly.

A small random model, so that it is the server that is tested. `test_server_overhead.py` measures what the server costs a token.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import time

import httpx
import psutil
import pytest
from servers import adaptive_engine, running, speaking_engine, speaking_model
from test_server_run import assert_ended_with_an_event, process_of, started_streams

from engines import make_engine
from tiny_models import save_tiny, tiny_tokenizer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
CLIENTS = 64
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def engine():
    return make_engine(
        speaking_model(), blocks=4000, max_num_seqs=CLIENTS, max_waiting=500, max_batch_tokens=256, cache={"poison": False}
    )


def request_bytes(path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def random_request(draw):
    """A stream: a short or long prompt, a short or long answer, as text, token ids or a chat."""
    body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": draw.choice((1, draw.randint(2, 40), draw.randint(40, 300))),
        "seed": draw.randrange(2**31),
    }
    length = draw.choice((draw.randint(1, 20), draw.randint(20, 600)))
    text = "".join(draw.choices("the and ing ou ll é", k=length))
    if draw.random() < 0.5:
        return CHAT, body | {"messages": [{"role": "user", "content": text}], "logprobs": draw.random() < 0.1}
    return COMPLETE, body | {"prompt": text if draw.random() < 0.5 else draw.choices(range(5, 260), k=length)}


def load(url, seconds, results):
    """In a process of its own: clients that stream one answer after the other over connections that they keep."""
    counts = {"requests": 0, "tokens": 0, "failures": []}

    async def client(host, port, number):
        draw, deadline = random.Random(number), time.monotonic() + seconds
        reader, writer = await asyncio.open_connection(host, port)
        while time.monotonic() < deadline:
            path, body = random_request(draw)
            writer.write(request_bytes(path, body))
            received = bytearray()
            while not received.endswith(END):
                part = await asyncio.wait_for(reader.read(65536), 60)
                received += part
                if not part or (b"\r\n\r\n" in received and not received.startswith(b"HTTP/1.1 200")):
                    break
            check(bytes(received), body)
            if draw.random() < 0.1:
                writer.close()
                reader, writer = await asyncio.open_connection(host, port)
        writer.close()

    def check(received, body):
        counts["requests"] += 1
        usage = received.rpartition(b'"usage":')[2].partition(b"\n")[0].removesuffix(b"}")
        if received.endswith(END) and b'"error":' not in received and usage.startswith(b"{"):
            tokens = json.loads(usage)["completion_tokens"]
            counts["tokens"] += tokens
            if tokens == body["max_tokens"]:
                return
        counts["failures"].append(received[:300].decode())

    async def all_of_them():
        address = httpx.URL(url)
        await asyncio.gather(*(client(address.host, address.port, number) for number in range(CLIENTS)))

    asyncio.run(all_of_them())
    results.put(counts)


def put_under_load(server, seconds):
    """What the clients counted, and the server's resident bytes afterwards."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = context.Process(target=load, args=(server.url, seconds, results))
    clients.start()
    counts = results.get(timeout=seconds + 120)
    clients.join()
    server.wait_until_idle()
    gc.collect()
    return counts, psutil.Process().memory_info().rss


def assert_load_leaves_nothing(warmup_seconds, seconds, growth_bytes):
    with running(engine) as server:
        _, before = put_under_load(server, warmup_seconds)
        start = time.monotonic()
        counts, after = put_under_load(server, seconds)
        elapsed = time.monotonic() - start
        figures = {
            "clients": CLIENTS,
            "seconds": round(elapsed, 1),
            "requests": counts["requests"],
            "tokens": counts["tokens"],
            "tokens_per_second": round(counts["tokens"] / elapsed),
            "failures": len(counts["failures"]),
            "rss_before_mb": round(before / 1e6, 1),
            "rss_after_mb": round(after / 1e6, 1),
            "busy": server.busy(),
        }
        print(json.dumps(figures))
        assert counts["failures"] == [] and counts["requests"] > CLIENTS
        assert after - before < growth_bytes
        server.inspect(lambda engine: engine.check_invariants())


@pytest.mark.slow
def test_mixed_streams_of_many_clients_leave_nothing():
    assert_load_leaves_nothing(3, 6, 40e6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mixed_streams_of_many_clients_leave_nothing_for_long():
    """Ten minutes; fewer with LOAD_SECONDS."""
    assert_load_leaves_nothing(30, int(os.environ.get("LOAD_SECONDS", "600")), 40e6)


async def leave_at_random(url, number, gate):
    """Hangs up somewhere between connecting and the end of an answer, sometimes without a farewell."""
    draw, address = random.Random(number), httpx.URL(url)
    async with gate:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        path, body = random_request(draw)
        whole = request_bytes(path, body | {"stream": draw.random() < 0.6, "max_tokens": 1000, "stream_options": None})
        writer.write(whole[: draw.randrange(len(whole))] if draw.random() < 0.2 else whole)
        try:
            async with asyncio.timeout(draw.random() * draw.choice((0.02, 0.5, 3))):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            pass
        finally:
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: speaking_engine(max_num_seqs=32, max_batch_tokens=128), adaptive_engine], ids=["native", "adaptive"]
)
def test_a_thousand_clients_that_leave_at_random_leave_nothing(make):
    async def all_of_them(url):
        gate = asyncio.Semaphore(150)
        await asyncio.gather(*(leave_at_random(url, number, gate) for number in range(1000)))

    with running(make) as server:
        asyncio.run(all_of_them(server.url))
        server.wait_until_idle(5)
        assert server.inspect(lambda engine: engine.stats.finished["abort"]) > 100, "many of them were running or waiting"
        assert server.metric("vera_num_requests_running") == server.metric("vera_num_requests_waiting") == 0
        server.inspect(lambda engine: engine.check_invariants())
        assert server.complete([5], max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
def test_term_under_load_ends_every_stream_with_an_event(tmp_path):
    save_tiny(tmp_path / "tiny", tokenizer=tiny_tokenizer(), vocab_size=len(tiny_tokenizer()), eos_token_id=None)
    settings = ["--port", "0", "--cache-max-bytes", "500000000", "--max-num-seqs", "32", "--grace", "1"]
    with process_of("-m", "vera.cli", "serve", str(tmp_path / "tiny"), *settings) as (process, url, _):
        running_threads, running_streams = started_streams(url, 32)
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        seconds = time.monotonic() - start
        assert_ended_with_an_event(running_threads, running_streams)
        assert 1 <= seconds < 8, "the grace time, and what is left of it to the end of the process"
