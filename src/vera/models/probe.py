"""The probe: runs a few tokens through a model, and believes only what it sees.

1. *Observed*: every layer must call the attention function once, in order, with equal shapes and with nothing but known options,
   and the mask that transformers would have built must be the one that these options describe. It is asked point by point, so
   that a window of 4096 needs no 4096 tokens.
2. *Hooked*: two sequences, and a token at the last position that the model allows, run as one flattened batch. Keys and values
   must be those observed: where they move with the length (dynamic rope), a cached page would be wrong for a longer sequence.
3. *Eager*: the logits of the two sequences must equal those of the model's own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from vera.attention.protocol import LayerAttention
from vera.errors import BrokenModel, ModelError, UnsupportedModel
from vera.models.dense import DenseAttention, dense_attention
from vera.models.hook import VERA_ATTENTION, Step, flat
from vera.models.narrow import compute_dtype
from vera.models.surroundings import one_thread

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

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


def probe(module: PreTrainedModel, name: str) -> Geometry:
    """Runs a few tokens and compares with the model's own attention; leaves `module` set to Vera's attention.

    Raises UnsupportedModel when the model attends in a way that the options of `LayerAttention` do not describe, and BrokenModel
    when its logits are not finite.
    """
    label = f"{name} ({type(module).__name__})"
    try:
        with torch.inference_mode(), one_thread():
            calls = _observed_calls(module)
            geometry = _geometry(module, calls)
            tokens = _probe_tokens(geometry)
            hooked = _hooked_logits(module, geometry, tokens, calls)
            _compare_with_eager(module, hooked, tokens)
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


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """One call of the attention function, as seen from inside; heads are `[tokens, heads, head_dim]`."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    vera_observer: _Observer | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention function of the observed run: notes the call, then attends densely so that the run can go on."""
    if vera_observer is None:
        raise _Refusal("its layers do not hand keyword arguments on to the attention function")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _Refusal(f"{type(module).__name__} does not know its layer index")
    shapes = [tuple(heads.shape) for heads in (query, key, value)]
    if key.shape != value.shape or query.shape[-2:] != key.shape[-2:]:
        raise _Refusal(f"queries, keys and values have shapes {', '.join(map(str, shapes))}; tokens and head sizes must be equal")
    options = _options(module, query.shape[-1], arguments)
    call = _LayerCall(layer, flat(query), flat(key), flat(value), options, attention_mask)
    vera_observer.calls.append(call)
    output = dense_attention(call.query, call.key, call.value, options)
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


def _observed_calls(module: PreTrainedModel) -> list[_LayerCall]:
    """The calls of one sequence's run up to the output head, each checked against its mask."""
    observer, tokens = _Observer(), _MIN_PROBE_TOKENS
    with _attention(module, _PROBE_ATTENTION):
        module.base_model(**_inputs(_ids(module, tokens), torch.arange(tokens)), vera_observer=observer)
    for call in observer.calls:
        _check_mask(call)
    return observer.calls


def _geometry(module: PreTrainedModel, calls: list[_LayerCall]) -> Geometry:
    num_layers = module.config.num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise _Refusal(
            f"its {num_layers} layers called the attention function {len(calls)} times; it must be once a layer, in order"
        )
    if len({(call.query.shape, call.key.shape) for call in calls}) > 1:
        raise _Refusal("the number or the size of its heads differs between layers")
    _, query_heads, head_dim = calls[0].query.shape
    kv_heads = calls[0].key.shape[1]
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


def _hooked_logits(module: PreTrainedModel, geometry: Geometry, tokens: int, observed: list[_LayerCall]) -> Tensor:
    """`[2, tokens, vocab]` of the two sequences; the first begins with the tokens that were observed."""
    lengths = [tokens, tokens, 1]
    ids = torch.cat([_ids(module, 2 * tokens), _ids(module, 1)])
    last = module.config.max_position_embeddings - 1
    positions = torch.cat([torch.arange(tokens), torch.arange(tokens), torch.tensor([last])])
    recorder = _Recorder(DenseAttention(lengths))
    with _attention(module, VERA_ATTENTION):
        logits: Tensor = module(**_inputs(ids, positions), vera_step=Step(recorder, geometry.layers)).logits
    for call, (key, value) in zip(observed, recorder.seen, strict=True):
        for before, after in ((call.key, key), (call.value, value)):
            if not _relative_difference(after[: len(before)], before) <= _tolerance(module):
                raise _Refusal(
                    "its keys depend on how long the sequences are (dynamic rope), so cached pages could not be reused"
                )
    return logits[0, :-1].float().view(2, tokens, -1)


def _compare_with_eager(module: PreTrainedModel, hooked: Tensor, tokens: int) -> None:
    ids = _ids(module, 2 * tokens).view(2, tokens)
    with _attention(module, "eager"):
        eager = module(input_ids=ids, position_ids=torch.arange(tokens).expand(2, -1), use_cache=False).logits.float()
    if not torch.isfinite(eager).all():
        raise BrokenModel(
            f"{type(module).__name__}: logits of a {tokens}-token probe are not finite; "
            f"the weights are damaged, or overflow in {compute_dtype(module)} (try dtype='float32')"
        )
    difference, limit = _relative_difference(hooked, eager), _tolerance(module)
    if not difference <= limit:
        raise _Refusal(f"its logits differ from its own eager attention by {difference:.1e} of the largest (limit {limit:.0e})")


@dataclass(slots=True)
class _Recorder:
    """A hook that keeps each layer's keys and values."""

    attend: DenseAttention
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerAttention) -> Tensor:
        self.seen.append((key, value))
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


def _probe_tokens(geometry: Geometry) -> int:
    """Enough to pass the end of a tiny window."""
    needed = [layer.window + 2 for layer in geometry.layers if layer.window is not None]
    return max([_MIN_PROBE_TOKENS, *(tokens for tokens in needed if tokens <= _MAX_PROBE_TOKENS)])


def _tolerance(module: PreTrainedModel) -> float:
    return max(_RELATIVE_TOLERANCE, 8 * torch.finfo(compute_dtype(module)).eps)
