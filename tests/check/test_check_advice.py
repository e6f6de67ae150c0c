"""What the check concludes from figures: pure decisions over made-up machines and models."""

import json
import shlex
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vera.check.advice import Load, ModelFacts, Verdict, advise, attention_speedup, cache_config
from vera.check.costs import PageCosts
from vera.check.machine import Device, Machine
from vera.check.rates import Disk, Rate, Rates, Timing
from vera.check.run import Report
from vera.models import ModelSpec

GIB = 2**30

MACHINE = Machine(
    cpu="a CPU",
    features=("avx2",),
    cores=8,
    core_quota=None,
    threads=8,
    busy_share=0.0,
    isa="avx2",
    isas=("avx2", "portable"),
    no_kernel=None,
    memory_bytes=64 * GIB,
    available_bytes=48 * GIB,
    is_limited=False,
    python="3.11",
    torch="2.13.0",
    torch_build="cpu",
    transformers="5.20",
    devices=(Device("cpu", "x86_64", 64 * GIB, 48 * GIB),),
    warnings=(),
)
RATE = Rate(10e9, is_unsteady=False)
DISK = Disk("/var/tmp", "ext4", in_memory=False, free_bytes=500 * GIB, write=RATE, read=RATE)
RATES = Rates(memory_read=RATE, copies={"cpu <-> host": RATE}, disk=DISK, gemm_prompt=RATE, gemm_decode=RATE)
SPEC = ModelSpec(
    name="model",
    architecture="LlamaForCausalLM",
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    vocab_size=32000,
    max_context=32768,
    dtype="float32",
    windows=(None,) * 32,
    eos_token_ids=frozenset({2}),
    bos_token_id=1,
    weights_revision="0" * 64,
    weight_bytes=16 * GIB,
)
MODEL = ModelFacts(SPEC, can_recompute=True)
LOAD = Load(sequences=16, context=32768)


def timing(seconds):
    return Timing(seconds, seconds, seconds)


COSTS = PageCosts(exact=timing(1e-6), sketch=timing(0.3e-6), recompute=timing(0.02), window_layers=16, unit_bytes=4 * 2**20)


def advice_for(machine=None, disk=None, spec=None, costs=None, load=LOAD, can_recompute=True):
    return advise(
        replace(MACHINE, **(machine or {})),
        replace(RATES, disk=replace(DISK, **(disk or {}))),
        ModelFacts(replace(SPEC, **(spec or {})), can_recompute),
        replace(COSTS, **(costs or {})),
        load,
    )


def values(advice):
    return {setting.name: setting.value for setting in advice.settings}


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_long_contexts_on_a_machine_with_a_kernel_suit():
    advice = advice_for()
    assert (advice.verdict, advice.verdict.exit_code) == (Verdict.SUITS, 0)
    assert "64.0 GiB in a native cache" in advice.reasons[0] and "2.7 times as fast" in advice.reasons[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": {"head_dim": 72}}, "multiple of 16"),
        ({"spec": {"windows": (1024,) * 32}}, "every layer has a sliding window"),
        ({"spec": {"max_context": 2048}, "load": Load(16, 2048)}, "min_context=2048"),
        ({"costs": {"no_kernel": "no compiler"}}, "no compiler"),
        ({"costs": {"sketch": timing(1e-6)}, "load": Load(2, 8000)}, "no time worth having"),
        ({"load": Load(2, 1000)}, "contexts of 1,000 tokens"),
    ],
)
def test_adaptive_cache_that_cannot_be_or_gains_nothing_is_advised_against(changes, reason):
    advice = advice_for(**changes)
    assert (advice.verdict, advice.verdict.exit_code) == (Verdict.NATIVE, 3)
    assert reason in advice.reasons[0]
    assert cache_config(advice).mode == "native"


def test_memory_alone_is_a_reason():
    advice = advice_for(costs={"sketch": timing(1e-6)})
    assert advice.verdict is Verdict.SUITS and "in a native cache" in advice.reasons[0]


def test_too_little_memory_for_one_sequence_cannot_be_served():
    advice = advice_for(machine={"available_bytes": 64 * 2**20})
    assert (advice.verdict, advice.verdict.exit_code, advice.settings) == (Verdict.CANNOT, 1, ())
    assert "free memory, or take a smaller model" in advice.reasons[0]


def test_without_a_model_the_machine_is_judged():
    assert advise(MACHINE, RATES, None, None, LOAD).verdict is Verdict.SUITS
    without = replace(MACHINE, isa=None, isas=(), no_kernel="no compiler")
    assert advise(without, RATES, None, None, LOAD).verdict is Verdict.NATIVE


def test_quickest_runs_decide_because_others_only_slow():
    slowed = Timing(seconds=9e-6, least=1e-6, most=20e-6)
    assert attention_speedup(SPEC, replace(COSTS, exact=slowed)) == attention_speedup(SPEC, COSTS)


