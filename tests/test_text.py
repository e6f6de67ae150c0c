"""Answers as text: characters split over tokens, stop strings across pieces, and prompts from every entry point.

The truth for the first is the tokenizer's decoding of all tokens at once, for the second a search that reads one character
after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tiny_models import CHATML, tiny_tokenizer
from vera.engine.text import AnswerText, IncrementalText, StopMatcher, TextDelta, encode_chat, encode_prompt
from vera.errors import RequestError
from vera.sampling_params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

unhurried = settings(deadline=None, max_examples=200)
"""A busy machine is no failure."""

BYTE_LEVEL = tiny_tokenizer()
BYTE_IDS = [BYTE_LEVEL.convert_tokens_to_ids(letter) for letter in "ab"]


def byte_ids(data: bytes) -> list[int]:
    """One token a byte."""
    # The alphabet of byte-level BPE: printable bytes stand for themselves, the others for the characters from 256 up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [BYTE_LEVEL.convert_tokens_to_ids(letters[byte]) for byte in data]


def sentencepiece_like(decoder: Any) -> PreTrainedTokenizerFast:
    """Words that begin with the space mark, byte-fallback tokens, and two special tokens."""
    words = ["▁", "▁▁", "▁the", "▁cat", "s", "▁s", "at", ",", "你", "▁你", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


LLAMA_LIKE = sentencepiece_like(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
METASPACE = sentencepiece_like(decoders.Metaspace())
BYT5 = ByT5Tokenizer()


def stream(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The piece of each token, and what `finish` gives."""
    text = IncrementalText(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = [text.push(token_id) for token_id in token_ids]
    pieces.append(text.finish())
    assert text.text == "".join(pieces)
    return pieces


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


# -- characters split over tokens (field case 29) ----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["😀", "a😀b", "한", "é", "né?", "👩‍👩‍👧 家族", "日本語のテキスト"])
def test_a_character_split_over_tokens_arrives_whole(text: str) -> None:
    pieces = stream(BYTE_LEVEL, byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


def byte_pairs_tokenizer(*tokens: bytes) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """A byte-level tokenizer with exactly these tokens, and their ids."""
    names = ["".join(BYTE_LEVEL.convert_ids_to_tokens(byte_ids(token))) for token in tokens]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend), list(range(len(names)))


@pytest.mark.parametrize(
    "tokens",
    [
        (b"\xf0\x9f", b"\x98\x80"),
        (b"\xed", b"\x95\x9c"),
        (b"\xc3", b"\xa9"),
        (b"ok \xf0\x9f\x98", b"\x80\xed\x95", b"\x9c!"),
    ],
    ids=["emoji 2+2", "korean 1+2", "e-acute 1+1", "borders inside tokens"],
)
def test_tokens_that_share_a_character_give_it_with_the_last_of_them(tokens: tuple[bytes, ...]) -> None:
    tokenizer, ids = byte_pairs_tokenizer(*tokens)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids) == b"".join(tokens).decode()
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_an_answer_cut_in_mid_character_is_streamed_as_it_is_decoded() -> None:
    ids = byte_ids("日本😀".encode())
    for length in range(len(ids) + 1):
        assert "".join(stream(BYTE_LEVEL, ids[:length])) == decode(BYTE_LEVEL, ids[:length])


def test_an_invalid_byte_does_not_stall_the_stream() -> None:
    pieces = stream(BYTE_LEVEL, byte_ids(b"ab\xffcd"))
    assert pieces == ["a", "b", "", REPLACEMENT + "c", "d", ""]


