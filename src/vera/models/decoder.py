"""Decoder layers in two native calls, for few rows: what comes before a layer's attention, and what comes after it.

transformers computes a Llama-like layer in some forty small torch calls, and in a decode step much of their time is dispatch. The
layer classes below have one and the same forward in transformers' source, up to biases, to norms of queries and keys, and to
windows, which are the hook's business. What does not fit the calls (many rows, gradients, another attention function, parts that
were replaced or have hooks) goes through that forward.

The models of these layers have one forward, too: embeddings, rotary tables, the layers, a norm. Where all layers fit, they run in
one loop, which looks once at all of them, and in which the end of a layer and the beginning of the next are one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from vera.models.hook import VERA_ATTENTION, Step
from vera.models.linear import WEIGHT_FORMATS, KernelLinear, takes
from vera.models.windows import Watcher, watchers_of

try:
    from transformers.utils import output_capturing
except ImportError:  # not public: without it, what asks for hidden states would not get them, so models keep their own loop
    _recordable: dict[str, Any] | None = None
else:
    _recordable = getattr(output_capturing, "_CAN_RECORD_REGISTRY", None)

try:
    from vera._native import after_attention as _after_attention
    from vera._native import before_attention as _before_attention
    from vera._native import between_attention as _between_attention
except ImportError:  # there was no compiler when Vera was installed; vera.attention says so
    _HAS_KERNELS = False
else:
    _HAS_KERNELS = True
    # A type checker cannot count the arguments in the tuples that they are called with.
    before_attention: Callable[..., None] = _before_attention
    between_attention: Callable[..., None] = _between_attention
    after_attention: Callable[..., None] = _after_attention


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Widths of a layer. `query` and `kv` are those of all heads."""

    hidden: int
    query: int
    kv: int
    head_dim: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class _Wiring:
    """What the calls are told about a layer; the tuples are arguments in the calls' order."""

    layer: int
    sizes: _Sizes
    largest_weight_bytes: int
    weight_format: int
    before: tuple[float, ...]
    """From `norm_weight` to `qk_norm_eps`."""
    output: tuple[float, ...]
    """`o_weight` and `o_bias`."""
    mlp: tuple[float, ...]
    """From `norm_weight` to `down_bias`."""


class _Parts:
    """Modules, and what can change in them without their being told: as it was when they were last looked at.

    A module without children cannot be changed by getting some, nor one without parameters: its class's forward has no use for
    them.
    """

    def __init__(self, callees: Iterable[nn.Module], owners: Iterable[nn.Module] = ()) -> None:
        """Hooks and a forward of their own are seen on `callees`. `owners` are run by others, whose business these are."""
        callees = list(callees)
        self._modules = [*callees, *owners]
        dicts = [module.__dict__ for module in self._modules]
        self._callees = dicts[: len(callees)]
        self._parents = [own for own in dicts if own["_modules"]]
        self._holders = [own for own in dicts if own["_parameters"]]
        self._norms = [own for own in dicts if "variance_epsilon" in own]
        self._configured = [own for own in dicts if "config" in own]
        # Kept, so that no other object can come to have the id of one of them.
        self._children = list(self._now_children())
        self._held = list(self._now_held())
        self._configs = list({id(own["config"]): own["config"] for own in self._configured}.values())
        self._parameters = [held for held in self._held if held is not None]
        self._state = self._now()

    def are_unchanged(self) -> bool:
        return self._state == self._now()

    def _now(self) -> list[object]:
        parameters = self._parameters
        return [
            [*map(id, self._now_held())],
            [*map(Tensor.data_ptr, parameters)],
            [parameter.dtype for parameter in parameters],
            [*map(Tensor.size, parameters)],
            [*map(Tensor.is_contiguous, parameters)],
            [*map(type, self._modules)],
            any(chain.from_iterable(map(_get_hooks, self._callees))) or any("forward" in own for own in self._callees),
            [*map(id, self._now_children())],
            [own.get("variance_epsilon") for own in self._norms],
            [id(own["config"]) for own in self._configured],
            [config._attn_implementation for config in self._configs],
        ]

    def _now_children(self) -> Iterator[nn.Module | None]:
        return chain.from_iterable(own["_modules"].values() for own in self._parents)

    def _now_held(self) -> Iterator[Tensor | None]:
        return chain.from_iterable(own["_parameters"].values() for own in self._holders)


