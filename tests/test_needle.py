"""A fact planted in a long text: native and adaptive cache give the same answers, wherever it stands and however asked for."""

from __future__ import annotations

import pytest

from vera import LLM, SamplingParams
from vera.bench.texts import text_tokens
from vera.models import load_model

CONTEXT = 2600
DEPTHS = 10
NEEDLE = "\n\nThe secret code of the blue lighthouse is 7492.\n\n"
QUESTIONS = (
    "What is the secret code of the blue lighthouse?",
    "Which number opens the blue lighthouse?",
    "Tell me the code of the blue lighthouse.",
    "The text names a secret code. Which one?",
    "What is written about the blue lighthouse?",
    "Complete: the secret code of the blue lighthouse is",
    "Somebody asks for the lighthouse code. What do you answer?",
    "Find the four digits that belong to the blue lighthouse.",
)


def conversations(tokenizer):
    """One for each depth and question; those of one depth begin alike."""
    filler = text_tokens(tokenizer, "prose", CONTEXT)
    for depth in range(DEPTHS):
        cut = depth * len(filler) // DEPTHS
        document = tokenizer.decode(filler[:cut]) + NEEDLE + tokenizer.decode(filler[cut:])
        for question in QUESTIONS:
            yield [{"role": "user", "content": f"{document}\n\n{question}"}]


def answers(model, cache):
    with LLM(model, cache=cache, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        return [output.text for output in llm.chat(list(conversations(model.tokenizer)), params)]


@pytest.mark.bench
@pytest.mark.embedded
@pytest.mark.timeout(1800)
def test_answers_about_a_planted_fact_are_the_same_text():
    model = load_model("embedded")
    native = answers(model, {"cache_max_bytes": 2_000_000_000})
    adaptive = answers(model, {"mode": "adaptive", "cache_max_bytes": 2_000_000_000})
    different = [(a, b) for a, b in zip(native, adaptive, strict=True) if a != b]
    print(f"{len(native) - len(different)} of {len(native)} answers are the same text; {different}")
    named = [sum("7492" in answer for answer in given) for given in (native, adaptive)]
    print(f"{named[0]} native and {named[1]} adaptive answers name the code")
    assert not different
