"""The native CPU kernels (see native/src/bindings.cpp). Addresses are those of contiguous tensors that the caller keeps alive."""

_Rows = tuple[int, int, int]
"""Address, token stride, head stride."""

class Tiers:
    def __init__(
        self,
        *,
        arena: int,
        arena_bytes: int,
        sketch_bits: int,
        sketch_keys: int,
        sketch_values: int,
        sketch_stride: int,
        warm: int,
        windows: int,
        window_layers: int,
        tolerances: int,
        skip_share: float,
        probes: int,
        report_rows: int,
        masses: int,
        frequencies: int,
        num_report_rows: int,
        report_blocks: int,
        errors: int,
        pages_read: int,
    ) -> None: ...

class Batch:
    def __init__(
        self,
        *,
        pages: int,
        num_pages: int,
        page_type: int,
        page_table: int,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        block_tables: int,
        sequences: int,
        max_blocks: int,
        query_starts: int,
        context_lens: int,
        page_size: int,
        head_dim: int,
        tiers: Tiers | None = None,
    ) -> None: ...

class Attention:
    isa: str
    seconds: float
    decode_seconds: float
    decode_bytes_read: int

    def __init__(self, isa: str = "") -> None: ...
    def attend(
        self,
        batch: Batch,
        layer: int,
        query_heads: int,
        query: _Rows,
        key: _Rows,
        value: _Rows,
        output: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: int,
        num_threads: int,
        again: bool = False,
    ) -> list[list[int]]: ...

def linear(x: int, weight: int, bias: int, y: int, rows: int, inputs: int, outputs: int, num_threads: int) -> None: ...
def sketch_pages(
    pages: int,
    key_parts: int,
    value_parts: int,
    count: int,
    page_type: int,
    page_size: int,
    head_dim: int,
    bits: int,
    num_threads: int,
    isa: str = "",
) -> int: ...
def copy_bytes(sources: int, targets: int, count: int, bytes: int, num_threads: int) -> None: ...
def plain_sum(address: int, bytes: int, num_threads: int) -> int: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def threads_runtime() -> str: ...
def advise_hugepages(address: int, bytes: int) -> bool: ...
