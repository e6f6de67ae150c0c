"""Paged attention in plain torch: the truth that the other backends are tested against, and what serves without a compiler."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vera.attention.checks import check_batch, check_call
from vera.attention.protocol import NO_PAGE, LayerAttention, PagedBatch, Tiers
from vera.attention.sketch import SketchFormat, read_header, read_key_steps, read_keys, read_values


class ReferenceAttention:
    """Dense attention, one sequence after another, in float32."""

    name = "reference"

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
        """See `AttentionBackend.attend`. Raises ValueError and IndexError for what `PagedBatch` does not allow."""
        check_batch(batch)
        check_call(batch, layer, query, key, value, options, tokens=batch.tokens)
        output = torch.empty(query.shape, dtype=torch.float32)
        starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
        spans = list(pairwise(starts))
        tables = [
            _Sequence(batch, layer, index, end - start, lengths[index], options) for index, (start, end) in enumerate(spans)
        ]
        for sequence, (start, end) in zip(tables, spans, strict=True):
            sequence.write(key[start:end], value[start:end])
        record = None if batch.tiers is None or again else _Record(batch.tiers, layer)
        for sequence, (start, end) in zip(tables, spans, strict=True):
            if end > start:
                output[start:end] = sequence.attend(query[start:end], record)
        if record is not None:
            record.append_hits()
        return output


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of one sequence in one layer, in float32. Whatever is not there is NaN."""

    keys: Tensor
    """`[kv_heads, blocks, head_dim, page_size]`"""
    values: Tensor
    """`[kv_heads, blocks, page_size, head_dim]`"""


