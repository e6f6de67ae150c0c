"""Prompts to token ids and back for the server: on a thread of its own, so that a long text holds up no stream."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vera.engine.text import IncrementalText, encode_chat, encode_prompt
from vera.errors import EngineStopped, RequestError, RequestTooLong
from vera.models import LoadedModel
from vera.server.errors import too_busy
from vera.server.tokens import TokenTexts

_Result = TypeVar("_Result")
_MOST_QUEUED = 4096
"""Above what is admitted by default: those that wait to be answered get their refusal from `Service.admit`."""


class Encoder:
    """One thread, and a copy of the model's tokenizer: a tokenizer may change itself while it encodes, and the engine decodes
    with its own at the same time."""

    def __init__(self, model: LoadedModel, max_model_len: int) -> None:
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._vocab_size = model.spec.vocab_size
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vera-encoder")
        self._turn = asyncio.Semaphore(1)
        """Whose function is on the thread. One waits for it here, where waiting can be given up; the thread has no queue."""
        self._num_queued = 0
        self.texts = TokenTexts(self._tokenizer)
        self._longest_token = self.texts.longest()
        if self._tokenizer is not None:
            # What a first call changes of the tokenizer, it changes now: single tokens are read while the thread encodes.
            self._tokenizer("x", verbose=False)

    async def prompt(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """As `encode_prompt`; a text that is known not to fit is refused unread. Raises RequestError and RequestTooLong."""
        if isinstance(prompt, str):
            self._check_length([prompt])
        return await self._run(
            lambda: encode_prompt(self._tokenizer, prompt, vocab_size=self._vocab_size, add_special_tokens=add_special_tokens)
        )

    async def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> list[int]:
        """As `encode_chat`."""
        self._check_length([text for message in messages for text in _texts_of(message.get("content"))])
        return await self._run(lambda: encode_chat(self._tokenizer, messages, **template))

    async def text(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises RequestError for ids outside the vocabulary."""

        def decode() -> str:
            self._check_known(token_ids)
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            return str(self._required().decode(token_ids, **options))

        return await self._run(decode)

    async def offsets(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """For each token, how many characters of the whole text come before it."""

        def walk() -> list[int]:
            text, offsets, length = IncrementalText(self._required(), skip_special_tokens=skip_special_tokens), [], 0
            for token in token_ids:
                offsets.append(length)
                length += len(text.push(token))
            return offsets

        return await self._run(walk)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        """Raises ApiError if too much is queued."""
        if self._num_queued >= _MOST_QUEUED:
            raise too_busy(f"{_MOST_QUEUED} texts wait to be read; try again later")
        self._num_queued += 1
        try:
            await self._turn.acquire()
            return await asyncio.shield(self._begin(function))
        finally:
            self._num_queued -= 1

    def _begin(self, function: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """The turn ends when the function does, whether or not its caller has left meanwhile."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, function)
        except RuntimeError:
            self._turn.release()
            raise EngineStopped("the server has ended and reads no more prompts") from None
        running.add_done_callback(self._end_turn)
        return running

    def _end_turn(self, ended: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not ended.cancelled():
            ended.exception()  # nobody else asks for it if the caller has left

    def _required(self) -> Any:
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer, so there is no text; pass token ids")
        return self._tokenizer

    def _check_known(self, token_ids: Sequence[int]) -> None:
        if (wrong := next((token for token in token_ids if not 0 <= token < self._vocab_size), None)) is not None:
            raise RequestError(f"tokens has token id {wrong}, outside the vocabulary 0 to {self._vocab_size - 1}")

    def _check_length(self, texts: Sequence[str]) -> None:
        """Where the longest token is known, so is the fewest number of tokens that a text can have."""
        length = sum(map(len, texts))
        fewest = 0 if self._longest_token is None else length // self._longest_token
        if fewest > self._max_model_len:
            raise RequestTooLong(
                f"the prompt's {length} characters are at least {fewest} tokens, above the {self._max_model_len} tokens served; "
                "shorten it"
            )


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
