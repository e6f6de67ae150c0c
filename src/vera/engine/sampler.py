"""The next token of each row of logits.

A row's token depends on its logits, its parameters, its seed and the index of the token in the answer, and on nothing else:
not on the batch, the place in it, a preemption or earlier calls. Three things make that so:

- One uniform number a token, hashed from (seed, index); there is no generator whose state could drift.
- The inverse of the cumulative distribution is taken over the kept tokens in the order of their ids. Which are kept is decided
  in one order, too: descending logit, then ascending id.
- Sums over the vocabulary run in numpy, whose order of addition within a row does not depend on the number of rows (torch
  splits a sum over threads by the shape of the whole).

The filters keep what the warpers of transformers keep. Each keeps a prefix of the descending order, so some hundred tokens
almost always decide, and the whole vocabulary is sorted only for rows where they do not. On a CPU nothing here uses torch's
threads, which would wait for each other longer than the work takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vera.sampling_params import SamplingParams

NO_TOKEN = -1
"""The token id of a row that has none, because its logits are not finite."""

_PREFIX_SIZES = (256, 4096)
"""About how many of the most likely tokens the filters look at before they sort the whole vocabulary."""
_SAMPLED = 16
"""Every how many-th token is in the sample that tells where the most likely ones begin."""
_BLOCK = 256
"""Tokens whose weights are summed together to find the block of the token drawn."""
_PROMPT_ROWS = 64
"""Prompt positions handled at a time: bounds the temporaries to a few copies of `[64, vocab]`."""

_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, before penalties and temperature."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token; ties share a rank."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at this place and their log-probabilities, best first, ties by id."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler chose for one row."""

    token_id: int
    """NO_TOKEN if not `finite`."""
    logprob: float | None = None
    """As in TokenLogprob; None if the request did not ask."""
    rank: int | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finite: bool = True
    """False: the logits held NaN or +inf, or no token was left to choose. The request cannot go on."""


@dataclass(slots=True, eq=False)
class SamplingRow:
    """What the sampler knows of one request, for as long as it lives."""

    params: SamplingParams
    seed: int
    """Resolved; taken modulo 2**64."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """The live list: it only grows, and its length is the index of the token to sample."""
    eos_token_ids: frozenset[int] = frozenset()
    _counts: npt.NDArray[np.int32] | None = field(default=None, init=False, repr=False)
    """`[vocab]`: how often each token is in the first `_num_counted` of the output."""
    _num_counted: int = field(default=0, init=False, repr=False)
    _in_prompt: npt.NDArray[np.bool_] | None = field(default=None, init=False, repr=False)

    @property
    def adjusts(self) -> bool:
        """The next token is not chosen from the logits as they are."""
        return self._bans_stops or bool(self.params.logit_bias) or self._penalises

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token."""
        return uniform(self.seed, len(self.output_token_ids))

    def adjust(self, logits: _Floats) -> None:
        """Changes one row `[vocab]` in place: the ban on ends before `min_tokens`, bias, then penalties."""
        params, vocab = self.params, len(logits)
        if self._bans_stops:
            # A model may name an end that its own vocabulary does not reach; there is nothing to ban then.
            logits[[token for token in (*self.eos_token_ids, *params.stop_token_ids) if token < vocab]] = -np.inf
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if not self._penalises:
            return
        counts = self._count_output(vocab)
        if params.repetition_penalty != 1:
            seen = np.flatnonzero(self._prompt_mask(vocab) | (counts > 0))
            values = logits[seen]
            logits[seen] = np.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
        logits -= params.presence_penalty * (counts > 0).astype(np.float32)
        logits -= params.frequency_penalty * counts.astype(np.float32)

    @property
    def _bans_stops(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def _penalises(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def _count_output(self, vocab: int) -> npt.NDArray[np.int32]:
        if self._counts is None:
            self._counts = np.zeros(vocab, np.int32)
        np.add.at(self._counts, np.asarray(self.output_token_ids[self._num_counted :], np.int64), 1)
        self._num_counted = len(self.output_token_ids)
        return self._counts

    def _prompt_mask(self, vocab: int) -> npt.NDArray[np.bool_]:
        if self._in_prompt is None:
            self._in_prompt = np.zeros(vocab, np.bool_)
            self._in_prompt[np.asarray(self.prompt_token_ids, np.int64)] = True
        return self._in_prompt


class Sampler:
    """Chooses tokens. Holds no state: what a request needs from one step to the next is in its SamplingRow."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token for each row of `logits` `[rows, vocab]`, float32, which is not modified.

        Greedy rows cost one pass over the logits where they are; only rows that draw, adjust or report log-probabilities
        are copied to the host. A row that is not finite does not disturb the others.
        """
        tokens = _best(logits)
        choosing = [i for i, row in enumerate(rows) if tokens[i] != NO_TOKEN and (row.adjusts or not row.params.greedy)]
        if choosing:
            for i, token in zip(choosing, _choose(_on_host(logits, choosing), [rows[i] for i in choosing]), strict=True):
                tokens[i] = token
        results = [Sampled(token, finite=token != NO_TOKEN) for token in tokens]
        top_n = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None and results[i].finite}
        if top_n:
            reporting = list(top_n)
            reports = _logprobs(_on_host(logits, reporting), [tokens[i] for i in reporting], max(top_n.values()))
            for i, report in zip(reporting, reports, strict=True):
                results[i] = Sampled(report.token_id, report.logprob, report.rank, report.top[: top_n[i]])
        return results


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], top_n: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens that are known already: row i of `logits` `[positions, vocab]` predicts token i.

    `top_n` most likely tokens are reported for each position. A row that is not finite gives NaN.
    """
    reports: list[TokenLogprob] = []
    for start in range(0, len(next_token_ids), _PROMPT_ROWS):
        tokens = next_token_ids[start : start + _PROMPT_ROWS]
        reports += _logprobs(_on_host(logits, range(start, start + len(tokens))), tokens, top_n)
    return reports


def uniform(seed: int, index: int) -> float:
    """Number `index` in [0, 1) of the stream `seed`: SplitMix64 (Steele, Lea and Flood, 2014), which can jump to any index."""
    golden = 0x9E3779B97F4A7C15
    # Hashing the seed first keeps seeds that differ by 1, as the n answers to one prompt have, from sharing numbers.
    state = _mix(seed + golden) + (index + 1) * golden
    return (_mix(state) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits to 64 bits, one to one."""
    mask = 0xFFFFFFFFFFFFFFFF
    value &= mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def _on_host(logits: Tensor, rows: Sequence[int]) -> _Floats:
    """A copy of some rows."""
    logits = logits.detach()
    if logits.device.type != "cpu":
        return cast("_Floats", logits[list(rows)].cpu().numpy())
    return cast("_Floats", logits.numpy()[list(rows)])