@pytest.mark.parametrize("invalid", [b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xc3\xc3", b"\xf5\x80"])
def test_however_many_invalid_bytes_hold_back_at_most_three_tokens(invalid: bytes) -> None:
    ids = byte_ids(invalid * 40)
    text = IncrementalText(BYTE_LEVEL)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += text.push(token_id)
        assert len(shown) >= len(decode(BYTE_LEVEL, ids[: max(count - 3, 0)]))
    assert shown + text.finish() == decode(BYTE_LEVEL, ids)


def test_a_character_after_many_invalid_bytes_arrives_whole() -> None:
    pieces = stream(BYTE_LEVEL, byte_ids(b"\x80" * 50 + "😀!".encode()))
    assert pieces[-3:] == ["😀", "!", ""]


def test_a_replacement_character_that_the_model_wrote_is_kept() -> None:
    ids = byte_ids(f"a{REPLACEMENT}b{REPLACEMENT}".encode())
    assert "".join(stream(BYTE_LEVEL, ids)) == f"a{REPLACEMENT}b{REPLACEMENT}"


def test_the_work_for_a_token_does_not_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    whole = PreTrainedTokenizerFast.decode

    def watched(self: PreTrainedTokenizerFast, token_ids: list[int], **options: Any) -> Any:
        lengths.append(len(token_ids))
        return whole(self, token_ids, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", watched)
    stream(BYTE_LEVEL, [*byte_ids("日本語 text 😀".encode() * 20), *byte_ids(b"\xff" * 200), *[2] * 200, *byte_ids(b"ok" * 50)])
    assert max(lengths) <= 40


CHARACTERS = st.text(st.sampled_from("ab é한日😀 \n" + REPLACEMENT), max_size=12).map(str.encode)
BYTES = st.lists(st.one_of(CHARACTERS, st.binary(max_size=5)), max_size=6).map(b"".join)


@unhurried
@given(BYTES, st.booleans())
def test_byte_level_pieces_joined_are_the_decoding_of_all_tokens(data: bytes, skip: bool) -> None:
    ids = byte_ids(data)
    pieces = stream(BYTE_LEVEL, ids, skip_special_tokens=skip)
    assert "".join(pieces) == decode(BYTE_LEVEL, ids, skip_special_tokens=skip) == data.decode(errors="replace")


@unhurried
@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 40), max_size=40), st.booleans())
def test_any_byte_level_tokens_with_special_and_unknown_ones_are_streamed_as_decoded(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, ids, skip_special_tokens=skip)) == decode(BYTE_LEVEL, ids, skip_special_tokens=skip)


WORDS = [[token] for token in range(3, 3 + 256 + 11) if token >= 259]
FALLBACK = [[3 + byte for byte in text.encode()] for text in ("é", "한", "😀", "a", " ")]
SPECIALS = [[0], [1], [2], [len(LLAMA_LIKE) - 1], [len(LLAMA_LIKE) + 7]]


@pytest.mark.parametrize("tokenizer", [LLAMA_LIKE, METASPACE], ids=["llama", "metaspace"])
@unhurried
@given(pieces=st.lists(st.sampled_from([*WORDS, *FALLBACK, *SPECIALS]), max_size=40), skip=st.booleans())
def test_sentencepiece_pieces_joined_are_the_decoding_of_all_tokens(
    tokenizer: PreTrainedTokenizerFast, pieces: list[list[int]], skip: bool
) -> None:
    ids = [token for piece in pieces for token in piece]
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == decode(tokenizer, ids, skip_special_tokens=skip)


def test_spaces_between_words_survive_where_the_decoder_strips_the_first() -> None:
    the, cat, space = (LLAMA_LIKE.convert_tokens_to_ids(token) for token in ("▁the", "▁cat", "▁"))
    ids = [1, the, 2, *[1] * 30, cat, space, space, cat]
    for tokenizer in (LLAMA_LIKE, METASPACE):
        assert stream(tokenizer, ids)[-6:] == ["", " cat", " ", " ", " cat", ""]


def test_tokens_without_text_before_a_split_character_do_not_use_up_its_wait() -> None:
    space, word = (LLAMA_LIKE.convert_tokens_to_ids(token) for token in ("▁", "▁the"))
    emoji = [3 + byte for byte in "😀".encode()]
    assert "".join(stream(LLAMA_LIKE, [space, *emoji])) == "😀"
    assert "".join(stream(LLAMA_LIKE, [word, 1, 2, 1, *emoji])) == "the😀"


def test_a_malformed_run_of_fallback_bytes_neither_stalls_nor_spoils_what_follows() -> None:
    the = LLAMA_LIKE.convert_tokens_to_ids("▁the")
    bad = [3 + byte for byte in "你".encode() + b"\xff" * 30]
    pieces = stream(LLAMA_LIKE, [the, *bad, the, the])
    assert pieces[3] == "你"
    assert pieces[-3:] == [REPLACEMENT + " the", " the", ""]
    assert all(any(window) for window in zip(*(pieces[i : i + 5] for i in range(5)), strict=False))


