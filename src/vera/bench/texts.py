"""Texts to be faithful on: prose, code and a chat of many turns, made of what every Python brings, or a file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from vera.bench.workload import document_text
from vera.engine.text import encode_chat
from vera.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("prose", "code", "chat")
"""The built-in texts. The same Python version and tokenizer give the same tokens."""

_MODULES = ("argparse", "textwrap", "dataclasses", "difflib", "fractions", "statistics", "calendar", "configparser")
_QUESTIONS = (
    "What does the reference say about {topic}?",
    "I am stuck on {topic}. Where do I begin?",
    "Thanks. Now something else: {topic}.",
    "A colleague asked me about {topic} today. What should I tell them?",
    "Could you remind me how {topic} work in Python?",
)
_FOLLOW_UPS = (
    "Please go on.",
    "And what else is there to know about it?",
    "I see. Is that all, or are there exceptions?",
    "Can you tell me more?",
)
_MAX_PARAGRAPHS = 4
"""Of a topic; each is an answer of its own."""
_PARAGRAPH_CHARACTERS = range(120, 900)


def check_text(text: str) -> None:
    """A ConfigError says so if `text` is neither one of KINDS nor a file."""
    if text not in KINDS and not Path(text).expanduser().is_file():
        raise ConfigError(f"text={text!r} is neither {', '.join(KINDS)} nor a file; give one of them")


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a built-in text or a file.

    Raises ConfigError for a text that is not there, is not UTF-8 or is shorter, and UnsupportedModel for `chat` where the
    tokenizer has no chat template.
    """
    check_text(text)
    if text == "chat":
        if not tokenizer.chat_template:
            raise UnsupportedModel("text='chat' needs a chat template, and this model has none; take prose, code or a file")
        token_ids = encode_chat(tokenizer, conversation(), add_generation_prompt=False)
    else:
        token_ids = tokenizer.encode(_read(text), add_special_tokens=False)
    if len(token_ids) < num_tokens:
        raise ConfigError(
            f"text={text!r} has {len(token_ids)} tokens, and {num_tokens} are needed; lower the context or the tokens, "
            "or give a longer text"
        )
    return token_ids[:num_tokens]


@cache
def code_text() -> str:
    """Sources of the standard library, one module after another: about 500 kB."""
    return "\n\n".join(inspect.getsource(import_module(name)) for name in _MODULES)


def conversation() -> list[dict[str, str]]:
    """User and assistant in turns, several hundred of them: questions about Python's help topics, and their paragraphs."""
    questions, follow_ups = (count(), count())
    messages: list[dict[str, str]] = []
    for name in sorted(topics):
        for place, paragraph in enumerate(_paragraphs(name)):
            if place == 0:
                asked = _QUESTIONS[next(questions) % len(_QUESTIONS)].format(topic=name.replace("-", " ").lower())
            else:
                asked = _FOLLOW_UPS[next(follow_ups) % len(_FOLLOW_UPS)]
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": paragraph}]
    return messages


def _paragraphs(topic: str) -> Iterator[str]:
    """The first few paragraphs that could be an answer: neither headings nor long listings."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in topics[topic].split("\n\n"))
    fitting = (paragraph for paragraph in paragraphs if len(paragraph) in _PARAGRAPH_CHARACTERS)
    return islice(fitting, _MAX_PARAGRAPHS)


def _read(text: str) -> str:
    if text == "prose":
        return document_text()
    if text == "code":
        return code_text()
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={text!r} is not UTF-8 text: {error}") from None
