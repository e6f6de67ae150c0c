"""Shadow answers: some that were served adaptively are computed once more natively, token by token, and compared.

The tokens of the answer are given to a native request as part of its prompt, so one pass over them shows what a native cache
would have thought at each; no answer is generated a second time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from vera.engine.async_engine import Ask
from vera.engine.request import FinishReason, Update
from vera.engine.sampler import TokenLogprob
from vera.errors import VeraError
from vera.rollout import Choice, Shadow, position
from vera.sampling_params import MAX_LOGPROBS, SamplingParams

_log = logging.getLogger(__name__)

_SALT = "shadow"
_WAITING = 8
"""Answers that wait for their replay; more are left out, since a replay takes as long as reading its prompt."""
_LAST = 2**31
"""The priority of a replay: all others first."""
_TIMEOUT_SECONDS = 600.0

Run = Callable[[Sequence[Ask]], AsyncGenerator[list[tuple[int, Update]], None]]
"""`AsyncEngine.answers`."""


@dataclass(slots=True)
class Witness:
    """What is kept of one answer for its replay."""

    choice: Choice
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, update: Update) -> None:
        self.tokens += update.new_token_ids
        self.logprobs += update.logprobs


class Shadows:
    """Chooses answers, replays them one after the other, and tells `observe`. Belongs to the event loop."""

    def __init__(self, share: float, observe: Callable[[Choice, Shadow], None]) -> None:
        """`share` of the requests are looked at."""
        self.share = share
        self.num_replayed = 0
        self.num_left_out = 0
        """Answers that were chosen, and came while too many waited, or could not be computed again."""
        self._observe = observe
        self._waiting: deque[Witness] = deque()
        self._come = asyncio.Event()

    def wants(self, request_id: str) -> bool:
        return position(_SALT, request_id) < self.share

    def watched(self, params: SamplingParams) -> SamplingParams:
        """The same answer, with the log-probabilities that a comparison needs."""
        return replace(params, logprobs=MAX_LOGPROBS)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, witness: Witness) -> None:
        """An answer has ended well. Those of one token show nothing."""
        if len(witness.tokens) < 2 or len(witness.logprobs) != len(witness.tokens):
            return
        if len(self._waiting) >= _WAITING:
            self.num_left_out += 1
            return
        self._waiting.append(witness)
        self._come.set()

    async def run(self, answers: Run, fidelity_of: Callable[[int], str]) -> None:
        """Replays what comes, until it is cancelled. What cannot be replayed is counted and told in the log. `fidelity_of` gives
        that of a native replay by its number of tokens."""
        while True:
            await self._come.wait()
            while self._waiting:
                witness = self._waiting.popleft()
                try:
                    fidelity = fidelity_of(len(witness.prompt) + len(witness.tokens))
                    shadow = await replay(witness, answers, fidelity)
                except VeraError as error:
                    _log.info("a shadow answer could not be computed", extra={"fields": {"error": str(error)}})
                    self.num_left_out += 1
                    continue
                except Exception:
                    _log.exception("a shadow answer failed")
                    self.num_left_out += 1
                    continue
                self.num_replayed += 1
                self._observe(witness.choice, shadow)
            self._come.clear()


async def replay(witness: Witness, answers: Run, fidelity: str = "native") -> Shadow:
    """`fidelity`: native, or exact, whose answers are the same, where native has no room. Raises what the engine raises, and
    VeraError if it gave the replay up.
    """
    prompt = [*witness.prompt, *witness.tokens]
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        seed=0,  # the engine's own seeds are for answers
        prompt_logprobs=MAX_LOGPROBS,
        prompt_logprobs_from=len(witness.prompt),
    )
    # Without its last token the replay is never longer than the answer was.
    ask = Ask(prompt[:-1], params, _LAST, _TIMEOUT_SECONDS, fidelity)
    native: list[TokenLogprob | None] = []
    async with aclosing(answers([ask])) as batches:
        async for batch in batches:
            for _, update in batch:
                native = update.prompt_logprobs or native
                if update.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.ABORT):
                    raise VeraError(update.error or f"the replay ended by {update.finish_reason.value}")
    pairs = zip(native[len(witness.prompt) :], witness.logprobs, strict=False)
    return compare([(theirs, ours) for theirs, ours in pairs if theirs is not None])


def compare(pairs: Sequence[tuple[TokenLogprob, TokenLogprob]]) -> Shadow:
    """Of each token what native and what the served cache reported."""
    return Shadow(
        tokens=len(pairs),
        kl_sum=math.fsum(divergence(native, served) for native, served in pairs),
        agreed=sum(_likeliest(native) == _likeliest(served) for native, served in pairs),
    )


def divergence(native: TokenLogprob, served: TokenLogprob) -> float:
    """Kullback-Leibler divergence of the served distribution from native, in nats, over the tokens that both report, with all
    others as one. Never above the full divergence (data processing inequality), and near it where the reported ones have nearly
    all of the mass. A value that is not finite counts as infinite.
    """
    ours = dict(served.top) | {served.token_id: served.logprob}
    theirs = dict(native.top) | {native.token_id: native.logprob}
    shared = [(math.exp(theirs[token]), math.exp(ours[token])) for token in theirs if token in ours]
    rest = (1 - sum(p for p, _ in shared), 1 - sum(q for _, q in shared))
    total = sum(_term(p, q) for p, q in shared) + _term(*(max(share, _LEAST) for share in rest))
    return max(0.0, total) if math.isfinite(total) else math.inf


_LEAST = 1e-6
"""What float32 logits leave of a sum's last digits."""


def _term(p: float, q: float) -> float:
    if p == 0:
        return 0.0
    return p * math.log(p / q) if q > 0 else math.inf


def _likeliest(token: TokenLogprob) -> int:
    return token.top[0][0] if token.top else token.token_id