_get_hooks = itemgetter("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _Inspected:
    """A layer as it was last looked at."""

    parts: _Parts
    """As long as they are unchanged, `wiring` holds."""
    wiring: _Wiring | None
    """None: something about the layer does not fit the calls."""


_CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls a layer's own cache; versions differ."""


class LayerInTwoCalls(nn.Module):
    """Stands before a decoder layer's own class.

    The calls fit only if all weights of the linear layers are held in one format.
    """

    _inspected: _Inspected | None = None

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Like the layer's own: `[1, rows, hidden]` in and out."""
        step = options.get("vera_step")
        has_cache = any(options.get(name) is not None for name in _CACHE_NAMES)
        if isinstance(step, Step) and not (arguments or has_cache or torch.is_grad_enabled()):
            wiring = self._wiring()
            if wiring is not None and (rope := _rope(wiring, hidden_states, options.get("position_embeddings"))) is not None:
                return _run([wiring], hidden_states.contiguous(), rope, step)
        return super().forward(hidden_states, *arguments, **options)

    def _wiring(self) -> _Wiring | None:
        """Looked at in every call, as `KernelLinear` does: the layer is its caller's too."""
        inspected = self._inspected
        if inspected is None or not inspected.parts.are_unchanged():
            parts = [part for part in self.modules() if part is not self]
            self._inspected = inspected = _Inspected(_Parts(parts, [self]), _wired(self))
        return inspected.wiring


_STEP_OPTIONS = {"input_ids", "position_ids", "vera_step"}


@dataclass(frozen=True, slots=True)
class _InspectedLayers:
    """A model's layers as they were last looked at."""

    holder: nn.ModuleList
    layers: list[nn.Module]
    parts: _Parts
    """As long as they are unchanged, `wirings` hold."""
    wirings: list[_Wiring]
    """One a layer, all of the same sizes. Empty: some layer does not fit the calls."""
    largest_weight_bytes: int


class LayersInOneLoop(nn.Module):
    """Stands before the class of a model without a head."""

    config: Any
    layers: Any
    embed_tokens: Any
    rotary_emb: Any
    norm: Any
    _inspected: _InspectedLayers | None = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Like the model's own."""
        if not arguments and self._may_loop(options):
            hidden = self._looped(options["input_ids"], options["position_ids"], options["vera_step"])
            if hidden is not None:
                return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))
        return super().forward(*arguments, **options)

    def _may_loop(self, options: dict[str, Any]) -> bool:
        """This is a step of ours, and nobody asks for more, or listens."""
        given = {name for name, value in options.items() if value is not None and value is not False}
        if given != _STEP_OPTIONS or torch.is_grad_enabled() or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        config = self.config
        return config.return_dict and not (config.output_hidden_states or config.output_attentions)

    def _looped(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor | None:
        """What flows out of the last layer. None: something does not fit, and no layer was run."""
        inspected = self._inspected_layers()
        if inspected is None or not inspected.wirings or not takes(token_ids.numel(), inspected.largest_weight_bytes):
            return None
        watchers: dict[int, list[Watcher]] = {}
        for wiring, layer in zip(inspected.wirings, inspected.layers, strict=True):
            if _runs_otherwise(layer.__dict__):
                found = watchers_of(layer)
                if found is None:
                    return None
                watchers[wiring.layer] = found
        hidden = self.embed_tokens(token_ids)
        rope = _rope(inspected.wirings[0], hidden, self.rotary_emb(hidden, position_ids=positions))
        return None if rope is None else _run(inspected.wirings, hidden.contiguous(), rope, step, watchers)

    def _inspected_layers(self) -> _InspectedLayers | None:
        """None: these are not the model's own layers, but what `windows` puts in their place for a while."""
        holder = self.layers
        inspected = self._inspected
        if inspected is None or inspected.holder is not holder or not inspected.parts.are_unchanged():
            layers = list(holder)
            if len(layers) != self.config.num_hidden_layers or not all(isinstance(layer, LayerInTwoCalls) for layer in layers):
                return None
            parts = [part for layer in layers for part in layer.modules() if part is not layer]
            wirings = [wiring for layer in layers if (wiring := _wired(layer)) is not None]
            fit = len(wirings) == len(layers) and len({w.sizes for w in wirings}) == 1
            self._inspected = inspected = _InspectedLayers(
                holder,
                layers,
                _Parts(parts, [*layers, holder]),
                wirings if fit else [],
                max((wiring.largest_weight_bytes for wiring in wirings), default=0),
            )
        return inspected


class LlamaLayer(LayerInTwoCalls, llama.LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """A Llama layer in two calls."""


class MistralLayer(LayerInTwoCalls, mistral.MistralDecoderLayer):  # type: ignore[no-untyped-call]
    """A Mistral layer in two calls."""


class Qwen2Layer(LayerInTwoCalls, qwen2.Qwen2DecoderLayer):  # type: ignore[no-untyped-call]
    """A Qwen2 layer in two calls."""


class Qwen3Layer(LayerInTwoCalls, qwen3.Qwen3DecoderLayer):  # type: ignore[no-untyped-call]
    """A Qwen3 layer in two calls."""


class LlamaLoop(LayersInOneLoop, llama.LlamaModel):  # type: ignore[no-untyped-call]
    """A Llama model in one loop."""


class MistralLoop(LayersInOneLoop, mistral.MistralModel):  # type: ignore[no-untyped-call]
    """A Mistral model in one loop."""


class Qwen2Loop(LayersInOneLoop, qwen2.Qwen2Model):  # type: ignore[no-untyped-call]
    """A Qwen2 model in one loop."""


class Qwen3Loop(LayersInOneLoop, qwen3.Qwen3Model):  # type: ignore[no-untyped-call]
    """A Qwen3 model in one loop."""


_ROWS_A_CALL = 128
"""So many rows stay in the caches, with what is computed of them."""
_BYTES_AT_ONCE = 2**20
"""Keys and values of several layers are one piece of memory up to this size."""

_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = "self_attn.o_proj"
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class _Family:
    """The classes that a layer's parts must be, exactly: a subclass may compute something else."""

    in_two_calls: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    head_norms: tuple[str, ...] = ()
    """Norms of each head of the queries and of the keys, if there are any."""


_FAMILIES: dict[type[nn.Module], _Family] = {
    llama.LlamaDecoderLayer: _Family(LlamaLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm),
    mistral.MistralDecoderLayer: _Family(MistralLayer, mistral.MistralAttention, mistral.MistralMLP, mistral.MistralRMSNorm),
    qwen2.Qwen2DecoderLayer: _Family(Qwen2Layer, qwen2.Qwen2Attention, qwen2.Qwen2MLP, qwen2.Qwen2RMSNorm),
    qwen3.Qwen3DecoderLayer: _Family(Qwen3Layer, qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm, _HEAD_NORMS),
}


_LOOPS: dict[type[nn.Module], type[nn.Module]] = {
    llama.LlamaModel: LlamaLoop,
    mistral.MistralModel: MistralLoop,
    qwen2.Qwen2Model: Qwen2Loop,
    qwen3.Qwen3Model: Qwen3Loop,
}


def speed_up_layers(module: nn.Module) -> int:
    """Gives the decoder layers of every known class the calls, in place; returns how many. Weights and names stay.

    Models of known classes get the loop. Each forward looks whether the calls fit. They do so only if `speed_up_linear` has been
    given the layers, too.
    """
    if not _HAS_KERNELS:
        return 0
    chosen = [layer for layer in module.modules() if type(layer) in _FAMILIES]
    for layer in chosen:
        layer.__class__ = _FAMILIES[type(layer)].in_two_calls
    if _recordable is None:
        return len(chosen)
    models: list[Any] = [model for model in module.modules() if type(model) in _LOOPS]
    for model in models:
        model.__class__ = _LOOPS[type(model)]
        dict.__setitem__(_recordable, str(type(model)), model._can_record_outputs)  # as the constructor has done
    return len(chosen)


def _rope(wiring: _Wiring, hidden: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines, `[1, rows, head_dim]`, as the calls read them. None: these are no rows of float32, or too many."""
    sizes = wiring.sizes
    if rope is None or hidden.dim() != 3 or hidden.shape[0] != 1 or hidden.shape[2] != sizes.hidden:
        return None
    rows = hidden.shape[1]
    if not rows or not takes(rows, wiring.largest_weight_bytes) or not _is_float32(hidden):
        return None
    cos, sin = rope
    if not cos.shape == sin.shape == (1, rows, sizes.head_dim) or not _is_float32(cos) or not _is_float32(sin):
        return None
    return cos.contiguous(), sin.contiguous()


def _run(
    wirings: list[_Wiring],
    hidden: Tensor,
    rope: tuple[Tensor, Tensor],
    step: Step,
    watchers: Mapping[int, Sequence[Watcher]] = MappingProxyType({}),
) -> Tensor:
    """Layers of the same sizes, one after another. `watchers` are shown what flows into a layer, by its number."""
    sizes, rows, threads = wirings[0].sizes, hidden.shape[1], torch.get_num_threads()
    query_heads, kv_heads, head_dim = sizes.query // sizes.head_dim, sizes.kv // sizes.head_dim, sizes.head_dim
    turns = [(first, min(_ROWS_A_CALL, rows - first)) for first in range(0, rows, _ROWS_A_CALL)]
    hidden_row, query_row, kv_row, head_row = 4 * sizes.hidden, 4 * sizes.query, 4 * sizes.kv, 4 * head_dim
    output = torch.empty_like(hidden)
    query = hidden.new_empty((rows, query_heads, head_dim))
    cos_at, sin_at, hidden_at, output_at, query_at = (tensor.data_ptr() for tensor in (*rope, hidden, output, query))
    attended_at, previous = 0, None
    keys_and_values = _keys_and_values(hidden, len(wirings), (rows, kv_heads, head_dim))
    for wiring, (key, value) in zip(wirings, keys_and_values, strict=True):
        key_at, value_at = key.data_ptr(), value.data_ptr()
        for first, count in turns:
            heads = (
                *wiring.before,
                cos_at + first * head_row,
                sin_at + first * head_row,
                query_at + first * query_row,
                key_at + first * kv_row,
                value_at + first * kv_row,
                wiring.weight_format,
            )
            if previous is None:
                before_attention(
                    hidden_at + first * hidden_row, *heads, count, sizes.hidden, query_heads, kv_heads, head_dim, threads
                )
            else:
                between_attention(
                    attended_at + first * query_row,
                    *previous.output,
                    hidden_at + first * hidden_row,
                    *previous.mlp,
                    output_at + first * hidden_row,
                    previous.weight_format,
                    *heads,
                    count,
                    sizes.hidden,
                    sizes.intermediate,
                    query_heads,
                    kv_heads,
                    head_dim,
                    threads,
                )
        if previous is not None:
            hidden, hidden_at = output, output_at  # further layers write over what flows through them
        layer = wiring.layer
        for watcher in watchers.get(layer, ()):
            watcher.keep(watcher.layer, hidden.squeeze(0))
        attended = step.attend(layer, query, key, value, step.options[layer])
        if attended.dtype is not torch.float32 or not attended.is_contiguous():
            attended = attended.float().contiguous()
        assert attended.shape == query.shape
        attended_at, previous = attended.data_ptr(), wiring
    assert previous is not None
    for first, count in turns:
        after_attention(
            attended_at + first * query_row,
            *previous.output,
            hidden_at + first * hidden_row,
            *previous.mlp,
            output_at + first * hidden_row,
            previous.weight_format,
            count,
            sizes.hidden,
            sizes.query,
            sizes.intermediate,
            threads,
        )
    return output


def _keys_and_values(like: Tensor, layers: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each layer memory of its own, as hooks may keep what they are given; small pieces are made together."""
    at_once = min(layers, max(1, _BYTES_AT_ONCE // (8 * math.prod(shape))))
    for first in range(0, layers, at_once):
        both = like.new_empty((2 * min(at_once, layers - first), *shape)).unbind()
        yield from zip(both[::2], both[1::2], strict=True)


def _runs_otherwise(own: dict[str, Any]) -> bool:
    """By a module's `__dict__`: calling it does more than its class's forward."""
    return any(_get_hooks(own)) or "forward" in own


def _wired(layer: Any) -> _Wiring | None:
    """None: some part is not what the layer's class has there, or is not as the calls read it."""
    family = next((family for own, family in _FAMILIES.items() if type(layer) in (own, family.in_two_calls)), None)
    if family is None or not _has_its_parts(layer, family):
        return None
    sizes = _sizes(layer)
    if not all(_is_readable(layer.get_submodule(name), shape) for name, shape in _shapes(sizes, family).items()):
        return None
    formats = {layer.get_submodule(name).weight.dtype for name in (*_QKV, _OUTPUT, *_MLP)}
    head_norms = [layer.get_submodule(name) for name in family.head_norms]
    epsilons = {norm.variance_epsilon for norm in head_norms} or {0.0}
    if len(formats) > 1 or len(epsilons) > 1 or sizes.head_dim % 2 or sizes.query % sizes.head_dim or sizes.kv % sizes.head_dim:
        return None
    norm_before, norm_after = (layer.get_submodule(name) for name in _NORMS)
    return _Wiring(
        layer=layer.self_attn.layer_idx,
        sizes=sizes,
        largest_weight_bytes=max(layer.get_submodule(name).weight.nbytes for name in (*_QKV, _OUTPUT, *_MLP)),
        weight_format=WEIGHT_FORMATS[formats.pop()],
        before=(
            norm_before.weight.data_ptr(),
            norm_before.variance_epsilon,
            *_addresses(layer, _QKV),
            *([norm.weight.data_ptr() for norm in head_norms] or [0, 0]),
            epsilons.pop(),
        ),
        output=tuple(_addresses(layer, [_OUTPUT])),
        mlp=(norm_after.weight.data_ptr(), norm_after.variance_epsilon, *_addresses(layer, _MLP)),
    )


def _has_its_parts(layer: Any, family: _Family) -> bool:
    """Each part is of the very class that transformers gave it, or has the linear kernel, and nobody listens in on it."""
    attention, mlp = layer.self_attn, layer.mlp
    if attention.config._attn_implementation != VERA_ATTENTION or type(attention) is not family.attention:
        return False
    if type(mlp) is not family.mlp or type(mlp.act_fn) not in (SiLUActivation, nn.SiLU):
        return False
    kinds = dict.fromkeys((*_QKV, _OUTPUT, *_MLP), KernelLinear) | dict.fromkeys((*_NORMS, *family.head_norms), family.norm)
    if any(type(layer.get_submodule(name)) is not kind for name, kind in kinds.items()):
        return False
    return not any(_runs_otherwise(part.__dict__) for part in layer.modules() if part is not layer)


def _sizes(layer: Any) -> _Sizes:
    attention = layer.self_attn
    return _Sizes(
        hidden=layer.input_layernorm.weight.numel(),
        query=attention.q_proj.weight.shape[0],
        kv=attention.k_proj.weight.shape[0],
        head_dim=attention.head_dim,
        intermediate=layer.mlp.gate_proj.weight.shape[0],
    )


def _shapes(sizes: _Sizes, family: _Family) -> dict[str, tuple[int, ...]]:
    """The shape that the weight of each part must have."""
    norms = dict.fromkeys(_NORMS, (sizes.hidden,)) | dict.fromkeys(family.head_norms, (sizes.head_dim,))
    return {
        **norms,
        "self_attn.q_proj": (sizes.query, sizes.hidden),
        "self_attn.k_proj": (sizes.kv, sizes.hidden),
        "self_attn.v_proj": (sizes.kv, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, sizes.query),
        "mlp.gate_proj": (sizes.intermediate, sizes.hidden),
        "mlp.up_proj": (sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }


def _is_readable(part: Any, shape: tuple[int, ...]) -> bool:
    """Norms and biases are float32; weights of linear layers may be held narrower."""
    weight, bias = part.weight, getattr(part, "bias", None)
    if weight.shape != shape or not weight.is_cpu or not weight.is_contiguous():
        return False
    if weight.dtype not in (WEIGHT_FORMATS if len(shape) == 2 else (torch.float32,)):
        return False
    return bias is None or (bias.shape == shape[:1] and _is_float32(bias) and bias.is_contiguous())


def _addresses(layer: nn.Module, names: Sequence[str]) -> list[int]:
    """Of the weights, then of the biases; 0 for none."""
    linears: list[Any] = [layer.get_submodule(name) for name in names]
    weights = [linear.weight.data_ptr() for linear in linears]
    return weights + [0 if linear.bias is None else linear.bias.data_ptr() for linear in linears]


def _is_float32(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu
