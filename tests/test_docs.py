"""What the README shows is what runs."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README_PORT = "127.0.0.1:8000"


@pytest.mark.embedded
@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_python_examples_run(readme, capsys):
    first, adaptive, _ = python_blocks(readme)
    names = {}
    exec(compile(first, readme, "exec"), names)
    assert "The capital of France is Paris." in capsys.readouterr().out
    exec(compile(adaptive, readme, "exec"), names)
    printed = capsys.readouterr().out
    assert "CacheUse(" in printed and "The capital of France is Paris." in printed


@pytest.mark.embedded
@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_server_and_client_examples_run(readme, capsys):
    command = re.search(r"^    (vera serve .*)$", (ROOT / readme).read_text(), re.M)[1]
    client = python_blocks(readme)[-1]
    assert README_PORT in client and len(client.strip().splitlines()) <= 13
    with serving(command) as address:
        exec(compile(client.replace(README_PORT, address), readme, "exec"), {})
    printed = capsys.readouterr().out
    assert "The capital of France is Paris." in printed and "'fidelity': 'exact'" in printed


@contextmanager
def serving(command: str) -> Iterator[str]:
    """The address of the server that a README's command starts, once it takes requests; on a port of its own."""
    words = [sys.executable, "-m", "vera.cli", *shlex.split(command)[1:], "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
            address = next(line["addresses"][0] for line in lines if line["message"] == "listening")
            next(line for line in lines if line["message"] == "ready")
            yield address
        finally:
            process.terminate()
            process.communicate()


def python_blocks(readme: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.S)


def test_both_readmes_show_the_same_commands():
    commands = [
        re.findall(r"^    ((?:make|vera) .*?)(?: {2,}#.*)?$", (ROOT / name).read_text(), re.M)
        for name in ("README.md", "README.zh-CN.md")
    ]
    assert commands[0] == commands[1] != []


def test_every_file_that_the_architecture_names_exists():
    named = re.findall(r"^\s+(\w+\.py) ", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    there = {path.name for path in (ROOT / "src").rglob("*.py")}
    assert set(named) <= there and named
