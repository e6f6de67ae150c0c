"""What is asked when. All of it is drawn from the seed before the clock starts; only `custom` reads a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vera.bench.serve.settings import Workload
from vera.bench.workload import document_text
from vera.errors import ConfigError

Message = Mapping[str, Any]
"""`{"role", "content"}`, as chat endpoints take it."""

_WORD_LIST = """
ability action age agency air amount animal answer area arm art article artist author baby back bank bed benefit bill
bird board body book box boy bridge brother call car care career case center century chance change child choice church
city class college color company concern control cost country couple course court culture cup dark data day deal decade
degree design disease doctor dog door east economy effect effort end energy event example eye face fact factor family
father feeling field fight figure film fire floor foot force form friend fund future game garden girl glass goal ground
group growth hair hand head health heart history home hour house idea image island issue job kind land law lawyer leader
leg letter level life light line list look loss lot love man market matter media member memory mind minute moment money
month mother movie music name nation nature need news night north note number ocean office oil order others page paper
parent part party people period person phone piece place plan plant player point police policy power price race rate
reason record region report rest result right risk river road role room rule scene school season sense series show side
sign sister site size skill son song sort sound source south space sport spring staff stage star state step stock store
story street study summer system table tax team term test thing time top town trade tree truth type use value view voice
wall water way week west wife window winter woman word work worker world year
"""
_WORDS = _WORD_LIST.split()
"""One token each in the usual vocabularies, so that a prompt has its length without the server's tokenizer being here."""
_CHARACTERS_A_TOKEN = 4.1
"""Of the document that `text` reads, with a vocabulary of 49,000 tokens."""
_CUSTOM_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: what is said in addition to all before, and the most tokens to answer."""

    messages: tuple[Message, ...]
    output_tokens: int
    wait_seconds: float = 0.0
    """Idle time before it, from the answer before it on."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other. It begins `at_seconds` after the clock started."""

    turns: tuple[Turn, ...]
    at_seconds: float = 0.0


def conversations(workload: Workload) -> list[Conversation]:
    """`num_prompts` conversations in the order of their arrival; the same settings give the same ones.

    ConfigError where the file of `custom` cannot be used.
    """
    times = arrival_times(workload.num_prompts, workload.request_rate, workload.burstiness, seed=workload.seed)
    plans = _plans(workload, random.Random(f"{workload.seed} prompts"))
    return [Conversation(turns, at) for turns, at in zip(plans, times, strict=True)]


def arrival_times(number: int, rate: float, burstiness: float, *, seed: int) -> list[float]:
    """Seconds from the start at which `number` conversations arrive, `rate` a second, the last at `number / rate`.

    The times between them are drawn from a gamma distribution, then stretched to end when they should: so a run's rate does
    not depend on its seed.
    """
    if math.isinf(rate):
        return [0.0] * number
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(number)]
    rng = random.Random(f"{seed} arrivals")
    drawn, now = [], 0.0
    for _ in range(number):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        drawn.append(now)
    stretch = number / rate / now if now > 0 else 0.0
    return [at * stretch for at in drawn]


def warm_up(workload: Workload) -> Turn:
    """A request as long as the others that shares no beginning with them."""
    rng = random.Random(f"{workload.seed} warm-up")
    tokens = _CUSTOM_WARM_UP_TOKENS if workload.dataset == "custom" else workload.prefix_len + workload.input_len
    return Turn((_user(_words(rng, tokens)),), workload.output_len)


def completion_prompt(messages: Sequence[Message]) -> str:
    """A conversation as one text, for endpoints that know no messages.

    Answers follow what was asked as they came, so that the tokens of a turn are the beginning of the next.
    """
    text = ""
    for message in messages:
        text += message["content"] if message["role"] == "assistant" or not text else " " + message["content"]
    return text


def _plans(workload: Workload, rng: random.Random) -> list[tuple[Turn, ...]]:
    match workload.dataset:
        case "custom":
            assert workload.path is not None
            return _custom(workload.path, workload)
        case "text":
            return [_text_turns(workload, rng) for _ in range(workload.num_prompts)]
        case "multi-turn":
            return _prefixed(workload, rng, workload.num_turns)
        case _:
            return _prefixed(workload, rng, 1)


def _prefixed(workload: Workload, rng: random.Random, num_turns: int) -> list[tuple[Turn, ...]]:
    """Conversations of random words that begin with one of the shared prefixes, all prefixes as often, in a random order."""
    prefixes = [_words(rng, workload.prefix_len) for _ in range(workload.num_prefixes)]
    order = [i % len(prefixes) for i in range(workload.num_prompts)]
    rng.shuffle(order)
    return [_spoken(workload, rng, prefixes[i], num_turns) for i in order]


def _spoken(workload: Workload, rng: random.Random, prefix: str, num_turns: int) -> tuple[Turn, ...]:
    turns = []
    for number in range(num_turns):
        said = _words(rng, _around(rng, workload.input_len, workload.range_ratio))
        if number == 0 and prefix:
            said = f"{prefix} {said}"
        output_tokens = _around(rng, workload.output_len, workload.range_ratio)
        turns.append(Turn((_user(said),), output_tokens, workload.think_seconds if number else 0.0))
    return tuple(turns)


def _text_turns(workload: Workload, rng: random.Random) -> tuple[Turn, ...]:
    """Prose from a random place of the document, from the beginning of a word on. Its length in tokens is an estimate."""
    text = document_text()
    length = round(_around(rng, workload.input_len, workload.range_ratio) * _CHARACTERS_A_TOKEN)
    start = rng.randrange(len(text))
    rotated = text[start:] + "\n\n" + text[:start]
    begin = rotated.index(" ") + 1
    excerpt = (rotated * (1 + (begin + length) // len(rotated)))[begin : begin + length]
    return (Turn((_user(excerpt.rstrip()),), _around(rng, workload.output_len, workload.range_ratio)),)


def _custom(path: Path, workload: Workload) -> list[tuple[Turn, ...]]:
    """The file's lines in their order, from the first again where there are fewer than prompts."""
    lines = [line for line in _read(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} is empty; give it a JSON object a line, each with `prompt` or `messages`")
    entries = [_entry(line, f"{path}, line {number}", workload) for number, line in enumerate(lines, 1)]
    return [entries[i % len(entries)] for i in range(workload.num_prompts)]


def _entry(line: str, where: str, workload: Workload) -> tuple[Turn, ...]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{where} must be an object with either `prompt` or `messages`")
    messages = entry["messages"] if "messages" in entry else [_user(entry["prompt"])]
    output_tokens = entry.get("output_tokens", workload.output_len)
    if not _are_messages(messages) or not isinstance(output_tokens, int) or output_tokens < 1:
        raise ConfigError(f"{where}: a prompt is a text, messages have `role` and `content`, output_tokens are from 1 up")
    return (Turn(tuple(messages), output_tokens),)


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)
    )


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def _around(rng: random.Random, length: int, ratio: float) -> int:
    """A length between `length * (1 - ratio)` and `length * (1 + ratio)`, both included, and at least 1."""
    return max(1, rng.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def _words(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(_WORDS, k=number))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
