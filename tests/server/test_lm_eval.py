"""lm-eval's `local-completions` against a real server; run where `lm_eval` is found, or named by LM_EVAL.

By hand, with the embedded model: `vera serve embedded`, then in tests/lm_eval

    lm_eval run --model local-completions --tasks vera_facts --include_path . \
      --model_args base_url=http://127.0.0.1:8000/v1/completions,model=NAME,tokenizer=FOLDER,num_concurrent=4
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from servers import NAME, running

from tiny_models import tiny_model, tiny_tokenizer

TASKS = Path(__file__).parents[1] / "lm_eval"
COMMAND = os.environ.get("LM_EVAL") or shutil.which("lm_eval")


def direct_loglikelihood(model, context, continuation):
    """By transformers alone; a request's text is tokenised in whole, as lm-eval does. Sum, and whether it is the greedy one."""
    tokenizer = tiny_tokenizer()
    whole = tokenizer(context + continuation)["input_ids"]
    split = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)[split - 1 : -1]
    targets = torch.tensor(whole[split:])
    total = logprobs.gather(1, targets[:, None]).sum().item()
    return total, bool((logprobs.argmax(-1) == targets).all())


@pytest.mark.bench
@pytest.mark.skipif(COMMAND is None, reason="lm_eval is not installed")
def test_loglikelihoods_of_lm_eval_are_transformers_own(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with running() as server:
        arguments = {
            "base_url": f"{server.url}/v1/completions",
            "model": NAME,
            "tokenizer": tmp_path / "tokenizer",
            "num_concurrent": 4,
            "max_length": 4096,
        }
        command = [COMMAND, "run", "--model", "local-completions", "--tasks", "vera_facts", "--include_path", TASKS]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        command += ["--batch_size", "3", "--output_path", tmp_path / "out", "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "OPENAI_API_KEY": "none"}
        run = subprocess.run(command, cwd=TASKS, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-3000:]
        server.wait_until_idle()
    (samples,) = (tmp_path / "out").rglob("samples_vera_facts_*.jsonl")
    compared, model = 0, tiny_model(vocab_size=len(tiny_tokenizer()))
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for place, (told,) in enumerate(sample["resps"]):
            asked = sample["arguments"][f"gen_args_{place}"]
            total, is_greedy = direct_loglikelihood(model, asked["arg_0"], asked["arg_1"])
            assert float(told[0]) == pytest.approx(total, abs=1e-3)
            assert (told[1] in (True, "True")) == is_greedy
            compared += 1
    assert compared == 40
