"""A thin hold on llama.cpp's C interface: one model, one context with a stream of keys and values for each sequence."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import llama_cpp
import numpy as np

_CHUNK_TOKENS = 512
_CELL_MULTIPLE = 256  # llama.cpp rounds the length of a stream up to this


@contextmanager
def loaded_weights(path: str) -> Iterator[Any]:
    """The model of a GGUF file, read into private memory: mapped weights would be missing from the memory that is compared."""
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    if hasattr(params, "use_mmap"):  # until llama-cpp-python 0.3.3x
        params.use_mmap = False
    else:
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    weights = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not weights:
        raise RuntimeError(f"llama.cpp cannot load {path}; its messages are on stderr")
    try:
        yield weights
    finally:
        llama_cpp.llama_model_free(weights)


class LlamaContext:
    """`batch` sequences of at most `sequence_tokens` tokens, F16 keys and values; frees its memory when the context closes."""

    def __init__(self, weights: Any, batch: int, sequence_tokens: int, num_threads: int, *, flash: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = batch
        params.n_ctx = batch * (-(-sequence_tokens // _CELL_MULTIPLE) * _CELL_MULTIPLE)
        params.n_batch = params.n_ubatch = max(_CHUNK_TOKENS, batch)
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = False
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(weights, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens; its messages are on stderr")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._tokens = llama_cpp.llama_batch_init(max(_CHUNK_TOKENS, batch), 0, 1)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
        self._num_sequences = batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self._tokens)
        llama_cpp.llama_free(self._context)

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Computes the prompt in sequence 0; returns the next token."""
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            chunk = token_ids[start : start + _CHUNK_TOKENS]
            for row, token in enumerate(chunk):
                last = start + row == len(token_ids) - 1
                self._put(row, token, position=start + row, sequence=0, with_logits=last)
            self._compute(len(chunk))
        return self._most_likely(len(chunk) - 1)

    def copy_to_all(self) -> None:
        """Copies sequence 0 to all the others. Streams are not unified, so the bytes are copied, at the next step."""
        for sequence in range(1, self._num_sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """One token of each sequence at `position`; returns the next ones."""
        for sequence, token in enumerate(tokens):
            self._put(sequence, token, position=position, sequence=sequence, with_logits=True)
        self._compute(len(tokens))
        return [self._most_likely(row) for row in range(len(tokens))]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def cache_bytes(self) -> int:
        """Of what the sequences hold now; all are as long as the first."""
        return self._num_sequences * int(llama_cpp.llama_state_seq_get_size(self._context, 0))

    def _put(self, row: int, token: int, *, position: int, sequence: int, with_logits: bool) -> None:
        self._tokens.token[row] = token
        self._tokens.pos[row] = position
        self._tokens.n_seq_id[row] = 1
        self._tokens.seq_id[row][0] = sequence
        self._tokens.logits[row] = with_logits

    def _compute(self, num_tokens: int) -> None:
        self._tokens.n_tokens = num_tokens
        if code := llama_cpp.llama_decode(self._context, self._tokens):
            raise RuntimeError(f"llama_decode returned {code}; its messages are on stderr")

    def _most_likely(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        buffer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._num_vocab)).contents
        return int(np.frombuffer(buffer, dtype=np.float32).argmax())
