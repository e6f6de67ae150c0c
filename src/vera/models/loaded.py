"""A model that passed the gate, and the one way to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vera.attention.protocol import LayerAttention
from vera.models.hook import VERA_ATTENTION, LayerHook, Step
from vera.models.probe import probe
from vera.models.spec import ModelSpec, weights_revision
from vera.models.surroundings import quiet_transformers
from vera.models.weights import check_state_dict


@dataclass(slots=True)
class LoadedModel:
    """A transformers model whose attention is ours. It owns `module`: calling the module directly is not supported."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None: the source brought none, so prompts must be token ids."""
    spec: ModelSpec
    layers: tuple[LayerAttention, ...]
    """How each layer attends; handed to the hook with each call."""

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, attend: LayerHook) -> Tensor:
        """Logits `[rows, vocab]` float32 of the tokens at `logit_rows`; `attend` is called once in each layer, in order.

        `token_ids` and `positions` are `[tokens]` int64: the new tokens of all sequences one after another (a flattened
        batch). Which token sees which is up to `attend`. With no `logit_rows` the output head is not run.
        """
        module = self.module
        if module.config._attn_implementation != VERA_ATTENTION:
            module.set_attn_implementation(VERA_ATTENTION)
        inputs = {
            "input_ids": token_ids.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "use_cache": False,
            "vera_step": Step(attend, self.layers),
        }
        with torch.inference_mode():
            if not len(logit_rows):
                module.base_model(**inputs)
                return torch.empty(0, self.spec.vocab_size)
            logits: Tensor = module(**inputs, logits_to_keep=logit_rows).logits
            return logits.squeeze(0).float()

    def replace_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies other weights of the same architecture into the module, and gives `spec` their revision.

        `state_dict` has the names of `module.state_dict()`; a tied head may be left out. Keys and values computed before are
        another model's from now on. Raises BrokenModel, with nothing changed, when tensors are missing, superfluous, of another
        shape or not finite.
        """
        check_state_dict(self.module, state_dict)
        self.module.load_state_dict(state_dict, strict=False)
        with quiet_transformers():
            self.layers = probe(self.module, self.spec.name).layers
        self.spec = replace(self.spec, weights_revision=weights_revision(self.module))
