"""Decoder layers in two calls: the same results as transformers' own forward, and that forward wherever they do not fit."""

import pytest
import torch
from torch import nn

from tiny_models import tiny_model
from vera.errors import UnsupportedModel
from vera.models import adopt_model, decoder, linear
from vera.models.dense import DenseAttention
from vera.models.linear import MAX_ROWS
from vera.models.narrow import narrow

pytest.importorskip("vera._native")

FAMILIES = ["llama", "mistral", "qwen2", "qwen2-window", "qwen3"]
LAYERS = 4


@pytest.fixture
def calls(monkeypatch):
    """The names of the native calls that were made, in order."""
    made: list[str] = []

    def spied(name):
        call = getattr(decoder, name)

        def spy(*arguments):
            made.append(name)
            call(*arguments)

        return spy

    for name in ("before_attention", "between_attention", "after_attention"):
        monkeypatch.setattr(decoder, name, spied(name))
    return made


def calls_of_a_loop(layers=LAYERS, turns=1):
    """The calls of so many layers in one loop, each for so many parts of the rows."""
    return ["before_attention"] * turns + ["between_attention"] * turns * (layers - 1) + ["after_attention"] * turns


def token_ids(rows):
    return torch.randint(128, (rows,), generator=torch.Generator().manual_seed(rows))


def logits(model, rows):
    """Of one sequence of so many tokens."""
    places = torch.arange(rows)
    return model.forward(token_ids(rows), places, places, DenseAttention([rows]))


def own_logits(model, rows):
    """The same from transformers' forward and eager attention."""
    model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        return model.module(input_ids=token_ids(rows)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, MAX_ROWS, 127, 128, 129, 300])
def test_results_are_those_of_transformers_forward(family, rows, calls):
    model = adopt_model(tiny_model(family))
    calls.clear()
    expected = own_logits(model, rows)
    assert calls == []
    assert (logits(model, rows) - expected).abs().max() < 2e-5
    assert calls == calls_of_a_loop(turns=-(-rows // 128))


@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4}, {"head_dim": 24}])
def test_biases_and_other_shapes_come_out_right(overrides, calls):
    model = adopt_model(tiny_model("llama", **overrides))
    expected = own_logits(model, 7)
    calls.clear()
    assert (logits(model, 7) - expected).abs().max() < 2e-5
    assert calls


def test_the_probe_takes_the_calls(calls):
    adopt_model(tiny_model())
    assert calls == calls_of_a_loop()


@pytest.mark.parametrize(
    ("name", "eps"), [("before_attention", 2), ("between_attention", 5), ("between_attention", 15), ("after_attention", 5)]
)
def test_a_wrong_result_of_the_calls_is_found_by_the_probe(name, eps, monkeypatch):
    call = getattr(decoder, name)
    monkeypatch.setattr(decoder, name, lambda *given: call(*given[:eps], 0.5, *given[eps + 1 :]))
    with pytest.raises(UnsupportedModel, match="is not supported"):
        adopt_model(tiny_model())


def test_a_row_s_result_is_the_same_in_every_batch():
    model, ids = adopt_model(tiny_model()), token_ids(16)

    def first_tokens(rows):
        """Each row a sequence of its own, at position 0."""
        return model.forward(ids[rows], torch.zeros(len(rows), dtype=torch.int64), torch.arange(len(rows)), alone(len(rows)))

    def alone(rows):
        return DenseAttention([1] * rows)

    together = first_tokens(torch.arange(16))
    for row in range(16):
        assert torch.equal(first_tokens(torch.tensor([row])), together[row : row + 1])


def test_more_rows_of_large_weights_are_left_to_transformers(calls, monkeypatch):
    model = adopt_model(tiny_model())
    monkeypatch.setattr(linear, "MAX_CACHED_BYTES", 0)
    calls.clear()
    logits(model, MAX_ROWS + 1)
    assert calls == []


def test_hooks_on_parts_are_run(calls):
    model, seen = adopt_model(tiny_model()), []
    before = logits(model, 5)
    calls.clear()
    handle = model.module.model.layers[1].mlp.register_forward_hook(lambda _part, _inputs, output: seen.append(1) or output * 2)
    doubled = logits(model, 5)
    assert seen == [1]
    assert not torch.allclose(doubled, before, atol=1e-4)
    assert len(calls) == 2 * (LAYERS - 1)
    handle.remove()
    assert torch.equal(logits(model, 5), before)


