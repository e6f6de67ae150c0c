"""What the gate turns away, and that it says why."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn

from tiny_models import save_tiny, tiny_config, tiny_model
from vera.errors import BrokenModel, ModelError, UnsupportedModel
from vera.models import adopt_model, load_model
from vera.models.dense import DenseAttention

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mamba():
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    return transformers.MambaForCausalLM(config)


def t5():
    config = transformers.T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def bert():
    config = transformers.BertConfig(**{**SMALL, "num_key_value_heads": 4, "is_decoder": False})
    return transformers.BertLMHeadModel(config)


def deepseek():
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16
    )
    return transformers.DeepseekV3ForCausalLM(config)


def chunked():
    config = transformers.Llama4TextConfig(**SMALL, head_dim=16, num_local_experts=2, attention_chunk_size=8)
    return transformers.Llama4ForCausalLM(config)


def bloom():
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=2))


def multimodal():
    text = tiny_config("gemma3").to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config)


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}


def rope(kind, **settings):
    def build():
        return tiny_model(
            "phi3" if kind == "longrope" else "llama",
            max_position_embeddings=64,
            original_max_position_embeddings=32,
            rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **settings},
        )

    return build


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (mamba, r"MambaForCausalLM|mamba"),
        (t5, "encoder-decoder"),
        (bert, r"BertLMHeadModel\) is not supported: .*bidirectional"),
        (deepseek, r"deepseek_v3.*kv_lora_rank"),
        (chunked, r"llama4_text.*chunked_attention"),
        (bloom, "BloomForCausalLM.*no pluggable attention|bloom"),
        (multimodal, "gemma3.*multimodal"),
        (rope("dynamic", factor=2.0), "'dynamic' makes keys depend on the length"),
        (rope("longrope", **LONG), "'longrope' makes keys depend on the length"),
        (lambda: tiny_model(head_dim=12), "head_dim 12 is not a multiple of 8"),
        (lambda: tiny_model(head_dim=264), "head_dim 264 is not a multiple of 8 up to 256"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(build, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        adopt_model(build().eval())


def test_a_refused_model_keeps_its_own_attention():
    module = tiny_model(head_dim=12)
    before = module.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        adopt_model(module)
    assert module.config._attn_implementation == before


def test_the_probe_alone_finds_keys_that_depend_on_the_length(monkeypatch):
    monkeypatch.setattr("vera.models.gate._LENGTH_DEPENDENT_ROPES", frozenset())
    with pytest.raises(UnsupportedModel, match="its keys depend on how long the sequences are"):
        adopt_model(rope("longrope", **LONG)())


def test_a_window_that_the_mask_has_and_the_layer_does_not_state_is_refused():
    module = tiny_model("qwen2-window", sliding_window=300)
    module.model.layers[3].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 3 states full attention, but its mask hides"):
        adopt_model(module)


@pytest.mark.parametrize("stated", [299, 301])
def test_a_window_that_is_off_by_one_is_refused_without_running_its_length(stated):
    module = tiny_model("qwen2-window", sliding_window=300)
    module.model.layers[2].self_attn.sliding_window = stated
    with pytest.raises(UnsupportedModel, match=f"layer 2 states window {stated}, but its mask"):
        adopt_model(module)


def patched_attention(module, layer, **extra):
    """One layer hands `extra` to the attention function."""
    attention = module.model.layers[layer].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, **extra})
    return module


@pytest.mark.parametrize("argument", ["position_bias", "block_mask", "q_descale"])
def test_an_argument_that_is_not_honoured_is_refused_by_name(argument):
    with pytest.raises(UnsupportedModel, match=f"its attention takes {argument}, which Vera does not honour"):
        adopt_model(patched_attention(tiny_model(), 3, **{argument: torch.zeros(1)}))


def test_attention_that_ignores_the_hook_is_refused():
    module = tiny_model()
    module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match="4 layers called the attention function 3 times"):
        adopt_model(module)


def test_eager_attention_that_differs_from_the_stated_options_is_refused(monkeypatch):
    llama = transformers.models.llama.modeling_llama
    own = llama.eager_attention_forward
    monkeypatch.setattr(
        llama, "eager_attention_forward", lambda module, query, *args, **kwargs: own(module, query * 1.05, *args, **kwargs)
    )
    with pytest.raises(UnsupportedModel, match="its logits differ from its own eager attention"):
        adopt_model(tiny_model())


def test_dropout_at_serving_time_is_off():
    module = tiny_model(attention_dropout=0.5).train()
    assert not adopt_model(module).module.training


def test_heads_that_differ_between_layers_are_refused():
    module = tiny_model()
    attention = module.model.layers[2].self_attn
    attention.k_proj, attention.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(2))
    attention.num_key_value_groups = 1
    with pytest.raises(UnsupportedModel, match="differs between layers"):
        adopt_model(module)


def test_logits_that_are_not_finite_are_a_broken_model():
    module = tiny_model()
    module.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BrokenModel, match="not finite"):
        adopt_model(module)


def test_an_adopted_module_says_why_it_cannot_be_called_directly():
    model = adopt_model(tiny_model())
    with pytest.raises(ModelError, match=r"set_attn_implementation\('sdpa'\)"):
        model.module(input_ids=torch.tensor([[1, 2]]))


def test_a_module_whose_attention_was_set_back_still_runs_through_the_hook():
    model = adopt_model(tiny_model())
    ids, rows = torch.arange(5), torch.arange(5)
    expected = model.forward(ids, rows, rows, DenseAttention([5]))
    model.module.set_attn_implementation("sdpa")
    assert torch.equal(model.forward(ids, rows, rows, DenseAttention([5])), expected)


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "seashell", "architectures": ["SeashellForCausalLM"], "auto_map": {"AutoModel": "code.Seashell"}},
            "SeashellForCausalLM.*brings its own code, which Vera does not run",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*causal language models"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantised"),
    ],
)
def test_a_folder_is_refused_by_its_config_before_weights_are_read(tmp_path, changes, reason):
    save_tiny(tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path)
