"""A model that passed the gate, and the one way to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vera.attention.protocol import LayerAttention
from vera.models.hook import VERA_ATTENTION, LayerHook, Step
from vera.models.narrow import compute_dtype, narrow, widen
from vera.models.probe import probe
from vera.models.spec import ModelSpec, weight_bytes, weights_revision
from vera.models.surroundings import quiet_transformers
from vera.models.weights import check_state_dict
from vera.models.windows import KeepHidden, decoder_layers, flowing_in, only_layers, watching


@dataclass(slots=True)
class LoadedModel:
    """A transformers model whose attention is ours. It owns `module`: calling the module directly is not supported."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None: the source brought none, so prompts must be token ids."""
    spec: ModelSpec
    layers: tuple[LayerAttention, ...]
    """How each layer attends; handed to the hook with each call."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        attend: LayerHook,
        *,
        keep_layers: Sequence[int] = (),
        keep: KeepHidden | None = None,
    ) -> Tensor:
        """Logits `[rows, vocab]` float32 of the tokens at `logit_rows`; `attend` is called once in each layer, in order.

        `token_ids` and `positions` are `[tokens]` int64: the new tokens of all sequences one after another (a flattened
        batch). Which token sees which is up to `attend`. With no `logit_rows` the output head is not run. `keep` is shown what
        flows into each of `keep_layers`.
        """
        module = self.module
        inputs = self._inputs(token_ids, positions, attend)
        with ExitStack() as stack:
            if keep is not None and keep_layers:
                stack.enter_context(watching(module.base_model, self.spec.num_layers, keep_layers, keep))
            stack.enter_context(torch.inference_mode())
            if not len(logit_rows):
                module.base_model(**inputs)
                return torch.empty(0, self.spec.vocab_size)
            logits: Tensor = module(**inputs, logits_to_keep=logit_rows).logits
            return logits.squeeze(0).float()

    @property
    def has_windows(self) -> bool:
        """`run_layers` can be used: the model keeps its decoder layers in one list."""
        return decoder_layers(self.module.base_model, self.spec.num_layers) is not None

    def run_layers(
        self, token_ids: Tensor, positions: Tensor, attend: LayerHook, *, first: int, stop: int, hidden: Tensor | None
    ) -> None:
        """Runs the layers `first` to `stop` alone, for the sake of what `attend` sees and writes.

        `hidden`, `[tokens, hidden]`, is what flows into layer `first`; None with `first` 0: the embeddings of `token_ids`.
        May be called from within `attend` of another forward pass.
        """
        base_model, layers = self.module.base_model, self.spec.num_layers
        assert (hidden is None) == (first == 0)
        inputs = self._inputs(token_ids, positions, attend)
        with ExitStack() as stack:
            if hidden is not None:
                replaced = hidden.to(compute_dtype(self.module)).unsqueeze(0)
                stack.enter_context(flowing_in(base_model, layers, first, replaced))
            stack.enter_context(only_layers(base_model, layers, first, stop))
            stack.enter_context(torch.inference_mode())
            base_model(**inputs)

    def _inputs(self, token_ids: Tensor, positions: Tensor, attend: LayerHook) -> dict[str, object]:
        if self.module.config._attn_implementation != VERA_ATTENTION:
            self.module.set_attn_implementation(VERA_ATTENTION)
        return {
            "input_ids": token_ids.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "use_cache": False,
            "vera_step": Step(attend, self.layers),
        }

    def replace_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copies other weights of the same architecture into the module, and gives `spec` their revision.

        `state_dict` has the names of `module.state_dict()`; a tied head may be left out. Keys and values computed before are
        another model's from now on. Weights that were held narrow are again where the new values allow it, which needs the
        memory of float32 for a moment. Raises BrokenModel, with nothing changed, when tensors are missing, superfluous, of
        another shape or not finite.
        """
        check_state_dict(self.module, state_dict)
        was_narrow = widen(self.module) > 0
        self.module.load_state_dict(state_dict, strict=False)
        if was_narrow:
            narrow(self.module)
        with quiet_transformers():
            self.layers = probe(self.module, self.spec.name).layers
        self.spec = replace(self.spec, weights_revision=weights_revision(self.module), weight_bytes=weight_bytes(self.module))
