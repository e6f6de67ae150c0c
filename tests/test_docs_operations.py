"""Every command of docs/operations.md, in its order, against a service of its own with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tiny_models import save_tiny, tiny_tokenizer
from vera.cli import app
from vera.heatlog.log import EVERY_SECONDS
from vera.params import ParameterStore

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ["operations.md", "operations.zh-CN.md"]
ADDRESS = "http://127.0.0.1:8000"
SMALLER = {"3000": "800"}
"""A word is four tokens to the tiny tokenizer."""
SERVE = ["--port", "0", "--cache-max-bytes", "50000000", "--threads", "1"]
MAY_SUIT_NATIVE = (0, 3)


def commands(name):
    """The indented lines that a reader types."""
    return re.findall(r"^(?: {4}| {6})((?:export|vera|curl) .*)$", (DOCS / name).read_text("utf-8"), re.M)


@contextmanager
def service(words, folder):
    """The address of what `vera serve` starts."""
    with (folder / "service.log").open("w") as log:
        command = [sys.executable, "-m", "vera.cli", *words[1:], *SERVE]
        process = subprocess.Popen(command, stderr=log, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while '"ready"' not in (text := (folder / "service.log").read_text()):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        yield "http://" + next(line["addresses"][0] for line in lines if line["message"] == "listening")
    finally:
        process.terminate()
        assert process.wait(30) == 0


def run(words, url):
    """What a command printed."""
    if words[0] == "curl":
        return fetch(words[1:], url)
    more = {"rollout": ["--url", url], "degrade": ["--url", url], "bench": ["--base-url", url]}.get(words[1], [])
    done = CliRunner().invoke(app, [*words[1:], *more], env={"COLUMNS": "200"})
    deadline = time.monotonic() + 3 * EVERY_SECONDS
    while words[1] == "heat" and done.exit_code and time.monotonic() < deadline:
        time.sleep(0.2)
        done = CliRunner().invoke(app, words[1:])
    allowed = MAY_SUIT_NATIVE if words[1] == "check" else (0,)
    assert done.exit_code in allowed, f"{shlex.join(words)}: {done.exception!r}\n{done.output}"
    return done.output


def fetch(words, url):
    """What curl does with these options."""
    options = {"-H": [], "-d": []}
    rest = iter(words)
    addresses = [word if word not in options else options[word].append(next(rest)) for word in rest]
    [address] = [word for word in addresses if word is not None]
    headers = dict(os.path.expandvars(header).split(": ", 1) for header in options["-H"])
    body = options["-d"][0] if options["-d"] else None
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, address.replace(ADDRESS, url), headers=headers, content=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """The folder in which the document was walked through, and what each command printed."""
    folder = tmp_path_factory.mktemp("operations")
    tokenizer = tiny_tokenizer()
    save_tiny(folder / "tiny", tokenizer=tokenizer, vocab_size=len(tokenizer), eos_token_id=None, max_position_embeddings=8192)
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VERA_HOME", str(folder))
        patch.delenv("VERA_API_KEY", raising=False)
        lines = iter(commands(NAMES[0]))
        for line in lines:
            words = [str(folder / "tiny") if word == "embedded" else SMALLER.get(word, word) for word in shlex.split(line)]
            if words[0] == "export":
                patch.setenv(*words[1].split("=", 1))
            elif words[1] == "serve":
                break
            else:
                printed[line] = run(words, None)
        with service(words, folder) as url:
            for line in lines:
                words = [SMALLER.get(word, word) for word in shlex.split(line)]
                printed[line] = run(words, url)
    return folder, printed


def test_commands_leave_the_trail_that_the_document_tells(walk):
    folder, _ = walk
    with ParameterStore(folder / "params.sqlite3") as store:
        assert store.verify().ok
        kinds = [event.kind for event in store.history("long-document")][1:]
        active = store.active("long-document")
    assert kinds == [
        "create",
        *("rollout.start", "rollout.hold", "rollout.resume", "rollout.step", "rollout.abort"),
        *("rollout.start", "rollout.promote", "activate"),
        *("create", "activate", "rollback"),
        *("degrade",) * 4,
    ]
    assert active.ref == "long-document@2"


def test_baseline_is_native_and_what_follows_is_adaptive(walk):
    folder, _ = walk
    native, adaptive = (json.loads((folder / f"{name}.json").read_text()) for name in ("native", "adaptive"))
    assert native["completed"] == adaptive["completed"] == 8
    assert native["vera"]["decode_steps"] == 0 < adaptive["vera"]["decode_steps"]


def test_answer_says_who_served_it(walk):
    _, printed = walk
    [answer] = [text for line, text in printed.items() if "customer-17" in line]
    assert json.loads(answer)["usage"]["vera"]["params_version"] == "long-document@2"


def test_heat_log_has_recalibrations_to_show(walk):
    _, printed = walk
    assert "recalibrations" in printed["vera heat heat.jsonl"]


def test_both_languages_give_the_same_commands():
    english, chinese = (commands(name) for name in NAMES)
    assert english == chinese and len(english) > 30
