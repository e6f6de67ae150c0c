"""`vera bench serve` against a server whose delays and failures are known."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from fake_openai import DONE, Cut, FakeServer, Refuse, chunk, delta, speaker, usage
from vera.bench.serve import ServeBench, Target, Workload, parse_goodput, render_serve, run_serve, save_result
from vera.errors import ConfigError, VeraError


def _bench(url, *, backend="openai", timeout_seconds=20.0, ignore_eos=False, target=None, workload=None, **others):
    return ServeBench(
        target=Target(base_url=url, backend=backend, timeout_seconds=timeout_seconds, ignore_eos=ignore_eos, **(target or {})),
        workload=Workload(**{"num_prompts": 4, "input_len": 10, "output_len": 5, **(workload or {})}),
        **{"num_warmups": 0, **others},
    )


def _run(answer, **settings):
    with FakeServer(answer) as server:
        return run_serve(_bench(server.base_url, **settings))


def _failure(answer, **settings):
    """The error of a run in which every request fails."""
    result = _run(answer, **settings)
    assert (result["completed"], result["failed"]) == (0, 4)
    return result["first_error"]


# -- time --------------------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_server():
    result = _run(speaker(5, first=0.2, gap=0.05))
    assert result["completed"] == 4
    assert 200 <= result["median_ttft_ms"] < 280
    assert 45 <= result["median_itl_ms"] < 80
    assert 45 <= result["median_tpot_ms"] < 80
    assert 400 <= result["median_e2el_ms"] < 550
    assert result["duration"] >= 0.4


def test_first_token_of_a_chat_is_the_first_text_and_not_the_role():
    async def answer(body):
        yield delta(role="assistant", content="")
        await asyncio.sleep(0.15)
        yield delta(content="Hello")
        yield delta("stop")
        yield usage(10, 2)
        yield DONE

    result = _run(answer, backend="openai-chat")
    assert result["median_ttft_ms"] >= 150
    assert result["details"]["generated_texts"] == ["Hello"] * 4


def test_an_answer_lasts_until_it_is_finished_and_not_until_its_counts_come():
    async def answer(body):
        yield chunk(" one")
        await asyncio.sleep(0.1)
        yield chunk("", "stop")
        await asyncio.sleep(0.3)
        yield usage(10, 2)
        yield DONE

    result = _run(answer)
    assert 100 <= result["median_e2el_ms"] < 300
    assert result["details"]["itls"] == [[]] * 4


def test_arrivals_keep_to_their_times():
    result = _run(speaker(1), workload={"num_prompts": 8, "request_rate": 20.0})
    assert 0.4 <= result["duration"] < 0.8
    assert result["details"]["start_times"] == sorted(result["details"]["start_times"])


def test_no_more_requests_are_under_way_than_allowed():
    with FakeServer(speaker(1, first=0.05)) as server:
        result = run_serve(_bench(server.base_url, max_concurrency=2, workload={"num_prompts": 6}))
    assert server.peak == result["max_concurrent_requests"] == 2
    assert max(result["details"]["queue_times"]) >= 0.1
    assert result["median_e2el_ms"] < 100, "waiting in the client is no latency of the server"


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_completions_are_asked_as_told():
    with FakeServer(speaker()) as server:
        target = {"temperature": 0.5, "extra_body": {"top_k": 5, "max_tokens": 9}}
        run_serve(_bench(server.base_url, ignore_eos=True, target=target, workload={"num_prompts": 1}))
    (body,) = server.bodies
    assert body.pop("prompt").count(" ") == 9
    assert body == {
        "model": "org/fake",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.5,
        "ignore_eos": True,
        "top_k": 5,
    }


def test_key_and_headers_are_sent_and_not_shown(tmp_path):
    with FakeServer(speaker()) as server:
        bench = _bench(server.base_url, target={"api_key": "sesame", "headers": {"X-Class": "batch"}})
        result = run_serve(bench)
    assert all("Authorization: Bearer sesame" in head and "X-Class: batch" in head for head in server.heads)
    assert "sesame" not in repr(bench) + json.dumps(result)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_as_people_write_it(ending):
    target = Target(base_url=f"http://here:8000{ending}", backend="openai-chat")
    assert target.url == "http://here:8000/v1/chat/completions"


def test_a_conversation_repeats_its_answers():
    async def answer(body):
        yield delta(content=f"answer {len(body['messages'])}")
        yield delta("stop")
        yield DONE

    with FakeServer(answer) as server:
        workload = {"dataset": "multi-turn", "num_prompts": 1, "num_turns": 3}
        result = run_serve(_bench(server.base_url, backend="openai-chat", workload=workload))
    assert (result["num_requests"], result["completed"]) == (3, 3)
    last = server.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in last if message["role"] == "assistant"] == ["answer 1", "answer 3"]


def test_idle_conversations_leave_their_place_to_others():
    workload = {"dataset": "multi-turn", "num_prompts": 4, "num_turns": 2, "think_seconds": 0.3}
    result = _run(speaker(1), max_concurrency=1, workload=workload)
    assert result["completed"] == 8
    assert 0.3 <= result["duration"] < 0.9, "idle times of conversations overlap"


def test_warm_up_is_not_counted():
    with FakeServer(speaker()) as server:
        result = run_serve(_bench(server.base_url, num_warmups=2))
    assert (result["completed"], len(server.bodies)) == (4, 6)
    assert server.bodies[0] == server.bodies[1] and server.bodies[0] not in server.bodies[2:]


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_token_counts_are_the_servers_and_what_vera_adds_is_summed():
    vera = {"cached_tokens": {"hot": 64, "cold": 1}, "hits": 2, "uncovered_hits": 1}
    result = _run(speaker(3, prompt_tokens_details={"cached_tokens": 5}, vera=vera))
    assert (result["total_input_tokens"], result["total_output_tokens"], result["total_cached_tokens"]) == (40, 12, 20)
    assert result["vera"] == {"cached_tokens": {"hot": 256, "cold": 4}, "hits": 8, "uncovered_hits": 4}


def test_chunks_are_counted_where_the_server_does_not_count():
    async def answer(body):
        for i in range(3):
            yield chunk(f" {i}", "length" if i == 2 else None)
        yield DONE

    result = _run(answer)
    assert (result["total_output_tokens"], result["without_usage"]) == (12, 4)


def test_events_may_come_in_pieces_together_and_with_comments():
    async def answer(body):
        yield b": hello\r\n\r\nda"
        yield b'ta:{"choices": [{"text": " one"}]}\r\n\r\ndata: {"choices": [{"te'
        yield b'xt": " two", "finish_reason": "stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'

    result = _run(answer)
    assert result["details"]["generated_texts"] == [" one two"] * 4


def test_an_answer_without_text_is_an_answer():
    async def answer(body):
        await asyncio.sleep(0.05)
        yield chunk("", "stop")
        yield usage(10, 1)
        yield DONE

    result = _run(answer)
    assert result["completed"] == 4
    assert result["median_ttft_ms"] >= 50


# -- failures ----------------------------------------------------------------------------------------------------------


def test_refusals_are_counted_with_their_reason():
    async def answer(body):
        raise Refuse(500, {"error": {"message": "out of pages"}})
        yield

    assert _failure(answer) == "500 Said: out of pages"


def test_a_cut_stream_is_a_failure():
    async def answer(body):
        yield chunk(" one")
        raise Cut

    assert "Error" in _failure(answer)


def test_a_stream_that_ends_before_its_answer_is_a_failure():
    async def answer(body):
        yield chunk(" one")

    assert _failure(answer) == "the stream ended before the answer was finished"


def test_an_error_in_mid_stream_is_a_failure():
    async def answer(body):
        yield chunk(" one")
        yield {"error": {"message": "preempted"}}
        yield DONE

    assert _failure(answer) == "the stream broke off: preempted"


@pytest.mark.parametrize("event", [b"data: {nonsense\n\n", b"data: [1]\n\n", b'data: {"choices": [3]}\n\n'])
def test_an_event_that_cannot_be_read_is_a_failure(event):
    async def answer(body):
        yield event
        yield DONE

    assert _failure(answer).startswith("an event of the stream cannot be read: ")


def test_a_stream_without_end_is_given_up():
    async def answer(body):
        while True:
            yield chunk(" on")
            await asyncio.sleep(0.02)

    start = time.monotonic()
    assert _failure(answer, timeout_seconds=0.3) == "took longer than 0.3 s"
    assert time.monotonic() - start < 5


def test_a_server_that_keeps_its_connection_open_after_the_answer_is_not_waited_for():
    async def answer(body):
        yield chunk(" one", "stop")
        yield DONE
        await asyncio.sleep(60)

    start = time.monotonic()
    assert _run(answer)["completed"] == 4
    assert time.monotonic() - start < 5


def test_nobody_listening_is_a_failure():
    result = run_serve(_bench(f"http://127.0.0.1:{_free_port()}", target={"model": "m"}))
    assert result["failed"] == 4
    assert "Cannot connect" in result["first_error"]


def test_some_failures_leave_the_other_figures_alone():
    numbers = iter(range(4))

    async def answer(body):
        if next(numbers) == 1:
            raise Refuse(429, {"error": {"message": "later"}})
        async for event in speaker(2)(body):
            yield event

    result = _run(answer)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 1, 6)


def test_a_failed_turn_ends_its_conversation():
    async def answer(body):
        raise Refuse(500, {})
        yield

    result = _run(answer, workload={"dataset": "multi-turn", "num_prompts": 2, "num_turns": 3})
    assert (result["failed"], result["unfinished"]) == (2, 4)


def test_a_failing_warm_up_is_told_before_anything_is_measured():
    async def answer(body):
        raise Refuse(404, {"error": {"message": "no such model"}})
        yield

    with pytest.raises(VeraError, match="no such model"):
        _run(answer, num_warmups=1)


def test_a_server_that_is_starting_is_waited_for():
    numbers = iter(range(10))

    async def answer(body):
        if next(numbers) == 0:
            raise Refuse(503, {"error": {"message": "loading"}})
        async for event in speaker(2)(body):
            yield event

    assert _run(answer, num_warmups=1, ready_check_timeout_sec=10)["completed"] == 4


@pytest.mark.parametrize("num_warmups", [0, 1])
def test_a_silent_server_is_not_waited_for_longer_than_told(num_warmups):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and nobody answers them
        bench = _bench(
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            target={"model": "m"},
            num_warmups=num_warmups,
            ready_check_timeout_sec=0.3,
        )
        start = time.monotonic()
        with pytest.raises(VeraError, match=r"not ready within 0\.3 s: nothing came back"):
            run_serve(bench)
        assert time.monotonic() - start < 5


def test_a_server_that_never_gets_ready_is_told_with_its_last_word():
    with pytest.raises(VeraError, match=r"not ready within 0\.3 s: .*Cannot connect"):
        run_serve(_bench(f"http://127.0.0.1:{_free_port()}", target={"model": "m"}, ready_check_timeout_sec=0.3))


def test_messages_need_the_chat_backend(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}\n')
    with pytest.raises(ConfigError, match="openai-chat"):
        _run(speaker(), workload={"dataset": "custom", "path": path})


def test_interruption_gives_what_there_is():
    numbers = iter(range(4))

    async def answer(body):
        if next(numbers) >= 2:
            await asyncio.sleep(60)
        async for event in speaker(2)(body):
            yield event

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    result = _run(answer)
    assert (result["completed"], result["failed"], result["unfinished"]) == (2, 0, 2)
    assert result["interrupted"] and 0.3 < result["duration"] < 5


# -- what is reported --------------------------------------------------------------------------------------------------


def test_limits_are_written_as_vllm_has_them():
    assert parse_goodput(["ttft:500 tpot:50", "e2el:5e3"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 5000.0}
    with pytest.raises(ConfigError, match="ttft=500"):
        parse_goodput(["ttft=500"])


@pytest.mark.parametrize(
    "wrong",
    [{"goodput": {"itl": 5.0}}, {"percentile_metrics": ("tfft",)}, {"metric_percentiles": (101.0,)}, {"max_concurrency": 0}],
)
def test_a_bench_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        ServeBench(**wrong)


def test_a_saved_result_has_vllms_keys(tmp_path):
    result = _run(speaker(3), goodput={"ttft": 500.0}, max_concurrency=3)
    plain = save_result(result, tmp_path / "new", None, detailed=False)
    assert plain.name == f"openai-infqps-concurrency3-fake-{result['date']}.json"
    written = json.loads(plain.read_text())
    measured = ("ttft", "tpot", "itl", "e2el")
    statistics = {f"{statistic}_{metric}_ms" for statistic in ("mean", "median", "std", "p99") for metric in measured}
    assert statistics | {
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "completed",
        "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    } <= set(written)  # fmt: skip
    assert "ttfts" not in written
    detailed = json.loads(save_result(result, tmp_path, "all.json", detailed=True).read_text())
    assert len(detailed["ttfts"]) == len(detailed["itls"]) == 4


def test_the_tables_say_what_to_doubt():
    async def answer(body):
        raise Refuse(500, {"error": "[broken]"})
        yield

    output = io.StringIO()
    Console(file=output, width=120).print(render_serve(_run(answer)))
    assert "The first error: 500 Said: [broken]" in output.getvalue()
    assert "time to first token" in output.getvalue()


# -- the command -------------------------------------------------------------------------------------------------------


def _vera(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "vera.cli", "bench", "serve", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, "OPENAI_API_KEY": "sesame"},
    )  # fmt: skip


def test_the_command_ends_with_one_json_line(tmp_path):
    with FakeServer(speaker(3)) as server:
        run = _vera(
            "--base-url", server.base_url, "--num-prompts", "3", "--random-input-len", "8", "--goodput", "ttft:5000", "tpot:5000",
            "--metric-percentiles", "50,99", "--save-result", "--result-dir", str(tmp_path), "--json",
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["completed"] == 3 and result["request_goodput"] > 0 and "p50_ttft_ms" in result
    assert [json.loads(path.read_text()) for path in tmp_path.iterdir()] == [result]
    assert server.bodies[0]["ignore_eos"] is True
    assert "Authorization: Bearer sesame" in server.heads[0]


def test_failed_requests_are_shown_and_leave_with_an_exit_code():
    arguments = ("--port", str(_free_port()), "--model", "m", "--num-warmups", "0", "--num-prompts", "2")
    run = _vera(*arguments)
    assert run.returncode == 1
    assert "2 of 2 requests failed" in run.stderr and "Cannot connect" in run.stderr
    assert "failed" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "vllm-chat"], "vllm-chat"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--header", "sesame"], "KEY=VALUE"),
        (["tpot:50"], "--goodput"),
        (["--metric-percentiles", "p99"], "p99"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_mistake_gives_one_clear_message(arguments, message):
    run = _vera(*arguments)
    assert run.returncode in (1, 2), run.stderr
    assert message in run.stderr and "Traceback" not in run.stderr and run.stdout == ""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
