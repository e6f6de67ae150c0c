"""The plain-torch backend against torch's own dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_batches import LAYER, Case, make_case
from vera.attention.protocol import LayerAttention
from vera.attention.reference import ReferenceAttention

BACKEND = ReferenceAttention()


def whole_sequences(options: LayerAttention | None = None) -> Case:
    """Sequences whose tokens are all new, so that their keys and values are at hand."""
    return make_case([(37, 37), (16, 16), (1, 1)], options=options)


def dense(case: Case, sequence: int, mask: Tensor | None = None) -> Tensor:
    start, end = case.batch.query_starts[sequence : sequence + 2].tolist()
    query, key, value = (rows[start:end].transpose(0, 1) for rows in (case.query, case.key, case.value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=case.options.scale, enable_gqa=True
    )
    return output.transpose(0, 1)


def test_whole_prompts_equal_dense_causal_attention() -> None:
    case = whole_sequences()
    output, _ = case.run(BACKEND)
    expected = torch.cat([dense(case, sequence) for sequence in range(3)])
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


def test_a_window_equals_a_band_mask() -> None:
    case = whole_sequences(LayerAttention(scale=0.25, window=5))
    distance = torch.arange(37)[:, None] - torch.arange(37)
    expected = dense(case, 0, mask=(distance >= 0) & (distance < 5))
    torch.testing.assert_close(case.run(BACKEND)[0][:37], expected, atol=1e-5, rtol=0)


def test_a_sink_takes_its_share_of_the_weight() -> None:
    case = make_case([(1, 1)], options=LayerAttention(scale=0.25, sinks=torch.tensor([0.0, 1.0, -3.0, 2.0, 0.5, 9.0])))
    logits = (case.query.view(2, 3, 16) * case.key.view(2, 1, 16)).sum(-1).flatten() * 0.25
    share = logits.exp() / (logits.exp() + case.options.sinks.exp())  # type: ignore[union-attr]
    expected = share[None, :, None] * case.value.repeat_interleave(3, dim=1)
    torch.testing.assert_close(case.run(BACKEND)[0], expected, atol=1e-6, rtol=0)


def test_a_softcap_bounds_the_logits() -> None:
    case = make_case([(2, 1)], kv_heads=1, group=1, options=LayerAttention(scale=100.0, softcap=0.5))
    output, pages = case.run(BACKEND)
    slot = int(case.batch.page_table[case.batch.block_tables[0, 0], LAYER, 0])
    keys, values = pages[slot, 0].view(16, 16)[:, :2], pages[slot, 1].view(16, 16)[:2]
    weights = torch.softmax(0.5 * torch.tanh(case.query.view(1, 16) @ keys * 100 / 0.5), dim=-1)
    torch.testing.assert_close(output.view(1, 16), weights @ values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_chunks_equal_the_whole_prompt(chunk: int) -> None:
    case = make_case([(37, 37)])
    whole, _ = case.run(BACKEND)
    for start in range(0, 37, chunk):
        end = min(37, start + chunk)
        batch = replace(
            case.batch,
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
        )
        output = BACKEND.attend(batch, LAYER, case.query[start:end], case.key[start:end], case.value[start:end], case.options)
        torch.testing.assert_close(output, whole[start:end], atol=1e-5, rtol=0)


def test_only_the_slots_of_new_tokens_are_written() -> None:
    case = make_case([(37, 5), (20, 1)])
    _, pages = case.run(BACKEND)
    before, after = case.batch.pages, pages
    changed = ~((before == after) | (before.isnan() & after.isnan()))
    assert int(changed.sum()) == 6 * 2 * 2 * 16  # tokens, kv heads, keys and values, head_dim
