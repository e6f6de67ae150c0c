"""The parts of the benchmarks that need no model: processes, memory, statistics, workload, settings, tables."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tiny_models import tiny_tokenizer
from vera.bench import DecodeBench, PrefillBench, render
from vera.bench.child import run_job
from vera.bench.gguf_f16 import f16_copy
from vera.bench.machine import describe_machine
from vera.bench.memory import MemoryMeter, parse_status, process_memory
from vera.bench.signals import ends_on_sigterm
from vera.bench.statistics import agreeing, decode_figures, merge_repeats, percentile
from vera.bench.workload import document_excerpt, document_text, document_tokens
from vera.cache import CacheShape
from vera.cache.housekeeping import TierStats
from vera.config import CacheConfig
from vera.errors import ConfigError

_JOBS = """
import os, signal, sys, time
from pathlib import Path
from tempfile import TemporaryDirectory
from vera.errors import ConfigError

def greet(name):
    print("loading...")
    print("half way", end="")
    print()
    return {"greeting": f"hello {name}", "threads": os.environ.get("OMP_NUM_THREADS")}

def break_down():
    raise ValueError("no such luck")

def refuse():
    raise ConfigError("batch=0 is too small; raise it")

def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def leave():
    os._exit(3)

def leave_quietly():
    os._exit(0)

def sleep(seconds):
    time.sleep(seconds)
    return {}

def sleep_in_a_folder():
    with TemporaryDirectory() as folder:
        Path(folder, str(os.getpid())).touch()
        time.sleep(60)

def sleep_deaf_to_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with TemporaryDirectory() as folder:
        Path(folder, str(os.getpid())).touch()
        time.sleep(60)

