"""Weights held in half precision by a model that computes in float32: the same results, half the bytes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tiny_models import families, save_tiny, tiny_model
from vera.errors import BrokenModel
from vera.models import adopt_model, load_model
from vera.models.dense import DenseAttention
from vera.models.linear import MAX_ROWS, KernelLinear, speed_up_linear
from vera.models.narrow import NarrowEmbedding, holds_exactly, narrow, round_to_half, widen

pytest.importorskip("vera._native")

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def logits(model, rows=9):
    ids = torch.arange(rows)
    return model.forward(ids, ids, ids, DenseAttention([rows]))


def stored(folder, family="llama", *, dtype=torch.bfloat16, **overrides):
    """A folder with a tiny checkpoint in half precision."""
    tiny_model(family, **overrides).to(dtype).save_pretrained(folder)
    return folder


def held_in(model):
    """What each parameter is held in."""
    return {name: parameter.dtype for name, parameter in model.module.named_parameters()}


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("rows", [1, 9, MAX_ROWS, MAX_ROWS + 1])
def test_results_are_those_of_wide_weights_bit_for_bit(tmp_path, dtype, rows):
    stored(tmp_path, dtype=dtype)
    narrow_model, wide_model = load_model(tmp_path), load_model(tmp_path, dtype="float32")
    assert narrow_model.spec.weight_bytes < wide_model.spec.weight_bytes
    assert torch.equal(logits(narrow_model, rows), logits(wide_model, rows))


@pytest.mark.parametrize("family", families())
def test_every_family_computes_the_same_whatever_holds_its_weights(tmp_path, family):
    stored(tmp_path, family)
    assert torch.equal(logits(load_model(tmp_path)), logits(load_model(tmp_path, dtype="float32")))


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_all_matrices_are_held_in_the_format_of_the_checkpoint(tmp_path, dtype):
    model = load_model(stored(tmp_path, dtype=dtype))
    assert held_in(model) == {name: torch.float32 if "norm" in name else dtype for name in held_in(model)}


def test_half_the_bytes_are_kept(tmp_path):
    stored(tmp_path)
    narrow_model, wide_model = load_model(tmp_path), load_model(tmp_path, dtype="float32")
    norms = sum(4 * parameter.numel() for name, parameter in wide_model.module.named_parameters() if "norm" in name)
    assert narrow_model.spec.weight_bytes - norms == (wide_model.spec.weight_bytes - norms) // 2


def is_mapped(model, folder):
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if str(folder) in line[-1]]
    weights = [weight for weight in model.module.parameters() if weight.dtype is torch.bfloat16]
    assert weights
    return {any(low <= weight.data_ptr() < high for low, high in ranges) for weight in weights}


def test_narrow_weights_lie_in_files_that_are_ours_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("VERA_HOME", str(tmp_path))
    ours, theirs = tmp_path / "models" / "converted", tmp_path / "theirs"
    assert is_mapped(load_model(stored(ours)), ours) == {True}
    assert is_mapped(load_model(stored(theirs)), theirs) == {False}


def test_a_mapped_file_is_not_written_when_weights_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("VERA_HOME", str(tmp_path))
    folder = stored(tmp_path / "models" / "converted")
    model = load_model(folder)
    before, first = (folder / "model.safetensors").read_bytes(), logits(model)
    model.replace_weights({name: tensor * 2 for name, tensor in model.module.state_dict().items()})
    assert not torch.equal(logits(model), first)
    assert (folder / "model.safetensors").read_bytes() == before
    assert torch.equal(logits(load_model(folder)), first)


def test_the_model_is_the_same_to_whoever_asks(tmp_path):
    stored(tmp_path)
    narrow_spec, wide_spec = load_model(tmp_path).spec, load_model(tmp_path, dtype="float32").spec
    assert narrow_spec.dtype == wide_spec.dtype == "float32"
    assert narrow_spec.weights_revision == wide_spec.weights_revision
    assert load_model(tmp_path, dtype="bfloat16").spec.weights_revision != wide_spec.weights_revision


def test_a_float32_checkpoint_stays_as_it_is(tmp_path):
    save_tiny(tmp_path)
    assert set(held_in(load_model(tmp_path)).values()) == {torch.float32}


def test_float32_is_held_where_it_is_asked_for(tmp_path):
    assert set(held_in(load_model(stored(tmp_path), dtype="float32")).values()) == {torch.float32}


def test_a_tied_embedding_is_held_once(tmp_path):
    model = load_model(stored(tmp_path, tie_word_embeddings=True))
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert model.module.lm_head.weight.dtype is torch.bfloat16


def test_a_weight_that_others_use_too_is_not_narrowed(tmp_path):
    model = load_model(stored(tmp_path, "gemma3", tie_word_embeddings=True))
    assert model.module.lm_head.weight.dtype is torch.float32  # its embedding is a class of its own


def test_a_module_in_memory_keeps_its_parameters():
    module = tiny_model().to(torch.bfloat16).float()
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    model = adopt_model(module)
    assert set(held_in(model).values()) == {torch.float32}
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before


def test_a_narrow_module_that_is_adopted_still_computes_in_float32(tmp_path):
    loaded = load_model(stored(tmp_path))
    assert adopt_model(loaded.module).spec.dtype == "float32"


def test_a_window_runs_in_float32(tmp_path):
    stored(tmp_path)
    ids, hidden = torch.arange(5), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))

    def queries(model):
        seen = []

        def attend(layer, query, key, value, options):
            seen.append(query)
            return query

        model.run_layers(ids, ids, attend, first=2, stop=4, hidden=hidden)
        return torch.stack(seen)

    assert torch.equal(queries(load_model(tmp_path)), queries(load_model(tmp_path, dtype="float32")))


def test_replaced_weights_are_narrow_again_where_they_can_be(tmp_path):
    model = load_model(stored(tmp_path / "bfloat16"))
    other = load_model(stored(tmp_path / "float16", dtype=torch.float16, seed=1), dtype="float32")
    other.module.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1 + 2**-20
    other.replace_weights(state_of(other))  # so that its revision is that of the changed weight
    model.replace_weights(state_of(other))
    for name, dtype in held_in(model).items():
        assert dtype is (torch.float32 if "norm" in name or "layers.1" in name else torch.float16), name
    assert torch.equal(logits(model), logits(other))
    assert model.spec.weights_revision == other.spec.weights_revision
    assert model.spec.weight_bytes < other.spec.weight_bytes


def test_refused_weights_leave_narrow_ones_as_they_were(tmp_path):
    model = load_model(stored(tmp_path))
    before, spec, held = logits(model), model.spec, held_in(model)
    with pytest.raises(BrokenModel, match="extra is not part of it"):
        model.replace_weights(state_of(model) | {"extra": torch.ones(1)})
    assert torch.equal(logits(model), before)
    assert (model.spec, held_in(model)) == (spec, held)


def test_a_model_whose_code_looks_at_what_a_weight_is_held_in_stays_wide(tmp_path, monkeypatch):
    stored(tmp_path)
    wide = logits(load_model(tmp_path, dtype="float32"))
    project = KernelLinear.forward
    monkeypatch.setattr(KernelLinear, "forward", lambda layer, x: project(layer, x.to(layer.weight.dtype).float()))
    model = load_model(tmp_path)
    assert set(held_in(model).values()) == {torch.float32}
    assert torch.equal(logits(model), wide)


@pytest.mark.parametrize(
    ("value", "holds_half", "holds_bfloat"),
    [
        (1 + 2**-10, True, False),
        (1 + 2**-11, False, False),
        (65504.0, True, False),
        (65536.0, False, True),
        (2**-24, True, True),
        (2**-25, False, True),
        (2**-14 + 2**-24, True, False),
        (0.0, True, True),
        (-0.0, True, True),
    ],
)
def test_a_format_holds_what_it_does_not_change(value, holds_half, holds_bfloat):
    weight = torch.zeros(3, 2**20)  # more than is compared at a time
    weight[2, -1] = value
    assert holds_exactly(weight, torch.float16) is holds_half
    assert holds_exactly(weight, torch.bfloat16) is holds_bfloat


def layers(*weights):
    module = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in weights])
    for layer, weight in zip(module, weights, strict=True):
        layer.weight = nn.Parameter(torch.as_tensor(weight).reshape(-1, 1))
    speed_up_linear(module)
    return module


def test_a_weight_that_both_formats_hold_goes_with_the_others():
    module = layers([1.0], [65536.0], [65536.0], [1 + 2**-10])
    assert narrow(module) == 4
    assert [layer.weight.dtype for layer in module] == [torch.bfloat16] * 3 + [torch.float16]


def test_a_weight_that_another_class_of_layer_uses_too_is_not_narrowed():
    class Own(nn.Linear):
        pass

    module = layers([1.0], [2.0])
    other = Own(1, 1, bias=False)
    other.weight = module[0].weight
    assert narrow(nn.ModuleList([*module, other])) == 1
    assert [layer.weight.dtype for layer in module] == [torch.float32, torch.float16]


def test_widened_weights_are_those_that_were_narrowed():
    values = torch.randn(40, 1).half().float()
    module = layers(values, [1 + 2**-20])
    assert narrow(module) == widen(module) == 1
    assert torch.equal(module[0].weight, values)
    assert widen(module) == 0


def test_an_embedding_that_renormalises_its_rows_is_not_narrowed():
    module = nn.ModuleList([nn.Embedding(4, 2, max_norm=1.0), nn.Embedding(4, 2)])
    nn.init.ones_(module[0].weight)
    nn.init.ones_(module[1].weight)
    assert narrow(module) == 1
    assert [type(layer) for layer in module] == [nn.Embedding, NarrowEmbedding]
    assert module[1](torch.tensor([1])).dtype is torch.float32


def test_rounding_to_half_precision_keeps_what_it_can():
    fits, rounded, too_large, small = [0.5], [1 + 2**-12, 2.0], [65536.0, 1 + 2**-12], [2**-30]
    module = layers(fits, rounded, too_large, small)
    round_to_half(module)
    assert [layer.weight.dtype for layer in module] == [torch.float16, torch.float16, torch.float32, torch.bfloat16]
    assert module[1].weight.flatten().tolist() == [1.0, 2.0]
    assert module[2].weight.flatten().tolist() == too_large
    assert module[3].weight.item() == 2**-30
