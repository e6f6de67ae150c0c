"""Teacher forcing: a text takes the place of the sampler's choice, and everything else runs as in serving.

The prompt is read, pages become hot and warm, errors are controlled and hits served by the engine's own steps; only the token
that each step ends with is the text's. `prepare` and `force` are the jobs of `fidelity`, each for a process of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from vera.bench.shape import shape_of
from vera.bench.texts import text_tokens
from vera.cache import CacheUse
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.engine.request import Update
from vera.engine.runner import StepLogits
from vera.engine.sampler import NO_TOKEN, Sampled
from vera.engine.scheduler import Chunk
from vera.errors import ConfigError, UnsupportedModel, VeraError
from vera.models import LoadedModel, load_model
from vera.models.hook import LayerHook
from vera.sampling_params import SamplingParams

_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = 448.0
_SPARE_BLOCKS = 4
_OVERHEAD = 1.1
"""The ceiling of the cache, in sizes of its blocks were they exact: room for tables and statistics besides."""


def prepare(*, model: str, text: str, context: int, tokens: int) -> dict[str, Any]:
    """The text's token ids: a prompt, what is forced, and the token after it, which the last prediction is held against.

    "folder" is where transformers finds the model. Loads it once, which converts it if need be. Raises ConfigError where text
    or model are too short for that.
    """
    loaded = load_model(model, progress=_tell)
    if context + tokens + 1 > loaded.spec.max_context:
        raise ConfigError(
            f"context={context}, tokens={tokens} and one more are above the {loaded.spec.max_context} tokens of "
            f"{loaded.spec.name}; lower the context or the tokens"
        )
    if loaded.tokenizer is None:
        raise UnsupportedModel(f"{loaded.spec.name} comes without a tokenizer, so it cannot read a text; add the tokenizer")
    return {
        "token_ids": text_tokens(loaded.tokenizer, text, context + tokens + 1),
        "model_name": loaded.spec.name,
        "folder": loaded.module.name_or_path,
    }


def force(
    *,
    model: str,
    token_ids: list[int],
    context: int,
    cache: dict[str, Any],
    logits_path: str,
    fp8_pages: bool = False,
    max_batch_tokens: int = 512,
    num_threads: int | None = None,
    attention_backend: str = "auto",
) -> dict[str, Any]:
    """Reads the first `context` tokens as a prompt and decodes with those that follow, all but the last, forced.

    Writes the float32 logits of these decode steps to `logits_path` (`.npy`, `[tokens, vocab]`) and returns what the cache did
    meanwhile. `cache` is a CacheConfig as a dict. With `fp8_pages` the keys and values of the prompt, once it is read, and those
    of each later token are rounded to float8 e4m3 with scale 1.
    """
    loaded = load_model(model)
    config = _with_room(CacheConfig.from_dict(cache), loaded, len(token_ids))
    engine = Teacher(
        Fp8Model(loaded.module, loaded.tokenizer, loaded.spec, loaded.layers) if fp8_pages else loaded,
        EngineConfig(
            cache=config,
            max_num_seqs=1,
            max_batch_tokens=max_batch_tokens,
            max_model_len=len(token_ids),
            num_threads=num_threads,
            attention_backend=attention_backend,
        ),
        token_ids[context:],
        Path(logits_path),
    )
    engine.auditor.every_step = True
    start = time.perf_counter()
    engine.add_request(token_ids[:context], SamplingParams(max_tokens=len(token_ids) - context, ignore_eos=True))
    use = _run(engine)
    seconds = time.perf_counter() - start
    figures = {
        "cache_bytes": engine.peak_bytes,
        "warm_bytes": engine.peak_warm_bytes,
        "native_cache_bytes": shape_of(loaded).native_bytes(CacheConfig(page_size=config.page_size), len(token_ids) - 1),
        "kernel": engine.backend.name,
        "seconds": seconds,
        **_tier_figures(engine, use),
    }
    engine.close()
    return figures


class Teacher(Engine):
    """An engine for one request whose answer is known: keeps the logits of its decode steps, and goes on with known tokens."""

    def __init__(self, model: LoadedModel, config: EngineConfig, answer: Sequence[int], logits_path: Path) -> None:
        """The logits that the prompt itself gives are not kept: they predict the first of `answer`, and no decode step made
        them. So there are as many rows as tokens are forced, one less than `answer` has.
        """
        super().__init__(model, config)
        self._answer = answer
        self._logits = _mapped(logits_path, len(answer) - 1, model.spec.vocab_size)
        self.peak_bytes = 0
        """Most bytes of fast memory that the cache used after a decode step."""
        self.peak_warm_bytes = 0
        self.hits: list[int] = []
        """Hits of each decode step."""

    def step(self) -> list[Update]:
        decodes, before = self.stats.decode_tokens, self._num_hits
        updates = super().step()
        if self.stats.decode_tokens > decodes:
            self.peak_bytes = max(self.peak_bytes, self.cache.used_bytes)
            self.peak_warm_bytes = max(self.peak_warm_bytes, self.cache.warm_bytes)
            self.hits.append(self._num_hits - before)
        return updates

    @property
    def _num_hits(self) -> int:
        stats = self.cache.tier_stats
        return 0 if stats is None else stats.hits

    def _sample(self, chunks: Sequence[Chunk], logits: StepLogits) -> list[Sampled | None]:
        return [self._given(chunk, logits.next_token[0]) if chunk.reaches_end else None for chunk in chunks]

    def _given(self, chunk: Chunk, logits: Tensor) -> Sampled:
        place = len(chunk.request.output_token_ids)
        if not torch.isfinite(logits).all():
            return Sampled(NO_TOKEN, finite=False)
        if place > 0:
            self._logits[place - 1] = logits.numpy()
        elif isinstance(self.model, Fp8Model):
            self.model.begin_rounding(self.cache.pool.pages)
        return Sampled(self._answer[place])


@dataclass(slots=True)
class Fp8Model(LoadedModel):
    """A model whose keys and values lose what an fp8 cache loses, as soon as it is told to begin."""

    _rounds: bool = field(default=False, init=False)

    def begin_rounding(self, pages: Tensor) -> None:
        """Rounds what is in the cache; what is computed from now on is rounded before it is written."""
        for page in pages:
            page.copy_(_fp8(page))
        self._rounds = True

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: LayerHook, **arguments: Any) -> Tensor:
        if not self._rounds:
            return LoadedModel.forward(self, token_ids, positions, logit_rows, attend, **arguments)

        def rounded(layer: int, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
            return attend(layer, query, _fp8(key), _fp8(value), options)

        return LoadedModel.forward(self, token_ids, positions, logit_rows, rounded, **arguments)


def _mapped(path: Path, rows: int, columns: int) -> NDArray[np.float32]:
    """A new `.npy` file, all of it on the disk: mapped, so that it does not count as the engine's memory."""
    array: NDArray[np.float32] = open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, columns))
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)  # a full disk is an OSError here, and a dead process later
    return array


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(_FP8).to(values.dtype)