def test_layers_with_a_window_gain_nothing():
    half = replace(SPEC, windows=(None, 1024) * 16)
    assert 1 < attention_speedup(half, COSTS) < attention_speedup(SPEC, COSTS)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_copies_wait_in_memory_where_all_fit():
    advised = values(advice_for(machine={"available_bytes": 400 * GIB}))
    assert (advised["warm_store"], advised["cache_max_size_ratio"]) == ("ram", 0.6)
    assert "warm_dir" not in advised


def test_copies_wait_on_the_disk_where_memory_is_too_small():
    advised = values(advice_for())
    assert (advised["warm_store"], advised["warm_dir"]) == ("file", "/var/tmp")


@pytest.mark.parametrize("disk", [{"free_bytes": 4 * GIB}, {"in_memory": True}])
def test_copies_wait_in_memory_where_the_disk_is_too_small_or_none(disk):
    advice = advice_for(disk=disk)
    assert (values(advice)["warm_store"], values(advice)["cache_max_size_ratio"]) == ("ram", 0.45)
    assert any("becomes cold" in setting.reason for setting in advice.settings)


def test_slow_recomputes_are_kept_rare_and_short():
    advised = values(advice_for(costs={"recompute": timing(0.5)}))
    assert (advised["recompute_time_share"], advised["recompute_budget"], advised["recompute_layer_limit"]) == (0.1, 1, 8)
    assert "recompute_budget" not in values(advice_for())


def test_model_that_cannot_run_some_layers_recomputes_nothing():
    advice = advice_for(costs={"recompute": None}, can_recompute=False)
    assert values(advice)["recompute_budget"] == 0
    assert any("nothing can be recomputed" in note for note in advice.notes)


@given(
    available=st.floats(26, 42),
    free=st.floats(20, 44),
    in_memory=st.booleans(),
    sequences=st.integers(1, 512),
    context=st.integers(64, 131072),
    recompute=st.floats(0.001, 5),
    limit=st.sampled_from(["quiet", "busy"]),
    windows=st.sampled_from([(None,) * 32, (None, 512) * 16]),
)
def test_settings_are_within_their_ranges_and_fit_the_machine(
    available, free, in_memory, sequences, context, recompute, limit, windows
):
    bytes_available, disk_free = int(2**available), int(2**free)
    advice = advice_for(
        machine={"available_bytes": bytes_available, "busy_share": 0.0 if limit == "quiet" else 1.0},
        disk={"free_bytes": disk_free, "in_memory": in_memory},
        spec={"windows": windows, "max_context": 131072},
        costs={"recompute": timing(recompute)},
        load=Load(sequences, context),
    )
    if advice.verdict is Verdict.CANNOT:
        return
    config = cache_config(advice)
    assert config.risks() == []
    if config.mode == "adaptive":
        assert config.warm_bytes > 0
        if config.warm_store == "ram":
            assert config.cache_max_size_ratio * bytes_available + config.warm_bytes <= 0.9 * bytes_available + 1
        else:
            assert not in_memory and config.warm_bytes <= 0.8 * disk_free


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"machine": {"busy_share": 0.8}}, "was busy (80%"),
        ({"costs": {"exact": Timing(1e-6, 1e-6, 5e-6)}}, "run this again when it is quiet"),
        ({"machine": {"is_limited": True}}, "a container's limit"),
        ({"disk": {"in_memory": True, "filesystem": "tmpfs"}}, "lies in memory (tmpfs)"),
        ({"machine": {"devices": (*MACHINE.devices, Device("cuda:0", "a GPU", GIB, GIB))}}, "cuda:0: seen and measured"),
        ({"spec": {"windows": (None, 512) * 16}}, "16 of 32 layers"),
    ],
)
def test_what_should_be_known_is_noted(changes, note):
    assert any(note in line for line in advice_for(**changes).notes)


def test_quiet_machine_has_nothing_to_note():
    assert advice_for().notes == ()


@pytest.mark.parametrize(("quota", "threads"), [(None, None), (8.0, None), (2.5, 2), (0.5, 1)])
def test_threads_follow_the_quota_of_a_container(quota, threads):
    assert advice_for(machine={"core_quota": quota}).threads == threads


def test_command_has_every_setting():
    advice = advice_for(machine={"core_quota": 2.0})
    report = Report(MACHINE, RATES, "my models/llama", MODEL, None, COSTS, LOAD, advice, seconds=1.0)
    words = shlex.split(report.command)
    assert words[:5] == ["vera", "serve", "my models/llama", "--cache", "adaptive"]
    assert {word.partition("=")[0] for word in words if "=" in word} == set(values(advice)) - {"mode", "cache_max_size_ratio"}
    assert words[-4:] == ["--max-num-seqs", "16", "--threads", "2"]
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert told["verdict"] == "suits" and told["settings"] == values(advice)
    assert told["machine"]["cpu"] == "a CPU" and set(asdict(COSTS)) == set(told["costs"])
