"""`vera inspect`: what is recorded of a run, and how it is drawn."""

import io
import json
from dataclasses import replace
from functools import cache as memoised

import numpy as np
import pytest
from rich.console import Console

from engines import loaded, prompt_of, reference_tokens
from tiny_models import tiny_tokenizer
from vera import LLM, SamplingParams, inspection
from vera.config import CacheConfig
from vera.errors import ConfigError, RequestTooLong, VeraError
from vera.inspection import check_picture, draw, inspect_cache, save_picture
from vera.inspection.terminal import error_histogram, sparkline

TIERED = {"mode": "adaptive", "page_dtype": "float32", "min_context": 64, "page_size": 16, "warm_store": "ram"}


def inspected(length=200, tokens=30, **settings):
    return inspect_cache(
        loaded(),
        prompt_of(length),
        tokens=tokens,
        cache=CacheConfig(**{**TIERED, "cache_max_bytes": 2**24, **settings}),
        attention_backend="reference",
    )


@memoised
def long_run():
    return inspected()


def drawn(run, *, width=80, colours=False):
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
        legacy_windows=False,
    )
    draw(run, console)
    return console.file.getvalue()


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_every_page_is_in_one_tier_and_some_left_fast_memory():
    run = long_run()
    assert run.tiers.shape == run.heat.shape == (15, 4, 2)  # 200 + 29 tokens in the cache, in blocks of 16
    assert sum(run.pages.values()) == run.tiers.size
    assert run.pages["warm"] > 0
    assert run.why_untiered is None
    assert (run.tiers[[0, -1]] == inspection.recorder.HOT).all()
    assert (run.heat >= 0).all() and (run.heat <= 1).all()


def test_answer_is_the_models_own():
    tokens = reference_tokens(prompt_of(200), 30)
    assert inspected(attention_tolerance=0.0).text == tiny_tokenizer().decode(tokens, skip_special_tokens=True)


def test_each_decode_step_is_recorded_with_its_hits_and_errors():
    settings = {**TIERED, "cache_max_bytes": 2**24, "attention_tolerance": 0.005}
    run = inspected(attention_tolerance=0.005)
    with LLM(loaded(), cache=settings, attention_backend="reference") as llm:
        stream = llm.stream(list(prompt_of(200)), SamplingParams(max_tokens=50, ignore_eos=True))
        for _ in range(30):
            next(stream)
        use = llm.engine.cache.use(stream.request_id)
        assert len(run.steps) == use.decode_steps == 29
        assert sum(step.hits for step in run.steps) == use.hits > 0
        assert np.mean([step.error for step in run.steps]) == pytest.approx(use.error_mean)
        assert run.error_max == use.error_max
        assert run.rates.hits_per_step == use.hits / 29


def test_a_layer_of_each_step_is_audited():
    run = long_run()
    estimated, true = run.errors_over_tolerance()
    assert len(estimated) == len(true) == len(run.audits) == len(run.steps)
    assert (true > 0).all()


def test_bytes_are_told_by_what_they_are_for():
    memory = long_run().memory
    assert memory.sketches > 0 and memory.warm > 0 and memory.tables > 0
    assert memory.exact_blocks + memory.hot_pages + memory.sketches + memory.tables <= memory.fast
    assert memory.native == 15 * 2 * 16 * 16 * 4 * 4 * 2


def test_cold_pages_and_recomputes_are_seen():
    run = inspected(length=400, warm_bytes=390_000, cold_drop_step=1, attention_tolerance=0.002, recompute_layer_limit=2)
    assert run.pages["cold"] > 0
    assert any(step.recomputed for step in run.steps)
    assert run.memory.checkpoints > 0
    assert any(line.count("o") > 3 for line in drawn(run).splitlines())


def test_run_whose_layers_all_have_cold_pages_has_no_true_errors_and_says_so():
    run = replace(long_run(), audits=())
    assert "the true ones are unknown" in drawn(run)
    assert "estimated over all layers" in drawn(run)


def test_longest_sequence_that_is_served_can_be_inspected_and_one_token_more_is_refused():
    model = loaded(max_position_embeddings=96)
    settings = CacheConfig(**{**TIERED, "cache_max_bytes": 2**24})
    run = inspect_cache(model, prompt_of(90), tokens=6, cache=settings, attention_backend="reference")
    assert run.answer_tokens == 6
    with pytest.raises(RequestTooLong, match="90 tokens plus 7"):
        inspect_cache(model, prompt_of(90), tokens=7, cache=settings, attention_backend="reference")


def test_ceiling_is_no_larger_than_what_is_to_be_seen():
    run = inspected(cache_max_bytes=2**30)
    assert run.memory.tables < run.memory.native


def test_progress_reaches_the_end():
    seen = []
    inspect_cache(
        loaded(), prompt_of(700), tokens=3, cache=CacheConfig(**TIERED), attention_backend="reference", progress=seen.append
    )
    assert seen[0] == 512 and seen[-1] == 702


