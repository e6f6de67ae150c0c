"""Runs the model over the chunks of one step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vera.attention.protocol import AttentionBackend, LayerAttention, PagedBatch
from vera.cache import AdaptiveCache
from vera.engine.audit import Auditor
from vera.engine.restore import Restorer
from vera.engine.scheduler import Chunk
from vera.models import LoadedModel


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Float32 logits of one step, `[rows, vocab]` each."""

    next_token: Tensor
    """One row for each chunk that reaches the end of its request's tokens, in order."""
    prompt: list[Tensor]
    """For each chunk whose request wants prompt log-probabilities: rows for the prompt tokens after those it has; else none."""


def prompt_rows(chunk: Chunk) -> range:
    """The positions in this chunk whose logits give a prompt token's log-probability that is still missing."""
    request = chunk.request
    if not request.wants_prompt_logprobs:
        return range(0)
    known = max(len(request.prompt_logprobs), 1)  # the first prompt token has none
    return range(max(chunk.start, known - 1), min(chunk.stop, len(request.prompt_token_ids) - 1))


class Runner:
    """One forward pass of the flattened batch. Keeps no state between steps but its clocks."""

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend, cache: AdaptiveCache, restorer: Restorer, auditor: Auditor
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._restorer = restorer
        self._auditor = auditor
        self.attention_seconds = 0.0
        """Time the last step spent in the attention backend, restores left out."""

    def run(self, chunks: Sequence[Chunk], batch: PagedBatch) -> StepLogits:
        """Writes the new tokens' keys and values to the batch's pages and gives the logits that the step needs."""
        token_ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        prompts: list[int] = []
        for chunk in chunks:
            offset = len(token_ids) - chunk.start
            token_ids += chunk.request.token_ids[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            prompts += (offset + position for position in prompt_rows(chunk))
            if chunk.reaches_end:
                ends.append(len(token_ids) - 1)
        self.attention_seconds = 0.0

        spans = [chunk.span for chunk in chunks]
        self._auditor.begin_step(batch)

        hits: list[Tensor] = [] if batch.tiers is None else batch.tiers.report.hits

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
            self._auditor.before(batch, layer)
            layers_with_hits = len(hits)
            start = time.perf_counter()
            output = self._backend.attend(batch, layer, query, key, value, options)
            self.attention_seconds += time.perf_counter() - start
            if len(hits) > layers_with_hits and self._restorer.restore_hits(batch, layer):
                restored = time.perf_counter()
                output = self._backend.attend(batch, layer, query, key, value, options, again=True)
                self.attention_seconds += time.perf_counter() - restored
            self._auditor.after(batch, spans, layer, query, output, options)
            return output

        def keep(layer: int, hidden: Tensor) -> None:
            if not self._restorer.running:
                self._cache.keep_checkpoints(spans, layer, hidden)

        logits = self._model.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            torch.tensor(ends + prompts),
            attend,
            keep_layers=self._cache.checkpoint_layers,
            keep=keep,
        )
        lengths = [len(prompt_rows(chunk)) for chunk in chunks]
        return StepLogits(logits[: len(ends)], list(torch.split(logits[len(ends) :], lengths)))
