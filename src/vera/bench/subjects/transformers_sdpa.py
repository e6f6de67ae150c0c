"""The baseline `transformers`: the same float32 weights, its `DynamicCache` and SDPA, in a plain greedy loop.

It is loaded by transformers alone: nothing that Vera changes in a model must be in it.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from vera.bench.statistics import decode_figures
from vera.bench.subjects import WARMUP_PROMPT_TOKENS, WARMUP_STEPS
from vera.models.surroundings import quiet_transformers

_MIB = 2**20
_MIN_STEPS = 3


def decode(
    *, folder: str, token_ids: list[int], batch: int, new_tokens: int, num_threads: int, step_budget_seconds: float
) -> dict[str, Any]:
    """Decodes `new_tokens` steps, or as many as `step_budget_seconds` allows, but at least three.

    The prompt is prefilled once and its cache copied to each sequence. If memory cannot hold `batch` of them, fewer are run:
    "batch" says how many.
    """
    runner = _Runner(folder, num_threads)
    batch = min(batch, runner.batch_that_fits(len(token_ids) + new_tokens + WARMUP_STEPS))
    start = time.perf_counter()
    tokens = runner.prefill(token_ids)
    prefill_seconds = time.perf_counter() - start
    runner.copy_cache(batch)
    answers = [tokens.expand(batch)]
    step_seconds: list[float] = []
    for step in range(WARMUP_STEPS + new_tokens):
        start = time.perf_counter()
        answers.append(runner.step(answers[-1]))
        seconds = time.perf_counter() - start
        if step >= WARMUP_STEPS:
            step_seconds.append(seconds)
        if len(step_seconds) >= _MIN_STEPS and sum(step_seconds) + seconds > step_budget_seconds:
            break
    by_sequence = torch.stack(answers, dim=1)
    return decode_figures(step_seconds, batch) | {
        "prefill_seconds": prefill_seconds,
        "cache_bytes": runner.cache_bytes(),
        "threads": torch.get_num_threads(),
        "sequences_agree": bool((by_sequence == by_sequence[0]).all()),
        "token_ids": by_sequence[0].tolist(),
    }


def prefill(*, folder: str, token_ids: list[int], num_threads: int) -> dict[str, Any]:
    """The whole prompt in one call, logits of the last token only, after a short warm-up."""
    runner = _Runner(folder, num_threads)
    runner.prefill(token_ids[:WARMUP_PROMPT_TOKENS])
    start = time.perf_counter()
    token = runner.prefill(token_ids)
    seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_s": len(token_ids) / seconds,
        "ttft_ms": 1e3 * seconds,
        "threads": torch.get_num_threads(),
        "token_ids": token.tolist(),
    }


class _Runner:
    """A transformers model and the cache of the prompt that it prefilled last."""

    def __init__(self, folder: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        with quiet_transformers():
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
        # transformers 5.24 renamed the argument.
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cache: Any = None

    def batch_that_fits(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` whose cache fits into the memory that is available, at least one.

        Beside the cache there are, for one layer at a time, the copy that grows it and keys and values repeated for each
        query head.
        """
        config = self._model.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layer_bytes = 2 * kv_heads * head_dim * 4 * num_tokens
        layers_held = config.num_hidden_layers + 1 + config.num_attention_heads // kv_heads
        room = 0.9 * psutil.virtual_memory().available - 512 * _MIB
        return max(1, int(room // (layers_held * layer_bytes)))

    def prefill(self, token_ids: list[int]) -> Tensor:
        """Computes the prompt into a new cache; returns the next token, `[1]`."""
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(torch.tensor([token_ids]))

    def step(self, tokens: Tensor) -> Tensor:
        """One token for each sequence: `[batch]` to `[batch]`."""
        return self._forward(tokens[:, None])

    def copy_cache(self, batch: int) -> None:
        self._cache.batch_repeat_interleave(batch)

    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._cache.layers for tensor in (layer.keys, layer.values))

    @torch.inference_mode()
    def _forward(self, token_ids: Tensor) -> Tensor:
        output = self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache})
        tokens: Tensor = output.logits[:, -1].argmax(dim=-1)
        return tokens
