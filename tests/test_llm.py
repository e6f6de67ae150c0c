"""The Python SDK."""

import gc
import weakref

import pytest

import vera
from engines import greedy, prompt_of, reference_tokens, tokens_of
from tiny_models import tiny_model, tiny_tokenizer
from vera import LLM, CacheConfig, SamplingParams
from vera.errors import ConfigError, EngineStopped, RequestError

SMALL = {"page_dtype": "float32", "cache_max_bytes": 16 * 2**20}
TIERED = {**SMALL, "mode": "adaptive", "min_context": 64, "page_size": 16, "warm_store": "ram", "warm_bytes": 16 * 2**20}
LONG = list(prompt_of(200))


@pytest.fixture
def llm():
    vocab = len(tiny_tokenizer())
    with LLM(tiny_model("llama", vocab_size=vocab), tokenizer=tiny_tokenizer(), cache=SMALL) as llm:
        yield llm


@pytest.fixture
def plain():
    """Over the model that `reference_tokens` knows."""
    with LLM(tiny_model("llama"), cache=SMALL) as llm:
        yield llm


@pytest.fixture
def tiered():
    """The same model over an adaptive cache."""
    with LLM(tiny_model("llama"), cache=TIERED, attention_backend="reference") as llm:
        yield llm


def test_public_names_are_the_documented_ones():
    nouns = {"CacheConfig", "CacheUse", "Completion", "EngineConfig", "Output", "SamplingParams", "VeraError"}
    assert set(vera.__all__) == nouns | {"LLM", "load_model"}
    assert all(hasattr(vera, name) for name in vera.__all__)
    with pytest.raises(AttributeError, match="LMM"):
        _ = vera.LMM


def test_outputs_come_in_the_order_of_the_prompts(plain):
    prompts = [list(prompt_of(length)) for length in (30, 3, 70)]
    outputs = plain.generate(prompts, greedy(6))
    assert [output.token_ids for output in outputs] == [reference_tokens(tuple(prompt), 6) for prompt in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_single_prompt_needs_no_list(plain):
    [output] = plain.generate(list(prompt_of(9)), greedy(4))
    assert output.token_ids == reference_tokens(prompt_of(9), 4)


def test_text_prompt_is_encoded_and_the_answer_decoded(llm):
    [output] = llm.generate("the thing", greedy(10))
    assert output.prompt_token_ids == tiny_tokenizer().encode("the thing")
    assert output.text == tiny_tokenizer().decode(output.token_ids, skip_special_tokens=True)


def test_each_prompt_can_have_parameters_of_its_own(plain):
    outputs = plain.generate([list(prompt_of(5)), list(prompt_of(6))], [greedy(2), greedy(5)])
    assert [len(output.token_ids) for output in outputs] == [2, 5]


def test_number_of_parameters_must_match(plain):
    with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
        plain.generate([[5], [6]], [greedy(2)])


def test_n_answers_differ_by_seed_and_the_first_is_the_single_one(plain):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    [output] = plain.generate(list(prompt_of(9)), params)
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    [single] = plain.generate(list(prompt_of(9)), SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))
    assert single.token_ids == output.completions[1].token_ids


def test_chat_uses_the_template_exactly(llm):
    messages = [{"role": "user", "content": "the thing"}]
    [output] = llm.chat(messages, greedy(3))
    expected = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert output.prompt_token_ids == tiny_tokenizer().encode(expected, add_special_tokens=False)


def test_streamed_answer_equals_the_whole_one(llm):
    whole = llm.generate("the thing", greedy(40))[0]
    updates = list(llm.stream("the thing", greedy(40)))
    assert tokens_of(updates) == whole.token_ids
    assert "".join(update.delta for update in updates) == whole.text
    assert updates[-1].finish_reason == whole.finish_reason == "length"


def test_two_streams_can_be_read_in_turn(plain):
    first, second = plain.stream(list(prompt_of(9)), greedy(8)), plain.stream(list(prompt_of(10)), greedy(8))
    tokens = ([], [])
    for one, other in zip(first, second, strict=True):
        tokens[0].extend(one.new_token_ids)
        tokens[1].extend(other.new_token_ids)
    assert tokens == (reference_tokens(prompt_of(9), 8), reference_tokens(prompt_of(10), 8))


