"""What a model's attention asks of the cache: the nouns that every attention backend shares.

One step runs a *flattened* batch: the new tokens of all sequences, one after another, `[tokens]`. In each layer the new
keys and values are first written to their pages, then every new token attends to all the pages of its own sequence up to
and including itself. A backend does both from one `PagedBatch`, which stays the same for all layers of a step.

Pages of an adaptive cache need not be exact in fast memory: `Tiers` says where else they are, and `TierReport` takes what
attending to them has shown. How a decode row attends to such pages is written at `Tiers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

NO_PAGE = -1
"""In a page table: this block has no exact page for this layer and head."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends, as the model's own code asked for it."""

    scale: float
    """Factor on the logits (often `1 / sqrt(head_dim)`, but Gemma differs)."""
    window: int | None = None
    """Sliding window: a token sees itself and the `window - 1` tokens before it. None: all."""
    softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` (Gemma 2)."""
    sinks: Tensor | None = None
    """`[query_heads]` float32: one extra logit a head that takes part in the softmax and has no value (GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where the pages are that have no slot in `PagedBatch.pages`, and how exactly each sequence wants them.

    A page is *exact* where it has a slot, or else a warm address; it is *cold* if it has neither, and then only its sketch can
    be read (`sketch.SketchFormat` says how a sketch is laid out). A sequence is served

    - exactly, if its tolerance is negative, if none of its blocks has a sketch, or in a layer with a window: the same arithmetic
      on the same bytes as with slots alone. A cold page raises IndexError.
    - within bounds otherwise, when it has one new token. With `q` the query times `scale`, and per query head:

      1. Logits of a page from its exact keys if it has a slot or no sketch, else from its sketch. One softmax over all tokens
         (softcap and sinks as always) gives weights `p_i`.
      2. A sketched page adds the error `e = (sum p_i^2) * (var_K * nu^2 + var_V)`, where `var_K = sum_c (q_c s_c)^2 / 12` over
         the steps `s_c` of its keys, and `nu` and `var_V` are stored with the sketch. The head's estimated error is
         `E = sqrt(sum e)`, its scale `N = mean of nu over the pages that have a sketch`.
      3. Where `E > tolerance * N`, the pages with the largest `e` are *hit*, largest first, until the rest is at most
         `(tolerance * N / 2)^2`. A hit page is hit for all query heads of its group. Hit pages with a warm address are read from
         there in full, and steps 1 to 3 are repeated with them exact; cold ones stay sketched but count as mended in this call.
      4. Values of pages (that have a sketch) whose mass, the sum of `p_i`, is negligible for every query head of the group may
         be left out: those left out have `sum of (mass * nu) <= skip_share * tolerance * N` in each head. Which ones is the
         backend's choice; the weights of the others stay as they are.

    - exactly otherwise (a part of a prompt), except that cold pages are read through their sketch.
    """

    arena: Tensor
    """`[bytes]` uint8: the memory that `pages` is a view of, and in which the sketches lie."""
    sketch_bits: int
    """2, 4 or 8."""
    sketch_keys: Tensor
    """`[num_blocks]` int64: the byte of `arena` where the key part of the block's sketch for layer 0, KV head 0 begins; NO_PAGE:
    the block has no sketch."""
    sketch_values: Tensor
    """The same for the value part."""
    sketch_stride: int
    """Bytes from one layer and KV head to the next, in both parts: `(l, h)` begins `(l * kv_heads + h) * sketch_stride` later."""
    warm: Tensor
    """`[num_blocks, windows]` int64: the address of the exact pages of a block for the layers of one window, laid out
    `[layers of the window, kv_heads]` pages as in `pages`; 0: released."""
    window_layers: int
    """Layers of a window (the last one may have fewer): layer `l` belongs to window `l // window_layers`."""
    tolerances: Tensor
    """`[sequences]` float32: `attention_tolerance`; negative: exactly."""
    skip_share: float
    """How much of the tolerance may be spent on values that are not read; see above."""
    probes: Tensor
    """`[sequences]` int32: for that many of the last new tokens of a part of a prompt, the backend also works out what steps 1 to
    3 would say if all pages that have a sketch were sketched, for the report alone: their masses and hits are recorded as a
    decode row's are (without listing the hits or counting errors), their outputs stay exact. Only where the tolerance is
    not negative, some block has a sketch and the layer has no window."""
    report_rows: Tensor
    """`[sequences]` int32: the row of each sequence in the report's statistics."""
    report: TierReport