@unhurried
@given(st.text(max_size=12), st.binary(max_size=3))
def test_a_slow_tokenizer_is_streamed_as_decoded(text: str, tail: bytes) -> None:
    ids = [byte + 3 for byte in text.encode() + tail]
    assert "".join(stream(BYT5, ids)) == decode(BYT5, ids)


# -- stop strings (field case 30) --------------------------------------------------------------------------------------


def run_stops(pieces: Sequence[str], stops: Sequence[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """The texts shown, with what `finish` gives, and the stop found."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown, matched = [], None
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            break
    shown.append(matcher.finish())
    return shown, matched


PIECES = ["Hel", "lo wo", "rld, b", "ye"]


def test_a_stop_across_pieces_is_cut_and_no_part_of_it_is_shown() -> None:
    shown, matched = run_stops(PIECES, ["world"])
    assert "".join(shown) == "Hello "
    assert not any("w" in text for text in shown)
    assert matched == "world"


def test_a_stop_can_be_left_in_the_text_and_nothing_after_it_is() -> None:
    shown, matched = run_stops(PIECES, ["world"], include_stop=True)
    assert "".join(shown) == "Hello world"
    assert matched == "world"


def test_what_was_held_back_is_shown_once_it_cannot_be_a_stop() -> None:
    assert run_stops(["wo", "nder"], ["world"]) == (["", "wonder", ""], None)


def test_what_was_held_back_is_shown_at_the_end() -> None:
    assert run_stops(["a wor"], ["world"]) == (["a ", "wor"], None)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    assert run_stops(["aab", "aabaa"], ["aabaac"]) == (["", "aab", "aabaa"], None)


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["ab", "b"], "x", "ab"),
        (["b", "ab"], "x", "ab"),
        (["abc", "ab"], "x", "ab"),
        (["abcd", "bc"], "xa", "bc"),
    ],
)
@pytest.mark.parametrize("pieces", [["xabcd"], list("xabcd")], ids=["at once", "one by one"])
def test_of_several_stops_the_one_complete_first_wins_then_the_longest(
    stops: list[str], text: str, matched: str, pieces: list[str]
) -> None:
    shown, found = run_stops(pieces, stops)
    assert ("".join(shown), found) == (text, matched)


def test_a_stop_in_the_first_piece_leaves_no_text() -> None:
    assert run_stops(["world and more"], ["world"]) == (["", ""], "world")


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("One. Two") == ("One", ".")
    assert matcher.push(" three. ") == ("", ".")
    assert matcher.finish() == ""


def test_text_that_is_not_searched_is_shown_and_is_no_part_of_a_stop() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the end, e", enabled=False) == ("the end, e", None)
    assert matcher.push("nd") == ("nd", None)
    assert matcher.push(" en") == (" ", None)
    assert matcher.push("d", enabled=False) == ("end", None)


def find_stop(text: str, stops: Sequence[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The text to show and the stop, by reading one character after another."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


@unhurried
@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_streamed_stops_equal_a_search_of_the_whole_text(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    shown, matched = run_stops(pieces, stops, include_stop=include_stop)
    text, expected = find_stop("".join(pieces), stops, include_stop=include_stop)
    assert ("".join(shown), matched) == (text, expected)


@unhurried
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_is_held_back_that_can_no_longer_be_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, matched = matcher.push(text)
    if matched is None:
        held = text[len(shown) :]
        assert held == "" or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)
        longer = [text[start:] for start in range(len(shown))]
        assert not any(len(stop) > len(end) and stop.startswith(end) for stop in stops for end in longer)


# -- the two together --------------------------------------------------------------------------------------------------


def answer(text: str | bytes, **params: Any) -> tuple[list[TextDelta], str, AnswerText]:
    """Deltas up to a stop or the end, what `finish` gives, and the answer; one token a byte."""
    whole = AnswerText(BYTE_LEVEL, SamplingParams(**params))
    deltas = []
    for token_id in byte_ids(text if isinstance(text, bytes) else text.encode()):
        deltas.append(whole.push(token_id))
        if deltas[-1].stop is not None:
            break
    rest = whole.finish()
    assert whole.text == "".join(delta.delta for delta in deltas) + rest
    return deltas, rest, whole


def test_an_answer_is_cut_at_its_stop() -> None:
    deltas, rest, whole = answer("Tschüss, Welt", stop=("üs", "Welt"))
    assert whole.text == "Tsch"
    assert deltas[-1].stop == "üs"
    assert rest == ""


def test_an_answer_can_include_its_stop() -> None:
    assert answer("one\ntwo", stop="\n", include_stop=True)[2].text == "one\n"


def test_an_answer_that_ends_while_text_is_held_back_has_all_of_it() -> None:
    deltas, rest, whole = answer(b"the wor\xf0\x9f", stop="world")
    assert whole.text == "the wor" + REPLACEMENT
    assert deltas[-1].stop is None
    assert rest == "wor" + REPLACEMENT


def test_finishing_twice_gives_nothing_more() -> None:
    *_, whole = answer("a wor", stop="world")
    assert whole.finish() == ""
    assert whole.text == "a wor"


def test_no_stop_is_found_in_the_first_min_tokens() -> None:
    assert answer("x.y.z.", stop=".", min_tokens=2)[2].text == "x.y"
    assert answer("x.y.z.", stop=".", min_tokens=3)[2].text == "x.y"
    assert answer("x.y.z.", stop=".", min_tokens=4)[2].text == "x.y.z"
    assert answer("abab", stop="ab", min_tokens=1)[2].text == "ab"


def test_special_tokens_are_in_the_text_only_if_asked_for() -> None:
    for skip, expected in ((True, "ab"), (False, "a</s>b")):
        whole = AnswerText(BYTE_LEVEL, SamplingParams(skip_special_tokens=skip))
        for token_id in (BYTE_IDS[0], 2, BYTE_IDS[1]):
            whole.push(token_id)
        whole.finish()
        assert whole.text == expected


def test_without_a_tokenizer_the_text_is_empty_and_stop_strings_are_refused() -> None:
    whole = AnswerText(None, SamplingParams())
    assert whole.push(5) == TextDelta("")
    assert whole.finish() == whole.text == ""
    with pytest.raises(RequestError, match=r"stop=\('x',\) needs a tokenizer.*stop_token_ids"):
        AnswerText(None, SamplingParams(stop="x"))


@unhurried
@given(BYTES, st.lists(st.sampled_from(["a", "ab", "b한", "😀", " \n", "é"]), max_size=3), st.booleans())
def test_an_answer_streamed_equals_the_search_of_its_decoding(data: bytes, stops: list[str], include_stop: bool) -> None:
    whole = answer(data, stop=tuple(stops), include_stop=include_stop)[2]
    assert whole.text == find_stop(data.decode(errors="replace"), stops, include_stop=include_stop)[0]


# -- prompts (field cases 32, 37 and 54) -------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi, the end?"}]


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_text_prompt_is_what_the_tokenizer_makes_of_it(add_bos: bool) -> None:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    ids = encode_prompt(tokenizer, "the and")
    assert ids == tokenizer("the and")["input_ids"]
    assert (ids[0] == 1) == add_bos


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template_bos", [True, False])
def test_a_chat_is_exactly_what_the_template_makes_of_it_with_no_second_bos(add_bos: bool, template_bos: bool) -> None:
    tokenizer = tiny_tokenizer(add_bos=add_bos, chat_template="{{ bos_token }}" * template_bos + CHATML)
    ids = encode_chat(tokenizer, MESSAGES)
    assert ids == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids.count(1) == int(template_bos)
    assert all(isinstance(token, int) for token in ids)


def test_template_arguments_reach_the_template() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0]['content'] }}{{ tone }}{% if add_generation_prompt %}>{% endif %}")
    assert decode(tokenizer, encode_chat(tokenizer, MESSAGES[1:], tone="!")) == "Hi, the end?!>"
    assert decode(tokenizer, encode_chat(tokenizer, MESSAGES[1:], add_generation_prompt=False, tone="!")) == "Hi, the end?!"


@pytest.mark.parametrize("add_bos", [True, False])
def test_token_ids_pass_untouched(add_bos: bool) -> None:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    for prompt in ([5, 1, 1, 7], (9,), np.array([4, 2]), torch.tensor([3, 3])):
        assert encode_prompt(tokenizer, prompt, vocab_size=10) == list(map(int, prompt))  # type: ignore[arg-type]
        assert encode_prompt(None, prompt, vocab_size=10) == list(map(int, prompt))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, 10], r"token id 10 in the prompt must be from 0 to 9"),
        ([-1], r"token id -1 in the prompt"),
        ([True], r"neither a text nor a list of token ids"),
        ([1.5], r"prompt=\[1.5\] is neither"),
        (["a"], r"neither a text nor"),
        (None, r"prompt=None is neither"),
        (5, r"prompt=5 is neither"),
        ([], r"has no tokens"),
        ("", r"the prompt '' has no tokens"),
        ("a\ud800", r"not valid Unicode: surrogates not allowed at character 1"),
    ],
    ids=repr,
)
def test_prompts_that_cannot_be_read_are_refused_with_the_reason(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_prompt(BYTE_LEVEL, prompt, vocab_size=10)


def test_an_empty_text_is_the_bos_token_where_the_tokenizer_adds_one() -> None:
    assert encode_prompt(tiny_tokenizer(add_bos=True), "") == [1]


def test_without_a_tokenizer_texts_and_messages_are_refused() -> None:
    with pytest.raises(RequestError, match=r"no tokenizer.*pass token ids"):
        encode_prompt(None, "hi")
    with pytest.raises(RequestError, match=r"no tokenizer.*pass token ids"):
        encode_chat(None, MESSAGES)


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "the end"}]
    ids = encode_chat(BYTE_LEVEL, [{"role": "user", "content": parts}])
    assert ids == encode_chat(BYTE_LEVEL, [{"role": "user", "content": "Look:\nthe end"}])


def test_other_keys_of_a_message_reach_the_template() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0]['name'] }}: {{ messages[0]['content'] }}")
    ids = encode_chat(tokenizer, [{"role": "user", "name": "Ann", "content": "hi"}])
    assert decode(tokenizer, ids) == "Ann: hi"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages=\[\] must be a list of at least one"),
        ("hi", r"messages='hi' must be a list"),
        ({"role": "user", "content": "hi"}, r"must be a list"),
        (None, r"messages=None must be"),
        (["hi"], r"messages\[0\]='hi' must be a"),
        ([{"content": "hi"}], r"the role of messages\[0\] is None"),
        ([*MESSAGES, {"role": "user"}], r"the content of messages\[2\] is None"),
        ([{"role": "user", "content": None}], r"the content of messages\[0\] is None"),
        ([{"role": "user", "content": 5}], r"the content of messages\[0\] is 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"has the part .*image_url.*only .*text.* can be served"),
        ([{"role": "user", "content": ["hi"]}], r"has the part 'hi'"),
        ([{"role": "user", "content": "\udfff"}], r"content of messages\[0\] is not valid Unicode"),
    ],
    ids=repr,
)
def test_messages_of_another_form_are_refused_with_the_reason(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encode_chat(BYTE_LEVEL, messages)


ALTERNATING = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        (ALTERNATING, ["user", "user"], "roles must alternate"),
        (ALTERNATING, ["critic"], "unknown role critic"),
        ("{{ 1 / 0 }}", ["user"], "division by zero"),
        ("{{ messages[0].missing.deeper }}", ["user"], "no attribute 'missing'"),
        ("{% if %}", ["user"], "Expected an expression"),
        (None, ["user"], "chat_template is not set"),
        ("", ["user"], "chat"),
    ],
)
def test_what_a_template_refuses_is_a_request_error_with_its_message(
    template: str | None, roles: list[str], message: str
) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    with pytest.raises(RequestError, match=message):
        encode_chat(tokenizer, [{"role": role, "content": "x"} for role in roles])


def test_arguments_that_would_change_the_form_of_the_result_are_refused() -> None:
    with pytest.raises(RequestError, match="return_dict, tokenize cannot be set"):
        encode_chat(BYTE_LEVEL, MESSAGES, tokenize=False, return_dict=True)
