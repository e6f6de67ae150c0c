"""Engines over tiny random models, and what their answers have to be."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tiny_models import tiny_model, tiny_tokenizer
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.models import LoadedModel, adopt_model
from vera.sampling_params import SamplingParams

PAGE = 16


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def loaded(family: str = "llama", **overrides: Any) -> LoadedModel:
    return adopt_model(tiny_model(family, **overrides), tiny_tokenizer(), name=f"tiny-{family}")


@cache
def shared_model() -> LoadedModel:
    """One tiny Llama for all tests that do not change it."""
    return loaded()


@cache
def reference_model() -> torch.nn.Module:
    """The same weights, run by transformers alone."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    return model


@cache
def reference_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of one sequence alone: dense attention, no cache, every token recomputed each time."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = reference_model()(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def make_engine(
    model: LoadedModel | None = None, *, blocks: int = 64, cache: dict[str, Any] | None = None, clock: Any = None, **config: Any
) -> Engine:
    """An engine whose cache holds `blocks` blocks of 16 tokens: fp32 pages, poisoned, so that every stale read shows."""
    model = model or shared_model()
    spec = model.spec
    block_bytes = 2 * PAGE * spec.head_dim * 4 * spec.num_layers * spec.num_kv_heads
    settings = {
        "page_size": PAGE,
        "page_dtype": "float32",
        "cache_max_bytes": blocks * block_bytes,
        "poison": True,
        **(cache or {}),
    }
    clock = {"clock": clock} if clock else {}
    return Engine(model, EngineConfig(cache=CacheConfig(**settings), **{"max_batch_tokens": 64, **config}), **clock)


def greedy(max_tokens: int | None = None, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, none of them special."""
    return tuple(random.Random(f"{length} {seed}").choices(range(3, 128), k=length))


def finish(engine: Engine, *, most_steps: int = 5000) -> dict[str, list[Update]]:
    """Steps until nothing is left; the updates of each request. Checks the books after each step."""
    updates: dict[str, list[Update]] = defaultdict(list)
    for _ in range(most_steps):
        if not engine.has_unfinished():
            return updates
        for update in engine.step():
            updates[update.request_id].append(update)
        engine.check_invariants()
    raise AssertionError(f"still unfinished after {most_steps} steps")


def tokens_of(updates: Sequence[Update]) -> list[int]:
    return [token for update in updates for token in update.new_token_ids]


def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    request_id = engine.add_request(prompt, params)
    return tokens_of(finish(engine)[request_id])
