"""Which models are served: refusals by name from the config, then a probe that runs the model and believes only what it sees.

The lists here give good messages; the probe gives the guarantee. It runs a few tokens three ways:

1. *Observed*: every layer must call the attention function once, in order, with equal shapes, with nothing but known options, and
   the mask that transformers would have built must be the one that these options describe (asked point by point, so that a
   window of 4096 needs no 4096 tokens).
2. *Hooked*, two sequences in one flattened batch: logits must equal those of the model's own eager attention.
3. *Far*: with another token at the last position the model allows in the batch, the keys and values of the others must not move.
   Where they do (dynamic rope), a cached page would be wrong for a longer sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from vera.attention.protocol import LayerAttention
from vera.errors import BrokenModel, ModelError, UnsupportedModel
from vera.models.dense import DenseAttention, dense_attention
from vera.models.hook import VERA_ATTENTION, Step, flat

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope", "su"})
_HONOURED_ARGUMENTS = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"})
_HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)

_PROBE_ATTENTION = "vera-probe"
_MIN_PROBE_TOKENS = 5
_MAX_PROBE_TOKENS = 12
_RELATIVE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the probe learned: the shape of a token's keys and values, and how each layer attends."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerAttention, ...]


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


def probe(module: PreTrainedModel, name: str) -> Geometry:
    """Runs a few tokens and compares with the model's own attention; leaves `module` set to Vera's attention.

    Raises UnsupportedModel when the model attends in a way that the options of `LayerAttention` do not describe, and BrokenModel
    when its logits are not finite.
    """
    label = f"{name} ({type(module).__name__})"
    try:
        with torch.inference_mode():
            geometry = _observed_geometry(module)
            tokens = _probe_tokens(module, geometry)
            keys_values = _compare_with_eager(module, geometry, tokens)
            _check_far_position(module, geometry, tokens, keys_values)
    except _Refusal as refusal:
        raise UnsupportedModel(f"{label} is not supported: {refusal}") from None
    except ModelError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{label} is not supported: a probe of {_MIN_PROBE_TOKENS} tokens failed with {error!r}"
        ) from error
    module.set_attn_implementation(VERA_ATTENTION)
    return geometry


class _Refusal(Exception):
    """Why the probe turns the model away; becomes an UnsupportedModel that names it."""


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


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """One call of the attention function, as seen from inside."""

    layer: int
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    options: LayerAttention
    mask: Any


@dataclass(frozen=True, slots=True)
class _MaskRule:
    """Stands where a mask would: `allows(batch, head, query_index, key_index)` is transformers' own rule for it."""

    allows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def sees(self, query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(self.allows(zero, zero, torch.tensor(query), torch.tensor(key)))


@dataclass(slots=True)
class _Observer:
    """Collects the calls of one observed run."""

    calls: list[_LayerCall] = field(default_factory=list)


def _observe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, vera_observer: _Observer, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention function of the observed run: notes the call, then attends densely so that the run can go on."""
    options = _options(module, query.shape[-1], arguments)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _Refusal(f"{type(module).__name__} does not know its layer index")
    shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    vera_observer.calls.append(_LayerCall(layer, *shapes, options, attention_mask))
    if query.shape != value.shape[:1] + query.shape[1:3] + value.shape[3:] or key.shape != value.shape:
        raise _Refusal(f"queries, keys and values have shapes {', '.join(map(str, shapes))}; head sizes must be equal")
    output = dense_attention(flat(query), flat(key), flat(value), options)
    return output.to(query.dtype).unsqueeze(0), None


def _observe_mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> _MaskRule:
    return _MaskRule(mask_function)


AttentionInterface.register(_PROBE_ATTENTION, _observe)
AttentionMaskInterface.register(_PROBE_ATTENTION, _observe_mask)


def _options(module: nn.Module, head_dim: int, arguments: dict[str, Any]) -> LayerAttention:
    """The attention function's arguments as `LayerAttention`; a _Refusal for any that is neither honoured nor harmless."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if unknown := sorted(set(given) - _HONOURED_ARGUMENTS - _HARMLESS_ARGUMENTS):
        raise _Refusal(f"its attention takes {', '.join(unknown)}, which Vera does not honour")
    if given.get("dropout"):
        raise _Refusal(f"it applies dropout {given['dropout']} while serving")
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _Refusal("its attention is bidirectional")
    sinks = given.get("s_aux")
    return LayerAttention(
        scale=float(given.get("scaling", head_dim**-0.5)),
        window=given.get("sliding_window"),
        softcap=given.get("softcap"),
        sinks=None if sinks is None else sinks.detach().float().clone(),
    )


def _observed_geometry(module: PreTrainedModel) -> Geometry:
    """Runs the observed pass and checks all its calls against each other and against the masks."""
    observer = _Observer()
    with _attention(module, _PROBE_ATTENTION):
        module(**_inputs(_ids(module, _MIN_PROBE_TOKENS), torch.arange(_MIN_PROBE_TOKENS)), vera_observer=observer)
    calls, num_layers = observer.calls, module.config.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise _Refusal(
            f"its {num_layers} layers called the attention function {len(calls)} times; it must be once a layer, in order"
        )
    if len({(call.query_shape, call.key_shape) for call in calls}) > 1:
        raise _Refusal("the number or the size of its heads differs between layers")
    for call in calls:
        _check_mask(call)
    _, query_heads, tokens, head_dim = calls[0].query_shape
    _, kv_heads, key_tokens, _ = calls[0].key_shape
    if tokens != _MIN_PROBE_TOKENS or key_tokens != tokens:
        raise _Refusal(f"{_MIN_PROBE_TOKENS} tokens made {tokens} queries and {key_tokens} keys")
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise _Refusal(f"head_dim {head_dim} is not a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}")
    if query_heads % kv_heads:
        raise _Refusal(f"{query_heads} query heads do not divide among {kv_heads} KV heads")
    return Geometry(query_heads, kv_heads, head_dim, tuple(call.options for call in calls))


def _check_mask(call: _LayerCall) -> None:
    """The mask rule that transformers made for the layer must say what the layer's window says, at each border."""
    if not isinstance(call.mask, _MaskRule):
        raise _Refusal(f"layer {call.layer} is not given a causal mask")
    window = call.options.window
    far = 2 * window + 3 if window is not None else 100_000
    oldest = far - window + 1 if window is not None else 0
    expected = {
        far + 1: False,
        far: True,
        far - 1: oldest <= far - 1,
        oldest: True,
        far // 2: oldest <= far // 2,
        oldest - 1: False,
    }
    for key, seen in expected.items():
        if key >= 0 and call.mask.sees(far, key) != seen:
            raise _Refusal(
                f"layer {call.layer} states {'window ' + str(window) if window is not None else 'full attention'}, "
                f"but its mask {'hides' if seen else 'shows'} the token {far - key} before the current one"
            )


def _compare_with_eager(module: PreTrainedModel, geometry: Geometry, tokens: int) -> list[Tensor]:
    """Flattened through the hook against one by one through eager attention; returns the keys and values seen by the hook."""
    lengths = [tokens, tokens - 2]
    ids = _ids(module, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    recorder = _Recorder(DenseAttention(lengths))
    with _attention(module, VERA_ATTENTION):
        hooked = module(**_inputs(ids, positions), vera_step=Step(recorder, geometry.layers)).logits[0].float()
    with _attention(module, "eager"):
        alone = [module(**_inputs(part, torch.arange(len(part)))).logits[0].float() for part in torch.split(ids, lengths)]
    eager = torch.cat(alone)
    if not torch.isfinite(eager).all():
        raise BrokenModel(
            f"{type(module).__name__}: logits of a {tokens}-token probe are not finite; "
            f"the weights are damaged, or overflow in {module.dtype} (try dtype='float32')"
        )
    difference, limit = _relative_difference(hooked, eager), _tolerance(module)
    if not difference <= limit:
        raise _Refusal(f"its logits differ from its own eager attention by {difference:.1e} of the largest (limit {limit:.0e})")
    return recorder.seen


def _check_far_position(module: PreTrainedModel, geometry: Geometry, tokens: int, expected: list[Tensor]) -> None:
    """A token at the last position beside the same sequences must leave their keys and values alone."""
    lengths = (tokens, tokens - 2, 1)
    ids = _ids(module, sum(lengths))
    last = torch.tensor([module.config.max_position_embeddings - 1])
    positions = torch.cat([torch.arange(tokens), torch.arange(tokens - 2), last])
    recorder = _Recorder(DenseAttention(lengths))
    with _attention(module, VERA_ATTENTION):
        module(**_inputs(ids, positions), vera_step=Step(recorder, geometry.layers))
    for before, after in zip(expected, recorder.seen, strict=True):
        if not _relative_difference(after[:-1], before) <= _tolerance(module):
            raise _Refusal("its keys depend on how long the sequences are (dynamic rope), so cached pages could not be reused")


@dataclass(slots=True)
class _Recorder:
    """A hook that keeps each layer's keys and values."""

    attend: DenseAttention
    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        self.seen.append(torch.stack([key, value], dim=1))
        return self.attend(layer, query, key, value, options)


@contextmanager
def _attention(module: PreTrainedModel, name: str) -> Iterator[None]:
    """Sets the attention function for the block, and what it was afterwards."""
    before = module.config._attn_implementation
    module.set_attn_implementation(name)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


def _inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
    return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}


def _ids(module: PreTrainedModel, count: int) -> Tensor:
    """Token ids spread over the vocabulary, the same in every run; longer lists begin with the shorter ones."""
    vocab_size: int = module.config.vocab_size
    return (torch.arange(count) * 7919 + 3) % vocab_size


def _relative_difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; NaN if there is any."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _probe_tokens(module: PreTrainedModel, geometry: Geometry) -> int:
    """Enough to pass the end of a tiny window."""
    needed = [layer.window + 2 for layer in geometry.layers if layer.window is not None]
    return max([_MIN_PROBE_TOKENS, *(tokens for tokens in needed if tokens <= _MAX_PROBE_TOKENS)])


def _tolerance(module: PreTrainedModel) -> float:
    return max(_RELATIVE_TOLERANCE, 8 * torch.finfo(module.dtype).eps)