def _best(logits: Tensor) -> list[int]:
    """The most likely token of each row, the lowest id among equals; NO_TOKEN where the row is not finite."""
    logits = logits.detach()
    if logits.device.type == "cpu":
        return _best_on_host(logits.numpy())
    # NaN counts as the largest in torch and numpy alike, so one look at the largest value shows NaN, +inf and all -inf.
    best = logits.argmax(dim=1, keepdim=True)
    return cast("list[int]", best.masked_fill(~logits.gather(1, best).isfinite(), NO_TOKEN).flatten().tolist())


def _best_on_host(logits: _Floats) -> list[int]:
    """As `_best`; numpy's argmax is ten times faster than torch's on a CPU."""
    best = logits.argmax(axis=1)
    finite = np.isfinite(logits[np.arange(len(logits)), best])
    return cast("list[int]", np.where(finite, best, NO_TOKEN).tolist())


def _choose(logits: _Floats, rows: Sequence[SamplingRow]) -> list[int]:
    """The next token of each row of `logits` `[rows, vocab]`, which is used up; NO_TOKEN where adjusting left none."""
    # Extreme penalties may overflow; the row is then found not finite.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for values, row in zip(logits, rows, strict=True):
            if row.adjusts:
                row.adjust(values)
    tokens = _best_on_host(logits)
    drawing = [i for i, row in enumerate(rows) if tokens[i] != NO_TOKEN and not row.params.greedy]
    if drawing:
        for i, token in zip(drawing, _draw(_pick(logits, drawing), [rows[i] for i in drawing]), strict=True):
            tokens[i] = token
    return tokens


def _draw(logits: _Floats, rows: Sequence[SamplingRow]) -> list[int]:
    """A random token for each row of `logits` `[rows, vocab]`, whose largest is finite."""
    # A float32 denormal could round to 0; the clamp changes nothing, since every difference is huge beside 1e-30.
    temperatures = np.maximum(np.asarray([row.params.temperature for row in rows], np.float32), np.float32(1e-30))
    weights = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        weights /= temperatures[:, None]
    np.exp(weights, out=weights)
    tokens = []
    for row, own, kept in zip(rows, weights, _filter(logits, weights.sum(axis=1), [row.params for row in rows]), strict=True):
        tokens.append(_invert(own, row.uniform) if kept is None else int(kept[_invert(own[kept], row.uniform)]))
    return tokens


def _invert(weights: _Floats, uniform: float) -> int:
    """The index where the running sum of `weights` passes the share `uniform` of the whole; one that has weight."""
    # In two levels: the running sum of a whole vocabulary in float64 costs ten times as much.
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    target = uniform * float(blocks[-1])
    block = _first_above(blocks, target)
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _first_above(inside, target - (float(blocks[block - 1]) if block else 0.0))


