"""Which models are served, as far as config and class tell: refusals by name, before any weight is read.

These lists give good messages; the guarantee is the probe's (see `probe`), which runs the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from vera.errors import UnsupportedModel

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuses what the config alone gives away, before any weight is read. Raises UnsupportedModel that says what and why."""
    for refusal in _config_refusals(config):
        raise UnsupportedModel(f"{name} ({config.model_type}) is not supported: {refusal}")


def check_class(model_class: type[PreTrainedModel], name: str) -> None:
    """Refuses classes that do not call a pluggable attention function, or that keep a state other than keys and values."""
    architecture = model_class.__name__
    if model_class._is_stateful:
        raise UnsupportedModel(
            f"{name} ({architecture}) is not supported: it keeps a recurrent state, Vera caches keys and values only"
        )
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(
            f"{name} ({architecture}) is not supported: its transformers class has no pluggable attention "
            "(_supports_attention_backend is false)"
        )


def _config_refusals(config: PreTrainedConfig) -> Iterator[str]:
    """Reasons, in the order in which they are worth telling."""
    if getattr(config, "quantization_config", None):
        yield "its weights are quantised; use the unquantised checkpoint, or a .gguf file"
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder; Vera serves decoder-only language models"
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        yield "it wraps several models (multimodal); use its text-only class and checkpoint"
    if getattr(config, "kv_lora_rank", None):
        yield "multi-head latent attention (kv_lora_rank) caches latents, not keys and values"
    if getattr(config, "max_position_embeddings", None) is None:
        yield "its config states no max_position_embeddings"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross-attention"
    if foreign := sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES):
        yield f"it has layers of type {', '.join(foreign)}; served are {', '.join(sorted(_SERVED_LAYER_TYPES))}"
    if getattr(config, "position_bias", None) or getattr(config, "alibi", False):
        yield "it adds a position bias to the attention logits"
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPES:
            yield f"rope type {rope_type!r} makes keys depend on the length of the sequence, so cached pages could not be reused"


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Of the whole model, or of each layer type (Gemma 3)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if isinstance(rope_type := entry.get("rope_type"), str):
            yield rope_type
