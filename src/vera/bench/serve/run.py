"""`vera bench serve` as a function: warm up, drive, report as one dict."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from vera.bench.serve.client import ApiClient
from vera.bench.serve.drive import Run, drive
from vera.bench.serve.figures import serving_figures, sum_usage
from vera.bench.serve.settings import ServeBench
from vera.bench.serve.workload import Conversation, conversations, warm_up
from vera.errors import ConfigError, VeraError

_RETRY_SECONDS = 0.5


def run_serve(bench: ServeBench, *, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Puts the load on the server and returns what came of it: JSON-ready, with the keys of `vllm bench serve` and a few more.

    Ours are `num_requests`, `unfinished` (neither completed nor failed: never sent, or under way at an interruption),
    `interrupted`, `first_error`, `total_cached_tokens`, `without_usage`, `vera` (the sums of `usage.vera`), and what the client
    itself cost. `details` has a list entry for each request; see `save_result`.

    Runs an event loop of its own, in a process that should do nothing else meanwhile. The first Ctrl-C ends the run early, and
    its figures are returned. A VeraError says so if the server does not answer the warm-up request.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise VeraError("`vera bench serve` needs aiohttp, which is not installed: pip install 'vera-engine[load]'")
    planned = conversations(bench.workload)
    if bench.target.backend == "openai" and any(_is_dialogue(conversation) for conversation in planned):
        raise ConfigError("the file has messages, which the backend `openai` cannot send; take --backend openai-chat")
    return asyncio.run(_measure(bench, planned, progress))


def save_result(result: Mapping[str, Any], folder: Path | None, name: str | None, *, detailed: bool) -> Path:
    """Writes a result as a JSON file and returns where it lies. `detailed` keeps the lists with an entry for each request.

    Without a name it is called after the backend, the rate, the model and the date.
    """
    limit = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] is not None else ""
    model = result["model_id"].rsplit("/", 1)[-1]
    usual = f"{result['backend']}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
    path = (folder or Path()).expanduser() / (name or usual)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = summary(result) | (result["details"] if detailed else {})
    path.write_text(json.dumps(written, allow_nan=False) + "\n", encoding="utf-8")
    return path


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without its lists."""
    return {name: value for name, value in result.items() if name != "details"}


async def _measure(bench: ServeBench, planned: list[Conversation], progress: Callable[[int], None] | None) -> dict[str, Any]:
    async with ApiClient(bench.target) as client:
        model = await _ready(bench, client)
        cpu_before = time.process_time()
        with _interrupts() as stop:
            run = await drive(planned, client.ask, max_concurrency=bench.max_concurrency, stop=stop, progress=progress)
    return _result(bench, model, run, cpu_seconds=time.process_time() - cpu_before)


async def _ready(bench: ServeBench, client: ApiClient) -> str:
    """Waits for the server, warms it up, and returns the model's name."""
    if not bench.ready_check_timeout_sec:
        return await _warm_model(bench, client)
    failure = "nothing came back"
    try:
        async with asyncio.timeout(bench.ready_check_timeout_sec):
            while True:
                try:
                    if not bench.num_warmups:
                        await client.check_up()
                    return await _warm_model(bench, client)
                except VeraError as error:
                    failure = str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise VeraError(
            f"{bench.target.base_url} was not ready within {bench.ready_check_timeout_sec:g} s: {failure} "
            "(raise --ready-check-timeout-sec, or see what the server is doing)"
        ) from None


async def _warm_model(bench: ServeBench, client: ApiClient) -> str:
    """The model's name, once the server has answered every warm-up request."""
    model = await client.find_model()
    await _warm_up(bench, client)
    return model


async def _warm_up(bench: ServeBench, client: ApiClient) -> None:
    turn = warm_up(bench.workload)
    for _ in range(bench.num_warmups):
        answer = await client.ask(turn.messages, turn.output_tokens)
        if answer.error is not None:
            raise VeraError(
                f"the warm-up request to {bench.target.url} failed: {answer.error} "
                "(check the address, the endpoint and the model; --ready-check-timeout-sec waits for a server that is starting)"
            )


@contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual."""
    stop = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main thread
        yield stop
        return
    loop = asyncio.get_running_loop()

    def press() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _result(bench: ServeBench, model: str, run: Run, *, cpu_seconds: float) -> dict[str, Any]:
    workload = bench.workload
    errors = [answer.error for answer in run.answers if answer.error is not None]
    return {
        "bench": "serve",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": bench.target.backend,
        "model_id": model,
        "base_url": bench.target.base_url,
        "dataset_name": workload.dataset,
        "num_prompts": workload.num_prompts,
        "num_requests": workload.num_requests,
        "request_rate": _finite(workload.request_rate),
        "burstiness": _finite(workload.burstiness),
        "max_concurrency": bench.max_concurrency,
        "seed": workload.seed,
        **serving_figures(
            run.answers,
            run.seconds,
            goodput=bench.goodput,
            metrics=bench.percentile_metrics,
            percentiles=bench.metric_percentiles,
        ),
        "unfinished": workload.num_requests - len(run.answers),
        "interrupted": run.interrupted,
        "first_error": errors[0] if errors else None,
        "vera": sum_usage(answer.vera for answer in run.answers),
        "client_cpu_share": cpu_seconds / run.seconds,
        "max_send_lag_ms": 1e3 * run.max_send_lag_seconds,
        "details": _details(run),
    }


def _details(run: Run) -> dict[str, list[Any]]:
    """An entry for each request that ended, in the order in which they ended. Times are seconds from the first sending on."""
    start = min((answer.sent_at for answer in run.answers), default=0.0)
    return {
        "input_lens": [answer.prompt_tokens for answer in run.answers],
        "output_lens": [answer.output_tokens for answer in run.answers],
        "ttfts": [answer.ttft_seconds for answer in run.answers],
        "itls": [list(answer.gaps_seconds) for answer in run.answers],
        "latencies": [answer.e2e_seconds for answer in run.answers],
        "start_times": [answer.sent_at - start for answer in run.answers],
        "queue_times": [answer.queued_seconds for answer in run.answers],
        "generated_texts": [answer.text for answer in run.answers],
        "errors": [answer.error or "" for answer in run.answers],
    }


def _is_dialogue(conversation: Conversation) -> bool:
    return any(len(turn.messages) > 1 or turn.messages[0]["role"] != "user" for turn in conversation.turns)


def _finite(value: float) -> float | str:
    """JSON knows no infinity."""
    return "inf" if math.isinf(value) else value
