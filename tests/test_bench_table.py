"""`vera bench table`: the plan, the time, the arithmetic, the page, and whole tables of a tiny model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench.table import PARTS, TableBench, quick
from vera.bench.table.figures import Done, exponent, line_through, policy_cost_of, ratio_spread_of, ratios_of, rows_of
from vera.bench.table.plan import ADAPTIVE, FP8, NATIVE, REFERENCE, Step, plan, seconds_of
from vera.bench.table.plots import check_plots
from vera.bench.table.readme import BEGIN, END, readme_table, with_table
from vera.bench.table.report import render_table
from vera.bench.table.results import DATA, PAGE, read_document, results_page, write_results
from vera.bench.table.run import run_table
from vera.cli import app
from vera.errors import ConfigError, ModelNotFound, VeraError

ROOT = Path(__file__).parent.parent
_AGREED = {
    "cache", "batch", "context", "cache_bytes", "process_bytes", "itl_ms_mean", "itl_ms_p99", "ttft_ms", "decode_tokens_per_s",
    "recompute_share", "kl_mean", "top1_agreement",
}  # fmt: skip
_RATIOS = {"process_bytes", "itl_mean", "itl_p99", "throughput", "sequences_at_equal_memory"}
_SHAPE = {"layers": 4, "kv_heads": 2, "head_dim": 16, "hidden_size": 64, "windowed_layers": ()}
SMALL = {"min_context": 256, "page_size": 16, "warm_store": "ram", "recalibrate_every": 4}


# -- a machine made up: known figures, and a clock that runs as told ----------------------------------------------------


class Machine:
    """Takes the place of processes. Steps last `native_ms` and `adaptive_ms`, every run `run_seconds`."""

    def __init__(self, *, run_seconds: float = 10.0, native_ms: float = 100.0, adaptive_ms: float = 50.0) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.failing: set[str] = set()
        self._run_seconds = run_seconds
        self._ms = {"native": native_ms, "adaptive": adaptive_ms}

    def clock(self) -> float:
        return self.now

    def run_job(self, call: str, arguments: dict[str, Any], *, timeout_seconds: float, **_: Any) -> dict[str, Any]:
        name = call.partition(":")[2]
        if name == "prepare" and "num_tokens" in arguments:
            tokens = list(range(arguments["num_tokens"]))
            return {"token_ids": tokens, "model_name": "made up", "max_context": 8192, "has_chat": True, "shape": _SHAPE}
        self.now += min(self._run_seconds, timeout_seconds)
        cache = arguments["cache"]["mode"] if "cache" in arguments else "text"
        self.ran.append(f"{name} {cache}")
        if self._run_seconds > timeout_seconds:
            return {"failed": "took too long"}
        if f"{name} {cache}" in self.failing:
            return {"failed": "it broke"}
        if name in ("prepare", "force"):
            return {"failed": "no logits here"}
        ms = self._ms[cache]
        sequences = {"native": arguments.get("native_sequences", 0), "adaptive": 20}[cache]
        batch = arguments.get("batch", sequences)
        return {
            "steps": arguments["new_tokens"] - 1,
            "cache_bytes": 1000.0 if cache == "native" else 400.0,
            "process_bytes": 9000,
            "serving_bytes": 3000 if cache == "native" else 1500,
            "itl_ms_mean": ms,
            "itl_ms_p99": 2 * ms,
            "ttft_ms": 5000.0,
            "decode_tokens_per_s": batch * 1e3 / ms,
            **({"sequences": sequences} if name == "capacity" else {}),
        }

    def table(self, bench: TableBench) -> dict[str, Any]:
        return run_table(bench, run_job=self.run_job, clock=self.clock, command="vera bench table")


def headline(**settings: Any) -> TableBench:
    return TableBench(**{"parts": ("headline",), "batches": (4,), "contexts": (500,), "new_tokens": 5, "repeats": 1, **settings})


def test_ratios_are_adaptive_by_native() -> None:
    document = Machine(native_ms=100, adaptive_ms=50).table(headline(parts=("headline", "equal memory")))
    assert document["ratios"] == {
        "process_bytes": 0.5,  # 1500 / 3000
        "cache_bytes": 0.4,
        "itl_mean": 0.5,
        "itl_p99": 0.5,
        "throughput": 2.0,
        "sequences_at_equal_memory": 5.0,  # 20 / 4
        "throughput_at_equal_memory": 10.0,  # 20 / 0.05 s by 4 / 0.1 s
    }


def test_queries_are_answers_a_second_and_good_ones_keep_both_limits() -> None:
    bench = headline(slo_itl_ms=60.0)
    native, adaptive = Machine(native_ms=100, adaptive_ms=50).table(bench)["rows"]
    assert native["qps"] == pytest.approx(10.0)  # 4 answers of 4 steps of 0.1 s
    assert native["goodput"] == 0.0  # measured, and none was good
    assert adaptive["goodput"] == adaptive["qps"] == pytest.approx(20.0)
    late = Machine().table(headline(slo_itl_ms=60.0, slo_ttft_ms=4999.0))["rows"][1]
    assert late["goodput"] == 0.0


def test_caches_take_turns() -> None:
    machine = Machine()
    machine.table(headline(repeats=3))
    assert machine.ran == ["decode native", "decode adaptive"] * 3


def test_what_was_not_measured_is_none() -> None:
    rows = Machine().table(headline())["rows"]
    assert [row["kl_mean"] for row in rows] == [None, None]
    assert rows[0]["recompute_share"] is None
    document = Machine().table(headline())
    assert document["ratios"]["sequences_at_equal_memory"] is None


def test_failed_run_is_a_row_without_figures_and_the_rest_goes_on() -> None:
    machine = Machine()
    machine.failing.add("decode adaptive")
    document = machine.table(headline(parts=("headline", "equal memory")))
    failed = document["rows"][1]
    assert failed["failed"] == "it broke" and failed["itl_ms_mean"] is None
    assert document["ratios"]["throughput"] is None
    assert document["ratios"]["sequences_at_equal_memory"] == 5.0


# -- the time ----------------------------------------------------------------------------------------------------------


def test_budget_is_kept_and_what_did_not_fit_is_named() -> None:
    machine = Machine(run_seconds=50.0)
    document = machine.table(headline(budget_minutes=10.0, repeats=10))
    # Of 600 seconds 24 are kept for the end; a twelfth run would not fit into the others.
    assert (machine.now, len(machine.ran), len(document["left_out"])) == (550.0, 11, 9)
    assert {left["why"] for left in document["left_out"]} == {"no time was left"}
    assert [row["repeats"] for row in document["rows"]] == [6, 5]


def test_run_that_would_go_beyond_the_budget_is_stopped() -> None:
    machine = Machine(run_seconds=50.0)
    document = machine.table(headline(budget_minutes=1.0))
    assert machine.now == pytest.approx(57.6)
    assert document["rows"][1]["failed"] == "took too long"


def test_headline_is_tried_however_slow_the_machine() -> None:
    machine = Machine(run_seconds=50.0)
    document = machine.table(headline(budget_minutes=1.0, repeats=3))
    assert machine.ran == ["decode native", "decode adaptive"]
    assert [left["what"] for left in document["left_out"]] == [
        f"headline: {cache}, 4 x 500 + 5 tokens, round {turn}" for turn in (2, 3) for cache in ("native", "adaptive")
    ]


def test_drift_without_its_reference_is_left_out_with_that_reason() -> None:
    document = Machine().table(headline(parts=("headline", "drift"), contexts=(3000,), drift_texts=("prose",)))
    assert [left["why"] for left in document["left_out"]] == ["its reference was not measured"] * 2
    assert document["drift"][0]["failed"] == "no logits here"


@pytest.mark.parametrize(("bench", "minutes"), [(TableBench(), 60), (TableBench(**quick()), 10)])
def test_whole_plan_of_the_embedded_model_fits_its_time(bench: TableBench, minutes: float) -> None:
    steps = plan(bench, max_context=8192)
    assert bench.budget_minutes == minutes
    assert sum(map(seconds_of, steps)) < 60 * minutes
    assert {step.part for step in steps} == set(bench.parts)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_most_valuable_runs_come_first() -> None:
    parts = list(dict.fromkeys(step.part for step in plan(TableBench(), max_context=8192)))
    assert parts == list(PARTS)


def test_sweep_has_every_batch_and_context_but_not_the_headline_twice() -> None:
    bench = TableBench(parts=("sweep",), batches=(1, 4), contexts=(500, 900), new_tokens=8, sweep_tokens=8)
    places = [(step.batch, step.context) for step in plan(bench, max_context=8192) if step.part == "sweep"]
    assert places == [(4, 500)] * 2 + [(1, 900)] * 2 + [(1, 500)] * 2
    longer = TableBench(parts=("sweep",), batches=(1, 4), contexts=(500, 900), new_tokens=9, sweep_tokens=8)
    assert len([step for step in plan(longer, max_context=8192) if step.part == "sweep"]) == 8


def test_drift_is_measured_within_the_models_context_only() -> None:
    bench = TableBench(parts=("drift",), contexts=(4000,), drift_tokens=100)
    assert any(step.kind == "drift" for step in plan(bench, max_context=4101))
    assert not any(step.kind == "drift" for step in plan(bench, max_context=4100))


def test_chat_is_left_out_for_a_model_without_a_chat_template() -> None:
    texts = {step.text for step in plan(TableBench(), max_context=8192, has_chat=False)}
    assert texts == {"", "prose", "code"}


def test_row_beyond_the_models_context_is_timing_only() -> None:
    document = Machine().table(headline(contexts=(8188,), new_tokens=5))
    assert [row["timing_only"] for row in document["rows"]] == [True, True]
    assert not any(row["timing_only"] for row in Machine().table(headline(contexts=(8186,), new_tokens=5))["rows"])


def test_adaptive_row_within_min_context_says_that_it_is_native() -> None:
    native, adaptive = Machine().table(headline(contexts=(2043,), new_tokens=5))["rows"]
    assert (native["native_by_min_context"], adaptive["native_by_min_context"]) == (False, True)
    assert not Machine().table(headline(contexts=(2044,), new_tokens=5))["rows"][1]["native_by_min_context"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batches": ()}, "batches"),
        ({"batches": (4, 4)}, "names one twice"),
        ({"contexts": (0,)}, "from 1 up"),
        ({"new_tokens": 1}, "new_tokens=1 must be a whole number from 2 up"),
        ({"budget_minutes": 0}, "budget_minutes"),
        ({"slo_itl_ms": float("inf")}, "slo_itl_ms"),
        ({"parts": ("headlines",)}, "unknown part 'headlines'; known are headline"),
        ({"cold_shares": (1.5,)}, "cold_shares: 1.5"),
        ({"tolerances": (2.0,)}, "attention_tolerance=2.0"),
        ({"drift_texts": ("nowhere.txt",)}, "nowhere.txt"),
        ({"adaptive": {"tolerance": 1}}, "unknown setting tolerance"),
    ],
)
def test_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableBench(**settings)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def run_of(variant: Any, turn: int, **outcome: Any) -> Done:
    step = Step(part="headline", kind="decode", variant=variant, context=500, new_tokens=5, batch=2, round=turn)
    usual = {"steps": 4, "cache_bytes": 10.0, "process_bytes": 9, "serving_bytes": 8, "itl_ms_p99": 1.0, "ttft_ms": 1.0}
    return Done(step, usual | {"decode_tokens_per_s": 2e3 / outcome["itl_ms_mean"]} | outcome)


def test_rounds_give_medians_with_their_least_and_largest_and_pairs_give_ratios() -> None:
    done = [
        run_of(NATIVE, 0, itl_ms_mean=100.0), run_of(ADAPTIVE, 0, itl_ms_mean=50.0),
        run_of(NATIVE, 1, itl_ms_mean=200.0), run_of(ADAPTIVE, 1, itl_ms_mean=80.0),
        run_of(NATIVE, 2, itl_ms_mean=120.0), run_of(ADAPTIVE, 2, itl_ms_mean=90.0),
    ]  # fmt: skip
    rows = rows_of(headline(repeats=3), done, max_context=8192)
    assert (rows[0]["itl_ms_mean"], rows[0]["spread"]["itl_ms_mean"], rows[0]["repeats"]) == (120.0, [100.0, 200.0], 3)
    assert ratios_of(rows)["itl_mean"] == pytest.approx(80 / 120)
    assert ratio_spread_of(done)["itl_mean"] == [0.4, 0.75]  # 80 / 200, 90 / 120


def test_drift_of_a_cache_is_in_its_rows_at_that_length() -> None:
    measured = Step(part="drift", kind="drift", variant=ADAPTIVE, context=500, new_tokens=20, text="prose")
    other = Step(part="drift", kind="drift", variant=ADAPTIVE, context=900, new_tokens=20, text="prose")
    fp8 = Step(part="drift", kind="drift", variant=FP8, context=500, new_tokens=20, text="prose")
    done = [
        run_of(NATIVE, 0, itl_ms_mean=1.0),
        run_of(ADAPTIVE, 0, itl_ms_mean=1.0),
        Done(other, {"kl_mean": 9.0, "top1_agreement": 0.1}),
        Done(measured, {"kl_mean": 0.25, "top1_agreement": 0.5}),
        Done(fp8, {"kl_mean": 0.75, "top1_agreement": 0.4}),
    ]
    native, adaptive, rounded = rows_of(headline(adaptive={"min_context": 64}), done, max_context=8192)
    assert (native["kl_mean"], adaptive["kl_mean"], adaptive["top1_agreement"]) == (None, 0.25, 0.5)
    assert (rounded["cache"], rounded["kl_mean"], rounded["itl_ms_mean"]) == ("fp8 pages", 0.75, None)


def test_exponent_of_growth() -> None:
    assert exponent([(1, 3), (2, 6), (4, 12)]) == pytest.approx(1)
    assert exponent([(10, 5), (1000, 5)]) == pytest.approx(0)
    assert exponent([(2, 4), (3, 9), (5, 25)]) == pytest.approx(2)
    assert exponent([(1, 0), (2, 1)]) is exponent([(1, 1)]) is None


def test_line_is_by_least_squares() -> None:
    assert line_through([(0, 1), (1, 3), (2, 5)]) == pytest.approx((2, 1, 1))
    assert line_through([(0, 0), (1, 2), (2, 1)]) == pytest.approx((0.5, 0.5, 0.25))


def test_policy_cost_is_told_by_the_page_that_was_touched() -> None:
    rows = [{"pages_touched_per_step": pages, "policy_ms": 0.5 + 0.01 * pages, "itl_ms_mean": 50.0} for pages in (0, 100, 450)]
    cost = policy_cost_of(rows)
    assert cost is not None
    assert cost["fixed_ms"] == pytest.approx(0.5)
    assert cost["us_per_page"] == pytest.approx(10.0)
    assert cost["largest_share_of_step"] == pytest.approx(0.1)
    assert policy_cost_of(rows[:2]) is None


def test_places_where_adaptive_does_not_help_are_found() -> None:
    assert Machine(native_ms=100, adaptive_ms=50).table(headline())["without_gain"] == []
    [place] = Machine(native_ms=100, adaptive_ms=98).table(headline())["without_gain"]
    assert place["throughput"] == pytest.approx(100 / 98)


# -- whole tables ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    save_tiny(folder, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return str(folder)


def in_this_process(call: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
    module, _, name = call.partition(":")
    outcome: dict[str, Any] = getattr(importlib.import_module(module), name)(**arguments)
    return outcome | {"process_bytes": 10**9, "rss_peak_bytes": 10**9}


@pytest.fixture(scope="module")
def document(model: str) -> dict[str, Any]:
    bench = TableBench(
        model=model,
        batches=(1, 3),
        contexts=(300, 600),
        new_tokens=21,
        sweep_tokens=9,
        repeats=2,
        long_context=4200,
        drift_tokens=8,
        drift_texts=("prose", "code"),
        tolerances=(0.05,),
        ceilings=(),
        cold_shares=(0.2,),
        num_threads=1,
        adaptive=SMALL,
        page_dtype="float32",
    )
    return run_table(bench, run_job=in_this_process, command="vera bench table tiny")


def rows_named(document: dict[str, Any], part: str, cache: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if (row["part"], row["cache"]) == (part, cache)]


def test_document_has_the_agreed_keys_and_is_json(document: dict[str, Any]) -> None:
    assert document["bench"] == "table" and {"machine", "commit", "rows", "ratios"} <= set(document)
    assert all(set(row) >= _AGREED for row in document["rows"])
    assert set(document["ratios"]) >= _RATIOS and None not in document["ratios"].values()
    assert not [row for row in document["rows"] if "failed" in row] and not document["left_out"]
    json.dumps(document, allow_nan=False)
    Console(file=None, quiet=True).print(render_table(document))


def test_figures_of_a_run_are_those_of_its_steps(document: dict[str, Any]) -> None:
    [native], [adaptive] = (rows_named(document, "headline", cache) for cache in ("native", "adaptive"))
    low, high = native["spread"]["itl_ms_mean"]
    # One of two rounds is the median's upper or lower part, and each has 3 tokens in every step.
    assert 3e3 / high <= native["decode_tokens_per_s"] <= 3e3 / low
    assert native["qps"] == pytest.approx(native["decode_tokens_per_s"] / 20)
    assert adaptive["itl_ms_p99"] >= adaptive["itl_ms_mean"] > 0
    assert document["ratios"]["itl_mean"] == adaptive["itl_ms_mean"] / native["itl_ms_mean"]


def test_native_cache_bytes_are_the_mean_of_what_the_steps_held(document: dict[str, Any]) -> None:
    [native] = rows_named(document, "headline", "native")
    block = 2 * 16 * 4 * 2 * 16 * 4  # keys and values, tokens, layers, KV heads, head_dim, float32
    # 600 tokens and the first of the answer; after step n there are 601 + n, of which 600 + n are computed.
    blocks = [-(-(600 + step) // 16) for step in range(1, 21)]
    assert native["cache_bytes"] == pytest.approx(3 * block * sum(blocks) / len(blocks), rel=0.02)


def test_every_cache_has_the_drift_of_its_kind(document: dict[str, Any]) -> None:
    drift = {row["cache"]: row["kl_mean"] for row in document["rows"] if row["context"] == 600}
    assert drift["native"] == pytest.approx(0, abs=1e-9) and drift["exact"] == pytest.approx(0, abs=1e-9)
    assert 0 < drift["adaptive"] <= drift["sketches only"]
    assert drift["fp8 pages"] > 0 and drift["adaptive, 20% cold"] > 0
    assert {entry["text"] for entry in document["drift"]} == {"prose", "code"}


def test_equal_memory_counts_sequences_under_the_native_ceiling(document: dict[str, Any]) -> None:
    [native], [adaptive] = (rows_named(document, "equal memory", cache) for cache in ("native", "adaptive"))
    assert native["ceiling_bytes"] == adaptive["ceiling_bytes"]
    assert native["batch"] == native["sequences"] == 3
    assert adaptive["cache_peak_bytes"] <= adaptive["ceiling_bytes"]
    assert document["ratios"]["sequences_at_equal_memory"] == adaptive["sequences"] / 3 > 1


def test_recalibrations_grow_with_tokens_and_not_with_context(document: dict[str, Any]) -> None:
    counts = {(row["batch"], row["context"]): row["recalibrations"] for row in rows_named(document, "sweep", "adaptive")}
    # 8 steps of a sequence, and heat is read once in 4 of its tokens.
    assert counts[1, 600] == counts[1, 300] == 2
    assert counts[3, 600] == counts[3, 300] == 6


def test_long_prompt_is_timed_beyond_the_models_context(document: dict[str, Any]) -> None:
    rows = [row for row in document["rows"] if row["part"] == "long"]
    assert [(row["context"], row["timing_only"], row["kl_mean"]) for row in rows] == [(4200, True, None)] * 2


def test_growth_of_native_cache_bytes_is_in_proportion(document: dict[str, Any]) -> None:
    [along] = [
        entry
        for entry in document["growth"]
        if entry["cache"] == "native" and entry["along"] == "batch" and entry["context"] == 600
    ]
    assert along["values"] == [1, 3]
    assert along["exponents"]["cache_bytes"] == pytest.approx(1, abs=0.02)


def test_table_of_processes_ends_with_one_json_line_and_writes_its_page(model: str, tmp_path: Path) -> None:
    command = f"bench table {model} --quick --parts headline --batch 2 --context 300 --new-tokens 6 --repeats 1 --threads 1"
    settings = f"--set min_context=64 --set warm_store=ram --json --no-plots --out {tmp_path}"
    words = [sys.executable, "-m", "vera.cli", *command.split(), *settings.split()]
    run = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert [row["cache"] for row in printed["rows"]] == ["native", "adaptive"]
    assert all(row["process_bytes"] > 0 for row in printed["rows"])
    assert printed["command"].startswith("vera bench table ")
    assert "headline: adaptive, 2 x 300 + 6 tokens" in run.stderr
    assert (tmp_path / PAGE).read_text() == results_page(read_document(tmp_path / DATA))


def test_model_that_is_not_there_is_refused_before_anything_runs() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        run_table(headline(model="no-such-model"), run_job=refuse("ModelNotFound", "no-such-model is not here"))


def refuse(error: str, message: str) -> Callable[..., dict[str, Any]]:
    return lambda *_, **__: {"failed": message, "error": error}


# -- the page, the pictures, the README --------------------------------------------------------------------------------


def test_page_comes_from_the_json_alone(document: dict[str, Any], tmp_path: Path) -> None:
    page, data, *pictures = write_results(document, tmp_path)
    assert page.read_text() == results_page(read_document(data))
    assert {picture.name for picture in pictures} == {
        f"results-{name}.png" for name in ("memory", "latency", "drift", "frontier")
    }
    assert all(
        picture.read_bytes().startswith(b"\x89PNG") and f"images/{picture.name}" in page.read_text() for picture in pictures
    )


def test_page_says_where_it_comes_from_and_what_is_missing(document: dict[str, Any], tmp_path: Path) -> None:
    incomplete = document | {"left_out": [{"what": "long: native", "why": "no time was left"}]}
    text = write_results(incomplete, tmp_path, plots=False)[0].read_text()
    assert "`vera bench table tiny`" in text and document["date"] in text and document["machine"]["cpu"] in text
    assert "long: native: left out, no time was left" in text
    assert "No GPU ran any of this" in text
    assert "Where adaptive does not help" in text and "How to read this" in text
    assert "images/" not in text


def test_page_of_the_repository_is_what_its_json_gives() -> None:
    folder = ROOT / "docs"
    if (folder / DATA).exists():
        assert (folder / PAGE).read_text(encoding="utf-8") == results_page(read_document(folder / DATA))


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readme_shows_the_results_of_the_repository(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    if (ROOT / "docs" / DATA).exists():
        table = readme_table(read_document(ROOT / "docs" / DATA), chinese="zh" in name)
        assert with_table(text, table) == text


def test_readme_table_has_both_caches_and_their_ratio() -> None:
    made_up = Machine(native_ms=100, adaptive_ms=50).table(headline(parts=("headline", "equal memory")))
    table = readme_table(made_up)
    assert "| mean inter-token latency | 100.0 ms | 50.0 ms | 0.50x |" in table
    assert "| sequences at equal cache memory | 4 | 20 | 5.00x |" in table
    assert "| 平均逐字延迟 | 100.0 ms | 50.0 ms | 0.50x |" in readme_table(made_up, chinese=True)


def test_table_replaces_what_is_between_the_markers() -> None:
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
    with pytest.raises(ConfigError, match="once each"):
        with_table(f"{END}\n{BEGIN}\n", "new")


@pytest.mark.parametrize("text", ["", "nothing", "[1]", '{"bench": "decode"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(VeraError, match=r"other\.json"):
        read_document(tmp_path / "other.json")


def test_page_again_takes_no_option_about_measuring(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["bench", "table", "--from", str(tmp_path / "table.json"), "--batch", "4"])
    assert isinstance(outcome.exception, ConfigError) and "--from measures nothing" in str(outcome.exception)


def test_page_again_is_the_same_page(document: dict[str, Any], tmp_path: Path) -> None:
    first, data, *_ = write_results(document, tmp_path / "first", plots=False)
    words = ["bench", "table", "--from", str(data), "--out", str(tmp_path / "again"), "--no-plots"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "again" / PAGE).read_text() == first.read_text()


def test_rounds_of_the_headline_are_told_with_their_spread(document: dict[str, Any], tmp_path: Path) -> None:
    page = write_results(document, tmp_path, plots=False)[0].read_text()
    assert "- native, 2 rounds: " in page and "- adaptive, 2 rounds: " in page


def test_pictures_without_matplotlib_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vera.bench.table.plots.find_spec", lambda _: None)
    with pytest.raises(VeraError, match="--no-plots"):
        check_plots()


def test_reference_is_no_row() -> None:
    step = Step(part="drift", kind="drift", variant=REFERENCE, context=500, new_tokens=20, text="prose")
    assert rows_of(headline(), [Done(step, {})], max_context=8192) == []
