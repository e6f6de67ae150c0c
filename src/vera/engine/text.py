"""Text to tokens and back: how every entry point makes a prompt, and how an answer's text grows token by token.

There is one function for text, token-id and chat prompts each, so that all entry points give the same ids.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vera.errors import RequestError
from vera.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HELD_TOKENS = 3
"""How many tokens may wait for the rest of a character: UTF-8 characters have up to 4 bytes, and a token at least one."""
_PENDING_LIMIT, _PENDING_KEPT = 16, 8
"""A window of more pending tokens than the first is cut back to the second; a split character spans fewer."""

_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "tokenize",
        "tokenizer_kwargs",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
    }
)
"""Arguments of `apply_chat_template` that decide the form of the result, not the text."""


# -- prompts -----------------------------------------------------------------------------------------------------------


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: str | Sequence[int],
    *,
    vocab_size: int | None = None,
    add_special_tokens: bool = True,
) -> list[int]:
    """The token ids of one prompt.

    Text becomes what the tokenizer makes of it by default (a BOS token if it adds one, unless `add_special_tokens` is False);
    token ids are taken as they are, after a check against the model's `vocab_size` if that is given. Raises RequestError for an
    empty prompt, ids outside the vocabulary, and text without a tokenizer.
    """
    if not isinstance(prompt, str):
        return _check_token_ids(prompt, vocab_size)
    if tokenizer is None:
        raise RequestError("the model has no tokenizer, so a text prompt cannot be read; pass token ids")
    _check_unicode("the prompt", prompt)
    token_ids: list[int] = list(tokenizer(prompt, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
    if not token_ids:
        raise RequestError(f"the prompt {prompt!r} has no tokens; give at least one")
    return token_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """The token ids of a conversation: exactly those of transformers' `apply_chat_template`, which adds no second BOS.

    A message has a `role` and a `content`, a text or a list of `{"type": "text", "text": ...}` parts, which are joined by line
    breaks; other keys reach the template unchanged, as do `template_kwargs`. Raises RequestError for messages of another form
    and for everything that the template refuses, with the template's own message.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer, so messages cannot be read; pass token ids as a prompt")
    if reserved := sorted(_RESERVED_TEMPLATE_ARGUMENTS & template_kwargs.keys()):
        raise RequestError(f"{', '.join(reserved)} cannot be set for a chat template; leave it out")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages={_shorten(messages)} must be a list of at least one {{'role', 'content'}}")
    conversation = [_check_message(place, message) for place, message in enumerate(messages)]
    try:
        token_ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False, **template_kwargs
        )
    # A template is a program that came with the model and runs on the user's messages: it may raise anything.
    except Exception as error:
        raise RequestError(f"the model's chat template refuses the messages: {str(error) or type(error).__name__}") from error
    if not token_ids:
        raise RequestError("the chat template made an empty prompt of the messages; give at least one with content")
    return cast("list[int]", token_ids)


def _check_token_ids(prompt: Sequence[int], vocab_size: int | None) -> list[int]:
    try:
        token_ids = [_whole_number(token) for token in prompt]
    except TypeError:
        raise RequestError(f"prompt={_shorten(prompt)} is neither a text nor a list of token ids") from None
    if not token_ids:
        raise RequestError("the prompt has no tokens; give at least one")
    for token in token_ids:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "from 0 up" if vocab_size is None else f"from 0 to {vocab_size - 1}, the model's vocabulary"
            raise RequestError(f"token id {token} in the prompt must be {limit}")
    return token_ids


