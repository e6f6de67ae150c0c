"""The recompute share of a service comes into its band, whether far too much is cold at first or nothing.

A tiny model serves four conversations at a time that come and go; the warm store has room for half of their blocks. The band is
changed while the engine runs, so all of this is what an operator could do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from engines import greedy, prompt_of
from tier_engines import tiered_engine, tiered_model
from vera.engine.engine import Engine

BAND = (0.08, 0.15)
_SEQUENCES = 4
_WINDOW = 100


@dataclass(frozen=True)
class Window:
    """A hundred steps of the trace."""

    recompute_share: float
    cold_share: float
    """Of the units, at the window's end."""


class Service:
    """Requests of 300 tokens and answers of 80, 160 or 240: one that ends is followed by the next."""

    def __init__(self, band: tuple[float, float]) -> None:
        self.engine: Engine = tiered_engine(
            tiered_model(context=1024),
            frames=200,
            warm_blocks=40,
            max_num_seqs=_SEQUENCES,
            max_batch_tokens=512,
            attention_backend="cpu",
            cache={
                "attention_tolerance": 0.02,
                "cold_drop_step": 128,
                "recalibrate_every": 32,
                "recompute_target": band,
                "prefix_reuse": False,
                "poison": False,
            },
        )
        self._running: set[str] = set()
        self._asked = 0

    def run(self, windows: int) -> list[Window]:
        return [self._window() for _ in range(windows)]

    def aim_at(self, band: tuple[float, float]) -> None:
        self.engine.set_cache_settings(replace(self.engine.cache.config, recompute_target=band))

    def _window(self) -> Window:
        before = self.engine.cache.tier_stats.snapshot()
        for _ in range(_WINDOW):
            while len(self._running) < _SEQUENCES:
                self._asked += 1
                answer = greedy(80 * (1 + self._asked % 3))
                self._running.add(self.engine.add_request(prompt_of(300, seed=self._asked), answer))
            ended = {update.request_id for update in self.engine.step() if update.finish_reason}
            self._running -= ended
        done = self.engine.cache.tier_stats.since(before)
        return Window(round(done.rates.recompute_share, 3), round(self.engine.cache.cold_share, 3))


def mean_share(windows: list[Window]) -> float:
    return sum(window.recompute_share for window in windows) / len(windows)


@pytest.mark.parametrize(("first", "too_much"), [((0.6, 1.0), True), ((0.0, 0.001), False)], ids=["too much cold", "none cold"])
def test_recompute_share_comes_into_its_band(first: tuple[float, float], too_much: bool) -> None:
    service = Service(first)
    start = service.run(4)
    if too_much:
        assert start[-1].recompute_share > BAND[1] and start[-1].cold_share > 0.3, start
    else:
        assert start[-1].recompute_share < BAND[0] / 2 and start[-1].cold_share < 0.06, start
    service.aim_at(BAND)
    trace = service.run(12)
    assert BAND[0] <= mean_share(trace[4:]) <= BAND[1], trace
    for half in (trace[4:8], trace[8:]):  # it stays there
        assert 0.75 * BAND[0] < mean_share(half) < 1.25 * BAND[1], trace
    service.engine.check_invariants()
