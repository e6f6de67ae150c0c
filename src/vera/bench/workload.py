"""The text that benchmarks and the demo run on: the standard library's own reference, which every machine has."""

from __future__ import annotations

import re
from functools import cache
from itertools import cycle, islice
from pydoc_data.topics import topics
from typing import Protocol

from vera.errors import ConfigError


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@cache
def document_text() -> str:
    """The help topics of Python in the order of their names: about 500 kB of English prose with code in it.

    Rulers and runs of blank lines are taken out, so that paragraphs are apart by exactly one empty line. The same Python
    version gives the same text.
    """
    return "\n\n".join(_clean(topics[name]) for name in sorted(topics))


def _clean(topic: str) -> str:
    lines = (line.rstrip() for line in topic.splitlines())
    kept = (line for line in lines if not re.fullmatch(r"\s*[*=\-~^]{3,}", line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def document_tokens(tokenizer: Tokenizer, num_tokens: int, *, seed: int = 0) -> list[int]:
    """Exactly `num_tokens` tokens of the document, without special tokens; a longer wish begins it again.

    Seed 0 begins at the beginning; another seed at another paragraph, the same one each time.
    """
    if num_tokens < 1:
        raise ConfigError(f"num_tokens={num_tokens} must be a whole number from 1 up")
    paragraphs = _paragraphs()
    start = seed * 977 % len(paragraphs)  # a prime step: neighbouring seeds share no text
    rotated = "".join(paragraphs[start:] + paragraphs[:start])
    return list(islice(cycle(tokenizer.encode(rotated, add_special_tokens=False)), num_tokens))


def document_excerpt(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Whole paragraphs from the beginning of the document, as many as fit into `num_tokens` tokens.

    A ConfigError says so if not even the first one fits.
    """
    taken: list[str] = []
    room = num_tokens
    for paragraph in _paragraphs():
        room -= len(tokenizer.encode(paragraph, add_special_tokens=False))
        if room < 0:
            break
        taken.append(paragraph)
    # Tokens can merge across the borders or, rarely, come out as more of them: the whole is what counts.
    while taken and len(tokenizer.encode("".join(taken).rstrip(), add_special_tokens=False)) > num_tokens:
        taken.pop()
    if not taken:
        raise ConfigError(f"num_tokens={num_tokens} is less than the first paragraph takes; ask for more")
    return "".join(taken).rstrip()


@cache
def _paragraphs() -> list[str]:
    """Each with the empty line that ends it."""
    return [paragraph + "\n\n" for paragraph in document_text().split("\n\n")]