def allocate(num_bytes):
    block = bytearray(num_bytes)
    for i in range(0, num_bytes, 4096):
        block[i] = 1
    time.sleep(0.1)
    del block
    return {}
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module `jobs` importable in child processes."""
    (tmp_path / "jobs.py").write_text(_JOBS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("jobs")
def test_job_returns_what_its_function_returned_whatever_it_printed_before() -> None:
    outcome = run_job("jobs:greet", {"name": "vera"}, num_threads=3)
    assert outcome["greeting"] == "hello vera"
    assert outcome["threads"] == "3"


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("break_down", "ValueError: no such luck"),
        ("refuse", "batch=0 is too small; raise it"),
        ("be_killed", "memory ran out"),
        ("leave", "exit code 3"),
        ("leave_quietly", "without a result"),
        ("not_there", "AttributeError"),
    ],
)
def test_job_that_goes_wrong_is_a_failure_with_a_reason(job: str, message: str) -> None:
    assert message in run_job(f"jobs:{job}", {})["failed"]


@pytest.mark.usefixtures("jobs")
def test_job_that_takes_too_long_is_stopped() -> None:
    start = time.monotonic()
    assert "longer than 0.5 s" in run_job("jobs:sleep", {"seconds": 60}, timeout_seconds=0.5)["failed"]
    assert time.monotonic() - start < 20


@pytest.mark.usefixtures("jobs")
def test_job_reports_memory_that_it_has_given_back_already() -> None:
    small, large = (run_job("jobs:allocate", {"num_bytes": mib * 2**20}) for mib in (1, 101))
    grown = large["process_bytes"] - small["process_bytes"]
    assert 90 * 2**20 < grown < 110 * 2**20
    assert large["rss_peak_bytes"] >= large["process_bytes"]


# -- how processes end ------------------------------------------------------------------------------------------------


@pytest.fixture
def parent_of(jobs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`parent_of(job)` runs it in a child of a new process; gives that process and the child's id, once the job is under way."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    parents = []

    def start(job: str) -> tuple[subprocess.Popen[bytes], int]:
        code = (
            "from vera.bench.child import run_job\n"
            "from vera.bench.signals import ends_on_sigterm\n"
            f"with ends_on_sigterm():\n    run_job('jobs:{job}', {{}})\n"
        )
        parents.append(subprocess.Popen([sys.executable, "-c", code]))
        within(30, lambda: any(folder.glob("*/*")))
        return parents[-1], int(next(folder.glob("*/*")).name)

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


def within(seconds: float, happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # ended, and nobody has asked how


@pytest.mark.parametrize("job", ["sleep_in_a_folder", "sleep_deaf_to_sigterm"])
def test_child_ends_when_its_parent_is_killed(parent_of: Any, job: str) -> None:
    parent, child = parent_of(job)
    parent.kill()
    within(10, lambda: not is_running(child))


def test_child_that_starts_after_its_parent_has_ended_does_nothing() -> None:
    code = "from vera.bench.signals import end_with; end_with(1); print('goes on')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (143, "")


def test_sigterm_ends_parent_and_child_and_leaves_no_folder(parent_of: Any, tmp_path: Path) -> None:
    parent, child = parent_of("sleep_in_a_folder")
    parent.terminate()
    assert parent.wait(10) == 143
    assert not is_running(child)
    assert not any((tmp_path / "temporary").iterdir())


def test_sigterm_ends_a_child_that_does_not_listen(parent_of: Any) -> None:
    parent, child = parent_of("sleep_deaf_to_sigterm")
    parent.terminate()
    assert parent.wait(15) == 143
    assert not is_running(child)


def test_sigterm_handler_of_others_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with ends_on_sigterm():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_private_memory_is_what_was_allocated_and_not_mapped_files() -> None:
    status = "Name:\tpython\nVmHWM:\t  900 kB\nRssAnon:\t  300 kB\nRssFile:\t  500 kB\nRssShmem:\t   20 kB\nThreads:\t4\n"
    memory = parse_status(status)
    assert memory.private_bytes == 320 * 1024
    assert memory.rss_peak_bytes == 900 * 1024


def test_meter_sees_a_peak_inside_the_context() -> None:
    before = process_memory().private_bytes
    with MemoryMeter(interval_seconds=0.005) as meter:
        block = np.ones(64 * 2**20, dtype=np.uint8)
        time.sleep(0.1)
        del block
    assert meter.peak_private_bytes - before > 60 * 2**20


# -- statistics --------------------------------------------------------------------------------------------------------


def test_percentile_is_the_nearest_rank() -> None:
    samples = [15.0, 50.0, 20.0, 35.0, 40.0]
    assert [percentile(samples, share) for share in (0.05, 0.30, 0.40, 0.50, 1.0)] == [15, 20, 20, 35, 50]


def test_decode_figures_count_every_sequence_of_a_step() -> None:
    figures = decode_figures([0.1, 0.1, 0.3, 0.1], batch=3)
    assert figures["decode_tokens_per_s"] == pytest.approx(3 * 4 / 0.6)
    assert figures["step_ms_p50"] == pytest.approx(100)
    assert figures["step_ms_p99"] == pytest.approx(300)


def test_repeats_give_medians_and_their_spread() -> None:
    merged = merge_repeats(
        [{"speed": 3.0, "name": "a", "fits": True}, {"speed": 1.0, "name": "a", "fits": True}, {"speed": 8.0, "name": "a"}]
    )
    assert merged == {"speed": 3.0, "name": "a", "fits": True, "spread": {"speed": [1.0, 8.0]}}


def test_repeats_that_failed_are_counted_and_not_averaged() -> None:
    assert merge_repeats([{"failed": "x"}, {"speed": 2.0}, {"failed": "y"}]) == {"speed": 2.0, "failed_repeats": 2}
    assert merge_repeats([{"failed": "x"}, {"failed": "y"}]) == {"failed": "x"}


def test_rates_are_ratios_of_what_was_counted_since_a_snapshot() -> None:
    stats = TierStats(pages_exact=50, pages_sketched=50, hits=1000, decode_steps=10, recompute_steps=10)
    before = stats.snapshot()
    stats.pages_exact, stats.pages_sketched, stats.values_skipped = 53, 59, 6
    stats.hits, stats.decode_steps, stats.recompute_steps, stats.uncovered_hits = 1020, 18, 12, 4
    assert asdict(stats.since(before).rates) == {
        "exact_read_share": 3 / 12,
        "values_skipped_share": 6 / 12,
        "hits_per_step": 20 / 8,
        "recompute_share": 2 / 8,
        "uncovered_per_step": 4 / 8,
    }


def test_rates_of_nothing_are_unknown() -> None:
    assert set(asdict(TierStats().rates).values()) == {None}


def test_native_bytes_are_those_of_whole_blocks() -> None:
    shape = CacheShape(layers=3, kv_heads=2, head_dim=16)
    block_bytes = 2 * 64 * 16 * 2 * 3 * 2
    assert [shape.native_bytes(CacheConfig(), tokens) for tokens in (0, 1, 64, 65)] == [
        0,
        block_bytes,
        block_bytes,
        2 * block_bytes,
    ]


def test_answers_agree_up_to_their_first_difference() -> None:
    assert agreeing([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreeing([1, 2], [1, 2, 3]) == 2


# -- workload ----------------------------------------------------------------------------------------------------------


def test_document_has_clean_paragraphs() -> None:
    text = document_text()
    assert len(text) > 300_000
    assert "\n\n\n" not in text
    assert "\n*****" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_prompt_has_exactly_the_tokens_asked_for_and_is_the_same_each_time() -> None:
    tokenizer = tiny_tokenizer()
    tokens = document_tokens(tokenizer, 500)
    assert len(tokens) == 500
    assert tokens == document_tokens(tokenizer, 500)
    assert tokenizer.decode(tokens).startswith(document_text()[:200])


def test_seed_chooses_another_part_of_the_document() -> None:
    tokenizer = tiny_tokenizer()
    first, second = (tokenizer.decode(document_tokens(tokenizer, 300, seed=seed)) for seed in (0, 1))
    assert first != second
    assert second[:100] in document_text()


def test_prompt_longer_than_the_document_begins_it_again() -> None:
    tokenizer = _WordTokenizer()
    whole = len(tokenizer.encode(document_text(), add_special_tokens=False))
    tokens = document_tokens(tokenizer, whole + 10)
    assert tokens[whole:] == tokens[:10]


def test_excerpt_ends_with_a_paragraph_and_fits() -> None:
    tokenizer = tiny_tokenizer()
    excerpt = document_excerpt(tokenizer, 1000)
    assert 500 < len(tokenizer.encode(excerpt, add_special_tokens=False)) <= 1000
    assert document_text().startswith(excerpt + "\n\n")


def test_excerpt_of_too_few_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_tokens=2 is less than the first paragraph"):
        document_excerpt(tiny_tokenizer(), 2)


class _WordTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baselines": ("sglang",)}, "unknown baseline 'sglang'; known are transformers, llama.cpp, vllm"),
        ({"caches": ("warm",)}, "unknown cache 'warm'; known are native"),
        ({"caches": "native"}, "must be a list of names"),
        ({"baselines": ("transformers", "transformers")}, "names one twice"),
        ({"caches": (), "baselines": ()}, "nothing to measure"),
        ({"context": 0}, "context=0 must be a whole number from 1 up"),
        ({"repeats": 0}, "repeats=0"),
        ({"page_dtype": "int8"}, "page_dtype='int8'"),
    ],
)
@pytest.mark.parametrize("bench", [DecodeBench, PrefillBench])
def test_setting_that_cannot_be_honoured_is_refused(bench: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(**settings)


def test_decode_settings_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="batch=0"):
        DecodeBench(batch=0)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_table_shows_figures_and_says_what_is_missing_reduced_or_different() -> None:
    result = {
        "bench": "decode",
        "batch": 16,
        "context": 800,
        "new_tokens": 32,
        "runs": {
            "native": {
                "batch": 16,
                "steps": 32,
                "decode_tokens_per_s": 1234.56,
                "cache_bytes": 2**30,
                "kernel_bandwidth_share": 0.7,
            },
            "transformers": {
                "batch": 4,
                "steps": 5,
                "decode_tokens_per_s": 3.4,
                "same_tokens_as_native": False,
                "tokens_agreeing": 6,
                "tokens_compared": 8,
            },
            "llama.cpp": {"missing": "llama-cpp-python is not installed"},
        },
        "ratios": {"native/transformers": 363.1},
        "model": "Tiny",
        "machine": describe_machine(2),
    }
    text = _printed(result)
    for words in (
        "1,234.6",
        "1,024",
        "70.0%",
        "363.10x",
        "only 4 sequences fit",
        "stopped after 5 steps",
        "6 of 8 tokens",
        "is not installed",
    ):
        assert words in text


def _printed(result: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- the half-precision copy -------------------------------------------------------------------------------------------


def test_f16_copy_keeps_metadata_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("VERA_HOME", str(tmp_path / "home"))
    matrix = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(32, 64)
    norm = np.linspace(0.5, 1.5, 64, dtype=np.float32)
    source = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(source, arch="llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    quantised = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    copy = f16_copy(source)

    reader = gguf.GGUFReader(copy)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.F16
    np.testing.assert_allclose(tensors["blk.0.attn_q.weight"].data, matrix, atol=5e-3)
    np.testing.assert_array_equal(tensors["output_norm.weight"].data, norm)
    assert f16_copy(source) == copy
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