@dataclass(slots=True)
class TierReport:
    """What attending showed about pages. Statistics grow until their owner resets them; the rest is of one step."""

    masses: Tensor
    """`[rows, layers, kv_heads, max_blocks]` float32, added to: each page's attention mass (sum of `p_i`, the largest of the
    query heads of the group) of each bounded decode row or probe. Rows served exactly record nothing."""
    frequencies: Tensor
    """The same shape and dtype, added to: 1 for each bounded decode row or probe that hit the page, or, where the page has a slot
    and a sketch, would have hit it: its own `e`, were it sketched, added to those of the row exceeds `(tolerance * N)^2`."""
    hits: list[Tensor] = field(default_factory=list)
    """For each layer with hits: `[hits, 5]` int32 of sequence, layer, KV head, block (its index in the sequence), and 1 if
    the page is cold, else 0."""
    errors: Tensor = field(default_factory=lambda: torch.zeros(0, 3, dtype=torch.float64))
    """`[sequences, 3]` float64, added to: over query heads and layers of bounded rows the sum of `E / N` (after hits; values left
    out counted in, as `sum of mass * nu / N`), the largest (not a sum), and the number of them."""
    pages_read: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """`[4]` int64, added to, pages of bounded decode rows: served exactly, served by sketch, of both those whose values were left
    out, and cold pages that were hit."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The pages that one step reads and writes: integers on the host, bytes in the pool. Backends modify only `pages`.

    The tokens of sequence `s` are rows `query_starts[s]` to `query_starts[s + 1]` of the flattened batch; their positions
    are the last ones below `context_lens[s]`. Token position `p` lives in block `block_tables[s, p // page_size]`, at
    offset `p % page_size` of page `page_table[block, layer, kv_head]`.
    """

    pages: Tensor
    """`[num_pages, 2, page_size * head_dim]`, float16, bfloat16 or float32. `[page, 0]` is the keys as
    `[head_dim, page_size]` (channel-major: 64 neighbouring tokens of one channel are one vector load), `[page, 1]` the values
    as `[page_size, head_dim]`."""
    page_table: Tensor
    """`[num_blocks, layers, kv_heads]` int32: the slot in `pages`, or NO_PAGE."""
    block_tables: Tensor
    """`[sequences, max_blocks]` int32; entries past a sequence's last block are undefined and never read."""
    query_starts: Tensor
    """`[sequences + 1]` int32, ascending, from 0 to `tokens`."""
    context_lens: Tensor
    """`[sequences]` int32: tokens in the cache once this step's are written."""
    page_size: int
    head_dim: int
    tiers: Tiers | None = None
    """None: every page that is needed has a slot in `pages`."""

    @property
    def tokens(self) -> int:
        return int(self.query_starts[-1])


class AttentionBackend(Protocol):
    """Writes and reads pages. Whatever it is, its results equal `reference.ReferenceAttention` up to rounding."""

    name: str

    def attend(
        self,
        batch: PagedBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: LayerAttention,
        *,
        again: bool = False,
    ) -> Tensor:
        """Writes the new keys and values to their pages, then returns the attention output of every new token.

        With `again`, the same layer of the same step was run before and pages were restored since: the report's statistics are
        left alone (`masses`, `frequencies`, `hits`), `errors` and `pages_read` too.

        `query` is `[tokens, query_heads, head_dim]`, `key` and `value` `[tokens, kv_heads, head_dim]`, float32, last
        dimension contiguous (the others may be strided), keys and queries already rotated. Query head `h` reads KV head
        `h // (query_heads // kv_heads)`. Returns `[tokens, query_heads, head_dim]` float32, contiguous.
        """
        ...


PAGE_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