def test_generate_does_not_disturb_a_stream_that_is_being_read(plain):
    stream = plain.stream(list(prompt_of(9)), greedy(8))
    begun = next(stream).new_token_ids
    assert plain.generate(list(prompt_of(10)), greedy(20))[0].token_ids == reference_tokens(prompt_of(10), 20)
    assert begun + tokens_of(list(stream)) == reference_tokens(prompt_of(9), 8)


def test_leaving_a_stream_early_frees_its_blocks(plain):
    stream = plain.stream(list(prompt_of(9)), greedy(50))
    next(stream)
    stream.close()
    plain.engine.step()
    assert plain.engine.cache.used_bytes == 0


def test_stream_that_was_never_read_is_ended_by_the_next_call(plain):
    plain.stream(list(prompt_of(9)), greedy(3000))
    plain.generate(list(prompt_of(10)), greedy(3))
    assert not plain.engine.has_unfinished()
    assert plain.engine.stats.finished["abort"] == 1


def test_cancelled_stream_ends_with_what_it_has_even_while_the_prompt_is_read(plain):
    [update] = list(plain.stream(list(prompt_of(3000)), greedy(50), cancelled=lambda: True))
    assert update.finish_reason == "abort"
    assert plain.engine.cache.used_bytes == 0


def test_more_prompts_than_may_wait_are_all_answered():
    with LLM(tiny_model("llama"), cache=SMALL, max_waiting=3) as llm:
        outputs = llm.generate([[5, 6 + i] for i in range(20)], greedy(2))
    assert [len(output.token_ids) for output in outputs] == [2] * 20


def test_dtype_of_a_loaded_model_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="dtype='bfloat16'"):
        LLM(tiny_model("llama"), dtype="bfloat16")


@pytest.mark.parametrize("values", [{"stop": None}, {"stop_token_ids": 5}, {"logit_bias": [1]}, {"temprature": 1}])
def test_wrong_sampling_parameter_is_refused_by_name(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        SamplingParams.from_dict(values)


def test_one_bad_prompt_raises_and_leaves_nothing_behind(plain):
    with pytest.raises(RequestError):
        plain.generate([[5, 6], [5000]], greedy(5))
    assert plain.generate([5, 6], greedy(5))[0].token_ids == reference_tokens((5, 6), 5)
    assert not plain.engine.has_unfinished()


@pytest.mark.parametrize("prompts", ["", [""], [[]], [""]])
def test_empty_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, greedy(5))


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], greedy(5)) == []


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_wrong_max_tokens_is_refused(value):
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize(
    "cache", ["native", {"mode": "native"}, CacheConfig(), {"cpu": "native"}, {"cpu": {"mode": "native"}}, {"cpu": CacheConfig()}]
)
def test_cache_settings_come_as_name_dict_or_config_for_all_or_by_device(cache):
    with LLM(tiny_model("llama"), cache=cache) as llm:
        assert llm.engine.config.cache == CacheConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "nativ"}, "nativ"),
        ({"cache": {"cache_max_sise_ratio": 0.5}}, "cache_max_sise_ratio.*known are.*cache_max_size_ratio"),
        ({"cache": {"cache_max_size_ratio": 1.5}}, "1.5"),
        ({"cache": {"page_dtype": "fp8"}}, "fp8"),
        ({"cache": {"cuda:0": "adaptive"}}, "'cuda:0'.* there is cpu"),
        ({"cache": {"cpu": "native", "gpu": {"mode": "native"}}}, "'gpu'.* there is cpu"),
        ({"cache": {"cpu": "native", "page_size": 16}}, "'page_size'.* there is cpu"),
        ({"cache": {"cpu": {"page_sise": 16}}}, "page_sise.*known are"),
        ({"max_num_seq": 3}, "max_num_seq.*known are"),
    ],
)
def test_wrong_setting_is_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model("llama"), **arguments)


def test_closed_llm_says_so():
    llm = LLM(tiny_model("llama"), cache=SMALL)
    llm.close()
    llm.close()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate([5], greedy(1))


def test_reading_a_stream_after_close_says_so(plain):
    stream = plain.stream([5, 6], greedy(9))
    next(stream)
    plain.close()
    with pytest.raises(EngineStopped, match="closed"):
        next(stream)


def test_close_frees_model_and_cache():
    model = tiny_model("llama")
    with LLM(model, cache=SMALL) as llm:
        llm.generate([5, 6], greedy(3))
        pool = weakref.ref(llm.engine.cache.pool.pages)
        module = weakref.ref(model)
        del model
    gc.collect()
    assert pool() is None
    assert module() is None


