"""Decoder layers in two native calls, for few rows: what comes before a layer's attention, and what comes after it.

transformers computes a Llama-like layer in some forty small torch calls, and in a decode step much of their time is dispatch. The
layer classes below have one and the same forward in transformers' source, up to biases, to norms of queries and keys, and to
windows, which are the hook's business. What does not fit the calls (many rows, gradients, another attention function, parts that
were replaced or have hooks) goes through that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from vera.models.hook import VERA_ATTENTION, Step
from vera.models.linear import WEIGHT_FORMATS, KernelLinear, takes

try:
    from vera._native import after_attention as _after_attention
    from vera._native import before_attention as _before_attention
except ImportError:  # there was no compiler when Vera was installed; vera.attention says so
    _HAS_KERNELS = False
else:
    _HAS_KERNELS = True
    # A type checker cannot count the arguments in the tuples that they are called with.
    before_attention: Callable[..., None] = _before_attention
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
    """What the two calls are told about a layer; the tuples are arguments in the calls' order."""

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


@dataclass(frozen=True, slots=True)
class _Inspected:
    """A layer as it was last looked at."""

    parts: tuple[nn.Module, ...]
    state: list[object]
    """What `_state` says of `parts`. As long as it says the same, `wiring` holds."""
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
                return _run(wiring, hidden_states.contiguous(), rope, step)
        return super().forward(hidden_states, *arguments, **options)

    def _wiring(self) -> _Wiring | None:
        """Looked at in every call, as `KernelLinear` does: the layer is its caller's too."""
        inspected = self._inspected
        if inspected is None or inspected.state != _state(inspected.parts):
            parts = tuple(self.modules())
            self._inspected = inspected = _Inspected(parts, _state(parts), _wired(self))
        return inspected.wiring


class LlamaLayer(LayerInTwoCalls, llama.LlamaDecoderLayer):  # type: ignore[no-untyped-call]
    """A Llama layer in two calls."""


class MistralLayer(LayerInTwoCalls, mistral.MistralDecoderLayer):  # type: ignore[no-untyped-call]
    """A Mistral layer in two calls."""


class Qwen2Layer(LayerInTwoCalls, qwen2.Qwen2DecoderLayer):  # type: ignore[no-untyped-call]
    """A Qwen2 layer in two calls."""


class Qwen3Layer(LayerInTwoCalls, qwen3.Qwen3DecoderLayer):  # type: ignore[no-untyped-call]
    """A Qwen3 layer in two calls."""


_ROWS_A_CALL = 128
"""So many rows stay in the caches, with what is computed of them."""

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


def speed_up_layers(module: nn.Module) -> int:
    """Gives the decoder layers of every known class the two calls, in place; returns how many. Weights and names stay.

    Each forward looks whether the calls fit. They do so only if `speed_up_linear` has been given the layers, too.
    """
    if not _HAS_KERNELS:
        return 0
    chosen = [layer for layer in module.modules() if type(layer) in _FAMILIES]
    for layer in chosen:
        layer.__class__ = _FAMILIES[type(layer)].in_two_calls
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


def _run(wiring: _Wiring, hidden: Tensor, rope: tuple[Tensor, Tensor], step: Step) -> Tensor:
    sizes, rows, threads = wiring.sizes, hidden.shape[1], torch.get_num_threads()
    query_heads, kv_heads = sizes.query // sizes.head_dim, sizes.kv // sizes.head_dim
    query = hidden.new_empty((rows, query_heads, sizes.head_dim))
    key = hidden.new_empty((rows, kv_heads, sizes.head_dim))
    value = torch.empty_like(key)
    cos, sin = rope
    for first in range(0, rows, _ROWS_A_CALL):
        before_attention(
            _row(hidden, first, sizes.hidden),
            *wiring.before,
            _row(cos, first, sizes.head_dim),
            _row(sin, first, sizes.head_dim),
            _row(query, first, sizes.query),
            _row(key, first, sizes.kv),
            _row(value, first, sizes.kv),
            wiring.weight_format,
            min(_ROWS_A_CALL, rows - first),
            sizes.hidden,
            query_heads,
            kv_heads,
            sizes.head_dim,
            threads,
        )
    attended = step.attend(wiring.layer, query, key, value, step.options[wiring.layer]).float().contiguous()
    assert attended.shape == query.shape
    output = torch.empty_like(hidden)
    for first in range(0, rows, _ROWS_A_CALL):
        after_attention(
            _row(attended, first, sizes.query),
            *wiring.output,
            _row(hidden, first, sizes.hidden),
            *wiring.mlp,
            _row(output, first, sizes.hidden),
            wiring.weight_format,
            min(_ROWS_A_CALL, rows - first),
            sizes.hidden,
            sizes.query,
            sizes.intermediate,
            threads,
        )
    return output


def _row(rows: Tensor, first: int, width: int) -> int:
    """The address of a row of contiguous float32."""
    return rows.data_ptr() + 4 * first * width


def _state(parts: tuple[Any, ...]) -> list[object]:
    """What can have changed in a layer since it was looked at. The layer comes first, then its parts.

    Hooks on the layer itself are run by whoever calls it, those on its parts only by transformers' forward.
    """
    state: list[object] = []
    for part in parts:
        state += part._modules.values()
        for parameter in part._parameters.values():
            if parameter is None:
                state.append(None)
            else:
                state += (parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.is_contiguous())
    for part in parts[1:]:
        state += (type(part), _runs_as_its_class(part), part.__dict__.get("variance_epsilon"))
    state.append(parts[0].self_attn.config._attn_implementation)
    return state


def _runs_as_its_class(part: nn.Module) -> bool:
    return not (part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__)


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
    return all(_runs_as_its_class(part) for part in layer.modules() if part is not layer)


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
