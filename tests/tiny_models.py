"""Small random models and a small tokenizer, made in memory: enough for nearly every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    # Larger than usual, so that attention logits are not all alike and a mistake shows in the logits.
    "initializer_range": 0.15,
}

_FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-window": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "phi3": (transformers.Phi3Config, {}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": 7, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"sliding_window": 7, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt-neox": (transformers.GPTNeoXConfig, {}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (transformers.GPT2Config, {}),
    "opt": (transformers.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def families() -> list[str]:
    """Names that `tiny_model` takes."""
    return list(_FAMILIES)


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """A config of 4 layers, 4 query heads, 2 KV heads of size 16 and 128 tokens of vocabulary; `overrides` are config fields."""
    config_class, own = _FAMILIES[family]
    return config_class(**{**_SHAPE, **own, **overrides})


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in evaluation mode, float32; the same for the same arguments. The global random state is left as it was."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _randomise(module)
    return module


def _randomise(module: PreTrainedModel) -> None:
    """Biases, norms and sinks start as constants, which would hide a tensor that is not loaded or not used."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 or "bias" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIALS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("i", "n"),
    ("in", "g"),
    ("o", "u"),
    ("l", "l"),
)


def tiny_tokenizer(*, chat_template: str | None = CHATML, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: 5 special tokens (`<s>` is 1, `</s>`, the end, is 2), the 256 bytes, and a few merges.

    Its vocabulary is larger than a tiny model's 128; give such a model `vocab_size=len(tiny_tokenizer())`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIALS, *alphabet, *(left + right for left, right in _MERGES)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIALS])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(
    path: Path, family: str = "llama", *, tokenizer: PreTrainedTokenizerFast | None = None, **overrides: Any
) -> PreTrainedModel:
    """Writes `tiny_model(family, **overrides)` as a Hugging Face folder, with the tokenizer if given, and returns the model."""
    module = tiny_model(family, **overrides)
    module.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return module
