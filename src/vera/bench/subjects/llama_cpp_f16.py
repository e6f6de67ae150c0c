"""The baseline `llama.cpp`: the same weights as F16, an F16 cache, through the C interface of llama-cpp-python.

Sequences have streams of their own (`kv_unified` off), so their keys and values are physically distinct, and the time of a
step is that of `llama_decode` for one token of each plus the choice of the most likely ones. Whether flash attention is the
faster way depends on the machine and the context, so the caller tries both. torch is not used here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vera.bench.statistics import decode_figures
from vera.bench.subjects import WARMUP_PROMPT_TOKENS, WARMUP_STEPS

if TYPE_CHECKING:
    from vera.bench.llama_context import LlamaContext

_NOT_INSTALLED = "llama-cpp-python is not installed; pip install 'vera-engine[bench]'"
_NO_GGUF = "it runs GGUF files only and {model!r} is not one"
_SPARE_TOKENS = 8
_MAX_SEQUENCES = 256


def decode(
    *,
    model: str,
    f16_path: str | None,
    token_ids: list[int],
    batch: int,
    new_tokens: int,
    num_threads: int,
    flash_attention: bool,
) -> dict[str, Any]:
    """Decodes `new_tokens` steps of `batch` sequences with the same prompt, prefilled once and copied."""
    if why := _why_missing(model, f16_path):
        return {"missing": why}
    if batch > _MAX_SEQUENCES:
        return {"missing": f"llama.cpp serves at most {_MAX_SEQUENCES} sequences at a time, not {batch}"}
    sequence_tokens = len(token_ids) + WARMUP_STEPS + new_tokens + _SPARE_TOKENS
    with _context(str(f16_path), batch, sequence_tokens, num_threads, flash=flash_attention) as context:
        start = time.perf_counter()
        token = context.prefill(token_ids)
        prefill_seconds = time.perf_counter() - start
        context.copy_to_all()
        answers = [[token] * batch]
        step_seconds: list[float] = []
        for step in range(WARMUP_STEPS + new_tokens):
            start = time.perf_counter()
            answers.append(context.step(answers[-1], len(token_ids) + step))
            if step >= WARMUP_STEPS:
                step_seconds.append(time.perf_counter() - start)
        return decode_figures(step_seconds, batch) | {
            "prefill_seconds": prefill_seconds,
            "cache_bytes": context.cache_bytes(),
            "flash_attention": flash_attention,
            "threads": num_threads,
            "sequences_agree": all(len(set(tokens)) == 1 for tokens in answers),
            "token_ids": [tokens[0] for tokens in answers],
        }


def prefill(*, model: str, f16_path: str | None, token_ids: list[int], num_threads: int, flash_attention: bool) -> dict[str, Any]:
    """The prompt in chunks of 512 tokens, after a short warm-up."""
    if why := _why_missing(model, f16_path):
        return {"missing": why}
    with _context(str(f16_path), 1, len(token_ids) + _SPARE_TOKENS, num_threads, flash=flash_attention) as context:
        context.prefill(token_ids[:WARMUP_PROMPT_TOKENS])
        context.clear()
        start = time.perf_counter()
        token = context.prefill(token_ids)
        seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": len(token_ids) / seconds,
        "ttft_ms": 1e3 * seconds,
        "flash_attention": flash_attention,
        "threads": num_threads,
        "token_ids": [token],
    }


@contextmanager
def _context(path: str, batch: int, sequence_tokens: int, num_threads: int, *, flash: bool) -> Iterator[LlamaContext]:
    from vera.bench.llama_context import LlamaContext, loaded_weights  # here, because llama_cpp may not be installed

    with loaded_weights(path) as weights, LlamaContext(weights, batch, sequence_tokens, num_threads, flash=flash) as context:
        yield context


def _why_missing(model: str, f16_path: str | None) -> str | None:
    if find_spec("llama_cpp") is None:
        return _NOT_INSTALLED
    return None if f16_path else _NO_GGUF.format(model=model)