def test_native_cache_has_nothing_to_inspect():
    with pytest.raises(ConfigError, match="'native' has no tiers"):
        inspect_cache(loaded(), prompt_of(9), tokens=1, cache=CacheConfig())


def test_json_has_the_promised_keys_and_no_nan():
    written = json.loads(json.dumps(long_run().to_dict(), allow_nan=False))
    assert set(written) == {
        "model", "context", "tokens", "text", "fidelity", "attention_tolerance", "page_size", "blocks", "layers", "kv_heads",
        "why_untiered", "pages", "bytes", "hits", "recomputed", "uncovered_hits", "rates", "errors", "error_max",
        "audits", "hot_share_map", "cold_share_map", "heat_map",
    }  # fmt: skip
    assert np.shape(written["heat_map"]) == np.shape(written["hot_share_map"]) == (4, 15)


# -- nothing tiered ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"length": 40, "tokens": 5}, "45 tokens are not above min_context=64"),
        ({"length": 1, "tokens": 1}, "2 tokens are not above min_context=64"),
        ({"length": 40, "tokens": 5, "min_context": 0}, "its 3 blocks of 16 tokens are the first, the latest and the open one"),
        ({"fidelity": "native"}, "the fidelity is native"),
        ({"fidelity": "exact", "warm_store": "none"}, "no room where it could wait warm"),
        ({"fidelity": "exact", "warm_bytes": 0}, "no room where it could wait warm"),
    ],
)
def test_run_that_tiers_nothing_is_drawn_and_says_why(settings, why):
    run = inspected(**settings)
    assert why in run.why_untiered
    assert run.pages["warm"] == run.pages["cold"] == 0
    for colours in (False, True):
        text = " ".join(drawn(run, width=500, colours=colours).split())
        assert why in text
        assert "none: no step read a sketch" in text


def test_exact_run_says_that_nothing_is_estimated():
    run = inspected(fidelity="exact")
    assert run.pages["warm"] > 0
    assert drawn(run).count("none: the fidelity is exact") == 2


def test_tolerance_of_zero_is_drawn_without_a_histogram():
    run = inspected(attention_tolerance=0.0)
    assert sum(step.hits for step in run.steps) > 0
    assert "none: the tolerance is 0" in drawn(run)
    json.dumps(run.to_dict(), allow_nan=False)


# -- how it is drawn ---------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_are_no_escape_codes_and_a_line_for_each_layer():
    text = drawn(long_run())
    assert "\x1b" not in text
    assert "▀" not in text
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("tiers")) + 1
    tiers = [line[6:] for line in lines[first : first + 4]]
    assert [line[:5].strip() for line in lines[first : first + 4]] == ["0", "1", "2", "3"]
    assert all(row.startswith("███") and row.endswith("██████") and "·" in row for row in tiers)  # three columns a block


def test_on_a_terminal_two_layers_share_a_line_in_colours():
    text = drawn(long_run(), colours=True)
    assert "\x1b[38;2;" in text
    assert "▀" in text
    assert "░" not in text


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = drawn(long_run(), colours=True)
    assert "38;2;" not in text
    assert "▀" not in text


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("width", [40, 80, 133])
@pytest.mark.parametrize("blocks", [1, 24, 25, 500])
def test_maps_fit_the_width(blocks, width, colours):
    random = np.random.default_rng(0)
    run = replace(
        long_run(),
        tiers=random.integers(0, 3, (blocks, 5, 2)).astype(np.int8),
        heat=random.random((blocks, 5, 2), dtype=np.float32),
        steps=long_run().steps * 10,
    )
    console = Console(width=width)
    lines = drawn(run, width=width, colours=colours).splitlines()
    assert max(console.render_str(line).cell_len if not colours else 0 for line in lines) <= width
    if colours:
        assert all(line.count("▀") <= width - 6 for line in lines)


def test_sparkline_shows_every_peak():
    assert sparkline([], 10) == ""
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([0, 1, 100], 10) == "▁▂█"
    crowded = sparkline([0] * 500 + [7] + [0] * 499, 50)
    assert len(crowded) == 50
    assert crowded.count("█") == 1


def test_error_histogram_has_a_bin_for_what_is_above():
    counts = error_histogram([0.0, 0.05, 0.95, 1.0, 7.0])
    assert counts == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]


# -- the picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"length": 1, "tokens": 1}, {"fidelity": "exact"}])
def test_picture_is_a_png(tmp_path, settings):
    path = tmp_path / "tiers.png"
    save_picture(inspected(**settings), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_told_with_the_line_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr(inspection.picture, "find_spec", lambda name: None)
    with pytest.raises(VeraError, match=r"pip install 'vera-engine\[plots\]'"):
        check_picture(tmp_path / "tiers.png")


@pytest.mark.parametrize(("name", "message"), [("nowhere/tiers.png", "no folder"), ("tiers.jpg", "does not end with .png")])
def test_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        check_picture(tmp_path / name)
