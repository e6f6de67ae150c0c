"""Loading folders: what is accepted, what is refused and by which name, and what identifies the weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import save_tiny, tiny_model, tiny_tokenizer
from vera.errors import BrokenModel, ConfigError, ModelNotFound
from vera.models import adopt_model, load_model, local_models, supported_families
from vera.models.dense import DenseAttention

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def logits(model):
    ids = torch.arange(9)
    return model.forward(ids, ids, ids, DenseAttention([9]))


def edit_weights(folder: Path, edit) -> None:
    """Rewrites the folder's tensors; `edit` changes the dict of them in place."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_a_saved_model_comes_back_with_the_same_logits(tmp_path, family):
    module = save_tiny(tmp_path, family)
    loaded = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(adopt_model(module)))
    assert loaded.spec.name == tmp_path.name


def test_shards_make_the_same_model_as_one_file(tmp_path):
    module = tiny_model()
    module.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_model(tmp_path).spec.weights_revision == adopt_model(module).spec.weights_revision


def test_every_parameter_is_written_by_the_load(tmp_path):
    saved = dict(save_tiny(tmp_path).named_parameters())
    torch.use_deterministic_algorithms(True)  # fills whatever torch.empty returns with NaN
    try:
        assert torch.empty(3).isnan().all()
        loaded = dict(load_model(tmp_path).module.named_parameters())
    finally:
        torch.use_deterministic_algorithms(False)
    assert loaded.keys() == saved.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, saved[name]), name


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (
            lambda t: t.update({"model.norm.scale": t.pop("model.norm.weight")}),
            r"model\.norm\.weight is missing; model\.norm\.scale is not",
        ),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), r"model\.extra\.weight is not part of it"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight has shape \(63,\), not \(64,\)"),
        (lambda t: t.pop(HEAD), r"lm_head\.weight is missing"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), r"model\.norm\.weight holds values that are not finite"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(tmp_path, edit, fault):
    save_tiny(tmp_path)
    edit_weights(tmp_path, edit)
    with pytest.raises(BrokenModel, match=fault):
        load_model(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_no_fault(tmp_path):
    save_tiny(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load_model(tmp_path).spec.num_layers == 4


def test_a_tied_model_without_a_head_uses_its_embedding(tmp_path):
    save_tiny(tmp_path, tie_word_embeddings=True)
    assert HEAD not in load_file(tmp_path / WEIGHTS)
    module = load_model(tmp_path).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_tied_model_may_bring_a_head_that_equals_its_embedding(tmp_path):
    save_tiny(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert load_model(tmp_path).module.lm_head.weight is not None


def test_a_tied_model_whose_head_differs_from_its_embedding_is_refused(tmp_path):
    save_tiny(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    with pytest.raises(BrokenModel, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(tmp_path)


def test_a_tied_model_without_embedding_and_head_names_the_missing_tensor(tmp_path):
    save_tiny(tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda t: t.pop(EMBEDDING))
    with pytest.raises(BrokenModel, match=r"embed_tokens\.weight is missing"):
        load_model(tmp_path)


def test_a_file_that_is_cut_short_is_named(tmp_path):
    save_tiny(tmp_path)
    file = tmp_path / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BrokenModel, match=rf"{WEIGHTS} is damaged or cut short"):
        load_model(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="200KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BrokenModel, match=rf"{shard.name} is missing, but the index"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path, content):
    tiny_model().save_pretrained(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BrokenModel, match=r"model\.safetensors\.index\.json cannot be read"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "config.json names no model_type"),
        ("{}", "config.json names no model_type"),
        ('{"model_type": "llama", "num_attention_heads": "many"}', "config.json is not a valid llama config"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, fault):
    save_tiny(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BrokenModel, match=fault):
        load_model(tmp_path)


def test_a_config_without_weights_says_what_is_needed(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(BrokenModel, match=r"has no weights: model\.safetensors"):
        load_model(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path):
    save_tiny(tmp_path, tokenizer=tiny_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BrokenModel, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_model(tmp_path)


def test_an_empty_folder_is_not_a_model(tmp_path):
    with pytest.raises(ModelNotFound, match="the folder is empty"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("modle", "did you mean '.*/model'"),
        ("", "the folder has no config.json; did you mean '.*/model'"),
        ("model/model.safetensors", "it is a file, but not a .gguf file; did you mean its folder, '.*/model'"),
        ("embeded", "did you mean 'embedded'"),
        ("nowhere", "no such file or folder"),
    ],
)
def test_a_near_miss_gets_a_suggestion(tmp_path, asked, hint):
    save_tiny(tmp_path / "model")
    with pytest.raises(ModelNotFound, match=hint + r".*Give a Hugging Face folder, a \.gguf file, or 'embedded'"):
        load_model(tmp_path / asked)


def test_an_unknown_dtype_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="dtype='int4' is not one of auto, float16, bfloat16, float32"):
        load_model(tmp_path, dtype="int4")


def test_half_precision_checkpoints_are_computed_in_float32_unless_told_otherwise(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    default, wide, half = (load_model(tmp_path, dtype=dtype) for dtype in ("auto", "float32", "bfloat16"))
    assert (default.spec.dtype, wide.spec.dtype, half.spec.dtype) == ("float32", "float32", "bfloat16")
    assert wide.spec.weight_bytes == 2 * half.spec.weight_bytes
    stored = load_file(tmp_path / WEIGHTS)["model.norm.weight"]
    assert torch.equal(default.module.model.norm.weight, stored.float())


def test_loading_touches_no_network(tmp_path, monkeypatch):
    save_tiny(tmp_path, tokenizer=tiny_tokenizer())

    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_model(tmp_path).tokenizer is not None


def test_loading_prints_nothing(tmp_path, capfd):
    save_tiny(tmp_path, tokenizer=tiny_tokenizer())
    edit_config(tmp_path, eos_token_id=5000)  # transformers has something to say about it
    capfd.readouterr()
    load_model(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_comes_along_with_its_template(tmp_path):
    save_tiny(tmp_path, tokenizer=tiny_tokenizer(add_bos=True))
    tokenizer = load_model(tmp_path).tokenizer
    assert tokenizer.decode(tokenizer("the end").input_ids) == "<s>the end"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    save_tiny(tmp_path)
    assert load_model(tmp_path).tokenizer is None


def test_every_stated_end_token_within_the_vocabulary_ends_an_answer(tmp_path):
    module = tiny_model(eos_token_id=[7, 5000])
    module.generation_config.eos_token_id = [9, 7]
    assert adopt_model(module, tiny_tokenizer()).spec.eos_token_ids == {2, 7, 9}


def revision(**overrides):
    return adopt_model(tiny_model(**overrides)).spec.weights_revision


def test_the_revision_follows_whatever_changes_keys_and_values():
    half = adopt_model(tiny_model().to(torch.bfloat16)).spec.weights_revision
    one_weight = tiny_model()
    one_weight.model.layers[3].self_attn.k_proj.weight.data[5, 5] += 1e-3
    theta = revision(rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    scaled = revision(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    everything = [revision(), revision(seed=1), half, adopt_model(one_weight).spec.weights_revision, theta, scaled]
    everything.append(revision(rms_norm_eps=1e-5))
    assert len(set(everything)) == len(everything)
    assert revision() == everything[0]


def test_the_revision_is_the_same_in_another_process(tmp_path):
    save_tiny(tmp_path)
    here = load_model(tmp_path).spec.weights_revision
    program = f"from vera.models import load_model; print(load_model({str(tmp_path)!r}).spec.weights_revision)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_replaced_weights_change_answers_and_revision():
    model, other = adopt_model(tiny_model("gpt-oss")), adopt_model(tiny_model("gpt-oss", seed=1))
    first = model.spec.weights_revision
    model.replace_weights(other.module.state_dict())
    assert torch.equal(logits(model), logits(other))
    assert model.spec.weights_revision == other.spec.weights_revision != first


def test_a_tied_head_may_be_left_out_when_weights_are_replaced():
    model, other = (adopt_model(tiny_model(seed=seed, tie_word_embeddings=True)) for seed in range(2))
    state = {name: tensor for name, tensor in other.module.state_dict().items() if name != HEAD}
    model.replace_weights(state)
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not part of it"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"has shape \(3,\), not \(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.full((64,), float("inf"))}), "not finite"),
    ],
)
def test_wrong_replacement_weights_change_nothing(edit, fault):
    model = adopt_model(tiny_model())
    before, spec = logits(model), model.spec
    state = {name: tensor * 2 for name, tensor in model.module.state_dict().items()}
    edit(state)
    with pytest.raises(BrokenModel, match=fault):
        model.replace_weights(state)
    assert torch.equal(logits(model), before)
    assert model.spec == spec


def test_local_models_lists_converted_and_downloaded_models(tmp_path, monkeypatch):
    monkeypatch.setenv("VERA_HOME", str(tmp_path / "vera"))
    monkeypatch.setattr("vera.models.catalogue.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / "abc"
    save_tiny(snapshot)
    save_tiny(tmp_path / "vera" / "models" / "tiny-f00")
    save_tiny(tmp_path / "vera" / "models" / ".tiny-f00.partial")
    listed = [entry for entry in local_models() if entry["kind"] != "embedded"]
    assert [(entry["name"], entry["kind"]) for entry in listed] == [("tiny-f00", "converted"), ("owner/tiny", "hub")]
    assert listed[1]["path"] == str(snapshot)
    assert listed[1]["size_bytes"] == (snapshot / WEIGHTS).stat().st_size
    assert load_model(listed[1]["path"]).spec.num_layers == 4


def test_families_are_named_once():
    assert len(set(supported_families())) == len(supported_families())
    assert "Llama" in supported_families()
