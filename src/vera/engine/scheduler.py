"""Which requests run in the next step, and how many tokens of each.

There is no prefill phase and no decode phase: every running request has known tokens and computed tokens, and a step lets the
second chase the first. A prompt, a decode and a rebuild after a preemption are the same thing with different distances.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from vera.cache import AdaptiveCache, Span
from vera.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one request that a step computes: tokens `start` to `stop` of `request.token_ids`."""

    request: Request
    start: int
    stop: int

    @property
    def reaches_end(self) -> bool:
        """The step gives logits for this request's next token."""
        return self.stop == len(self.request.token_ids)

    @property
    def span(self) -> Span:
        return Span(self.request.id, self.start, self.stop)


class Scheduler:
    """Continuous batching: first come, first served within a priority, under a budget of tokens and of sequences."""

    def __init__(self, cache: AdaptiveCache, *, max_num_seqs: int, max_batch_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = max_batch_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of the requests that were admitted, each counted when it first was."""
        self.num_cached_tokens = 0
        """Those of them that were found in the cache then."""

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.rank)

    def start(self, request: Request) -> None:
        """Lets a request run whose tokens are in the cache already, past the queue."""
        request.status = Status.RUNNING
        insort(self.running, request, key=lambda r: r.rank)

    def remove(self, request: Request, *, discard: bool = False) -> None:
        """Ends a request wherever it is and gives its blocks back; with `discard`, no other request may reuse them."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._cache.release(request.id, discard=discard)
        elif request.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def schedule(self) -> list[Chunk]:
        """The next step's work, by rank. Admits and preempts as needed; every chunk's blocks are there when this returns.

        Requests that need one token come first, so that a long prompt holds up nobody's answer; then prompts, running and
        waiting ones by rank.
        """
        plan = _Plan(self._max_batch_tokens)
        for request in self._running(decoding=True):
            self._continue(request, plan)
        for request in self._running(decoding=False):
            self._admit_waiting(plan, ahead_of=request)
            self._continue(request, plan)
        self._admit_waiting(plan)
        return sorted(plan.chunks.values(), key=lambda chunk: chunk.request.rank)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks; it starts over from what is still cached when its turn comes."""
        self.running.remove(request)
        self._cache.release(request.id)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def check_invariants(self) -> None:
        """Raises AssertionError if queues, requests and cache disagree."""
        self._cache.check_invariants()
        assert len(self.running) <= self._max_num_seqs
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(request.status in (Status.WAITING, Status.PREEMPTED) for request in self.waiting)
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=lambda request: request.rank)
        for request in self.running:
            assert 0 <= request.num_computed < len(request.token_ids)

    def _running(self, *, decoding: bool) -> list[Request]:
        return [request for request in self.running if (request.num_pending == 1) == decoding]

    def _continue(self, request: Request, plan: _Plan) -> None:
        """As many tokens of a running request as the budget allows; none if it was preempted a moment ago."""
        stop = request.num_computed + min(request.num_pending, plan.budget)
        if stop > request.num_computed and request.status is Status.RUNNING and self._make_room(request, stop, plan):
            plan.add(request, stop)

    def _make_room(self, request: Request, num_tokens: int, plan: _Plan) -> bool:
        """Blocks for this running request, preempting the last in rank. False: it was itself the last."""
        while not self._cache.reserve(request.id, num_tokens):
            victim = self.running[-1]
            self._give_way(victim, plan)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, plan: _Plan, *, ahead_of: Request | None = None) -> None:
        """Lets waiting requests run, best first, while there are budget, seats and room."""
        while plan.budget and self.waiting and (ahead_of is None or self.waiting[0].rank < ahead_of.rank):
            request = self.waiting[0]
            if not self._admit(request, plan):
                return
            stop = request.num_computed + min(request.num_pending, plan.budget)
            if not self._make_room(request, stop, plan):
                return
            plan.add(request, stop)

    def _admit(self, request: Request, plan: _Plan) -> bool:
        """Lets the first waiting request run; running requests of a worse priority give way if that is enough."""
        while (cached := self._seat(request)) is None:
            worse = [other for other in self.running if other.priority > request.priority]
            if not worse or not self._would_fit(request, worse):
                return False
            self._give_way(worse[-1], plan)
        self.waiting.remove(request)
        request.num_computed = cached
        if request.num_cached is None:
            request.num_cached = cached
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += cached
        self.start(request)
        return True

    def _seat(self, request: Request) -> int | None:
        if len(self.running) >= self._max_num_seqs:
            return None
        # A block to spare for each running sequence, so that letting one more in does not at once preempt another.
        return self._cache.admit(
            request.id,
            request.token_ids,
            headroom=len(self.running),
            reuse=_may_reuse(request),
            fidelity=request.fidelity,
            tolerance=request.attention_tolerance,
            settings=request.cache_settings,
            use=request.cache_use,
        )

    def _would_fit(self, request: Request, without: list[Request]) -> bool:
        """There would be room if these running requests gave way: nobody loses their work for nothing."""
        ids = [other.id for other in without]
        headroom = len(self.running) - len(without)
        return self._cache.would_fit(
            request.token_ids,
            without=ids,
            headroom=headroom,
            reuse=_may_reuse(request),
            fidelity=request.fidelity,
            settings=request.cache_settings,
        )

    def _give_way(self, request: Request, plan: _Plan) -> None:
        plan.chunks.pop(request.id, None)
        self.preempt(request)


class _Plan:
    """The step that is being put together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.chunks: dict[str, Chunk] = {}

    @property
    def budget(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - sum(chunk.stop - chunk.start for chunk in self.chunks.values())

    def add(self, request: Request, stop: int) -> None:
        """The request's tokens up to `stop`, for which there are blocks; the budget may have grown since that was settled."""
        self.chunks[request.id] = Chunk(request, request.num_computed, stop)


def _may_reuse(request: Request) -> bool:
    """Log-probabilities of the prompt need every position computed."""
    return not request.wants_prompt_logprobs
