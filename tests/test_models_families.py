"""The hook against transformers' own eager attention, family by family."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tiny_models import families, tiny_model
from vera.models import adopt_model
from vera.models.dense import DenseAttention

LENGTHS = [40, 23]
TOLERANCE = 1e-4


def token_ids(count: int, vocab_size: int = 128) -> torch.Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def eager_logits(module: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """`[tokens, vocab]` of one sequence alone, no cache, attention as transformers has it."""
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        return module(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", families())
def test_flattened_sequences_give_the_logits_that_each_gives_alone(family):
    ids = token_ids(sum(LENGTHS))
    reference = tiny_model(family)
    expected = torch.cat([eager_logits(reference, part) for part in torch.split(ids, LENGTHS)])
    model = adopt_model(tiny_model(family))
    logits = model.forward(ids, positions(LENGTHS), torch.arange(len(ids)), DenseAttention(LENGTHS))
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", (None, None, None, None)),
        ("mistral", (7, 7, 7, 7)),
        ("qwen2-window", (None, None, 7, 7)),
        ("gemma2", (7, None, 7, None)),
        ("gpt-oss", (7, None, 7, None)),
    ],
)
def test_windows_are_learned_layer_by_layer(family, windows):
    assert adopt_model(tiny_model(family)).spec.windows == windows


def test_scale_softcap_and_sinks_are_learned_from_the_models_own_calls():
    gemma = adopt_model(tiny_model("gemma2")).layers[0]
    assert gemma.scale == pytest.approx(20**-0.5)
    assert gemma.softcap == 5.0
    module = tiny_model("gpt-oss")
    sinks = adopt_model(module).layers[1].sinks
    assert sinks is not None
    assert torch.equal(sinks, module.model.layers[1].self_attn.sinks)


def test_a_window_hides_the_token_just_outside_and_shows_the_one_just_inside():
    model = adopt_model(tiny_model("mistral", num_hidden_layers=1, sliding_window=4))
    ids = token_ids(11)

    def last_logits(changed: int) -> torch.Tensor:
        other = ids.clone()
        other[changed] = (ids[changed] + 1) % 128
        return model.forward(other, torch.arange(11), torch.tensor([10]), DenseAttention([11]))

    unchanged = model.forward(ids, torch.arange(11), torch.tensor([10]), DenseAttention([11]))
    assert torch.equal(last_logits(6), unchanged)
    assert not torch.allclose(last_logits(7), unchanged)


def test_logits_come_in_the_order_of_the_rows_asked_for():
    model = adopt_model(tiny_model())
    ids, places = token_ids(8), torch.arange(8)
    everything = model.forward(ids, places, torch.arange(8), DenseAttention([8]))
    some = model.forward(ids, places, torch.tensor([6, 2]), DenseAttention([8]))
    assert torch.allclose(some, everything[[6, 2]], atol=1e-5)


def test_no_rows_means_that_the_output_head_is_not_run():
    model = adopt_model(tiny_model())
    calls: list[int] = []
    model.module.lm_head.register_forward_hook(lambda *_: calls.append(1))
    layers: list[int] = []

    def attend(layer, query, key, value, options):
        layers.append(layer)
        return query

    logits = model.forward(token_ids(4), torch.arange(4), torch.tensor([], dtype=torch.int64), attend)
    assert logits.shape == (0, 128)
    assert (calls, layers) == ([], [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hook_is_given_float32_heads_whatever_the_weights_are_held_in(dtype):
    model = adopt_model(tiny_model("phi3").to(dtype))
    seen: list[torch.Tensor] = []

    def attend(layer, query, key, value, options):
        seen.extend([query, key, value])
        return DenseAttention([5])(layer, query, key, value, options)

    logits = model.forward(token_ids(5), torch.arange(5), torch.arange(5), attend)
    assert {heads.dtype for heads in seen} == {logits.dtype} == {torch.float32}
    assert {heads.stride(-1) for heads in seen} == {1}
    assert [tuple(heads.shape) for heads in seen[:3]] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]


def test_values_are_handed_over_without_a_copy():
    model = adopt_model(tiny_model())
    made: list[int] = []
    given: list[int] = []
    for layer in model.module.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _module, _inputs, output: made.append(output.data_ptr()))

    def attend(layer, query, key, value, options):
        given.append(value.data_ptr())
        return query

    model.forward(token_ids(5), torch.arange(5), torch.tensor([4]), attend)
    assert given == made


def test_no_mask_is_built(monkeypatch):
    model = adopt_model(tiny_model("gemma2"))
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    monkeypatch.setattr("transformers.masking_utils.eager_mask", None)
    monkeypatch.setattr("transformers.masking_utils.AttentionMaskInterface._global_mapping", {})
    assert model.forward(token_ids(5), torch.arange(5), torch.tensor([4]), DenseAttention([5])).shape == (1, 128)
