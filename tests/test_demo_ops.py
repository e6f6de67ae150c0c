"""`vera demo-ops` with a tiny model: the whole story, and what is said when a part of it goes wrong."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tiny_models import save_tiny, tiny_tokenizer
from vera.cli import app
from vera.errors import VeraError
from vera.ops_demo.service import Service
from vera.ops_demo.settings import Candidate, OpsDemo
from vera.ops_demo.story import run_ops_demo

UNSEEN = ("ttft_ratio=none", "itl_ratio=none", "audit_error=none", "audit_ratio=none", "shadow_agreement=none")
OPTIONS = ("--cache-max-bytes", "50000000", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer()
    save_tiny(path, tokenizer=tokenizer, vocab_size=len(tokenizer), eos_token_id=None)
    return str(path)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def demo(folder):
    """Random weights have no taste: the good candidate may diverge as it likes, the bad one not at all."""
    return OpsDemo(
        model=folder,
        serve_options=OPTIONS,
        shadow_share=1.0,
        num_documents=2,
        document_characters=300,
        answer_tokens=8,
        num_clients=2,
        think_seconds=0.2,
        baseline_requests=4,
        degraded_requests=2,
        patience_seconds=120.0,
        good=Candidate(("min_context=64",), "a good one", "25:0:1,100:0:1", (*UNSEEN, "shadow_kl=none")),
        bad=Candidate(
            ("attention_tolerance=1", "hot_max_share=0"),
            "a bad one",
            "50:0:1,100:0:1",
            (*UNSEEN, "shadow_kl=0.000000001", "min_shadow_tokens=7"),
        ),
    )


def children():
    """Services that this process has started, and what they have; other tests may have left helpers of Python's own."""
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if "vera.cli" in " ".join(process.cmdline())]


@pytest.fixture
def quick_commands(monkeypatch):
    """Commands run in this process: nine starts of the interpreter less."""

    def run(service, *words, width):
        done = CliRunner().invoke(app, words, env={"COLUMNS": str(width), "VERA_ADMIN_KEY": service.admin_key})
        assert done.exit_code == 0, (words, done.exception)
        return done.output

    monkeypatch.setattr(Service, "run", run)


def test_good_candidate_is_promoted_and_the_bad_one_rolled_back(demo, quick_commands):
    shown = io.StringIO()
    result = run_ops_demo(demo, Console(file=shown, width=200), keep=False)
    good, bad = result["good"], result["bad"]
    assert (good["candidate"], good["promoted"], good["weights"]) == ("long-document@2", True, [25, 100])
    assert (bad["candidate"], bad["promoted"], bad["author"]) == ("long-document@3", False, "guard")
    assert "shadow_kl" in bad["reason"]
    assert result["visitors_that_came_again"] >= 1
    assert result["degraded"]["native"] >= 2 <= result["degraded"]["adaptive"]
    for told in ("promoted", "rolled back", "vera degrade on", "/dashboard", "docs/operations.md", "recalibrations"):
        assert told in shown.getvalue(), told
    assert not children()


def test_command_that_is_refused_is_named(tmp_path):
    service = Service("embedded", tmp_path, (), shadow_share=0.0)
    words = ("params", "create", "long-document", "--set", "attention_tolerence=1", "--reason", "why")
    with pytest.raises(VeraError, match=r"`vera params create .*` failed with exit code 2: .*attention_tolerence"):
        service.run(*words, "--store", str(service.store), width=80)


def test_service_that_does_not_start_is_said(tmp_path):
    service = Service("embedded", tmp_path, ("--nonsense",), shadow_share=0.0)
    with pytest.raises(VeraError, match=r"ended with exit code 2.*nonsense"), service:
        pass
    assert not children()


def test_ended_demonstration_leaves_no_service(folder, tmp_path):
    """Told by SIGTERM, while the service starts."""
    command = [sys.executable, "-m", "vera.cli", "demo-ops", "--model", folder, "--no-keep", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not (started := psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 128 + signal.SIGTERM
    assert not any(child.is_running() for child in started) and not list(tmp_path.iterdir())
