"""The command line: `vera generate | chat | demo | inspect | fidelity | bench | models`.

Answers and JSON go to stdout, everything else to stderr. Exit codes: 0 done, 1 it could not be done, 2 wrong usage.
"""

from __future__ import annotations

import json
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

from vera.config import CacheConfig
from vera.errors import ConfigError, RequestError, UnsupportedModel, VeraError
from vera.sampling_params import SamplingParams

if TYPE_CHECKING:
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
        adaptive=_settings(cache_set or []),
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
            settings=CacheConfig.from_dict(given | _settings(cache_set or [])),
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
    baseline: Annotated[str, typer.Option("--baseline", help="transformers, llama.cpp, with commas between.")] = "",
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
                adaptive=_settings(adaptive or []),
            )
        ),
        as_json,
    )


@bench.command("prefill")
def bench_prefill(
    context: Annotated[int, typer.Option("--context", help="Tokens of the prompt.")] = 8000,
    cache: Annotated[str, typer.Option("--cache", help="Caches to measure, with commas between.")] = "native",
    baseline: Annotated[str, typer.Option("--baseline", help="transformers, llama.cpp, with commas between.")] = "",
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


# -- details -----------------------------------------------------------------------------------------------------------


def _sampling(
    max_tokens: int | None, temperature: float, top_p: float, top_k: int, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )


def _cache(mode: str, ratio: float, max_bytes: int | None, page_dtype: str, others: list[str] | None) -> CacheConfig:
    settings = {"mode": mode, "cache_max_size_ratio": ratio, "cache_max_bytes": max_bytes, "page_dtype": page_dtype}
    return CacheConfig.from_dict(settings | _settings(others or []))


def _llm(model: str, cache: CacheConfig, threads: int | None) -> LLM:
    with _status("loading the model"):
        from vera.llm import LLM

        return LLM(model, cache=cache, num_threads=threads)


@contextmanager
def _status(text: str) -> Iterator[None]:
    """Says what is going on, where a person is watching."""
    if _stderr.is_terminal:
        with _stderr.status(text):
            yield
    else:
        yield


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


def _settings(pairs: list[str]) -> dict[str, Any]:
    """`name=value` options as a dict; a value is JSON, or else text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not of the form name=value, such as attention_tolerance=0.05")
        try:
            settings[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            settings[name.strip()] = value
    return settings


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