def _first_above(reached: _Doubles, target: float) -> int:
    """The first index at which a running sum is above `target`; the last that added, should rounding put it beyond the end."""
    return int(np.searchsorted(reached, min(target, np.nextafter(reached[-1], -np.inf)), side="right"))


def _filter(logits: _Floats, masses: _Floats, params: Sequence[SamplingParams]) -> list[_Ints | None]:
    """The ids, ascending, that top-k, top-p and min-p keep of each row `[rows, vocab]`; None where they keep all.

    `masses` `[rows]`: the sum of `exp((logit - largest logit) / temperature)`.
    """
    vocab = logits.shape[1]
    kept: list[_Ints | None] = [None] * len(params)
    undecided = [i for i, own in enumerate(params) if 0 < own.top_k < vocab or own.top_p < 1 or own.min_p > 0]
    for size in (*_PREFIX_SIZES, vocab):
        prefixes = zip(undecided, _most_likely(_pick(logits, undecided), size), strict=True)
        undecided = []
        for i, (ids, values) in prefixes:
            num_kept = _num_kept(values, float(masses[i]), params[i], vocab)
            if num_kept is None:
                undecided.append(i)
            else:
                kept[i] = np.sort(ids[:num_kept])
        if not undecided:
            break
    return kept


def _num_kept(values: _Floats, mass: float, params: SamplingParams, vocab: int) -> int | None:
    """How many of a row's most likely tokens the filters keep, given a prefix of them; None: it takes more to tell.

    `values` are the largest logits in descending order. Equal to transformers' TopK-, TopP- and MinPLogitsWarper one after
    another: top-k keeps all that equal the last, top-p counts in shares of what top-k kept, min-p compares with the most
    likely token.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((values - values[0]).astype(np.float64) / params.temperature)
    reached = np.cumsum(weights)
    size, limits = len(values), []
    if 0 < params.top_k < vocab:
        if params.top_k > size:
            return None
        limits.append(int(np.count_nonzero(values >= values[params.top_k - 1])))
        mass = float(reached[limits[0] - 1])
    if params.top_p < 1:
        limits.append(int(np.searchsorted(reached, params.top_p * mass)) + 1)
    if params.min_p > 0:
        num_likely = int(np.count_nonzero(weights >= params.min_p))
        # If all of the prefix pass, so may tokens beyond it.
        limits.append(num_likely if num_likely < size else size + 1)
    if min(limits) > size:
        return size if size == vocab else None
    return min(limits)


def _pick(logits: _Floats, rows: Sequence[int]) -> _Floats:
    """Some rows, ascending; the array itself if that is all of them, since copies of this size are most of the time."""
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _most_likely(logits: _Floats, size: int) -> Iterator[tuple[_Ints, _Floats]]:
    """For each row of `[rows, vocab]`, the ids and logits of about `size` largest, at least `size // 16`; all from `vocab` up.

    Ordered by descending logit, then ascending id; whatever equals the last is in.
    """
    rows, vocab = logits.shape
    if size < vocab:
        # Any floor gives a true prefix of the order; one from a sample gives about the right size for a tenth of the time.
        floor = np.partition(logits[:, ::_SAMPLED], -(size // _SAMPLED), axis=1)[:, -(size // _SAMPLED), None]
    else:
        floor = np.full((rows, 1), -np.inf, np.float32)
    row_of, ids = np.divmod(np.flatnonzero(logits >= floor), vocab)
    starts = np.searchsorted(row_of, np.arange(rows + 1))
    for row, values in enumerate(logits):
        candidates = ids[starts[row] : starts[row + 1]]
        candidates = candidates[np.argsort(-values[candidates], kind="stable")]
        yield candidates, values[candidates]


def _logprobs(logits: _Floats, token_ids: Sequence[int], top_n: int) -> list[TokenLogprob]:
    """The report on one token for each row of `logits` `[rows, vocab]`."""
    with np.errstate(invalid="ignore"):
        largest = logits.max(axis=1, keepdims=True)
        shifted = logits - largest
        log_mass = largest[:, 0] + np.log(np.exp(shifted, out=shifted).sum(axis=1))
        chosen = logits[np.arange(len(logits)), np.asarray(token_ids, np.int64)]
        logprobs = (chosen - log_mass).tolist()
    ranks = (np.count_nonzero(logits > chosen[:, None], axis=1) + 1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(logits)
    if top_n:
        tops = [
            tuple(zip(ids[:top_n].tolist(), (values[:top_n] - mass).tolist(), strict=True))
            for mass, (ids, values) in zip(log_mass, _most_likely(logits, top_n * _SAMPLED), strict=True)
        ]
    return [TokenLogprob(*report) for report in zip(token_ids, logprobs, ranks, tops, strict=True)]
