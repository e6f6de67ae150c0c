"""The command line, run as a person or a script would."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tiny_models import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(path, tokenizer=tiny_tokenizer(), vocab_size=len(tiny_tokenizer()), eos_token_id=None)
    return str(path)


def vera(*arguments, text=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "vera.cli", *arguments],
        input=text, capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def test_generate_prints_the_answer_and_nothing_else_on_stdout(folder):
    run = vera("generate", "the thing", "--model", folder, "--max-tokens", "5")
    assert run.returncode == 0, run.stderr
    as_json = vera("generate", "the thing", "--model", folder, "--max-tokens", "5", "--json")
    assert run.stdout == json.loads(as_json.stdout)["text"] + "\n"


def test_generate_json_has_the_promised_keys(folder):
    run = vera("generate", "the thing", "--model", folder, "--max-tokens", "5", "--json")
    answer = json.loads(run.stdout.splitlines()[-1])
    assert set(answer) == {
        "text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "cache_use",
    }  # fmt: skip
    assert (answer["completion_tokens"], answer["finish_reason"], answer["cached_tokens"]) == (5, "length", 0)
    assert answer["cache_use"] is None


def test_generate_takes_the_settings_of_an_adaptive_cache(folder):
    settings = ["--cache", "adaptive", "--cache-max-bytes", "30000000", "--set", "min_context=64", "--set", "page_size=16"]
    run = vera("generate", "the thing " * 50, "--model", folder, "--max-tokens", "8", *settings, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["cache_use"]["decode_steps"] == 7


def test_inspect_draws_on_stderr_and_prints_json(folder, tmp_path):
    settings = ["--set", "min_context=64", "--set", "page_size=16", "--png", str(tmp_path / "tiers.png")]
    run = vera("inspect", "--model", folder, "--context", "300", "--tokens", "8", *settings, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["context"], result["tokens"], len(result["hits"])) == (300, 8, 7)
    assert result["pages"]["warm"] > 0
    assert "where the pages are" in run.stderr
    assert "\x1b" not in run.stderr
    assert (tmp_path / "tiers.png").exists()


def test_demo_answers_with_both_caches(folder):
    settings = ["--set", "min_context=64", "--set", "page_size=16"]
    run = vera("demo", "--model", folder, "--context", "600", "--max-tokens", "4", *settings, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert list(result["runs"]) == ["native", "adaptive"]
    assert set(result["runs"]["native"]) == set(result["runs"]["adaptive"])
    assert result["runs"]["adaptive"]["hits_per_step"] is not None
    assert len(result["same_answers"]) == 4
    assert "process memory" in run.stderr


def test_generate_reads_stdin(folder):
    run = vera("generate", "-", "--model", folder, "--max-tokens", "5", "--json", text="the thing")
    assert json.loads(run.stdout)["prompt_tokens"] == len(tiny_tokenizer().encode("the thing"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generat", "x"], 2, "generat"),
        (["generate", "x", "--max-token", "5"], 2, "--max-token"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens=0"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature=-1"),
        (["generate", "x", "--page-dtype", "fp8"], 2, "fp8"),
        (["generate", "x", "--model", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["generate", "", "--model", "FOLDER"], 2, "prompt"),
        (["generate", "x" * 6000, "--model", "FOLDER"], 2, "tokens served"),
        (["generate", "x", "--model", "FOLDER", "--cache-max-bytes", "1000"], 1, "below one block"),
        (["generate", "x", "--cache", "adaptiv"], 2, "adaptiv"),
        (["generate", "x", "--set", "fidelity"], 2, "name=value"),
        (["inspect", "--set", "fidelity=exakt"], 2, "exakt"),
        (["inspect", "--text", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["inspect", "--png", "tiers.jpg"], 2, "tiers.jpg"),
        (["inspect", "--model", "FOLDER", "--context", "5000"], 2, "tokens served"),
        (["bench", "decode", "--baseline", "lama.cpp"], 2, "lama.cpp"),
    ],
)
def test_mistake_gives_one_clear_message_and_its_exit_code(folder, arguments, code, message):
    run = vera(*[folder if argument == "FOLDER" else argument for argument in arguments])
    assert run.returncode == code, run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_bytes_that_are_no_text_are_refused(folder):
    run = subprocess.run(
        [sys.executable, "-m", "vera.cli", "generate", "-", "--model", folder],
        input=b"\xff\xfe",
        capture_output=True,
        timeout=120,
    )
    assert run.returncode == 2
    assert b"UTF-8" in run.stderr or b"Unicode" in run.stderr  # as the locale has it


def test_help_is_quick():
    start = time.monotonic()
    run = vera("--help")
    assert run.returncode == 0
    assert "generate" in run.stdout
    assert time.monotonic() - start < 3, "the help must not import torch"


def test_models_lists_families_and_what_is_here():
    run = vera("models", "--json")
    listed = json.loads(run.stdout)
    assert "Llama" in listed["families"]
    assert isinstance(listed["local"], list)


def test_chat_answers_line_by_line_until_the_end(folder):
    run = vera("chat", "--model", folder, "--max-tokens", "3", text="the thing\n\n/reset\nand the thing\n/exit\nnever asked\n")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) >= 2


def test_interrupt_stops_the_answer_and_not_the_chat(folder):
    chat = subprocess.Popen(
        [sys.executable, "-u", "-m", "vera.cli", "chat", "--model", folder, "--temperature", "1", "--seed", "1"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    chat.stdin.write(b"the thing\n")
    chat.stdin.flush()
    assert chat.stdout.read(10)  # the answer has begun; it would go on for 4,000 tokens
    chat.send_signal(signal.SIGINT)
    rest, errors = chat.communicate(b"/exit\n", timeout=60)
    assert chat.returncode == 0, errors
    assert b"[stopped]" in errors
    assert len(rest) < 20_000
