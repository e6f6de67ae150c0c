"""The engine behind asyncio: streams, cancellation, health, the end."""

import asyncio
import threading
import time

import pytest

from engines import greedy, make_engine, prompt_of, reference_tokens, tokens_of
from vera.engine.async_engine import Ask, AsyncEngine
from vera.errors import CapacityError, EngineStopped, RequestError


def run(scenario, **config):
    """Runs `scenario(engine)` with a started AsyncEngine and closes it."""

    async def main():
        engine = AsyncEngine(make_engine(**config))
        engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), timeout=60)
        finally:
            await engine.close()

    return asyncio.run(main())


async def collect(engine, prompt, params):
    return [update async for update in engine.stream(prompt, params)]


async def until_idle(engine):
    """The figures once nothing runs or waits any more: running, waiting, bytes in use, aborts."""
    for _ in range(1000):
        figures = await engine.inspect(
            lambda inner: (inner.num_running, inner.num_waiting, inner.cache.used_bytes, inner.stats.finished["abort"])
        )
        if figures[:2] == (0, 0):
            return figures
        await asyncio.sleep(0.005)
    raise AssertionError(f"still busy: {figures}")


def test_streams_run_together_and_answer_rightly():
    async def scenario(engine):
        prompts = [prompt_of(5 + 7 * seed, seed) for seed in range(8)]
        answers = await asyncio.gather(*(collect(engine, prompt, greedy(10)) for prompt in prompts))
        for prompt, updates in zip(prompts, answers, strict=True):
            assert tokens_of(updates) == reference_tokens(prompt, 10)
            assert [update.finished for update in updates] == [False] * 9 + [True]

    run(scenario)


@pytest.mark.parametrize("updates_read", [0, 1, 5])
def test_leaving_a_stream_frees_everything(updates_read):
    async def scenario(engine):
        stream = engine.stream(prompt_of(30), greedy(1000))
        for _ in range(updates_read):
            await anext(stream)
        await stream.aclose()
        assert await until_idle(engine) == (0, 0, 0, 1 if updates_read else 0)

    run(scenario, blocks=200)


def test_cancelled_task_frees_everything_wherever_it_is():
    async def scenario(engine):
        for delay in (0, 0.0005, 0.002, 0.01, 0.03):
            tasks = [asyncio.create_task(collect(engine, prompt_of(60, seed), greedy(500))) for seed in range(6)]
            await asyncio.sleep(delay)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (await until_idle(engine))[:3] == (0, 0, 0)
            assert not engine._answers

    run(scenario, blocks=200, max_num_seqs=3)


def test_an_id_can_be_used_again_at_once_after_a_disconnect():
    async def scenario(engine):
        first = engine.stream(prompt_of(30), greedy(500), request_id="mine")
        await anext(first)
        await first.aclose()
        second = [update async for update in engine.stream(prompt_of(9), greedy(10), request_id="mine")]
        assert tokens_of(second) == reference_tokens(prompt_of(9), 10)
        assert {update.request_id for update in second} == {"mine"}

    run(scenario, blocks=200)


def test_an_id_that_is_being_answered_is_refused():
    async def scenario(engine):
        first = engine.stream(prompt_of(30), greedy(500), request_id="mine")
        await anext(first)
        with pytest.raises(RequestError, match="'mine'"):
            await anext(engine.stream(prompt_of(9), greedy(10), request_id="mine"))
        await first.aclose()

    run(scenario, blocks=200)


def test_closing_engine_takes_no_new_requests():
    async def scenario(engine):
        open_stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(60)))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(engine.close(drain_seconds=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="closing"):
            await collect(engine, prompt_of(5), greedy(1))
        await closing
        assert len(tokens_of(await open_stream)) == 60

    run(scenario)


def test_close_that_is_cancelled_while_it_waits_ends_the_engine_at_once():
    async def scenario(engine):
        stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(1000)))
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(engine.close(drain_seconds=50))
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(EngineStopped):
            await stream

    run(scenario, blocks=200)


def test_stream_before_start_says_so():
    async def main():
        engine = AsyncEngine(make_engine())
        with pytest.raises(EngineStopped, match="not started"):
            await collect(engine, prompt_of(5), greedy(1))
        await engine.close()

    asyncio.run(main())


def test_normal_requests_are_never_aborted():
    async def scenario(engine):
        await asyncio.gather(*(collect(engine, prompt_of(5, seed), greedy(3)) for seed in range(100)))
        assert (await until_idle(engine))[3] == 0

    run(scenario)


def test_refused_request_raises_and_the_others_go_on():
    async def scenario(engine):
        other = asyncio.create_task(collect(engine, prompt_of(5), greedy(20)))
        with pytest.raises(RequestError, match="no tokens"):
            await collect(engine, (), greedy(1))
        assert tokens_of(await other) == reference_tokens(prompt_of(5), 20)

    run(scenario)


def test_hung_loop_is_not_alive_and_recovers():
    async def scenario(engine):
        gate = threading.Event()
        hang = asyncio.create_task(engine.inspect(lambda _: gate.wait(20)))
        await asyncio.sleep(0.2)
        assert not engine.is_alive(longest_step_seconds=0.1)
        assert engine.is_alive(longest_step_seconds=60)
        gate.set()
        await hang
        await asyncio.sleep(0.05)
        assert engine.is_alive(longest_step_seconds=1.5)

    run(scenario)


