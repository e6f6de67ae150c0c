"""What the backends refuse, and how a backend is chosen."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_batches import Case, make_case
from vera.attention import make_backend
from vera.attention.protocol import NO_PAGE, AttentionBackend, LayerAttention
from vera.attention.reference import ReferenceAttention
from vera.errors import ConfigError


def backends() -> list[AttentionBackend]:
    try:
        return [ReferenceAttention(), make_backend("cpu")]
    except ConfigError:
        return [ReferenceAttention()]


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return request.param  # type: ignore[no-any-return]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_batch(case: Case, **changes: Any) -> Case:
    return replace(case, batch=replace(case.batch, **changes))


def with_table_entry(case: Case, value: int, block: int = 0) -> Case:
    """The page of KV head 1 in one of the first sequence's blocks."""
    table = case.batch.page_table.clone()
    table[case.batch.block_tables[0, block], 1, 1] = value
    return with_batch(case, page_table=table)


def with_block_id(case: Case, value: int) -> Case:
    tables = case.batch.block_tables.clone()
    tables[0, 1] = value
    return with_batch(case, block_tables=tables)


@pytest.fixture
def case() -> Case:
    return make_case([(20, 1), (30, 4)])


@pytest.mark.parametrize("slot", [NO_PAGE - 1, 10_000, 2**31 - 1])
def test_a_page_outside_the_pool_is_refused(backend: AttentionBackend, case: Case, slot: int) -> None:
    with pytest.raises(IndexError, match=f"{slot}.* outside the {case.batch.pages.shape[0]} pages"):
        with_table_entry(case, slot).run(backend)


@pytest.mark.parametrize("block", [0, 1], ids=["read", "written"])
def test_a_needed_block_without_a_page_is_refused(backend: AttentionBackend, case: Case, block: int) -> None:
    with pytest.raises(IndexError, match="NO_PAGE"):
        with_table_entry(case, NO_PAGE, block).run(backend)


@pytest.mark.parametrize("block", [-1, 6, 2**31 - 1, -(2**31)])
def test_a_block_outside_the_page_table_is_refused(backend: AttentionBackend, case: Case, block: int) -> None:
    with pytest.raises(IndexError, match=f"{block}.* outside the 6 blocks"):
        with_block_id(case, block).run(backend)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_page_table_is_refused(backend: AttentionBackend, case: Case, layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer={layer} is outside the 2 layers"):
        backend.attend(case.batch, layer, case.query, case.key, case.value, case.options)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pages": torch.zeros(20, 2, 256, dtype=torch.float64)}, "float64"),
        ({"pages": torch.zeros(20, 2, 255)}, "255"),
        ({"pages": torch.zeros(20, 256, 2).transpose(1, 2)}, "contiguous"),
        ({"page_table": torch.zeros(6, 2, 2, dtype=torch.int64)}, "page_table is torch.int64"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "block_tables"),
        ({"block_tables": torch.zeros(4, 2, dtype=torch.int32).T}, "block_tables"),
        ({"query_starts": int32(0, 5)}, "query_starts"),
        ({"query_starts": int32(0, 6, 5)}, "falls"),
        ({"context_lens": int32(20, 3)}, "context_lens=3"),
        ({"context_lens": int32(20, 49)}, "context_lens=49"),
        ({"context_lens": torch.tensor([20, 30])}, "context_lens is torch.int64"),
    ],
)
def test_tables_that_do_not_fit_are_refused(backend: AttentionBackend, case: Case, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_batch(case, **changes).run(backend)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": torch.zeros(4, 6, 16)}, "query"),
        ({"query": torch.zeros(5, 5, 16)}, "5 query heads"),
        ({"query": torch.zeros(5, 6, 16, dtype=torch.float16)}, "query is torch.float16"),
        ({"query": torch.zeros(5, 6, 32)[:, :, ::2]}, "query"),
        ({"key": torch.zeros(5, 3, 16)}, "key"),
        ({"value": torch.zeros(5, 2, 8)}, "value"),
        ({"options": LayerAttention(scale=1.0, window=0)}, "window=0"),
        ({"options": LayerAttention(scale=1.0, softcap=0.0)}, "softcap=0.0"),
        ({"options": LayerAttention(scale=1.0, sinks=torch.zeros(5))}, "sinks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    backend: AttentionBackend, case: Case, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(case, **changes).run(backend)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("change", [torch.Tensor.double, lambda rows: rows[:-1], lambda rows: rows.transpose(0, 2)])
def test_tensors_of_a_later_layer_are_checked_too(backend: AttentionBackend, case: Case, name: str, change: Any) -> None:
    rows = {"query": case.query, "key": case.key, "value": case.value}
    backend.attend(case.batch, 0, **rows, options=case.options)
    with pytest.raises(ValueError, match=f"{name} is torch.float"):
        backend.attend(case.batch, 1, **(rows | {name: change(rows[name])}), options=case.options)


def test_output_of_a_layer_outlives_the_next_call(backend: AttentionBackend, case: Case) -> None:
    first = backend.attend(case.batch, 1, case.query, case.key, case.value, case.options)
    copy = first.clone()
    second = backend.attend(case.batch, 1, case.query, case.key, case.value * 2, case.options)
    assert not torch.equal(second, copy)
    assert torch.equal(first, copy)


def test_a_refused_batch_leaves_the_pages_untouched(backend: AttentionBackend, case: Case) -> None:
    broken = with_table_entry(case, NO_PAGE)
    before = broken.batch.pages.clone()
    with pytest.raises(IndexError):
        backend.attend(broken.batch, 1, broken.query, broken.key, broken.value, broken.options)
    torch.testing.assert_close(broken.batch.pages, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_the_kernel_names_the_head_dims_it_can_do(head_dim: int) -> None:
    pytest.importorskip("vera._native")
    with pytest.raises(ValueError, match=f"head_dim={head_dim}.*multiple of 8 up to 256.*reference"):
        make_case([(5, 1)], head_dim=head_dim).run(make_backend("cpu"))


def test_the_kernel_names_the_groups_it_can_do() -> None:
    pytest.importorskip("vera._native")
    with pytest.raises(ValueError, match=r"65 query heads for 1 KV heads.*at most 64"):
        make_case([(5, 1)], kv_heads=1, group=65).run(make_backend("cpu"))


def test_an_instruction_set_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vera._native")
    monkeypatch.setenv("VERA_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"VERA_CPU_ISA=mmx.*it can run .*portable"):
        make_backend("auto")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend='gpu' is not one of auto, cpu, reference"):
        make_backend("gpu")


def test_without_the_kernel_auto_warns_and_serves_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_kernel(monkeypatch)
    with pytest.warns(UserWarning, match="plain torch.*install a C") as warned:
        assert make_backend("auto").name == "reference"
    assert len(warned) == 1


def test_without_the_kernel_cpu_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_the_kernel(monkeypatch)
    with pytest.raises(ConfigError, match=r"attention_backend='cpu' cannot be: the native kernel is not there.*install a C"):
        make_backend("cpu")


def forget_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vera._native", None)
    monkeypatch.delitem(sys.modules, "vera.attention.cpu", raising=False)
    monkeypatch.delattr("vera._native", raising=False)


def test_group_that_is_too_large_for_the_kernel_is_served_by_the_reference_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="65 query heads share a KV head"):
        assert make_backend("auto", group=65).name == "reference"
    with pytest.raises(ConfigError, match="65 query heads"):
        make_backend("cpu", group=65)
