"""The command line: `vera generate | chat | serve | check | demo | demo-ops | inspect | heat | fidelity | bench | tune | models |
params | rollout | degrade`.

Answers and JSON go to stdout, everything else to stderr. Exit codes: 0 done, 1 it could not be done, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vera.bench.options import settings_from
from vera.bench.peers import bench_peers
from vera.bench.table.command import bench_table
from vera.config import CacheConfig
from vera.errors import ConfigError, RequestError, UnsupportedModel, VeraError
from vera.ops_demo.command import demo_ops
from vera.params.commands import app as params_commands
from vera.rollout.commands import degrade_app, rollout_app
from vera.sampling_params import SamplingParams
from vera.tune.command import tune

if TYPE_CHECKING:
    from vera.engine.engine import Engine
    from vera.engine.request import Update
    from vera.llm import LLM

app = typer.Typer(
    help="Vera: an inference engine for language models whose KV cache is adaptive.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Measure this machine: every run in a process of its own, baselines in the same call.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
bench.command("table")(bench_table)
bench.command("peers")(bench_peers)
app.command()(tune)
app.command("demo-ops")(demo_ops)
app.add_typer(params_commands, name="params")
app.add_typer(rollout_app, name="rollout")
app.add_typer(degrade_app, name="degrade")

_stderr = Console(stderr=True)

Model = Annotated[str, typer.Option("--model", "-m", help="A Hugging Face folder, a .gguf file, or `embedded`.")]
CacheRatio = Annotated[float, typer.Option("--cache-max-size-ratio", help="Share of available memory that the cache may take.")]
CacheBytes = Annotated[int | None, typer.Option("--cache-max-bytes", help="The cache's ceiling in bytes, instead of the ratio.")]
Cache = Annotated[str, typer.Option("--cache", help="`native` (every page exact in fast memory) or `adaptive`.")]
CacheSet = Annotated[
    list[str] | None, typer.Option("--set", help="Another cache setting, such as attention_tolerance=0.05; repeatable.")
]
AdaptiveSet = Annotated[
    list[str] | None, typer.Option("--set", help="Adaptive: a cache setting such as attention_tolerance=0.05; repeatable.")
]
PageDtype = Annotated[str, typer.Option("--page-dtype", help="How the cache stores: float16, bfloat16 or float32.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads to compute with; all cores if not given.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the most likely tokens that have this share together.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from this many most likely tokens; 0 for all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the answer; may be given several times.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]


def main() -> None:
    """What the `vera` command runs."""
    try:
        app()
    except (ConfigError, RequestError) as error:
        _fail(error, code=2)
    except (VeraError, OSError) as error:
        _fail(error, code=1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; `-` reads it from stdin.")],
    model: Model = "embedded",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message: use the chat template.")] = False,
    cache: Cache = "native",
    cache_max_size_ratio: CacheRatio = 0.6,
    cache_max_bytes: CacheBytes = None,
    page_dtype: PageDtype = "float16",
    cache_set: CacheSet = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text (or, with --chat, answer a message)."""
    params = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    config = _cache(cache, cache_max_size_ratio, cache_max_bytes, page_dtype, cache_set)
    text = _read_stdin() if prompt == "-" else prompt
    with _llm(model, config, threads) as llm:
        if as_json:
            output = (llm.chat([{"role": "user", "content": text}], params) if chat else llm.generate(text, params))[0]
            answer = output.completions[0]
            _print_json(
                {
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "finish_reason": answer.finish_reason,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "completion_tokens": len(answer.token_ids),
                    "cached_tokens": output.num_cached_tokens,
                    "cache_use": asdict(answer.cache_use) if answer.cache_use is not None else None,
                }
            )
            error = answer.error
        else:
            with _interrupts() as interrupted:
                if chat:
                    updates = llm.stream_chat([{"role": "user", "content": text}], params, cancelled=interrupted)
                else:
                    updates = llm.stream(text, params, cancelled=interrupted)
                _, error = _print_stream(updates)
            if interrupted():
                raise KeyboardInterrupt
    if error:
        raise VeraError(f"the answer broke off: {error}")


