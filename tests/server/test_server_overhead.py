"""What the server costs beside the engine, at 64 streams. A small random model, so that it is the server that is measured."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time

import httpx
import pytest
from servers import running, speaking_model

from engines import greedy, make_engine

STREAMS, TOKENS = 64, 200
BODY = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def engine():
    return make_engine(speaking_model(), blocks=2000, max_num_seqs=STREAMS, max_waiting=STREAMS, cache={"poison": False})


def seconds_alone():
    """The engine without a server, on a thread of its own as with one."""
    made = engine()
    for number in range(STREAMS):
        made.add_request([5, 6, 7 + number], greedy(TOKENS))
    start = time.perf_counter()
    while made.has_unfinished():
        made.step()
    seconds = time.perf_counter() - start
    made.close()
    return seconds


def read_streams(url, results):
    """In a process of its own: plain sockets that count events, so that the client costs little."""

    async def one(host, port, number):
        reader, writer = await asyncio.open_connection(host, port)
        body = json.dumps({**BODY, "prompt": [5, 6, 7 + number]}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        writer.write(head.encode() + body)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received = received[-64:] + await reader.read(65536)
        writer.close()

    async def all_of_them():
        address = httpx.URL(url)
        start = time.perf_counter()
        await asyncio.gather(*(one(address.host, address.port, number) for number in range(STREAMS)))
        return time.perf_counter() - start

    results.put(asyncio.run(all_of_them()))


def seconds_served():
    """Wall time, and the CPU time of the event loop's thread."""
    context = multiprocessing.get_context("spawn")
    with running(engine) as server:

        async def cpu_seconds():
            return time.thread_time()

        results = context.Queue()
        client = context.Process(target=read_streams, args=(server.url, results))
        before = server.on_loop(cpu_seconds())
        client.start()
        seconds = results.get(timeout=120)
        client.join()
        return seconds, server.on_loop(cpu_seconds()) - before


@pytest.mark.bench
def test_overhead_per_token_is_at_most_three_tenths_of_a_millisecond():
    alone = min(seconds_alone() for _ in range(2))
    served, loop = min(seconds_served() for _ in range(3))
    per_token = (served - alone) / (STREAMS * TOKENS) * 1e3
    print(
        json.dumps(
            {
                "streams": STREAMS,
                "tokens": STREAMS * TOKENS,
                "alone_s": round(alone, 3),
                "served_s": round(served, 3),
                "overhead_ms_per_token": round(per_token, 4),
                "loop_cpu_ms_per_token": round(loop / (STREAMS * TOKENS) * 1e3, 4),
            }
        )
    )
    assert per_token <= 0.3
