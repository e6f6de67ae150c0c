"""`vera tune` as a person would run it, with made-up measurements in the place of the processes; once with real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench import DecodeBench
from vera.cli import main
from vera.config import CacheConfig
from vera.params import ParameterStore

_MIB = 2**20


class Processes:
    """What the measuring processes would answer. A higher tolerance is faster and drifts more."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, dict[str, Any]]] = []
        self.benches: list[DecodeBench] = []
        self.native: dict[str, Any] = {
            "decode_tokens_per_s": 100.0,
            "step_ms_p99": 40.0,
            "cache_bytes": 400 * _MIB,
            "process_bytes": 1000 * _MIB,
        }
        self.broken: Callable[[CacheConfig], str | None] = lambda config: None

    def run_job(self, call: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.jobs.append((call.partition(":")[2], arguments))
        return {"look": self._look, "prepare": self._prepare, "force": self._force}[call.partition(":")[2]](arguments)

    def _look(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"model_name": "made-up", "num_layers": 30, "native_bytes": 400 * _MIB, "available_bytes": 9000 * _MIB}

    def _prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": [0] * (arguments["context"] + arguments["tokens"] + 1)}

    def _force(self, arguments: dict[str, Any]) -> dict[str, Any]:
        config = CacheConfig.from_dict(arguments["cache"])
        if why := self.broken(config):
            return {"failed": why}
        logits = np.zeros((len(arguments["token_ids"]) - arguments["context"] - 1, 2), dtype=np.float32)
        if config.mode == "adaptive":
            logits[:, 0] = config.attention_tolerance  # KL of two near-equal logits is an eighth of the square
        np.save(arguments["logits_path"], logits)
        return {"seconds": 1.0}

    def run_decode(self, bench: DecodeBench) -> dict[str, Any]:
        self.benches.append(bench)
        faster = 1 + 10 * bench.adaptive.get("attention_tolerance", 0.015)
        adaptive = {
            "decode_tokens_per_s": 100.0 * faster,
            "step_ms_p99": 30.0,
            "cache_bytes": 160 * _MIB,
            "process_bytes": 500 * _MIB,
            "recompute_share": 0.1,
        }
        return {"runs": {"native": self.native, "adaptive": adaptive}, "machine": {"cpu": "made-up"}}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made_up = Processes()
    monkeypatch.setattr("vera.tune.measure.run_job", made_up.run_job)
    monkeypatch.setattr("vera.tune.measure.run_decode", made_up.run_decode)
    return made_up


@pytest.fixture
def vera(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """Runs `vera tune` with a store of its own; gives exit code, the JSON object if there is one, and what is for people."""
    monkeypatch.setenv("VERA_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> tuple[int, dict[str, Any] | None, str]:
        monkeypatch.setattr(sys, "argv", ["vera", "tune", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        out, errors = capfd.readouterr()
        return done.value.code or 0, json.loads(out.splitlines()[-1]) if "--json" in arguments else None, out + errors

    return run


CREATE = ("--create", "long-document", "--author", "ada", "--reason", "for the new machine")


def test_choice_becomes_a_version_whose_reason_has_the_figures(vera: Any, processes: Processes, tmp_path: Path) -> None:
    code, result, said = vera("--trials", "8", "--json", *CREATE)
    assert code == 0 and result["created"] == "long-document@2"
    chosen = result["trials"][result["chosen"] - 1]
    tolerance = chosen["settings"]["attention_tolerance"]
    assert chosen["within_limits"] and result["chosen"] in result["frontier"]
    assert chosen["latency"] == pytest.approx(1 / (1 + 10 * tolerance))
    assert (chosen["p99"], chosen["memory"], chosen["process"]) == (0.75, 0.4, 0.5)
    assert chosen["kl_mean"] == pytest.approx(tolerance**2 / 8, rel=1e-3)
    with ParameterStore(tmp_path / "params.sqlite3") as store:
        version = store.get("long-document@2")
        assert store.active("long-document") is None
    assert (version.author, version.parent) == ("ada", "long-document@1")
    assert version.reason.startswith("for the new machine; tuned for long-document (4 x 7600 + 128 tokens, made-up)")
    assert f"latency {chosen['latency']:.3f}" in version.reason and "seed 0" in version.reason
    assert version.settings["attention_tolerance"] == tolerance
    assert version.settings["cache_max_size_ratio"] == 0.6  # not searched, so not touched
    assert "long-document@2 is created, and not active yet" in said


def test_each_trial_runs_native_beside_the_candidate_on_the_same_work(vera: Any, processes: Processes) -> None:
    vera("--workload", "multi-turn", "--batch", "3", "--trials", "2", "--repeats", "2", "--threads", "1", "--json")
    bench = processes.benches[1]
    assert (bench.caches, bench.batch, bench.context, bench.repeats, bench.threads) == (("native", "adaptive"), 3, 4000, 2, 1)
    assert bench.cold_share == 0.1
    assert bench.adaptive["recalibrate_every"] == 128  # of the profile multi-turn
    forced = [arguments for name, arguments in processes.jobs if name == "force"]
    assert [arguments["cache"]["mode"] for arguments in forced] == ["native", "adaptive", "adaptive"]  # one reference for all
    assert forced[2]["cache"]["attention_tolerance"] == bench.adaptive["attention_tolerance"]


def test_nothing_within_the_limits_says_so_creates_nothing_and_leaves_with_3(
    vera: Any, processes: Processes, tmp_path: Path
) -> None:
    code, result, said = vera("--trials", "3", "--max-kl", "1e-9", "--json", *CREATE)
    assert (code, result["chosen"], result["created"]) == (3, None, None)
    assert "nothing taken: no trial has KL <= 1e-09" in said
    with ParameterStore(tmp_path / "params.sqlite3") as store:
        assert len(store.versions("long-document")) == 1


def test_settings_that_are_the_best_already_are_not_created_again(vera: Any, processes: Processes) -> None:
    code, result, said = vera("--trials", "1", "--json", *CREATE)
    assert (code, result["chosen"], result["created"]) == (0, 1, None)
    assert "nothing created: long-document@1 has these settings already" in said


def test_interrupt_shows_what_was_measured_and_creates_nothing(vera: Any, processes: Processes) -> None:
    real = processes.run_decode

    def interrupted(bench: DecodeBench) -> dict[str, Any]:
        if len(processes.benches) == 2:
            raise KeyboardInterrupt
        return real(bench)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vera.tune.measure.run_decode", interrupted)
        code, result, said = vera("--json", *CREATE)
    assert code == 130
    assert (len(result["trials"]), result["stop"], result["chosen"], result["created"]) == (2, "interrupted", None, None)
    assert "nothing taken: interrupted" in said


def test_candidate_that_cannot_run_is_told_of_and_the_others_go_on(vera: Any, processes: Processes) -> None:
    processes.broken = lambda config: "no room" if config.hot_max_share > 0.1 else None
    code, result, said = vera("--trials", "10", "--json")
    failed = [trial for trial in result["trials"] if "failed" in trial]
    assert code == 0 and 0 < len(failed) < 10
    assert f"trial {failed[0]['number']} failed: no room" in said


def test_native_cache_that_fails_ends_it(vera: Any, processes: Processes) -> None:
    processes.native = {"failed": "killed, most likely because memory ran out"}
    code, _, said = vera()
    assert code == 1 and "the native cache failed" in said


def test_ratio_is_measured_as_a_ceiling_where_memory_is_short(vera: Any, processes: Processes) -> None:
    _, result, _ = vera("--trials", "6", "--memory-mib", "500", "--json")
    for bench, trial in zip(processes.benches, result["trials"], strict=True):
        assert bench.adaptive["cache_max_bytes"] == int(trial["settings"]["cache_max_size_ratio"] * 500 * _MIB)


def test_given_setting_stays_and_is_not_searched(vera: Any, processes: Processes) -> None:
    _, result, said = vera("--trials", "3", "--set", "hot_max_share=0.09", "--json")
    assert all(bench.adaptive["hot_max_share"] == 0.09 for bench in processes.benches)
    assert result["not_searched"]["hot_max_share"] == "0.09 was given"
    assert "not searched: hot_max_share: 0.09 was given" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--objective", "beauty"), "objective='beauty' is not one of latency, memory, throughput"),
        (("--workload", "poems"), "workload='poems' is not one of long-document"),
        (("--trials", "0"), "trials=0 must be a whole number from 1 up"),
        (("--budget-minutes", "0"), "budget_minutes=0.0 must be above 0"),
        (("--max-kl", "0"), "max_kl=0.0 must be a number above 0"),
        (("--context", "1500"), "context=1500 is within min_context=2048"),
        (("--set", "warm_bytes=1000000"), "both size the warm store"),
        (("--set", "mode=native"), "mode='native' leaves nothing to tune"),
        (("--set", "fidelity=exact"), "fidelity='exact' leaves nothing to tune"),
        (("--set", "warm_byts=1"), "unknown setting warm_byts"),
        (("--set", "warm_bytes"), "not of the form name=value"),
        (("--reason", "because"), "give --create PROFILE too"),
        (("--create", "No Such Name"), "must be small letters"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_measured(
    vera: Any, processes: Processes, arguments: tuple[str, ...], message: str
) -> None:
    code, _, said = vera(*arguments)
    assert code == 2 and message in said
    assert not processes.benches


def test_rehearsal_leaves_no_trace_in_the_store(vera: Any, processes: Processes, tmp_path: Path) -> None:
    vera("--trials", "1", *CREATE)
    with ParameterStore(tmp_path / "params.sqlite3") as store:
        assert {event.kind for event in store.history()} == {"create"}
        assert store.verify().ok


@pytest.mark.bench
@pytest.mark.slow
def test_tiny_model_is_tuned_with_real_measurements(vera: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "model", tokenizer=tokenizer, vocab_size=len(tokenizer))
    settings = [option for pair in ("min_context=64", "page_size=16", "warm_store=ram") for option in ("--set", pair)]
    work = ("--batch", "2", "--context", "400", "--new-tokens", "8", "--cold-share", "0.2", "--threads", "1")
    loose = ("--max-kl", "10", "--max-p99-ratio", "1000", "--trials", "2")
    code, result, _ = vera(str(tmp_path / "model"), *work, *loose, *settings, "--create", "tiny", "--json")
    assert code == 0
    assert result["created"] == "tiny@1"
    for trial in result["trials"]:
        assert trial["latency"] > 0 and trial["memory"] > 0 and trial["kl_mean"] > 0