def _with_room(config: CacheConfig, model: LoadedModel, tokens: int) -> CacheConfig:
    """The same settings with a ceiling that one sequence of `tokens` fits under, whatever tier its pages are in."""
    spare_tokens = (config.recompute_budget + _SPARE_BLOCKS) * config.page_size
    ceiling = int(_OVERHEAD * shape_of(model).native_bytes(config, tokens + spare_tokens))
    return CacheConfig.from_dict(config.to_dict() | {"cache_max_bytes": ceiling, "prefix_reuse": False})


def _run(engine: Teacher) -> CacheUse | None:
    """Steps to the end; returns what the cache did for the request."""
    use = None
    while engine.has_unfinished():
        for update in engine.step():
            if update.error:
                raise VeraError(f"the text could not be read to its end: {update.error}")
            use = update.cache_use
    return use


def _tier_figures(engine: Teacher, use: CacheUse | None) -> dict[str, Any]:
    """What an adaptive cache counted; nothing for a native one."""
    stats = engine.cache.tier_stats
    if stats is None or use is None:
        return {}
    return {
        **asdict(stats.rates),
        "hits_by_step": engine.hits,
        "uncovered_hits": stats.uncovered_hits,
        "error_estimated_mean": use.error_mean,
        "error_estimated_max": use.error_max,
        "error_ratios": [result.ratio for result in engine.auditor.results if result.ratio is not None],
    }


def _tell(line: str) -> None:
    print(f"vera fidelity: {line}", file=sys.stderr, flush=True)
