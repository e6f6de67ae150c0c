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

def linear(
    x: int, weight: int, bias: int, y: int, rows: int, inputs: int, outputs: int, num_threads: int, weight_format: int = 0
) -> None:
    """`y [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T + bias`, for few rows.

    All float32, but for the weights: `weight_format` 0 float32, 1 float16, 2 bfloat16. These are widened as they are read, which
    is exact: the result is, bit for bit, that of the same weights in float32. A row's result does not depend on `rows` and
    `num_threads`. A `bias` of 0: none. ValueError for sizes that are not positive and an unknown format.
    """

def before_attention(
    hidden: int,
    norm_weight: int,
    eps: float,
    q_weight: int,
    k_weight: int,
    v_weight: int,
    q_bias: int,
    k_bias: int,
    v_bias: int,
    q_norm: int,
    k_norm: int,
    qk_norm_eps: float,
    cos: int,
    sin: int,
    query: int,
    key: int,
    value: int,
    weight_format: int,
    rows: int,
    hidden_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    num_threads: int,
) -> None:
    """A Llama-like decoder layer up to its attention, for few rows: RMSNorm, q, k and v, rotary positions.

    Reads `hidden [rows, hidden_size]`, `cos` and `sin` `[rows, head_dim]` (for `x * cos + rotate_half(x) * sin`) and weights
    `[heads * head_dim, hidden_size]`; writes `query [rows, query_heads, head_dim]`, and `key` and `value`
    `[rows, kv_heads, head_dim]`.
    `q_norm` and `k_norm` `[head_dim]` are the weights of an RMSNorm of each head before the rotation. Biases and these norms may
    be 0: none. Formats, exactness and the independence of rows are those of `linear`. ValueError for sizes that are not
    positive, an odd `head_dim` and an unknown format.
    """

def after_attention(
    attended: int,
    o_weight: int,
    o_bias: int,
    hidden: int,
    norm_weight: int,
    eps: float,
    gate_weight: int,
    up_weight: int,
    down_weight: int,
    gate_bias: int,
    up_bias: int,
    down_bias: int,
    output: int,
    weight_format: int,
    rows: int,
    hidden_size: int,
    query_size: int,
    intermediate_size: int,
    num_threads: int,
) -> None:
    """The same layer from its attention on: o, residual, RMSNorm, `silu(gate) * up`, down, residual.

    Reads `attended [rows, query_size]` and what the layer was given, `hidden [rows, hidden_size]`; writes
    `output [rows, hidden_size]`, which may be `hidden`. What passes between the products lies in memory that threads keep from
    call to call: `2 * rows * intermediate_size` floats of the caller, `rows * hidden_size` of each thread. Biases may be 0: none.
    All else as for `before_attention`.
    """

def between_attention(
    attended: int,
    o_weight: int,
    o_bias: int,
    hidden: int,
    norm_weight: int,
    eps: float,
    gate_weight: int,
    up_weight: int,
    down_weight: int,
    gate_bias: int,
    up_bias: int,
    down_bias: int,
    output: int,
    weight_format: int,
    next_norm_weight: int,
    next_eps: float,
    q_weight: int,
    k_weight: int,
    v_weight: int,
    q_bias: int,
    k_bias: int,
    v_bias: int,
    q_norm: int,
    k_norm: int,
    qk_norm_eps: float,
    cos: int,
    sin: int,
    query: int,
    key: int,
    value: int,
    next_weight_format: int,
    rows: int,
    hidden_size: int,
    intermediate_size: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    num_threads: int,
) -> None:
    """`after_attention` of one layer, then `before_attention` of the next on its `output`; both have the same sizes.

    The same results as by the two calls. `query` may be what `attended` was.
    """

def rms_norm(x: int, weight: int, eps: float, y: int, rows: int, size: int, num_threads: int) -> None:
    """`y [rows, size] = weight * x / sqrt(mean(x ** 2) + eps)`; `y` may be `x`. ValueError for sizes that are not positive."""

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
