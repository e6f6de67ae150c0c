"""What a model makes of a workload: tokens and bytes, found out in a process of its own, since it loads the model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from vera.bench.serve.settings import Workload
from vera.bench.serve.workload import Conversation, completion_prompt, conversations
from vera.bench.shape import shape_of
from vera.config import CacheConfig
from vera.errors import ConfigError
from vera.models import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of one model and one workload."""

    block_tokens: int
    """Tokens of a block."""
    block_bytes: int
    """What a native cache takes for a block."""
    sequence_tokens: tuple[int, ...]
    """For each request, or conversation, its tokens at its end, answers included."""


def measure_facts(*, model: str, workloads: dict[str, dict[str, Any]], page_dtype: str) -> dict[str, Any]:
    """The model's name ("model_name"), and for each workload the fields of `Facts`. Converts the model, if need be.

    Raises ConfigError where a sequence is longer than the model's context, or the model reads no text.
    """
    loaded = load_model(model, progress=lambda line: print(f"vera bench: {line}", file=sys.stderr, flush=True))
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.spec.name} comes without a tokenizer, so it reads no text; name another model")
    config = CacheConfig(page_dtype=page_dtype)
    facts = {}
    for name, fields in workloads.items():
        tokens = [_tokens(loaded.tokenizer, conversation) for conversation in conversations(Workload(**fields))]
        if max(tokens) > loaded.spec.max_context:
            raise ConfigError(
                f"workload {name} has a sequence of {max(tokens)} tokens, above the {loaded.spec.max_context} of "
                f"{loaded.spec.name}'s context; leave it out of --workload, or name a model with a longer context"
            )
        facts[name] = {
            "block_tokens": config.page_size,
            "block_bytes": shape_of(loaded).block_bytes(config),
            "sequence_tokens": tokens,
        }
    return {"model_name": loaded.spec.name, "facts": facts}


def _tokens(tokenizer: Any, conversation: Conversation) -> int:
    said = completion_prompt([message for turn in conversation.turns for message in turn.messages])
    token_ids: list[int] = tokenizer(said)["input_ids"]
    return len(token_ids) + sum(turn.output_tokens for turn in conversation.turns)
