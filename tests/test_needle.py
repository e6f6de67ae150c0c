"""A fact planted in a long text: native and adaptive cache give the same answers, wherever it stands and however asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from vera import LLM, SamplingParams
from vera.bench.texts import text_tokens
from vera.models import LoadedModel, load_model

CONTEXT = 4200
"""Tokens of the text around the fact: twice as many as an adaptive cache leaves native."""
DEPTHS = 10
FACT = "7492"
NEEDLE = f"\n\nThe secret code of the blue lighthouse is {FACT}.\n\n"
QUESTIONS = (
    "What is the secret code of the blue lighthouse? Answer with the number alone.",
    "Which number is the secret code of the blue lighthouse?",
    "Which four digits are the secret code of the blue lighthouse?",
    "What four digits are the secret code of the blue lighthouse?",
    "The secret code of the blue lighthouse is which number?",
    "Repeat the sentence about the secret code of the blue lighthouse.",
    "Quote the sentence about the secret code of the blue lighthouse.",
    "Answer in one sentence: what is the secret code of the blue lighthouse?",
)
"""Ways of asking that the native cache finds the fact by; what a model makes up hangs on differences below any tolerance."""


def cases(depths: Sequence[int], questions: Sequence[str]) -> Iterator[tuple[int, str]]:
    """In the order in which they are asked: those of one depth follow each other, so that its document is read once."""
    for depth in depths:
        for question in questions:
            yield depth, question


def conversation(tokenizer: Any, depth: int, question: str) -> list[dict[str, str]]:
    filler = text_tokens(tokenizer, "prose", CONTEXT)
    cut = depth * len(filler) // DEPTHS
    document = tokenizer.decode(filler[:cut]) + NEEDLE + tokenizer.decode(filler[cut:])
    return [{"role": "user", "content": f"{document}\n\n{question}"}]


def answers(model: LoadedModel, mode: str, asked: Sequence[tuple[int, str]]) -> list[str]:
    conversations = [conversation(model.tokenizer, *case) for case in asked]
    with LLM(model, cache={"mode": mode, "cache_max_bytes": 2_000_000_000}, max_num_seqs=4) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=24))
        assert all(len(output.prompt_token_ids) > CONTEXT for output in outputs)
        if mode == "adaptive":
            tiers = llm.engine.cache.tier_stats
            assert tiers is not None and tiers.pages_sketched > 0, "nothing was served within bounds"
    return [output.text for output in outputs]


def differences(asked: Sequence[tuple[int, str]], native: Sequence[str], adaptive: Sequence[str]) -> list[str]:
    return [
        f"depth {depth} of {DEPTHS}, {question!r}\n  native:   {one!r}\n  adaptive: {other!r}"
        for (depth, question), one, other in zip(asked, native, adaptive, strict=True)
        if one != other
    ]


def summary(native: Sequence[str], adaptive: Sequence[str]) -> str:
    same = sum(one == other for one, other in zip(native, adaptive, strict=True))
    told = [[FACT in answer for answer in given] for given in (native, adaptive)]
    return (
        f"{same} of {len(native)} answers are the same text; the fact is in {sum(told[0])} native and {sum(told[1])} adaptive "
        f"answers, to {sum(map(all, zip(*told, strict=True)))} questions in both"
    )


@pytest.mark.embedded
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("depths", "questions"),
    [
        pytest.param((5,), QUESTIONS[:1], marks=pytest.mark.slow, id="once"),
        pytest.param(range(DEPTHS), QUESTIONS, marks=pytest.mark.bench, id="everywhere"),
    ],
)
def test_answers_about_a_planted_fact_are_the_same_text(depths, questions, capsys):
    model = load_model("embedded")
    asked = list(cases(depths, questions))
    native, adaptive = (answers(model, mode, asked) for mode in ("native", "adaptive"))
    different = differences(asked, native, adaptive)
    with capsys.disabled():
        print(f"\n{summary(native, adaptive)}")
    assert any(FACT in answer for answer in native), f"the model does not find the fact natively: {native}"
    assert not different, "\n".join([summary(native, adaptive), *different])


def test_answers_that_differ_are_told_with_both_texts_and_counted():
    asked = list(cases((0, 7), ("Which?",)))
    assert differences(asked, ["a", "It is 7492."], ["a", "7491"]) == [
        "depth 7 of 10, 'Which?'\n  native:   'It is 7492.'\n  adaptive: '7491'"
    ]
    assert summary(["7492", "It is 7492."], ["7492", "7491"]) == (
        "1 of 2 answers are the same text; the fact is in 2 native and 1 adaptive answers, to 1 questions in both"
    )
