"""The embedded model against transformers: the same tokens with fp32 pages, nearly the same distributions with fp16 pages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engines import greedy, tokens_of
from vera.attention import make_backend
from vera.bench.workload import document_tokens
from vera.cache import AdaptiveCache, CacheShape, Span
from vera.config import CacheConfig, EngineConfig
from vera.engine.engine import Engine
from vera.models import load_model

pytestmark = [pytest.mark.embedded, pytest.mark.slow]

NEW_TOKENS = 64
LENGTHS = [
    1, 2, 3, 5, 8, 13, 21, 34, 47, 55, 62, 63, 64, 65, 66, 89, 100, 120, 127, 128, 129, 144, 160, 191, 192, 193,
    233, 255, 256, 257, 300, 377, 450, 511, 513, 610, 800, 1100, 2000, 3000,
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load_model("embedded")


@pytest.fixture(scope="module")
def prompts(model):
    """40 prompts from different places of the document."""
    assert len(LENGTHS) == 40
    return [document_tokens(model.tokenizer, length, seed=seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def transformers_model():
    """The same weights in a module of its own, with nothing of Vera's in it."""
    folder = load_model("embedded").module.name_or_path
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    assert {type(layer) for layer in module.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    return module.eval()


@pytest.fixture(scope="module")
def references(transformers_model, prompts):
    """What `transformers.generate` gives for each prompt alone, greedy."""

    def generate(prompt):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        output = transformers_model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return output[0, len(prompt) :].tolist()

    return [generate(prompt) for prompt in prompts]


def engine_of(model, *, blocks=400, **config):
    block_bytes = 2 * 64 * 64 * 4 * 30 * 3
    cache = CacheConfig(page_dtype="float32", cache_max_bytes=blocks * block_bytes, poison=True)
    return Engine(model, EngineConfig(cache=cache, max_model_len=4096, **config))


def run(engine, prompts, *, preempt_every=0):
    """The answers to all prompts at once. With `preempt_every`, that often in steps a random running request is preempted."""
    ids = [engine.add_request(prompt, greedy(NEW_TOKENS)) for prompt in prompts]
    dice, updates, step = random.Random(0), {request_id: [] for request_id in ids}, 0
    while engine.has_unfinished():
        step += 1
        for update in engine.step():
            updates[update.request_id].append(update)
        if preempt_every and step % preempt_every == 0 and engine._scheduler.running:
            engine._scheduler.preempt(dice.choice(engine._scheduler.running))
        engine.check_invariants()
    return [tokens_of(updates[request_id]) for request_id in ids]


def shuffled(prompts, references, seed):
    order = random.Random(seed).sample(range(len(prompts)), len(prompts))
    return [prompts[i] for i in order], [references[i] for i in order]


def test_each_prompt_alone(model, prompts, references):
    engine = engine_of(model)
    for prompt, reference in zip(prompts, references, strict=True):
        assert run(engine, [prompt]) == [reference]


@pytest.mark.parametrize(("chunk", "seed"), [(512, 1), (64, 2), (16, 3)])
def test_random_batches_and_chunk_sizes(model, prompts, references, chunk, seed):
    prompts, references = shuffled(prompts, references, seed)
    assert run(engine_of(model, max_batch_tokens=chunk, max_num_seqs=16), prompts) == references


@pytest.mark.parametrize(("chunk", "longest"), [(1, 320), (7, 1100)])
def test_chunks_that_do_not_divide_a_block(model, prompts, references, chunk, longest):
    few = [(p, r) for p, r in zip(prompts, references, strict=True) if len(p) <= longest][-8:]
    engine = engine_of(model, max_batch_tokens=chunk, max_num_seqs=1)
    assert run(engine, [p for p, _ in few]) == [r for _, r in few]


def test_second_time_with_prefix_hits(model, prompts, references):
    engine = engine_of(model, max_num_seqs=16)
    assert run(engine, prompts) == references
    before = engine.stats.cached_tokens
    again, expected = shuffled(prompts, references, 4)
    assert run(engine, again) == expected
    assert engine.stats.cached_tokens - before == sum((length - 1) // 64 * 64 for length in LENGTHS)


def test_preemptions_by_a_small_pool_and_at_random(model, prompts, references):
    engine = engine_of(model, blocks=64, max_num_seqs=16)
    assert run(engine, prompts, preempt_every=7) == references
    assert engine.stats.preemptions > 40


def test_fp16_pages_change_next_to_nothing(model, transformers_model):
    """Teacher-forced on the last 2,000 tokens of an 8k context: decode steps through fp16 pages against fp32 transformers."""
    tokens = document_tokens(model.tokenizer, 8000, seed=7)
    with torch.inference_mode():
        reference = transformers_model(input_ids=torch.tensor([tokens]), logits_to_keep=2000, use_cache=False).logits[0]
    shape = CacheShape(model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim)
    cache = AdaptiveCache(shape, CacheConfig(cache_max_bytes=200_000_000), identity=model.spec.weights_revision)
    backend = make_backend("auto")
    cache.admit("text", tokens)

    def forward(start, stop, rows):
        batch = cache.batch([Span("text", start, stop)])
        chunk = torch.tensor(tokens[start:stop]), torch.arange(start, stop), torch.tensor(rows, dtype=torch.int64)
        return model.forward(*chunk, lambda layer, *rest: backend.attend(batch, layer, *rest))

    for start in range(0, 6000, 500):
        forward(start, start + 500, [])
    divergences, agreements = [], 0
    for position in range(6000, 8000):
        ours = forward(position, position + 1, [0])[0].log_softmax(-1)
        theirs = reference[position - 6000].log_softmax(-1)
        divergences.append(float((theirs.exp() * (theirs - ours)).sum()))
        agreements += int(ours.argmax() == theirs.argmax())
    mean = sum(divergences) / 2000
    print(f"8k context, fp16 pages: mean KL {mean:.2e}, max {max(divergences):.2e}, agreement {agreements / 2000:.4f}")
    assert agreements / 2000 >= 0.998
    assert mean <= 1e-5