def _whole_number(value: Any) -> int:
    """Raises TypeError for what is no whole number; numpy's and torch's integers are."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _check_message(place: int, message: Any) -> dict[str, Any]:
    """A copy of the message whose content is one text."""
    name = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}={_shorten(message)} must be a {{'role', 'content'}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"the role of {name} is {_shorten(role)}; give a text such as 'user'")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(name, part) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"the content of {name} is {_shorten(content)}; give a text or a list of text parts")
    _check_unicode(f"the content of {name}", content)
    return {**message, "content": content}


def _part_text(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"{name} has the part {_shorten(part)}; only {{'type': 'text', 'text': ...}} can be served")
    return text


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: {error.reason} at character {error.start}; remove it") from None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- answers -----------------------------------------------------------------------------------------------------------


class IncrementalText:
    """The text of one answer, piece by piece: the pieces joined are what the tokenizer makes of all the tokens at once.

    A character whose bytes are split over tokens is held back until it is whole, for at most 3 tokens; bytes that never become a
    character turn into U+FFFD as they do in the whole. Only a few tokens are decoded at a time: those that are pending, after
    the ones before them, since tokens may read differently at the start of a text (SentencePiece drops a leading space).

    One case differs from the whole: a vocabulary with byte fallback, where a run of byte tokens is malformed at its end. The
    tokenizer then replaces the run from its start; characters that were released stay here.

    Not `tokenizers.decoders.DecodeStream`, because that waits for as long as invalid bytes keep coming, and loses what it holds
    at the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        """Tokens whose text is out, then, from `_first_pending`, tokens that may have more to give."""
        self._first_pending = 0
        self._num_released = 0
        """Characters of the window's text that are out."""
        self._num_waiting = 0
        """Tokens in a row after which the text ended in what may be the begin of a character."""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was released."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_id: int) -> str:
        """The text that became final with this token."""
        self._window.append(token_id)
        text = self._decode()
        num_final = self._count_final(text)
        piece = text[self._num_released : num_final]
        all_final = num_final == len(text)
        if all_final and num_final != self._num_released:
            self._restart()
        else:
            self._num_released = max(self._num_released, num_final)
            self._bound_window(len(text))
        self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """What was held back. Nothing may be pushed afterwards."""
        piece = self._decode()[self._num_released :]
        self._num_released += len(piece)
        self._pieces.append(piece)
        return piece

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            self._window, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast("str", text)

    def _count_final(self, text: str) -> int:
        """How many characters of the window's text no later token can change, after one more token."""
        num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
        self._num_waiting = self._num_waiting + 1 if num_replaced else 0
        if self._num_waiting > _HELD_TOKENS:
            # No single character takes so long: these are invalid bytes, and only the last may yet begin a character.
            num_replaced = min(num_replaced, 1)
        return len(text) - num_replaced

    def _restart(self) -> None:
        """All is out: what was pending is from now on what precedes."""
        del self._window[: self._first_pending]
        self._first_pending = len(self._window)
        self._num_released = len(self._decode())

    def _bound_window(self, length: int) -> None:
        """Drops the oldest pending tokens if there are many: invalid bytes or tokens without text, all out but the tail."""
        if len(self._window) - self._first_pending > _PENDING_LIMIT:
            num_held = length - self._num_released
            del self._window[self._first_pending : -_PENDING_KEPT]
            self._num_released = len(self._decode()) - num_held


class StopMatcher:
    """Finds stop strings in a growing text, wherever the pieces are cut.

    The stop that is complete first wins; of those complete at the same character, the one that begins first (the longest). So a
    stop is found as soon as its last character is there. Only text that may still turn out to be a stop is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        """The longest end of the text so far that begins a stop."""
        self._matched: str | None = None

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop that was found; after that there is no more text.

        Not `enabled`: this text is no part of any stop. It is shown, with what was held back, and not searched.
        """
        if self._matched is not None:
            return "", self._matched
        text, self._held = self._held + text, ""
        if not enabled:
            return text, None
        self._matched = self._first_complete(text)
        if self._matched is not None:
            start = text.find(self._matched)
            return text[: start + len(self._matched) if self._include_stop else start], self._matched
        num_held = self._num_held(text)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown, None

    def finish(self) -> str:
        """What was held back, now that no stop can come of it."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str) -> str | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[2] if found else None

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop."""
        return max((_num_begun(text, stop) for stop in self._stops), default=0)


def _num_begun(text: str, stop: str) -> int:
    """How many characters of `stop`, short of all, `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token brought."""

    delta: str
    stop: str | None = None
    """The stop string that this token completed; the answer ends with it."""


class AnswerText:
    """The text of one answer as its reader sees it: decoded, and cut at the first stop string.

    Text of the first `min_tokens` tokens is not searched for stops. Without a tokenizer the text is empty; stop strings
    are then refused with a RequestError.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise RequestError(f"stop={params.stop!r} needs a tokenizer, and the model has none; use stop_token_ids")
        self._decoded = tokenizer and IncrementalText(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All deltas so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token_id: int) -> TextDelta:
        """The text that became final with this token, and the stop string it completed. After a stop there is no more text."""
        if self._decoded is None:
            return TextDelta("")
        self._num_tokens += 1
        delta, stop = self._matcher.push(self._decoded.push(token_id), enabled=self._searches)
        self._pieces.append(delta)
        return TextDelta(delta, stop)

    def finish(self) -> str:
        """What was held back. Nothing may be pushed afterwards; a second call gives nothing."""
        if self._decoded is None:
            return ""
        delta, _ = self._matcher.push(self._decoded.finish(), enabled=self._searches)
        delta += self._matcher.finish()
        self._pieces.append(delta)
        return delta

    @property
    def _searches(self) -> bool:
        return self._num_tokens > self._min_tokens
