"""The fidelity measurement of a tiny model: texts, teacher forcing, drift, and what a whole run reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench import teacher
from vera.bench.fidelity import FidelityBench, drift, render_fidelity, run_fidelity
from vera.bench.texts import KINDS, conversation, text_tokens
from vera.cli import app
from vera.config import CacheConfig
from vera.errors import ConfigError, UnsupportedModel, VeraError

CONTEXT, TOKENS = 700, 24
_AGREED = {
    "text", "context", "tokens", "kl_mean", "kl_max", "top1_agreement", "perplexity", "error_true_over_estimated_p50",
    "error_true_over_estimated_p99", "cache_bytes_ratio", "exact_read_share", "hits_per_step", "recompute_share", "controls",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    save_tiny(folder, tokenizer=tokenizer, vocab_size=len(tokenizer))
    return str(folder)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return text_tokens(tiny_tokenizer(), "prose", CONTEXT + TOKENS + 1)


@pytest.fixture(scope="module")
def forced(model: str, token_ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a cache in this process: `forced(CacheConfig(...))` gives its logits and its figures."""
    folder = tmp_path_factory.mktemp("logits")

    def run(cache: CacheConfig, **arguments: Any) -> tuple[np.ndarray, dict[str, Any]]:
        path = folder / "logits.npy"
        figures = teacher.force(
            model=model,
            token_ids=token_ids,
            context=CONTEXT,
            cache=cache.to_dict(),
            logits_path=str(path),
            num_threads=torch.get_num_threads(),
            **arguments,
        )
        return np.load(path), figures

    return run


@pytest.fixture(scope="module")
def reference(forced: Any) -> np.ndarray:
    return forced(CacheConfig(page_dtype="float32"))[0]


def adaptive(**settings: Any) -> CacheConfig:
    return CacheConfig(mode="adaptive", min_context=256, warm_store="ram", **settings)


def kl_mean(reference: np.ndarray, logits: np.ndarray, token_ids: list[int]) -> float:
    return drift(reference, logits, np.asarray(token_ids[CONTEXT + 1 :]))["kl_mean"]


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_built_in_text_is_long_enough_and_the_same_each_time(kind: str) -> None:
    tokens = text_tokens(tiny_tokenizer(), kind, 20_000)
    assert len(tokens) == 20_000
    assert text_tokens(tiny_tokenizer(), kind, 100) == tokens[:100]


def test_built_in_texts_differ() -> None:
    assert len({tuple(text_tokens(tiny_tokenizer(), kind, 500)) for kind in KINDS}) == len(KINDS)


def test_chat_has_many_turns_of_user_and_assistant() -> None:
    messages = conversation()
    assert len(messages) > 200
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)


def test_chat_is_rendered_with_the_models_template() -> None:
    text = tiny_tokenizer().decode(text_tokens(tiny_tokenizer(), "chat", 3000))
    assert text.startswith("<|im_start|>user\n")
    assert text.count("<|im_start|>assistant\n") > 4


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="chat template"):
        text_tokens(tiny_tokenizer(chat_template=None), "chat", 10)


def test_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the thing and the other thing", encoding="utf-8")
    assert text_tokens(tiny_tokenizer(), str(file), 3) == tiny_tokenizer().encode("the thing")[:3]


def test_text_that_is_too_short_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("zzzz", encoding="utf-8")
    with pytest.raises(ConfigError, match="has 4 tokens, and 50 are needed"):
        text_tokens(tiny_tokenizer(), str(file), 50)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        text_tokens(tiny_tokenizer(), str(file), 1)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": "poetry"}, "text='poetry' is neither prose, code, chat nor a file"),
        ({"cache": "warm"}, "cache='warm' is not one of adaptive, exact, native"),
        ({"context": 0}, "context=0 must be a whole number from 1 up"),
        ({"tokens": True}, "tokens=True must be"),
        ({"context": 2048}, "context=2048 is within min_context=2048"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0"),
    ],
)
def test_wrong_setting_is_refused_with_its_value_and_the_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FidelityBench(**values)


def test_native_cache_may_be_measured_at_any_context() -> None:
    assert FidelityBench(cache="native", context=1).measured.mode == "native"


# -- drift -------------------------------------------------------------------------------------------------------------


def test_drift_of_logits_from_themselves_is_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(70, 11)).astype(np.float32)
    figures = drift(logits, logits + np.float32(2), np.arange(70) % 11)
    assert figures["kl_max"] == pytest.approx(0, abs=1e-12)
    assert figures["top1_agreement"] == 1
    assert figures["perplexity"] == pytest.approx(figures["perplexity_reference"])


def test_drift_is_what_the_definitions_say() -> None:
    ours, theirs = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    figures = drift(ours.astype(np.float32), theirs.astype(np.float32), np.array([0, 1]))
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert figures["kl_mean"] == pytest.approx(first / 2, rel=1e-5)
    assert figures["kl_max"] == pytest.approx(first, rel=1e-5)
    assert figures["top1_agreement"] == 0.5
    assert figures["perplexity_reference"] == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-5)
    assert figures["perplexity"] == pytest.approx((0.25 * 0.8) ** -0.5, rel=1e-5)


# -- teacher forcing ---------------------------------------------------------------------------------------------------