def test_idle_loop_stays_alive():
    async def scenario(engine):
        await asyncio.sleep(1.3)
        assert engine.is_alive(longest_step_seconds=0.2)

    run(scenario)


def test_dead_loop_ends_every_stream_with_an_error():
    async def scenario(engine):
        def die(_):
            raise SystemExit("the loop is to die")

        stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(1000)))
        await asyncio.sleep(0.05)
        engine._inbox.append((lambda: die(None), __import__("concurrent.futures").futures.Future()))
        with pytest.raises(EngineStopped, match="ended"):
            await stream
        assert not engine.is_alive()
        with pytest.raises(EngineStopped):
            await collect(engine, prompt_of(5), greedy(1))

    run(scenario, blocks=200)


def test_close_ends_open_streams_and_the_thread():
    async def scenario(engine):
        stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(1000)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineStopped, match="closed"):
            await stream
        assert not engine._thread.is_alive()

    run(scenario, blocks=200)


def test_close_lets_answers_finish_while_there_is_time():
    async def scenario(engine):
        stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(30)))
        await asyncio.sleep(0.01)
        await engine.close(drain_seconds=20)
        assert tokens_of(await stream) == reference_tokens(prompt_of(5), 30)

    run(scenario)


def test_loop_that_hangs_is_given_up_and_its_streams_end():
    async def scenario(engine):
        stream = asyncio.create_task(collect(engine, prompt_of(5), greedy(1000)))
        await asyncio.sleep(0.05)
        gate = threading.Event()
        engine._post(lambda: gate.wait(20))
        await asyncio.sleep(0.05)
        await engine.close(join_seconds=0.1)
        with pytest.raises(EngineStopped, match="hangs"):
            await stream
        assert engine.is_running
        gate.set()

    run(scenario, blocks=200)


def test_several_answers_come_to_one_reader():
    async def scenario(engine):
        asks = [Ask(prompt_of(5 + seed, seed), greedy(6 + seed)) for seed in range(4)]
        tokens = {index: [] for index in range(4)}
        async for batch in engine.answers(asks):
            for index, update in batch:
                tokens[index] += update.new_token_ids
        assert tokens == {seed: reference_tokens(prompt_of(5 + seed, seed), 6 + seed) for seed in range(4)}
        assert not engine._answers

    run(scenario)


@pytest.mark.parametrize("wrong", [Ask((), greedy(1)), Ask(prompt_of(5), greedy(10**6)), Ask(prompt_of(5), fidelity="exakt")])
def test_answers_are_added_all_or_none(wrong):
    async def scenario(engine):
        with pytest.raises(RequestError):
            await anext(engine.answers([Ask(prompt_of(5), greedy(100)), wrong]))
        assert (await until_idle(engine))[:3] == (0, 0, 0)

    run(scenario)


def test_more_answers_than_may_wait_are_refused_together():
    async def scenario(engine):
        with pytest.raises(CapacityError, match="3 more"):
            await anext(engine.answers([Ask(prompt_of(5), greedy(100))] * 3))
        assert await until_idle(engine) == (0, 0, 0, 0)

    run(scenario, max_waiting=2)


def test_close_before_start_is_harmless():
    asyncio.run(AsyncEngine(make_engine()).close())


def test_a_forgotten_engine_does_not_keep_the_interpreter():
    async def main():
        engine = AsyncEngine(make_engine())
        engine.start()
        assert engine._thread.daemon
        await engine.close()

    start = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - start < 10


# -- an adaptive cache -------------------------------------------------------------------------------------------------

TIERED = {"cache": {"mode": "adaptive", "min_context": 64, "warm_store": "ram"}, "attention_backend": "reference", "blocks": 400}


def test_stream_takes_fidelity_and_tolerance():
    async def scenario(engine):
        for asked in ({"fidelity": "exact"}, {"fidelity": "native"}, {"attention_tolerance": 0.0}):
            updates = [update async for update in engine.stream(prompt_of(200), greedy(10), **asked)]
            assert tokens_of(updates) == reference_tokens(prompt_of(200), 10)
        with pytest.raises(RequestError, match="'exakt'"):
            await anext(engine.stream(prompt_of(200), greedy(10), fidelity="exakt"))

    run(scenario, **TIERED)


@pytest.mark.parametrize("name", ["mine", None])
def test_fidelity_of_an_open_stream_can_be_changed(name):
    async def scenario(engine):
        stream = engine.stream(prompt_of(200), greedy(300), request_id=name)
        first = await anext(stream)
        await engine.set_fidelity(first.request_id, "exact")
        updates = [first] + [update async for update in stream]
        assert len(tokens_of(updates)) == 300
        assert 0 <= updates[-1].cache_use.decode_steps < 200
        with pytest.raises(RequestError, match=f"{first.request_id!r}"):
            await engine.set_fidelity(first.request_id, "exact")

    run(scenario, **TIERED)


def test_fidelity_that_cannot_be_given_is_refused_and_the_stream_goes_on():
    async def scenario(engine):
        stream = engine.stream(prompt_of(5), greedy(50), request_id="mine")
        first = await anext(stream)
        with pytest.raises(RequestError, match="adaptive"):
            await engine.set_fidelity("mine", "exact")
        assert tokens_of([first] + [update async for update in stream]) == reference_tokens(prompt_of(5), 50)

    run(scenario)
