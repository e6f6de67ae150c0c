"""The baseline `vllm`: its CPU build, the same weights, through the engine that its servers use, in this process.

Prefix caching is off, so that the pages of all sequences are distinct; the engine reads one prompt a step. Whether float32 or
bfloat16 is the faster way depends on the machine, so the caller tries both.
"""

from __future__ import annotations

import math
import os
import time
from importlib.util import find_spec
from typing import Any

from vera.bench.statistics import decode_figures
from vera.bench.subjects import WARMUP_STEPS

_NOT_INSTALLED = (
    "vLLM is not installed; its CPU build has to fit this environment's torch, see "
    "https://docs.vllm.ai/en/latest/getting_started/installation/cpu.html"
)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SPARE_TOKENS = 256
"""For each sequence: the pages of vLLM's CPU build are of up to 128 tokens."""


def decode(*, folder: str, token_ids: list[int], batch: int, new_tokens: int, num_threads: int, dtype: str) -> dict[str, Any]:
    """Decodes `new_tokens` steps of `batch` sequences with the same prompt, each of which reads it for itself."""
    if find_spec("vllm") is None:
        return {"missing": _NOT_INSTALLED}
    # The first sequence has made a token for each prompt that was read after its own when the last one begins.
    tokens = len(token_ids) + 1 + batch + WARMUP_STEPS + new_tokens
    _set_environment(folder, batch * (tokens + _SPARE_TOKENS), _ITEM_BYTES[dtype])
    engine, greedy = _engine(folder, len(token_ids), batch, tokens, dtype)
    answers: dict[str, list[int]] = {}
    start = time.perf_counter()
    for number in range(batch):
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, greedy)
    while len(answers) < batch:
        _step(engine, answers)
    prefill_seconds = time.perf_counter() - start
    for _ in range(WARMUP_STEPS):
        _step(engine, answers)
    step_seconds = []
    for _ in range(new_tokens):
        start = time.perf_counter()
        if _step(engine, answers) != batch:
            raise RuntimeError(f"a step of vLLM did not give all {batch} sequences a token; the figures would be wrong")
        step_seconds.append(time.perf_counter() - start)
    shortest = min(len(answer) for answer in answers.values())
    first = answers["0"][:shortest]
    return decode_figures(step_seconds, batch) | {
        "prefill_seconds": prefill_seconds,
        "dtype": dtype,
        "threads": num_threads,
        "sequences_agree": all(answer[:shortest] == first for answer in answers.values()),
        "token_ids": first,
    }


def prefill(*, folder: str, token_ids: list[int], num_threads: int, dtype: str) -> dict[str, Any]:
    """The prompt in one step, after the engine's own warm-up."""
    if find_spec("vllm") is None:
        return {"missing": _NOT_INSTALLED}
    tokens = len(token_ids) + 2
    _set_environment(folder, tokens + _SPARE_TOKENS, _ITEM_BYTES[dtype])
    engine, greedy = _engine(folder, len(token_ids), 1, tokens, dtype)
    answers: dict[str, list[int]] = {}
    start = time.perf_counter()
    engine.add_request("0", {"prompt_token_ids": token_ids}, greedy)
    while not answers:
        _step(engine, answers)
    seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": len(token_ids) / seconds,
        "ttft_ms": 1e3 * seconds,
        "dtype": dtype,
        "threads": num_threads,
        "token_ids": answers["0"][:1],
    }


def _set_environment(folder: str, num_tokens: int, item_bytes: int) -> None:
    """What vLLM reads when it is imported: the engine in this process, no network, threads as told, room for the pages."""
    gib = math.ceil(num_tokens * _token_bytes(folder, item_bytes) / 2**30)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _token_bytes(folder: str, item_bytes: int) -> int:
    """Keys and values of one token."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * item_bytes)


def _engine(folder: str, prompt_tokens: int, batch: int, sequence_tokens: int, dtype: str) -> tuple[Any, Any]:
    """The engine, and parameters of greedy answers that go on to the end of a sequence."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    arguments = EngineArgs(
        model=folder,
        dtype=dtype,
        max_model_len=sequence_tokens,
        max_num_seqs=batch,
        max_num_batched_tokens=prompt_tokens + batch,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=sequence_tokens - prompt_tokens, ignore_eos=True)
    return LLMEngine.from_engine_args(arguments), greedy


def _step(engine: Any, answers: dict[str, list[int]]) -> int:
    """One step; how many sequences it gave a token."""
    outputs = engine.step()
    for output in outputs:
        answers[output.request_id] = list(output.outputs[0].token_ids)
    return len(outputs)