def test_progress_bar_goes_to_stderr(plain, capsys):
    plain.generate([[5], [6]], greedy(2), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


# -- an adaptive cache -------------------------------------------------------------------------------------------------


def test_adaptive_answer_comes_with_what_the_cache_did(tiered):
    [output] = tiered.generate(LONG, greedy(40))
    use = output.completions[0].cache_use
    assert use.decode_steps == 39  # the first token comes from the prompt
    assert use.error_count > 0
    assert use.error_mean <= use.error_max


def test_native_answer_has_no_cache_use(plain):
    [output] = plain.generate(LONG, greedy(3))
    assert output.completions[0].cache_use is None
    assert output.num_cached_tokens_by_tier is None


def test_reused_prefix_is_told_by_tier(tiered):
    tiered.generate(LONG, greedy(40))
    [again] = tiered.generate(LONG, greedy(2))
    tiers = again.num_cached_tokens_by_tier
    assert sum(tiers.values()) == again.num_cached_tokens == 192
    assert tiers["warm"] > tiers["hot"] > 0


def test_exact_answer_has_the_tokens_of_native(tiered):
    [output] = tiered.generate(LONG, greedy(40), fidelity="exact")
    assert output.token_ids == reference_tokens(tuple(LONG), 40)
    assert output.completions[0].cache_use.error_count == 0


def test_every_way_to_ask_takes_fidelity_and_tolerance(tiered):
    vocab = len(tiny_tokenizer())
    with LLM(
        tiny_model("llama", vocab_size=vocab), tokenizer=tiny_tokenizer(), cache=TIERED, attention_backend="reference"
    ) as llm:
        messages = [{"role": "user", "content": "the thing and " * 30}]
        strict = {"attention_tolerance": 0.0}
        exact = llm.chat(messages, greedy(10), fidelity="exact")[0].token_ids
        assert llm.chat(messages, greedy(10), **strict)[0].token_ids == exact
        assert tokens_of(llm.stream_chat(messages, greedy(10), **strict)) == exact
        assert tokens_of(llm.stream_chat(messages, greedy(10), fidelity="native")) == exact
    assert tokens_of(tiered.stream(LONG, greedy(10), **strict)) == reference_tokens(tuple(LONG), 10)


def test_tolerance_decides_how_much_is_hit(tiered):
    hits = [
        tiered.generate(LONG, greedy(20), attention_tolerance=tolerance)[0].completions[0].cache_use.hits
        for tolerance in (1.0, 0.001)
    ]
    assert hits[0] == 0 < hits[1]


def test_running_stream_changes_to_exact_and_loses_no_token(tiered):
    stream = tiered.stream(LONG, greedy(30))
    begun = [next(stream) for _ in range(10)]
    stream.set_fidelity("exact")
    updates = begun + list(stream)
    assert len(tokens_of(updates)) == 30
    assert updates[-1].cache_use.decode_steps == 9  # bounded ones: those before the change, without the prompt's


def test_ended_stream_cannot_change_its_fidelity(tiered):
    stream = tiered.stream(LONG, greedy(3))
    list(stream)
    with pytest.raises(RequestError, match="no request"):
        stream.set_fidelity("exact")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fidelity": "exakt"}, "'exakt' is not one of native, bounded, exact"),
        ({"attention_tolerance": 1.5}, "1.5 is outside 0 to 1"),
        ({"attention_tolerance": float("nan")}, "nan is outside 0 to 1"),
    ],
)
def test_wrong_fidelity_or_tolerance_is_refused_and_nothing_runs(tiered, asked, message):
    with pytest.raises(RequestError, match=message):
        tiered.generate(LONG, greedy(3), **asked)
    assert not tiered.engine.has_unfinished()


@pytest.mark.parametrize("asked", [{"fidelity": "bounded"}, {"fidelity": "exact"}, {"attention_tolerance": 0.1}])
def test_native_cache_refuses_what_it_cannot_give(plain, asked):
    with pytest.raises(RequestError, match="needs an adaptive cache"):
        plain.stream(LONG, greedy(3), **asked)
    assert plain.generate([5, 6], greedy(3), fidelity="native")[0].token_ids == reference_tokens((5, 6), 3)
