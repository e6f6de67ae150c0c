"""`vera bench peers`: its arithmetic over made-up runs, what it says of those that are not there, and a whole run."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiny_models import save_tiny, tiny_tokenizer
from vera.bench import DecodeBench
from vera.bench.peers import render_peers, run_peers
from vera.bench.subjects import vllm_cpu
from vera.cli import main

_RUNS: dict[str, dict[str, Any]] = {
    "native": {"decode_tokens_per_s": 100.0, "process_bytes": 1000, "cache_bytes": 600, "batch": 16, "steps": 32},
    "adaptive": {"decode_tokens_per_s": 180.0, "process_bytes": 550, "cache_bytes": 240, "batch": 16, "steps": 32},
    "transformers": {"decode_tokens_per_s": 10.0, "process_bytes": 4000, "cache_bytes": 2400, "batch": 8, "steps": 5},
    "llama.cpp": {"failed": "no luck"},
    "vllm": {"missing": "vLLM is not installed; see here"},
}
_MACHINE = {"cpu": "made-up", "cores": 2, "isa": "avx2", "threads": 2, "torch": "2", "load_average": 0.1}


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[DecodeBench]:
    """The benchmarks that were run; each gives `_RUNS`."""
    asked: list[DecodeBench] = []

    def run_decode(bench: DecodeBench) -> dict[str, Any]:
        asked.append(bench)
        settings = {"bench": "decode", "batch": bench.batch, "context": bench.context, "new_tokens": bench.new_tokens}
        return {**settings, "runs": _RUNS, "ratios": {"adaptive/native": 1.8}, "model": "made-up", "machine": _MACHINE}

    monkeypatch.setattr("vera.bench.peers.run_decode", run_decode)
    return asked


def vera(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vera", "bench", "peers", *arguments])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)


def test_ratios_are_by_native_and_by_transformers_of_those_that_ran(decodes: list[DecodeBench]) -> None:
    assert run_peers(DecodeBench())["ratios"] == {
        "native": {
            "adaptive": {"decode_tokens_per_s": 1.8, "process_bytes": 0.55, "cache_bytes": 0.4},
            "transformers": {"decode_tokens_per_s": 0.1, "process_bytes": 4.0, "cache_bytes": 4.0},
        },
        "transformers": {
            "native": {"decode_tokens_per_s": 10.0, "process_bytes": 0.25, "cache_bytes": 0.25},
            "adaptive": {"decode_tokens_per_s": 18.0, "process_bytes": 0.1375, "cache_bytes": 0.1},
        },
    }


def test_everyone_is_asked_for_the_same_work(decodes: list[DecodeBench], monkeypatch: pytest.MonkeyPatch) -> None:
    vera(monkeypatch, "some/model", "--batch", "4", "--context", "3000", "--new-tokens", "9", "--set", "sketch_bits=8")
    (bench,) = decodes
    assert (bench.model, bench.batch, bench.context, bench.new_tokens) == ("some/model", 4, 3000, 9)
    assert (bench.caches, bench.baselines) == (("native", "adaptive"), ("transformers", "llama.cpp", "vllm"))
    assert bench.adaptive == {"sketch_bits": 8}


def test_missing_one_is_named_with_a_way_and_failed_one_makes_the_exit_code(
    decodes: list[DecodeBench], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert vera(monkeypatch, "--json") == 1
    out, errors = capfd.readouterr()
    assert json.loads(out)["runs"]["vllm"] == {"missing": "vLLM is not installed; see here"}
    assert "vllm: vLLM is not installed; see here" in errors
    assert "vera: llama.cpp: no luck" in errors
    assert "adaptive by transformers: 18.00 times the tokens/s, 0.14 times the memory" in errors
    assert "transformers: only 8 sequences fit into memory" in errors


def test_without_a_yardstick_there_are_no_ratios_by_it(decodes: list[DecodeBench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_RUNS, "native", {"failed": "no memory"})
    ratios = run_peers(DecodeBench())["ratios"]
    assert ratios["native"] == {}
    assert set(ratios["transformers"]) == {"adaptive"}


# -- vLLM, of which only the interface is here -------------------------------------------------------------------------

_VLLM = '''
import os
from types import SimpleNamespace as Simple

seen = {}

class EngineArgs:
    def __init__(self, **arguments):
        seen.update(arguments)

class SamplingParams(Simple):
    pass

class LLMEngine:
    """Reads a prompt a step, while those read before go on; a token is its place in the answer."""

    @classmethod
    def from_engine_args(cls, arguments):
        seen["environment"] = {name: value for name, value in os.environ.items() if name.startswith("VLLM")}
        return cls()

    def __init__(self):
        self.waiting, self.running = [], {}

    def add_request(self, request_id, prompt, params):
        seen.setdefault("prompts", []).append(prompt["prompt_token_ids"])
        self.waiting.append((request_id, params))

    def step(self):
        if self.waiting:
            request_id, params = self.waiting.pop(0)
            self.running[request_id] = (params, [])
        outputs = []
        for request_id, (params, tokens) in list(self.running.items()):
            tokens.append(len(tokens))
            if len(tokens) == params.max_tokens:
                del self.running[request_id]
            outputs.append(Simple(request_id=request_id, outputs=[Simple(token_ids=tokens)]))
        return outputs
'''


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with the names of vLLM that are used, and what it was given."""
    (tmp_path / "vllm.py").write_text(_VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(vllm_cpu, "_token_bytes", lambda folder, item_bytes: 2**20 * item_bytes)
    import vllm

    yield vllm.seen
    sys.modules.pop("vllm", None)


def test_vllm_reads_distinct_prompts_and_every_timed_step_serves_all(vllm: dict[str, Any]) -> None:
    run = vllm_cpu.decode(folder="there", token_ids=[5] * 100, batch=3, new_tokens=4, num_threads=1, dtype="bfloat16")
    assert (run["batch"], run["steps"], run["dtype"]) == (3, 4, "bfloat16")
    assert vllm["prompts"] == [[5] * 100] * 3 and vllm["enable_prefix_caching"] is False
    assert (vllm["model"], vllm["max_num_seqs"], vllm["max_num_batched_tokens"]) == ("there", 3, 103)
    assert run["token_ids"] == list(range(1 + 2 + 4))  # of the prompt, of the warm-up, timed: those of the last sequence
    assert run["sequences_agree"]
    # 3 x (100 + 1 + 3 + 2 + 4 + 256) tokens of 2 MiB
    assert vllm["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert vllm["environment"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_vllm_prefill_is_the_time_to_the_first_token(vllm: dict[str, Any]) -> None:
    run = vllm_cpu.prefill(folder="there", token_ids=[5] * 100, num_threads=1, dtype="float32")
    assert run["prefill_tokens_per_s"] == pytest.approx(100 / (run["ttft_ms"] / 1e3))
    assert run["token_ids"] == [0]


def test_vllm_that_is_not_installed_is_missing_with_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "find_spec", lambda name: None)
    arguments: dict[str, Any] = {"folder": "there", "token_ids": [5], "num_threads": 1, "dtype": "float32"}
    for run in (vllm_cpu.decode(batch=1, new_tokens=1, **arguments), vllm_cpu.prefill(**arguments)):
        assert "docs.vllm.ai" in run["missing"]


# -- a whole run -------------------------------------------------------------------------------------------------------


@pytest.mark.bench
@pytest.mark.slow
def test_tiny_model_beside_its_peers(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path, tokenizer=tokenizer, vocab_size=len(tokenizer))
    settings = {"min_context": 64, "page_size": 16, "warm_store": "ram"}
    result = run_peers(
        DecodeBench(
            model=str(tmp_path),
            batch=2,
            context=200,
            new_tokens=4,
            caches=("native", "adaptive"),
            adaptive=settings,
            num_threads=1,
        )
    )
    assert set(result["ratios"]["transformers"]) >= {"native", "adaptive"}
    assert set(result["ratios"]["native"]) >= {"adaptive", "transformers"}
    assert "not one" in result["runs"]["llama.cpp"]["missing"] or "pip install" in result["runs"]["llama.cpp"]["missing"]
    Console(file=io.StringIO()).print(render_peers(result))
