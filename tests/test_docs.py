"""What the README shows is what runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.embedded
@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_python_examples_run(readme, capsys):
    first, adaptive = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.S)
    names = {}
    exec(compile(first, readme, "exec"), names)
    assert "The capital of France is Paris." in capsys.readouterr().out
    exec(compile(adaptive, readme, "exec"), names)
    printed = capsys.readouterr().out
    assert "CacheUse(" in printed and "The capital of France is Paris." in printed


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