@app.command()
def chat(
    model: Model = "embedded",
    system: Annotated[str | None, typer.Option("--system", help="The system message; the model's own if not given.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    cache: Cache = "native",
    cache_max_size_ratio: CacheRatio = 0.6,
    cache_max_bytes: CacheBytes = None,
    page_dtype: PageDtype = "float16",
    cache_set: CacheSet = None,
    threads: Threads = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /reset begins a new conversation; /exit, Ctrl-D or Ctrl-C at the prompt ends."""
    params = _sampling(max_tokens, temperature, top_p, top_k, seed, None)
    config = _cache(cache, cache_max_size_ratio, cache_max_bytes, page_dtype, cache_set)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with _llm(model, config, threads) as llm:
        while (line := _ask()) is not None:
            if line == "/reset":
                messages = list(opening)
                continue
            if not line:
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                with _interrupts() as interrupted:
                    answer, error = _print_stream(llm.stream_chat(asked, params, cancelled=interrupted))
            except RequestError as refusal:
                _stderr.print(f"vera: {refusal} (/reset begins a new conversation)", style="red", markup=False, highlight=False)
                continue
            if error:
                _stderr.print(f"vera: the answer broke off: {error}", style="red", markup=False, highlight=False)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    host: Annotated[str, typer.Option("--host", help="The address to listen on; beyond loopback a key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes any free port.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What clients call the model; its own name if not given.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Keys that open the API, one a line, beside those of VERA_API_KEY.")
    ] = None,
    allow_no_key: Annotated[bool, typer.Option("--allow-no-key", help="Listen beyond loopback without a key.")] = False,
    tls_certificate: Annotated[str | None, typer.Option("--tls-certificate", help="A PEM file; with --tls-key: HTTPS.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", help="The certificate's key, a PEM file.")] = None,
    cache: Cache = "native",
    cache_max_size_ratio: CacheRatio = 0.6,
    cache_max_bytes: CacheBytes = None,
    page_dtype: PageDtype = "float16",
    cache_set: CacheSet = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Most answers that run at the same time.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option("--max-batch-tokens", help="Most new tokens a step computes.")] = 512,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Most answers that wait; more are refused with 429.")] = 2048,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Longest prompt and answer in tokens; all that fits if not given.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", help="Most bytes of a request's body.")] = 4 * 2**20,
    max_n: Annotated[int, typer.Option("--max-n", help="Most answers to one prompt.")] = 16,
    request_timeout: Annotated[float, typer.Option("--request-timeout", help="Seconds until a request is given up.")] = 600.0,
    health_timeout: Annotated[float, typer.Option("--health-timeout", help="Seconds of the longest legal step.")] = 60.0,
    grace: Annotated[float, typer.Option("--grace", help="Seconds that running answers have after a TERM signal.")] = 30.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the access log.")] = False,
    heat_log: Annotated[
        str | None,
        typer.Option("--heat-log", help="Append the heat distributions of an adaptive cache to this file; see `vera heat`."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Follow this profile's versions, with rollouts; see `vera params`, `vera rollout`."),
    ] = None,
    params_store: Annotated[
        Path | None, typer.Option("--params-store", help="The store of versions; params.sqlite3 in Vera's home if not given.")
    ] = None,
    shadow_share: Annotated[
        float, typer.Option("--shadow-share", help="Of a candidate's answers, the share that is computed natively too.")
    ] = 0.05,
    threads: Threads = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API. Needs the extra `server`. Keys come from VERA_API_KEY and VERA_ADMIN_KEY."""
    from vera.config import EngineConfig
    from vera.server.settings import ServerSettings, read_admin_key, read_keys

    settings = ServerSettings(
        host=host,
        port=port,
        served_model_name=served_model_name,
        api_keys=read_keys(api_key_file),
        admin_key=read_admin_key(),
        allow_no_key=allow_no_key,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        max_body_bytes=max_body_bytes,
        max_n=max_n,
        request_timeout_seconds=request_timeout,
        health_timeout_seconds=health_timeout,
        grace_seconds=grace,
        log_prompts=log_prompts,
        heat_log=heat_log,
    )
    if profile is None and params_store is not None:
        raise ConfigError(f"--params-store {params_store} is used with --profile alone; name the profile to follow")
    if profile is None and _was_given(context, "shadow_share"):
        raise ConfigError(f"--shadow-share {shadow_share:g} is used with --profile alone: without one there is no candidate")
    try:
        from vera.server.following import follow_nothing, follow_profile
        from vera.server.run import serve as run_server
    except ModuleNotFoundError as error:
        raise VeraError(f"{error.name} is missing; install vera-engine[server]") from None
    if profile is None:
        cache_config = _cache(cache, cache_max_size_ratio, cache_max_bytes, page_dtype, cache_set)
        oversight = follow_nothing(cache_config, shadow_share=shadow_share)
    else:
        options = {"mode": cache, "cache_max_size_ratio": cache_max_size_ratio}
        options |= {"cache_max_bytes": cache_max_bytes, "page_dtype": page_dtype}
        named = {"mode": "cache"}
        given = {name: value for name, value in options.items() if _was_given(context, named.get(name, name))}
        given |= settings_from(cache_set or [])
        cache_config, oversight = follow_profile(profile, given, store=params_store, shadow_share=shadow_share)
    config = EngineConfig(
        cache=cache_config,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_waiting=max_num_seqs + max_waiting,  # what comes between two steps waits first, seats or not
        max_model_len=max_model_len,
        num_threads=threads,
    )

    def load() -> Engine:
        from vera.engine.engine import Engine
        from vera.models import load_model

        return Engine(load_model(model), config)

    run_server(load, settings, oversight=oversight)


@app.command()
def check(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`; that if it is installed.")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", help="Answers that shall run at the same time.")] = 16,
    context: Annotated[int | None, typer.Option("--context", help="Tokens of each; the model's context, if not given.")] = None,
    warm_dir: Annotated[
        Path | None, typer.Option("--warm-dir", help="Where a warm file would lie; the folder for temporary files if not given.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine and a model: what they have and do, and which cache and settings suit them.

    Exit codes: 0 an adaptive cache suits, 1 Vera cannot serve this here, 2 wrong usage, 3 it can, but with a native cache.
    """
    with _status("looking at the machine") as tell:
        from vera.check import draw_report, run_check

        report = run_check(model, warm_dir=warm_dir, sequences=sequences, context=context, num_threads=threads, tell=tell)
    draw_report(report, _stderr if as_json else Console())
    if as_json:
        _print_json(report.to_dict())
    raise typer.Exit(report.advice.verdict.exit_code)


@app.command()
def demo(
    model: Model = "embedded",
    context: Annotated[int, typer.Option("--context", help="Tokens of the document.")] = 7000,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of each answer.")] = 64,
    cache_set: AdaptiveSet = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Ask several questions about one long document, with a native and an adaptive cache, and see what both cost."""
    from vera.demo import run_demo

    with _status("loading the model"):
        from vera.models import load_model

        loaded = load_model(model)
    result = run_demo(
        loaded,
        context=context,
        max_tokens=max_tokens,
        num_threads=threads,
        console=_stderr if as_json else Console(),
        adaptive=settings_from(cache_set or []),
    )
    if as_json:
        _print_json(result)


@app.command("inspect")
def inspect_command(
    model: Model = "embedded",
    text: Annotated[str, typer.Option("--text", help="prose, code, chat, or a file: what is read.")] = "prose",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the text that are read.")] = 4000,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens that are then written, greedily.")] = 128,
    cache_max_size_ratio: CacheRatio = 0.6,
    cache_max_bytes: CacheBytes = None,
    page_dtype: PageDtype = "float16",
    cache_set: CacheSet = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw into this file too; needs the extra `plots`.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run a text through an adaptive cache and see its tiers, heat, hits and errors."""
    config = _cache("adaptive", cache_max_size_ratio, cache_max_bytes, page_dtype, cache_set)
    with _status("loading the model"):
        from vera.bench.texts import check_text, text_tokens
        from vera.inspection import check_picture, draw, inspect_cache, save_picture
        from vera.models import load_model

        check_text(text)
        if png is not None:
            check_picture(png)
        loaded = load_model(model)
    if loaded.tokenizer is None:
        raise UnsupportedModel(f"{loaded.spec.name} has no tokenizer, so it cannot read a text; name another model")
    prompt = text_tokens(loaded.tokenizer, text, context)
    with _bar("tokens", context + tokens - 1) as move:
        inspection = inspect_cache(loaded, prompt, tokens=tokens, cache=config, num_threads=threads, progress=move)
    draw(inspection, _stderr if as_json else Console())
    if png is not None:
        save_picture(inspection, png)
    if as_json:
        _print_json(inspection.to_dict())


@app.command()
def heat(
    file: Annotated[
        Path, typer.Argument(help="What `vera serve --heat-log FILE` writes; the files that it filled before come along.")
    ],
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only so many recalibrations, the latest.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw into this file too; needs the extra `plots`.")] = None,
    as_json: AsJson = False,
) -> None:
    """See how hot the pages of a server were: tiers and heat scores over time."""
    from vera.heatlog.history import read_heat_log
    from vera.heatlog.picture import save_history
    from vera.heatlog.terminal import draw_history
    from vera.inspection import check_picture

    if png is not None:
        check_picture(png)
    history = read_heat_log(file, last=last)
    draw_history(history, _stderr if as_json else Console())
    if png is not None:
        save_history(history, png)
    if as_json:
        _print_json(history.to_dict())


@app.command()
def fidelity(
    model: Model = "embedded",
    text: Annotated[str, typer.Option("--text", help="prose, code, chat, or a file.")] = "prose",
    context: Annotated[int, typer.Option("--context", help="Tokens of the text that are the prompt.")] = 7700,
    tokens: Annotated[int, typer.Option("--tokens", help="Decode steps, each given the text's next token.")] = 384,
    cache: Annotated[str, typer.Option("--cache", help="adaptive, exact, or native.")] = "adaptive",
    tolerance: Annotated[float | None, typer.Option("--tolerance", help="Sets attention_tolerance.")] = None,
    hot_score_threshold: Annotated[
        float | None, typer.Option("--hot-score-threshold", help="Heat from which a page is hot.")
    ] = None,
    sketch_bits: Annotated[int | None, typer.Option("--sketch-bits", help="2, 4 or 8.")] = None,
    warm_store: Annotated[str | None, typer.Option("--warm-store", help="file, ram or none.")] = None,
    warm_bytes: Annotated[int | None, typer.Option("--warm-bytes", help="Most bytes of the warm store.")] = None,
    page_dtype: PageDtype = "float16",
    cache_set: CacheSet = None,
    controls: Annotated[bool, typer.Option("--controls/--no-controls", help="Measure bf16, fp8 and bare sketches too.")] = True,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How far a cache's answers drift from native's: the same text through both, token by token."""
    from vera.bench.fidelity import FidelityBench, render_fidelity, run_fidelity

    named = {
        "attention_tolerance": tolerance,
        "hot_score_threshold": hot_score_threshold,
        "sketch_bits": sketch_bits,
        "warm_store": warm_store,
        "warm_bytes": warm_bytes,
        "page_dtype": page_dtype,
    }
    given = {name: value for name, value in named.items() if value is not None}  # all others are CacheConfig's own defaults
    result = run_fidelity(
        FidelityBench(
            model=model,
            text=text,
            context=context,
            tokens=tokens,
            cache=cache,
            settings=CacheConfig.from_dict({"mode": "adaptive"} | given | settings_from(cache_set or [])),
            controls=controls,
            num_threads=threads,
        )
    )
    (_stderr if as_json else Console()).print(render_fidelity(result))
    if as_json:
        _print_json(result)
    _complain(result["controls"])


@app.command()
def models(as_json: AsJson = False) -> None:
    """What can be served, and which models are here."""
    from vera.models import local_models, supported_families

    families, here = supported_families(), local_models()
    if as_json:
        _print_json({"families": families, "local": here})
        return
    table = Table("model", "where", title="models on this machine")
    for entry in here:
        table.add_row(str(entry["name"]), str(entry["path"]))
    console = Console()
    console.print(table)
    console.print("families tried in tests: " + ", ".join(families))
    console.print("Others are served too if their attention passes the check at loading; a refusal names the reason.")


@bench.command("decode")
def bench_decode(
    batch: Annotated[int, typer.Option("--batch", help="Sequences decoded together.")] = 16,
    context: Annotated[int, typer.Option("--context", help="Tokens of each sequence's prompt.")] = 8000,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Steps that are timed.")] = 32,
    cache: Annotated[str, typer.Option("--cache", help="Caches to measure, with commas between.")] = "native",
    baseline: Annotated[str, typer.Option("--baseline", help="transformers, llama.cpp, vllm, with commas between.")] = "",
    model: Model = "embedded",
    page_dtype: PageDtype = "float16",
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each, in turns; figures are then medians.")] = 1,
    cold_share: Annotated[
        float | None, typer.Option("--cold-share", help="Adaptive: limit the warm store so that this share of units is cold.")
    ] = None,
    adaptive: AdaptiveSet = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Decode speed at a batch and a context; the pages of all sequences are physically distinct."""
    from vera.bench import DecodeBench, run_decode

    _report(
        run_decode(
            DecodeBench(
                model=model,
                batch=batch,
                context=context,
                new_tokens=new_tokens,
                caches=_names(cache),
                baselines=_names(baseline),
                page_dtype=page_dtype,
                repeats=repeats,
                num_threads=threads,
                cold_share=cold_share,
                adaptive=settings_from(adaptive or []),
            )
        ),
        as_json,
    )


@bench.command("prefill")
def bench_prefill(
    context: Annotated[int, typer.Option("--context", help="Tokens of the prompt.")] = 8000,
    cache: Annotated[str, typer.Option("--cache", help="Caches to measure, with commas between.")] = "native",
    baseline: Annotated[str, typer.Option("--baseline", help="transformers, llama.cpp, vllm, with commas between.")] = "",
    model: Model = "embedded",
    page_dtype: PageDtype = "float16",
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each, in turns; figures are then medians.")] = 1,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How fast one long prompt is read."""
    from vera.bench import PrefillBench, run_prefill

    _report(
        run_prefill(
            PrefillBench(
                model=model,
                context=context,
                caches=_names(cache),
                baselines=_names(baseline),
                page_dtype=page_dtype,
                repeats=repeats,
                num_threads=threads,
            )
        ),
        as_json,
    )


@bench.command("serve")
def bench_serve(
    rest: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="The server, instead of host and port.")] = None,
    host: Annotated[str, typer.Option("--host", help="Where the server listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Its port.")] = 8000,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="A path; the usual one of the backend if not given.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="openai (completions) or openai-chat.")] = "openai",
    model: Annotated[str | None, typer.Option("--model", help="The first that the server lists if not given.")] = None,
    dataset_name: Annotated[
        str, typer.Option("--dataset-name", help="random, prefix_repetition, multi-turn, custom or text.")
    ] = "random",
    dataset_path: Annotated[Path | None, typer.Option("--dataset-path", help="custom: a JSON Lines file.")] = None,
    custom_output_len: Annotated[
        int, typer.Option("--custom-output-len", help="custom: tokens of answers that the file gives no length.")
    ] = 256,
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests; for multi-turn, conversations.")] = 1000,
    request_rate: Annotated[float, typer.Option("--request-rate", help="Arrivals a second; inf: all at once.")] = float("inf"),
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="1: a Poisson process; lower: bursts; higher: more even (gamma distribution).")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option("--max-concurrency", help="Most requests under way.")] = None,
    input_len: Annotated[int, typer.Option("--random-input-len", "--input-len", help="Tokens of a prompt or turn.")] = 1024,
    output_len: Annotated[int, typer.Option("--random-output-len", "--output-len", help="Tokens of an answer.")] = 128,
    range_ratio: Annotated[
        float, typer.Option("--random-range-ratio", help="Lengths vary by this share, up and down; 0 to below 1.")
    ] = 0.0,
    prefix_len: Annotated[int, typer.Option("--random-prefix-len", help="Tokens before them that all prompts share.")] = 0,
    repetition_prefix_len: Annotated[
        int, typer.Option("--prefix-repetition-prefix-len", help="prefix_repetition: tokens of a shared prefix.")
    ] = 256,
    repetition_suffix_len: Annotated[
        int, typer.Option("--prefix-repetition-suffix-len", help="prefix_repetition: tokens after it.")
    ] = 256,
    repetition_num_prefixes: Annotated[
        int, typer.Option("--prefix-repetition-num-prefixes", help="prefix_repetition: different prefixes.")
    ] = 10,
    repetition_output_len: Annotated[
        int, typer.Option("--prefix-repetition-output-len", help="prefix_repetition: tokens of an answer.")
    ] = 128,
    num_turns: Annotated[int, typer.Option("--num-turns", help="multi-turn: requests of a conversation.")] = 4,
    think_time: Annotated[
        float, typer.Option("--think-time", help="multi-turn: idle seconds between an answer and the next request.")
    ] = 0.0,
    goodput: Annotated[
        list[str] | None, typer.Option("--goodput", help="Limits in ms that make a request good: ttft:500 tpot:50 e2el:5000.")
    ] = None,
    percentile_metrics: Annotated[
        str, typer.Option("--percentile-metrics", help="What is reported; also client_queue_time, e2el_including_client_queue.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option("--metric-percentiles", help="Percentiles, with commas between.")] = "99",
    num_warmups: Annotated[int, typer.Option("--num-warmups", help="Requests before the clock starts.")] = 1,
    ready_check_timeout_sec: Annotated[
        float, typer.Option("--ready-check-timeout-sec", help="Wait so long for a server that is starting.")
    ] = 0.0,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds after which a request is given up and counts as failed.")
    ] = 1800.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same at the same times.")] = 0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of full length; if not given, on for random words."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; the server's default if not given.")
    ] = None,
    extra_body: Annotated[str | None, typer.Option("--extra-body", help="A JSON object, merged into each request.")] = None,
    header: Annotated[list[str] | None, typer.Option("--header", help="KEY=VALUE, sent with each request; repeatable.")] = None,
    save: Annotated[bool, typer.Option("--save-result", help="Write the result to a JSON file.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="The file has an entry for each request too.")] = False,
    result_dir: Annotated[Path | None, typer.Option("--result-dir", help="Its folder; the current one if not given.")] = None,
    result_filename: Annotated[str | None, typer.Option("--result-filename", help="Its name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put load on a server that speaks OpenAI's protocol, and time its answers. OPENAI_API_KEY is sent if it is set."""
    from vera.bench.serve import (
        MADE_UP,
        ServeBench,
        Target,
        Workload,
        parse_goodput,
        render_serve,
        run_serve,
        save_result,
        summary,
    )

    if rest and not goodput:
        raise ConfigError(f"unexpected {' '.join(rest)!r}; several limits follow --goodput, such as --goodput ttft:500 tpot:50")
    lengths = {"input_len": input_len, "output_len": output_len, "prefix_len": prefix_len}
    if dataset_name == "prefix_repetition":
        lengths = {
            "input_len": repetition_suffix_len,
            "output_len": repetition_output_len,
            "prefix_len": repetition_prefix_len,
            "num_prefixes": repetition_num_prefixes,
        }
    elif dataset_name == "custom":
        lengths["output_len"] = custom_output_len
    settings = ServeBench(
        target=Target(
            base_url=base_url or f"http://{host}:{port}",
            endpoint=endpoint,
            backend=backend,
            model=model,
            api_key=os.environ.get("OPENAI_API_KEY"),
            headers=_headers(header or []),
            temperature=temperature,
            ignore_eos=dataset_name in MADE_UP if ignore_eos is None else ignore_eos,
            extra_body=_json_object("--extra-body", extra_body),
            timeout_seconds=request_timeout,
        ),
        workload=Workload(
            dataset=dataset_name,
            num_prompts=num_prompts,
            range_ratio=range_ratio,
            num_turns=num_turns,
            think_seconds=think_time,
            path=dataset_path,
            request_rate=request_rate,
            burstiness=burstiness,
            seed=seed,
            **lengths,
        ),
        max_concurrency=max_concurrency,
        num_warmups=num_warmups,
        ready_check_timeout_sec=ready_check_timeout_sec,
        goodput=parse_goodput([*(goodput or []), *(rest or [])]),
        percentile_metrics=_names(percentile_metrics),
        metric_percentiles=_numbers("--metric-percentiles", metric_percentiles),
    )
    with _bar("requests", settings.workload.num_requests) as move:
        result = run_serve(settings, progress=move)
    (_stderr if as_json else Console()).print(render_serve(result))
    if save or save_detailed:
        _stderr.print(f"written to {save_result(result, result_dir, result_filename, detailed=save_detailed)}", markup=False)
    if as_json:
        _print_json(summary(result))
    if result["interrupted"]:
        raise KeyboardInterrupt
    if result["failed"]:
        raise VeraError(f"{result['failed']} of {result['num_requests']} requests failed; the first: {result['first_error']}")


@bench.command("workloads")
def bench_workloads(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or `embedded`.")] = "embedded",
    workload: Annotated[
        str, typer.Option("--workload", help="long-document, multi-turn, short-text, with commas between; all if not given.")
    ] = "long-document,multi-turn,short-text",
    cache_bytes: Annotated[int | None, typer.Option("--cache-bytes", help="The ceiling of either cache, in bytes.")] = None,
    budget_sequences: Annotated[
        float | None,
        typer.Option("--budget-sequences", help="The ceiling, as what native needs for so many of the longest sequences."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests of each workload; for multi-turn, conversations.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: whether it works, not how well.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each cache, in turns; figures are then medians.")] = 1,
    page_dtype: PageDtype = "float16",
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Most answers that run at the same time.")] = 16,
    adaptive: AdaptiveSet = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for workloads.json and workloads.md.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Long documents, conversations and short texts through the service: native and adaptive in turns, under one ceiling."""
    from vera.bench.workloads import WorkloadsBench, render_workloads, run_workloads, save_workloads

    result = run_workloads(
        WorkloadsBench(
            model=model,
            workloads=_names(workload),
            cache_bytes=cache_bytes,
            budget_sequences=budget_sequences,
            requests=requests,
            quick=quick,
            repeats=repeats,
            page_dtype=page_dtype,
            max_num_seqs=max_num_seqs,
            adaptive=settings_from(adaptive or []),
            seed=seed,
            num_threads=threads,
        )
    )
    (_stderr if as_json else Console()).print(render_workloads(result))
    if out is not None:
        for path in save_workloads(result, out):
            _stderr.print(f"written to {path}", markup=False)
    if as_json:
        _print_json(result)
    for measured in result["workloads"]:
        _complain({f"{measured['name']}, {cache}": measured[cache] for cache in ("native", "adaptive")})


# -- details -----------------------------------------------------------------------------------------------------------


def _sampling(
    max_tokens: int | None, temperature: float, top_p: float, top_k: int, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )


def _cache(mode: str, ratio: float, max_bytes: int | None, page_dtype: str, others: list[str] | None) -> CacheConfig:
    settings = {"mode": mode, "cache_max_size_ratio": ratio, "cache_max_bytes": max_bytes, "page_dtype": page_dtype}
    return CacheConfig.from_dict(settings | settings_from(others or []))


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _llm(model: str, cache: CacheConfig, threads: int | None) -> LLM:
    with _status("loading the model"):
        from vera.llm import LLM

        return LLM(model, cache=cache, num_threads=threads)


@contextmanager
def _status(text: str) -> Iterator[Callable[[str], None]]:
    """Says what is going on, where a person is watching; the callable takes what is next."""
    if _stderr.is_terminal:
        with _stderr.status(text) as status:
            yield status.update
    else:
        yield lambda _: None


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar where a person is watching; the callable takes how much is done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_stderr, transient=True, disable=not _stderr.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from None


def _ask() -> str | None:
    """The next line from the person; None at the end."""
    try:
        line = input("you> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as error:
        _stderr.print(f"vera: this line is not UTF-8 text: {error}", style="red", markup=False, highlight=False)
        return ""
    return None if line == "/exit" else line


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C sets a flag that is looked at between steps, instead of raising in the middle of one; the third raises."""
    presses = 0

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses >= 3:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


def _print_stream(updates: Iterable[Update]) -> tuple[str, str | None]:
    """Writes an answer as it comes; returns its text and what went wrong, if anything did."""
    text, last = "", None
    for last in updates:
        text += last.delta
        sys.stdout.write(last.delta)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if last is not None and last.finish_reason == "abort":
        _stderr.print("[stopped]", style="dim", markup=False, highlight=False)
    return text, last.error if last is not None else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in _names(text))
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be numbers with commas between, such as 50,99") from None


def _json_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} {text!r} must be a JSON object, such as {json.dumps({'top_k': 5})}")
    return value


def _headers(pairs: list[str]) -> dict[str, str]:
    """`KEY=VALUE` options as a dict of texts. A refusal does not repeat the value: it may be a secret."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError("a --header is not of the form KEY=VALUE, such as X-Request-Class=batch")
        headers[name.strip()] = value.strip()
    return headers


def _report(result: dict[str, Any], as_json: bool) -> None:
    from vera.bench import render

    (_stderr if as_json else Console()).print(render(result))
    if as_json:
        _print_json(result)
    _complain(result["runs"])


def _complain(runs: dict[str, Any]) -> None:
    """A VeraError for the runs that failed, if any did."""
    failed = [f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run]
    if failed:
        raise VeraError("; ".join(failed))


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def _fail(error: Exception, *, code: int) -> None:
    _stderr.print(f"vera: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
