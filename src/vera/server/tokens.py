"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenizers import decoders

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenTexts:
    """What each token id stands for by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) if tokenizer is not None else frozenset()
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, token_id: int) -> str:
        """A token that is only part of a character is written as `bytes:\\xe2\\x82`."""
        return self._lookup(token_id)[0]

    def bytes(self, token_id: int) -> list[int] | None:
        """None: the tokenizer does not tell."""
        return self._lookup(token_id)[1]

    def longest(self) -> int | None:
        """An upper bound for the characters of a token. None: one token may stand for any number, because the tokenizer changes
        texts before it reads them, or has a token for all that it does not know."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is not None or not isinstance(backend.decoder, decoders.ByteLevel):
            return None
        return max((len(token) for token in self._tokenizer.get_vocab()), default=1) or 1

    def _lookup(self, token_id: int) -> tuple[str, list[int] | None]:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        token = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return f"token_id:{token_id}", None
        if token_id in self._special:
            return token, list(token.encode())
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if token.startswith(_METASPACE) and not text.startswith(" "):
            text = f" {text}"  # a decoder drops the space that begins a text
        if _REPLACEMENT not in text:
            return text, list(text.encode())
        if (raw := _raw_bytes(token)) is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def _raw_bytes(token: str) -> bytes | None:
    """The bytes of a byte-fallback or a byte-level token; None: it is neither."""
    if fallback := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_of_character()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return None


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for characters from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