def test_forced_steps_give_the_logits_of_the_text(model: str, token_ids: list[int], reference: np.ndarray) -> None:
    """A row for each decode step, in the order of the text: what transformers gives for the whole of it at once."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = plain(input_ids=torch.tensor([token_ids[:-1]])).logits[0, CONTEXT:]
    assert reference.shape == (TOKENS, plain.config.vocab_size)
    assert np.abs(reference - logits.numpy()).max() < 1e-3


def test_native_does_not_drift_from_itself(forced: Any, reference: np.ndarray, token_ids: list[int]) -> None:
    again, figures = forced(CacheConfig(page_dtype="float32"), max_batch_tokens=96)
    assert kl_mean(reference, again, token_ids) < 1e-10
    assert figures["cache_bytes"] == 2 * figures["native_cache_bytes"]
    assert "hits_by_step" not in figures


def test_tolerance_zero_leaves_next_to_no_drift(forced: Any, reference: np.ndarray, token_ids: list[int]) -> None:
    logits, figures = forced(adaptive(attention_tolerance=0.0, page_dtype="float32"))
    assert kl_mean(reference, logits, token_ids) < 1e-9
    assert figures["exact_read_share"] == 1


def test_sketches_without_error_control_drift_most(forced: Any, reference: np.ndarray, token_ids: list[int]) -> None:
    bounded, figures = forced(adaptive(attention_tolerance=0.005))
    bare, bare_figures = forced(adaptive(attention_tolerance=1.0, hot_score_threshold=1.0, hot_max_share=0.0, skip_share=0.0))
    assert kl_mean(reference, bounded, token_ids) < 0.5 * kl_mean(reference, bare, token_ids)
    assert sum(figures["hits_by_step"]) > sum(bare_figures["hits_by_step"]) == 0
    assert len(figures["hits_by_step"]) == TOKENS
    assert len(figures["error_ratios"]) > TOKENS / 2


def test_fp8_pages_lose_what_fp8_loses(forced: Any, reference: np.ndarray, token_ids: list[int]) -> None:
    rounded, _ = forced(CacheConfig(), fp8_pages=True)
    half, _ = forced(CacheConfig())
    assert 0 < 100 * kl_mean(reference, half, token_ids) < kl_mean(reference, rounded, token_ids) < 0.1


def test_text_above_the_models_context_is_refused_with_both_numbers(model: str) -> None:
    with pytest.raises(ConfigError, match=r"context=4000, tokens=100 .* 4096 tokens"):
        teacher.prepare(model=model, text="prose", context=4000, tokens=100)


# -- a whole run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(model: str) -> dict[str, Any]:
    """What the command prints."""
    arguments = ["--model", model, "--text", "code", "--context", str(CONTEXT), "--tokens", str(TOKENS), "--threads", "1"]
    run = vera_fidelity(*arguments, "--set", "min_context=256", "--json")
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


def vera_fidelity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vera.cli", "fidelity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.soak
def test_run_reports_the_agreed_keys(result: dict[str, Any]) -> None:
    assert set(result) >= _AGREED
    assert set(result["perplexity"]) == {"native", "adaptive"}
    assert set(result["controls"]) == {"bf16_self", "fp8", "sketch_only"}
    for control in result["controls"].values():
        assert set(control) >= {"kl_mean", "kl_max", "top1_agreement"}
    json.dumps(result, allow_nan=False)


@pytest.mark.soak
def test_table_has_a_line_for_the_cache_and_each_control(result: dict[str, Any]) -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(render_fidelity(result))
    for name in ("adaptive", "bf16_self", "fp8", "sketch_only", "hits a step"):
        assert name in capture.get()


def test_control_that_fails_is_reported_and_the_rest_is_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(call: str, arguments: dict[str, Any], **_: Any) -> dict[str, Any]:
        if "bf16" in call or arguments.get("fp8_pages"):
            return {"failed": "no"}
        outcome: dict[str, Any] = getattr(teacher, call.partition(":")[2])(**arguments)
        return outcome | {"process_bytes": 0}

    monkeypatch.setattr("vera.bench.fidelity.run_job", run_here)
    settings = CacheConfig(mode="adaptive", min_context=CONTEXT)
    bench = FidelityBench(model=model, context=CONTEXT, tokens=2, cache="native", settings=settings, num_threads=1)
    result = run_fidelity(bench)
    assert result["controls"] == {"bf16_self": {"failed": "no"}, "fp8": {"failed": "no"}}
    assert set(result["perplexity"]) == {"native", "native_float16"}
    assert result["hits_per_step"] is None
    render_fidelity(result)


@pytest.mark.slow
def test_sigterm_leaves_no_folder_behind(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vera.cli", "fidelity", "--model", model, "--context", "3000", "--tokens", "900"]
    run = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    with run:
        assert run.stderr is not None
        while (line := run.stderr.readline()) and "reference" not in line:
            pass
        (folder,) = tmp_path.glob("vera-fidelity-*")
        while run.poll() is None and not any(folder.iterdir()):
            time.sleep(0.02)
        run.terminate()
        assert run.wait(15) == 143
    assert not list(tmp_path.glob("vera-fidelity-*"))


def test_mistake_on_the_command_line_gives_one_message() -> None:
    run = vera_fidelity("--context", "100")
    assert (run.returncode, run.stdout) == (2, "")
    assert "min_context=2048" in run.stderr
    assert "Traceback" not in run.stderr


def test_settings_that_the_command_is_not_given_are_the_caches_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(bench: Any) -> dict[str, Any]:
        asked.append(bench.settings)
        raise VeraError("enough")

    monkeypatch.setattr("vera.bench.fidelity.run_fidelity", run)
    CliRunner().invoke(app, ["fidelity"])
    CliRunner().invoke(app, ["fidelity", "--tolerance", "0.03"])
    assert asked == [CacheConfig(mode="adaptive"), CacheConfig(mode="adaptive", attention_tolerance=0.03)]