def test_hook_on_a_layer_is_run_and_what_it_gives_goes_on(calls):
    model = adopt_model(tiny_model())
    before = logits(model, 5)
    calls.clear()
    handle = model.module.model.layers[1].register_forward_hook(lambda _layer, _inputs, output: output * 2)
    doubled = logits(model, 5)
    assert calls == ["before_attention", "after_attention"] * LAYERS
    assert (doubled - own_logits(model, 5)).abs().max() < 2e-5
    handle.remove()
    assert torch.equal(logits(model, 5), before)


def test_global_hooks_see_every_layer():
    model, seen = adopt_model(tiny_model()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, _inputs, _output: seen.append(module))
    try:
        logits(model, 5)
    finally:
        handle.remove()
    assert all(any(module is layer for module in seen) for layer in model.module.model.layers)


def test_layer_that_was_replaced_in_the_list_is_run(calls):
    model, other = adopt_model(tiny_model()), adopt_model(tiny_model(seed=1))
    before = logits(model, 5)
    calls.clear()
    model.module.model.layers[2] = other.module.model.layers[2]
    after = logits(model, 5)
    assert calls == calls_of_a_loop()
    other.module.set_attn_implementation("eager")
    assert (after - own_logits(model, 5)).abs().max() < 2e-5
    assert not torch.allclose(after, before, atol=1e-4)


def test_list_of_fewer_layers_is_run_as_it_is():
    model = adopt_model(tiny_model())
    logits(model, 5)
    model.module.model.layers = model.module.model.layers[:3]
    assert (logits(model, 5) - own_logits(model, 5)).abs().max() < 2e-5


def test_keys_and_values_that_a_hook_keeps_stay_as_they_were(calls):
    model, kept, copies, places = adopt_model(tiny_model()), [], [], torch.arange(5)

    def attend(layer, query, key, value, options):
        kept.extend((key, value))
        copies.extend((key.clone(), value.clone()))
        return DenseAttention([5])(layer, query, key, value, options)

    model.forward(token_ids(5), places, places, attend)
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def test_adopted_model_still_records_hidden_states_for_a_caller_of_its_own():
    module = tiny_model()
    with torch.inference_mode():
        expected = module(input_ids=token_ids(5)[None], output_hidden_states=True).hidden_states
        adopt_model(module).module.set_attn_implementation("sdpa")
        recorded = module(input_ids=token_ids(5)[None], output_hidden_states=True).hidden_states
    assert len(recorded) == len(expected) == LAYERS + 1
    assert all((one - other).abs().max() < 2e-5 for one, other in zip(recorded, expected, strict=True))


def replace_parameter(layer):
    layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 2)


def replace_data(layer):
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2


def write_in_place(layer):
    layer.self_attn.v_proj.weight.data.mul_(2)


def add_bias(layer):
    layer.mlp.down_proj.bias = nn.Parameter(torch.ones(layer.mlp.down_proj.out_features))


def transpose_in_place(layer):
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.T


def change_epsilon(layer):
    layer.post_attention_layernorm.variance_epsilon = 0.5


def replace_norm(layer):
    layer.input_layernorm = nn.LayerNorm(layer.input_layernorm.weight.numel())


def replace_class(layer):
    class Doubling(type(layer.mlp)):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    layer.mlp.__class__ = Doubling


def replace_part(layer):
    layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj, nn.Tanh())


def replace_activation(layer):
    layer.mlp.act_fn = nn.GELU()


def replace_forward(layer):
    own = layer.mlp.forward
    layer.mlp.forward = lambda hidden: own(hidden) * 2


def convert_a_weight(layer):
    weight = layer.mlp.gate_proj.weight
    weight.data = weight.data.half()


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_data,
        write_in_place,
        add_bias,
        transpose_in_place,
        change_epsilon,
        replace_norm,
        replace_class,
        replace_part,
        replace_activation,
        replace_forward,
        convert_a_weight,
    ],
)
def test_a_layer_that_was_changed_between_calls_is_seen_as_it_is(change):
    model = adopt_model(tiny_model())
    before = logits(model, 5)
    change(model.module.model.layers[2])
    after = logits(model, 5)
    assert (after - own_logits(model, 5)).abs().max() < 2e-5
    assert not torch.allclose(after, before, atol=1e-4)


