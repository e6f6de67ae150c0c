"""The noise that users live with already: the answers of a bfloat16 model in transformers depend on the chunks of its prompt.

Vera's own attention gives each sequence the same bits in any chunking, so the control has to be transformers' own.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from vera.models.surroundings import quiet_transformers


@torch.inference_mode()
def force(*, folder: str, token_ids: list[int], context: int, chunk: int, num_threads: int, logits_path: str) -> dict[str, Any]:
    """Reads the first `context` tokens in chunks of `chunk`, then those that follow, all but the last, in one.

    Writes the logits of that one to `logits_path` (`.npy`, float32 `[tokens, vocab]`). Weights, keys, values and SDPA are in
    bfloat16. The same for every model that transformers loads.
    """
    torch.set_num_threads(num_threads)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
    # transformers 5.24 renamed the argument.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    keep = {cache_name: DynamicCache(config=model.config)}
    ids = torch.tensor([token_ids])
    start = time.perf_counter()
    for begin in range(0, context, chunk):
        model(input_ids=ids[:, begin : min(begin + chunk, context)], use_cache=True, logits_to_keep=1, **keep)
    logits = model(input_ids=ids[:, context:-1], use_cache=True, **keep).logits[0]
    seconds = time.perf_counter() - start
    np.save(logits_path, logits.float().numpy())
    return {"seconds": seconds}