class _Sequence:
    """One sequence's pages in one layer, from the first block that its new tokens see."""

    def __init__(self, batch: PagedBatch, layer: int, index: int, new_tokens: int, length: int, options: LayerAttention) -> None:
        size = batch.page_size
        _check_lengths(index, new_tokens, length, batch.block_tables.shape[1] * size)
        self.index = index
        self.options = options
        self.page_size = size
        self.length = length
        self.first_new = length - new_tokens
        first_visible = 0 if options.window is None else max(0, self.first_new + 1 - options.window)
        self.first_block = first_visible // size if new_tokens else -(-length // size)
        blocks = _block_ids(batch, index, self.first_block, -(-length // size))
        self.slots = _page_slots(batch, layer, index, blocks)
        self.tiers = None if batch.tiers is None else _SequenceTiers(batch, batch.tiers, layer, index, blocks)
        self.bounded = self.tiers is not None and self.tiers.bounded and options.window is None
        self._check_pages(f"sequence {index}, layer {layer}")
        self.pages = batch.pages
        self.keys = batch.pages[:, 0].view(-1, batch.head_dim, size)
        self.values = batch.pages[:, 1].view(-1, size, batch.head_dim)

    def write(self, key: Tensor, value: Tensor) -> None:
        """`key` and `value` are `[new_tokens, kv_heads, head_dim]`; rounds them to the dtype of the pages."""
        positions = torch.arange(self.first_new, self.length)
        slots = self.slots[positions // self.page_size - self.first_block]
        offsets = (positions % self.page_size)[:, None]
        self.keys[slots, :, offsets] = key.to(self.keys.dtype)
        self.values[slots, offsets] = value.to(self.values.dtype)

    def attend(self, query: Tensor, record: _Record | None) -> Tensor:
        """`query` is `[new_tokens, query_heads, head_dim]`, and so is the result."""
        grouped = query.reshape(len(query), self.slots.shape[1], -1, query.shape[2])
        if self.bounded and len(query) == 1:
            return self._attend_within_bounds(grouped[0], record).view_as(query)
        if self.bounded and record is not None:
            self._probe(grouped, record)
        pages = self._as_exact_as_can_be()
        weights = self._weights(grouped, self._written_keys(pages.keys), self._visible())
        return torch.einsum("kgts,ksd->tkgd", weights, self._written_values(pages.values)).reshape(query.shape)

    def _weights(self, query: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """`[kv_heads, group, new_tokens, tokens]` from queries `[new_tokens, kv_heads, group, head_dim]`."""
        logits = torch.einsum("tkgd,kds->kgts", query, keys) * self.options.scale
        if (cap := self.options.softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~visible, float("-inf"))
        if (sinks := self.options.sinks) is None:
            return torch.softmax(logits, dim=-1)
        column = sinks.view(*logits.shape[:2], 1, 1).expand(-1, -1, len(query), 1)
        return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]

    def _visible(self) -> Tensor:
        """`[new_tokens, tokens]`: which of the gathered tokens each new token attends to."""
        query = torch.arange(self.first_new, self.length)[:, None]
        token = torch.arange(self.first_block * self.page_size, self.length)
        visible = token <= query
        return visible if self.options.window is None else visible & (token > query - self.options.window)

    def _attend_within_bounds(self, query: Tensor, record: _Record | None) -> Tensor:
        """`query` is `[kv_heads, group, head_dim]`, and so is the result: steps 1 to 4 of `Tiers` for a decode row."""
        assert self.tiers is not None
        exact, sketches = self._exact_pages(), self.tiers.sketches()
        sketched = sketches.there & ~self._has_slot()
        served = self._control_error(query, self._visible(), exact, sketches, sketched=sketched)
        masses = self._page_sums(served.weights)
        budget = self.tiers.skip_share * self.tiers.tolerance * sketches.norm
        left_out = _cheapest(masses * sketches.nu[:, None], sketches.there, budget)
        if record is not None:
            record.attention(self.index, masses, served.hit | self._needed(query, served, sketches))
            record.service(self.index, served, sketches, masses, left_out)
        values = _mixed(exact.values, sketches.pages.values, served.by_sketch).masked_fill(left_out[:, :, None, None], 0)
        return torch.einsum("kgs,ksd->kgd", served.weights, self._written_values(values))

    def _probe(self, query: Tensor, record: _Record) -> None:
        """Records what the last new tokens would ask for if all pages that have a sketch were sketched.

        `query` is `[new_tokens, kv_heads, group, head_dim]`.
        """
        assert self.tiers is not None
        exact, sketches, visible = self._exact_pages(), self.tiers.sketches(), self._visible()
        for token in range(max(0, len(query) - self.tiers.probes), len(query)):
            asked = self._control_error(query[token], visible[token : token + 1], exact, sketches, sketched=sketches.there)
            record.attention(self.index, self._page_sums(asked.weights), asked.hit)

    def _control_error(self, query: Tensor, visible: Tensor, exact: _Pages, sketches: _Sketches, *, sketched: Tensor) -> _Served:
        """Steps 1 to 3 of `Tiers` for one row.

        `query` is `[kv_heads, group, head_dim]`, `visible` `[1, tokens]`; `sketched`, `[kv_heads, blocks]`, are the pages that
        are read by their sketch unless they are hit.
        """
        assert self.tiers is not None
        allowed = self.tiers.tolerance * sketches.norm[:, None]
        hit = torch.zeros_like(sketched)
        while True:
            by_sketch = sketched & ~(hit & self._is_exact())
            keys = _mixed(exact.keys, sketches.pages.keys, by_sketch)
            weights = self._weights(query[None], self._written_keys(keys), visible).squeeze(2)
            errors = self._page_sums(weights.square()) * sketches.variance(query * self.options.scale)
            errors = errors.masked_fill(~by_sketch[:, None], 0)
            open_errors = errors.masked_fill(hit[:, None], 0)  # what was hit and is cold counts as mended
            exceeding = open_errors.sum(dim=-1).sqrt() > allowed
            if not exceeding.any():
                return _Served(weights, by_sketch, hit, errors)
            worst = _largest(open_errors, rest=(allowed / 2) ** 2)
            hit = hit | (worst & exceeding[:, :, None]).any(dim=1)

    def _needed(self, query: Tensor, served: _Served, sketches: _Sketches) -> Tensor:
        """`[kv_heads, blocks]`: hot pages that would have been hit if they had been read by sketch, all else being as it is."""
        assert self.tiers is not None
        allowed = (self.tiers.tolerance * sketches.norm[:, None]) ** 2
        own = self._page_sums(served.weights.square()) * sketches.variance(query * self.options.scale)
        needed = (own + served.errors.sum(dim=-1, keepdim=True) > allowed[:, :, None]).any(dim=1)
        return needed & sketches.there & self._has_slot()

    def _page_sums(self, weights: Tensor) -> Tensor:
        """`[..., tokens]` added up by page: float64 `[..., blocks]`."""
        blocks = len(self.slots)
        padded = torch.nn.functional.pad(weights.double(), (0, blocks * self.page_size - weights.shape[-1]))
        return padded.view(*padded.shape[:-1], blocks, self.page_size).sum(dim=-1)

    def _as_exact_as_can_be(self) -> _Pages:
        """Exact pages; by sketch those that are cold."""
        exact = self._exact_pages()
        if self.tiers is None or bool(self._is_exact().all()):
            return exact
        sketched = self.tiers.sketches().pages
        return _Pages(
            keys=_mixed(exact.keys, sketched.keys, ~self._is_exact()),
            values=_mixed(exact.values, sketched.values, ~self._is_exact()),
        )

    def _exact_pages(self) -> _Pages:
        """All pages that have a slot or a warm address."""
        blocks, kv_heads = self.slots.shape
        pages = self.pages[self.slots.clamp(min=0)]  # [blocks, kv_heads, 2, page_size * head_dim]
        if self.tiers is not None:
            pages = torch.where(self._has_slot().T[:, :, None, None], pages, self.tiers.warm_pages())
        keys, values = pages.transpose(0, 1).float().unbind(2)
        return _Pages(
            keys=keys.reshape(kv_heads, blocks, -1, self.page_size),
            values=values.reshape(kv_heads, blocks, self.page_size, -1),
        )

    def _written_keys(self, keys: Tensor) -> Tensor:
        """`[kv_heads, head_dim, tokens]` of the pages' keys.

        What lies behind the last written token may be NaN, which no mask can undo: it is cut off before any arithmetic.
        """
        return keys.transpose(1, 2).flatten(2)[:, :, : self.length - self.first_block * self.page_size]

    def _written_values(self, values: Tensor) -> Tensor:
        """`[kv_heads, tokens, head_dim]` of the pages' values, cut off likewise."""
        return values.flatten(1, 2)[:, : self.length - self.first_block * self.page_size]

    def _has_slot(self) -> Tensor:
        """`[kv_heads, blocks]`"""
        return (self.slots != NO_PAGE).T

    def _is_exact(self) -> Tensor:
        """`[kv_heads, blocks]`: the page has a slot or a warm address."""
        return self._has_slot() if self.tiers is None else self._has_slot() | (self.tiers.warm != 0)

    def _check_pages(self, where: str) -> None:
        """Raises IndexError for a page that is needed and cannot be had."""
        written = torch.arange(len(self.slots)) >= self.first_new // self.page_size - self.first_block
        readable = self._is_exact()
        if self.bounded:
            assert self.tiers is not None
            readable = readable | self.tiers.has_sketch
        missing = torch.where(written, ~self._has_slot(), ~readable).nonzero().tolist()
        if missing:
            head, block = missing[0]
            problem = f"{where}: block {block + self.first_block}, KV head {head} is NO_PAGE in page_table"
            if self.tiers is None or written[block]:
                raise IndexError(f"{problem}, but the block is needed")
            if self.bounded:
                raise IndexError(f"{problem} and has neither a warm address nor a sketch")
            raise IndexError(f"{problem} and cold, but it is to be read exactly; restore it first")


class _SequenceTiers:
    """Where the pages of one sequence are that have no slot, in one layer."""

    def __init__(self, batch: PagedBatch, tiers: Tiers, layer: int, index: int, blocks: Tensor) -> None:
        self.kv_heads = batch.page_table.shape[2]
        self.dtype = batch.pages.dtype
        self.arena = tiers.arena
        self.format = SketchFormat(batch.page_size, batch.head_dim, tiers.sketch_bits)
        self.tolerance = float(tiers.tolerances[index])
        self.skip_share = tiers.skip_share
        self.probes = int(tiers.probes[index])
        self.has_sketch = tiers.sketch_keys[blocks] != NO_PAGE
        """`[blocks]`"""
        self.bounded = self.tolerance >= 0 and bool(self.has_sketch.any())
        at = (layer * self.kv_heads + torch.arange(self.kv_heads)) * tiers.sketch_stride
        self.sketch_keys = tiers.sketch_keys[blocks] + at[:, None]
        """`[kv_heads, blocks]`: bytes of the arena; undefined where there is no sketch."""
        self.sketch_values = tiers.sketch_values[blocks] + at[:, None]
        window, place = divmod(layer, tiers.window_layers)
        starts = tiers.warm[blocks, window]
        self.warm = torch.where(starts == 0, 0, starts + place * self.kv_heads * self._page_bytes())
        """`[blocks]`: the address of the page of the layer's first KV head, the others follow it; 0: released."""

    def warm_pages(self) -> Tensor:
        """`[blocks, kv_heads, 2, page_size * head_dim]`; NaN where released."""
        half_page = self.format.page_size * self.format.head_dim
        pages = torch.full((len(self.warm), self.kv_heads, 2, half_page), float("nan"), dtype=self.dtype)
        for block, address in enumerate(self.warm.tolist()):
            if address:
                memory = (ctypes.c_char * (self.kv_heads * self._page_bytes())).from_address(address)
                pages[block] = torch.frombuffer(memory, dtype=self.dtype).view(pages.shape[1:])
        return pages

    def sketches(self) -> _Sketches:
        there = self.has_sketch.expand(self.kv_heads, -1)
        key_parts = self._bytes(self.sketch_keys[there], self.format.key_bytes)
        value_parts = self._bytes(self.sketch_values[there], self.format.value_bytes)
        nu, var_values = read_header(key_parts)
        size, head_dim = self.format.page_size, self.format.head_dim
        nan = float("nan")
        return _Sketches(
            pages=_Pages(
                keys=torch.full((*there.shape, head_dim, size), nan).index_put((there,), read_keys(key_parts, self.format)),
                values=torch.full((*there.shape, size, head_dim), nan).index_put((there,), read_values(value_parts, self.format)),
            ),
            there=there,
            key_steps=torch.zeros((*there.shape, head_dim)).index_put((there,), read_key_steps(key_parts, self.format)),
            nu=torch.zeros(there.shape).index_put((there,), nu),
            var_values=torch.zeros(there.shape).index_put((there,), var_values),
        )

    def _bytes(self, starts: Tensor, count: int) -> Tensor:
        """`[starts, count]` uint8 from the arena."""
        return self.arena[starts[:, None] + torch.arange(count)]

    def _page_bytes(self) -> int:
        return 2 * self.format.page_size * self.format.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Sketches:
    """What the sketches of one sequence say in one layer."""

    pages: _Pages
    there: Tensor
    """`[kv_heads, blocks]`: the page has a sketch. Where it has none, the numbers below are 0."""
    key_steps: Tensor
    """`[kv_heads, blocks, head_dim]`"""
    nu: Tensor
    """`[kv_heads, blocks]`"""
    var_values: Tensor
    """`[kv_heads, blocks]`"""

    @property
    def norm(self) -> Tensor:
        """`N`, float64 `[kv_heads]`: the mean of nu over the pages that have a sketch."""
        return self.nu.double().sum(dim=1) / self.there.sum(dim=1)

    def variance(self, query: Tensor) -> Tensor:
        """`var_K * nu^2 + var_V` for scaled queries `[kv_heads, group, head_dim]`: float64 `[kv_heads, group, blocks]`."""
        var_keys = torch.einsum("kgd,kbd->kgb", query.double().square(), self.key_steps.double().square()) / 12
        return var_keys * self.nu.double().square()[:, None] + self.var_values.double()[:, None]


@dataclass(frozen=True, slots=True)
class _Served:
    """How one row was served."""

    weights: Tensor
    """`[kv_heads, group, tokens]`"""
    by_sketch: Tensor
    """`[kv_heads, blocks]`: read by sketch in the end."""
    hit: Tensor
    """`[kv_heads, blocks]`"""
    errors: Tensor
    """`e` of each page read by sketch, cold ones that were hit included: float64 `[kv_heads, group, blocks]`."""


class _Record:
    """What one call adds to the report of its step."""

    def __init__(self, tiers: Tiers, layer: int) -> None:
        self.report = tiers.report
        self.rows = tiers.report_rows
        self.layer = layer
        self.hits: list[Tensor] = []

    def attention(self, sequence: int, masses: Tensor, hit: Tensor) -> None:
        """A decode row or probe: its masses `[kv_heads, group, blocks]`, the pages that it hit or needed `[kv_heads, blocks]`."""
        row, blocks = int(self.rows[sequence]), hit.shape[1]
        self.report.masses[row, self.layer, :, :blocks] += masses.amax(dim=1).float()
        self.report.frequencies[row, self.layer, :, :blocks] += hit

    def service(self, sequence: int, served: _Served, sketches: _Sketches, masses: Tensor, left_out: Tensor) -> None:
        """How a decode row was served; `left_out`, `[kv_heads, blocks]`, are the pages whose values were not read."""
        cold = served.hit & served.by_sketch
        pages = [~served.by_sketch, served.by_sketch, left_out, cold]
        self.report.pages_read += torch.stack([chosen.sum() for chosen in pages])
        skipped = (masses * sketches.nu[:, None]).masked_fill(~left_out[:, None], 0).sum(dim=-1)
        norm = sketches.norm[:, None]
        shares = torch.where(norm > 0, (served.errors.sum(dim=-1).sqrt() + skipped) / norm, 0)
        errors = self.report.errors[sequence]
        errors[0] += shares.sum()
        errors[1] = torch.maximum(errors[1], shares.max())
        errors[2] += shares.numel()
        heads, blocks = served.hit.nonzero(as_tuple=True)
        columns = [torch.full_like(heads, sequence), torch.full_like(heads, self.layer), heads, blocks, cold[heads, blocks]]
        self.hits.append(torch.stack(columns, dim=1).int())

    def append_hits(self) -> None:
        """Lists the hits of all sequences, if there are any."""
        if any(len(hits) for hits in self.hits):
            self.report.hits.append(torch.cat(self.hits))


def _mixed(exact: Tensor, sketched: Tensor, by_sketch: Tensor) -> Tensor:
    """Keys or values `[kv_heads, blocks, ...]`, those of `sketched` where `by_sketch`, `[kv_heads, blocks]`, is true."""
    return torch.where(by_sketch[:, :, None, None], sketched, exact)


def _largest(errors: Tensor, *, rest: Tensor) -> Tensor:
    """Which of the errors `[..., blocks]` have to go, largest first, until the sum of the others is at most `rest`, `[...]`."""
    ascending, order = errors.sort(dim=-1)
    return torch.zeros_like(errors, dtype=torch.bool).scatter(-1, order, ascending.cumsum(dim=-1) > rest[..., None])


def _cheapest(costs: Tensor, candidates: Tensor, budget: Tensor) -> Tensor:
    """Which of the candidate pages, `[kv_heads, blocks]`, cost no head more than the budget `[kv_heads]` together.

    `costs` is `[kv_heads, group, blocks]`. Pages are taken in ascending order of what they cost the head that needs them most.
    """
    costs = costs.masked_fill(~candidates[:, None], float("inf"))
    order = costs.amax(dim=1).argsort(dim=-1)
    spent = costs.gather(2, order[:, None].expand_as(costs)).cumsum(dim=-1)
    affordable = (spent <= budget[:, None, None]).all(dim=1)
    return torch.zeros_like(candidates).scatter(1, order, affordable)


def _check_lengths(index: int, new_tokens: int, length: int, capacity: int) -> None:
    if new_tokens < 0:
        raise ValueError(f"sequence {index}: query_starts falls by {-new_tokens}; it must ascend")
    if not new_tokens <= length <= capacity:
        raise ValueError(
            f"sequence {index}: context_lens={length} must lie between its {new_tokens} new tokens "
            f"and the {capacity} that block_tables holds"
        )


def _block_ids(batch: PagedBatch, index: int, first_block: int, end_block: int) -> Tensor:
    """`[blocks]` int64: the sequence's blocks from `first_block` on."""
    blocks = batch.block_tables[index, first_block:end_block].long()
    num_blocks = batch.page_table.shape[0]
    if bad := blocks[(blocks < 0) | (blocks >= num_blocks)].tolist():
        raise IndexError(f"sequence {index}: block {bad[0]} is outside the {num_blocks} blocks of page_table")
    return blocks


def _page_slots(batch: PagedBatch, layer: int, index: int, blocks: Tensor) -> Tensor:
    """`[blocks, kv_heads]` int64: where the pages of these blocks are; some may be NO_PAGE."""
    slots, num_pages = batch.page_table[blocks, layer].long(), batch.pages.shape[0]
    if bad := slots[((slots < 0) & (slots != NO_PAGE)) | (slots >= num_pages)].tolist():
        raise IndexError(
            f"sequence {index}, layer {layer}: page_table entry {bad[0]} is outside the {num_pages} pages of the pool"
        )
    return slots