def test_weights_of_another_type_at_the_same_place_are_seen_as_they_are(calls):
    model = adopt_model(tiny_model().half().float())
    narrow(model.module)
    before = logits(model, 5)
    calls.clear()
    for part in model.module.model.layers[2].modules():
        if isinstance(part, nn.Linear):
            part.weight.data = part.weight.data.view(torch.bfloat16)
    after = logits(model, 5)
    assert calls == calls_of_a_loop()
    assert (after - own_logits(model, 5)).abs().max() < 2e-5
    assert not torch.allclose(after, before, atol=1e-4)


def test_another_activation_is_left_to_transformers(calls):
    model = adopt_model(tiny_model("llama", hidden_act="gelu"))
    logits(model, 5)
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_computes_in_half_precision_is_left_to_transformers(dtype, calls):
    model = adopt_model(tiny_model().to(dtype))
    logits(model, 5)
    assert calls == []


def test_other_families_are_left_to_transformers(calls):
    adopt_model(tiny_model("gemma2"))
    assert calls == []


def test_heads_are_handed_over_as_the_hook_promises():
    model, seen = adopt_model(tiny_model("qwen3")), []

    def attend(layer, query, key, value, options):
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        assert {heads.stride(-1) for heads in (query, key, value)} == {1}
        return query

    logits_of_two = model.forward(token_ids(2), torch.arange(2), torch.arange(2), attend)
    assert logits_of_two.shape == (2, 128)
    assert seen == [(layer, (2, 4, 16), (2, 2, 16), (2, 2, 16)) for layer in range(LAYERS)]


def test_an_attention_output_that_is_apart_in_memory_is_read_rightly():
    model = adopt_model(tiny_model())

    def attend(*arguments):
        output = DenseAttention([5])(*arguments)
        return torch.stack([output, output], dim=-1)[..., 0]

    places = torch.arange(5)
    assert torch.equal(model.forward(token_ids(5), places, places, attend), logits(model, 5))


def test_what_flows_into_a_layer_is_kept_and_a_window_goes_on_from_it(calls):
    model, hidden, places = adopt_model(tiny_model()), {}, torch.arange(5)
    whole, window = [], []

    def noting(seen):
        def attend(layer, query, key, value, options):
            seen.append((layer, key, value))
            return DenseAttention([5])(layer, query, key, value, options)

        return attend

    calls.clear()
    model.forward(
        token_ids(5),
        places,
        places,
        noting(whole),
        keep_layers=[2],
        keep=lambda layer, state: hidden.update({layer: state.clone()}),
    )
    model.run_layers(token_ids(5), places, noting(window), first=2, stop=4, hidden=hidden[2])
    assert calls == calls_of_a_loop() + ["before_attention", "after_attention"] * 2
    assert [layer for layer, _, _ in window] == [2, 3]
    for (_, key, value), (_, again_key, again_value) in zip(whole[2:], window, strict=True):
        assert torch.equal(key, again_key)
        assert torch.equal(value, again_value)


def test_layers_of_another_model_run_within_a_call():
    outer, inner, expected = adopt_model(tiny_model()), adopt_model(tiny_model(seed=1)), logits(adopt_model(tiny_model()), 5)

    def attend(*arguments):
        logits(inner, 9)
        return DenseAttention([5])(*arguments)

    places = torch.arange(5)
    assert torch.equal(outer.forward(token_ids(5), places, places, attend), expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_layer_with_a_cache_of_transformers_own_is_left_to_it(name, calls, monkeypatch):
    model, seen = adopt_model(tiny_model()), []
    own = decoder.llama.LlamaDecoderLayer.forward

    def forward(layer, hidden_states, **options):
        seen.append(options.pop(name))
        return own(layer, hidden_states, **options)

    monkeypatch.setattr(decoder.llama.LlamaDecoderLayer, "forward", forward)
    for layer in model.module.model.layers:
        given = layer.forward
        monkeypatch.setattr(layer, "forward", lambda *a, given=given, **options: given(*a, **{**options, name: "a cache"}))
    calls.clear()
    logits(model, 5)
    assert seen == ["a cache"] * LAYERS and calls == []
