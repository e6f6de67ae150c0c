"""The kinds of traffic that Vera is meant for, as loads of `vera bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vera.bench.serve.settings import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of traffic. Its adaptive cache has the settings of the starting profile of the same name."""

    name: str
    about: str
    """For people: what is asked, in a few words without numbers."""
    workload: Workload
    quick: Workload
    """The same with less to do."""
    max_concurrency: int | None
    """Requests under way at a time, each followed at once by the next. None: as many as the workload brings."""
    quick_concurrency: int | None
    budget_share: float
    """Where no ceiling is given: of the tokens that are of use at the same time, native has room for this share."""
    goodput: Mapping[str, float]
    """What a good request keeps: limits in milliseconds on `ttft`, `tpot` and `e2el`."""

    def load(self, *, quick: bool, requests: int | None) -> Workload:
        """What is asked; `requests` sets the number of requests, or of conversations."""
        workload = self.quick if quick else self.workload
        if requests is None:
            return workload
        own_prefixes = workload.num_prefixes == workload.num_prompts
        return replace(workload, num_prompts=requests, num_prefixes=requests if own_prefixes else workload.num_prefixes)

    def concurrency(self, *, quick: bool) -> int | None:
        return self.quick_concurrency if quick else self.max_concurrency


_LONG_DOCUMENT = Workload(dataset="text", num_prompts=16, input_len=6400, output_len=256, range_ratio=0.1)
_MULTI_TURN = Workload(
    dataset="multi-turn",
    num_prompts=24,
    num_turns=6,
    prefix_len=1500,  # what each conversation is about: a text of its own, in the first turn
    num_prefixes=24,
    input_len=200,
    output_len=96,
    range_ratio=0.2,
    think_seconds=8.0,
    request_rate=2.0,
)
_SHORT_TEXT = Workload(dataset="random", num_prompts=128, input_len=250, output_len=96, range_ratio=0.6)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="long-document",
            about="a long document each, no two alike",
            workload=_LONG_DOCUMENT,
            quick=replace(_LONG_DOCUMENT, num_prompts=4, input_len=3600, output_len=96),
            max_concurrency=8,
            quick_concurrency=4,
            budget_share=1 / 3,
            goodput={"ttft": 60_000, "tpot": 250},
        ),
        Scenario(
            name="multi-turn",
            about="conversations that grow turn by turn, idle between a turn and the next",
            workload=_MULTI_TURN,
            quick=replace(
                _MULTI_TURN, num_prompts=8, num_turns=4, num_prefixes=8, input_len=250, output_len=32, think_seconds=4.0
            ),
            max_concurrency=None,
            quick_concurrency=None,
            budget_share=1 / 2,  # with a third the sketches of all idle conversations do not fit beside what runs
            goodput={"ttft": 10_000, "tpot": 250},
        ),
        Scenario(
            name="short-text",
            about="short prompts, no two alike",
            workload=_SHORT_TEXT,
            quick=replace(_SHORT_TEXT, num_prompts=24, output_len=48),
            max_concurrency=16,
            quick_concurrency=16,
            budget_share=1 / 3,
            goodput={"ttft": 5_000, "tpot": 250},
        ),
    )
}
"""By name."""
