"""`vera check` on this machine: what is measured is sane, what cannot work is refused politely."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from engines import loaded
from tiny_models import save_tiny, tiny_config
from vera.check import Verdict, draw_report, run_check
from vera.check import machine as machine_module
from vera.check import run as run_module
from vera.check.costs import measure_costs, window_layers_of
from vera.check.machine import core_quota, look_at_machine
from vera.check.rates import device_copies, measure_disk, timed
from vera.config import CacheConfig
from vera.errors import ConfigError, ModelNotFound

ADAPTIVE = CacheConfig(mode="adaptive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(path)
    return str(path)


def vera(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "vera.cli", "check", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_machine_is_described():
    machine = look_at_machine()
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert 0 <= machine.busy_share <= 1 and machine.cores >= 1
    assert machine.isa is None or machine.isa in machine.isas
    assert machine.torch == torch.__version__.split("+")[0] or machine.torch == torch.__version__
    assert machine.devices[0].name == "cpu"


def test_devices_of_cuda_are_listed_with_their_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    device = look_at_machine().devices[1]
    assert (device.name, device.model, device.memory_bytes, device.free_bytes) == ("cuda:0", "a GPU", 4, 3)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"a/b": "max 100000"}, None),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a/b": "max 100000", "a": "50000 100000"}, 0.5),
        ({"a/b": "nonsense"}, None),
    ],
)
def test_quota_is_the_least_of_all_groups_around(tmp_path, files, quota):
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    for group, text in files.items():
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / group / "cpu.max").write_text(text + "\n")
    assert core_quota(cgroups=tmp_path / "groups", membership=membership) == quota
    assert core_quota(cgroups=tmp_path, membership=tmp_path / "nothing") is None


def test_timing_is_a_median_within_its_time():
    now, steps = 0.0, iter([9.0, 1.0, 5.0, 2.0, 100.0])

    def work():
        nonlocal now
        now += next(steps)

    timing = timed(work, repeats=3, seconds=60, clock=lambda: now)
    assert (timing.seconds, timing.least, timing.most) == (2.0, 1.0, 5.0)
    assert timing.is_unsteady


def test_slow_work_is_run_once_besides_warming_up():
    now = 0.0

    def work():
        nonlocal now
        now += 10

    assert timed(work, repeats=7, seconds=0.4, clock=lambda: now).seconds == 10
    assert now == 20


def test_disk_is_measured_and_nothing_is_left_there(tmp_path):
    disk = measure_disk(tmp_path)
    assert disk.write.per_second > 0 and disk.read.per_second > 0 and disk.free_bytes > 0
    assert disk.filesystem != "unknown"
    assert list(tmp_path.iterdir()) == []


def test_memory_that_looks_like_a_disk_is_noticed():
    assert measure_disk(Path("/dev/shm")).in_memory


def test_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--warm-dir"):
        measure_disk(tmp_path / "nowhere")


def test_copies_to_a_device_are_measured_both_ways():
    rates = device_copies("cpu", 2**20)
    assert set(rates) == {"host -> cpu", "cpu -> host"} and all(rate.per_second > 0 for rate in rates.values())


def test_pages_of_a_model_are_measured():
    model = loaded()
    costs = measure_costs(model, ADAPTIVE)
    assert 0 < costs.sketch.least <= costs.sketch.seconds < 1e-3
    assert 0 < costs.exact.least <= costs.exact.seconds < 1e-3
    assert 0 < costs.recompute.seconds < 10
    assert costs.window_layers == 4


def test_pages_that_cannot_be_sketched_are_measured_exactly():
    costs = measure_costs(loaded(head_dim=8), ADAPTIVE)
    assert costs.sketch is None and costs.exact.seconds > 0


def test_model_that_the_kernel_cannot_serve_is_measured_in_plain_torch():
    model = loaded(num_attention_heads=65, num_key_value_heads=1, hidden_size=65 * 16)
    assert "65 query heads" in measure_costs(model, ADAPTIVE).no_kernel
    assert measure_costs(loaded(), ADAPTIVE).no_kernel is None


@pytest.mark.parametrize(("layers", "limit", "window"), [(4, 16, 4), (30, 16, 15), (32, 16, 16), (33, 16, 11)])
def test_windows_are_those_of_the_cache(layers, limit, window):
    spec = type("Spec", (), {"num_layers": layers})
    assert window_layers_of(spec, CacheConfig(mode="adaptive", recompute_layer_limit=limit)) == window


# -- the report --------------------------------------------------------------------------------------------------------


def text_of(report):
    console = Console(width=100, file=io.StringIO())
    draw_report(report, console)
    return console.file.getvalue()


def test_report_has_machine_measurements_model_and_verdict(folder, tmp_path):
    report = run_check(folder, warm_dir=tmp_path, sequences=4)
    text = text_of(report)
    for part in ("machine", "measured", "LlamaForCausalLM", "an exact page", "a cold block", "settings that fit 4 sequences"):
        assert part in text
    assert report.load.context == 4096
    assert report.command in text
    json.dumps(report.to_dict(), allow_nan=False)


def test_model_that_is_refused_is_part_of_the_report(tmp_path):
    tiny_config(alibi=True).save_pretrained(tmp_path)
    report = run_check(str(tmp_path))
    assert report.advice.verdict is Verdict.CANNOT and report.command is None
    assert "position bias" in report.advice.reasons[0]
    assert "Vera cannot serve this here" in text_of(report)


def test_model_larger_than_memory_is_not_even_loaded(folder, monkeypatch):
    monkeypatch.setattr(machine_module, "available_bytes", lambda: 2**18)
    monkeypatch.setattr(run_module, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    report = run_check(folder)
    assert report.advice.verdict is Verdict.CANNOT
    assert "take a smaller model" in report.advice.reasons[0]


def test_without_the_embedded_model_the_machine_alone_is_judged(monkeypatch):
    def nothing(*_, **__):
        raise ModelNotFound("the embedded model is not installed")

    monkeypatch.setattr(run_module, "load_model", nothing)
    report = run_check()
    assert report.advice.verdict in (Verdict.SUITS, Verdict.NATIVE) and report.model is None
    assert "No model was looked at: the embedded model is not installed" in text_of(report)
    assert run_check("embedded").advice.verdict is Verdict.CANNOT


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"context": 0}, {"num_threads": 0}, {"context": 5000}])
def test_options_that_cannot_be_meant_are_refused(folder, wrong):
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        run_check(folder, **wrong)


# -- the command -------------------------------------------------------------------------------------------------------


def test_command_prints_json_alone_on_stdout_and_exits_with_its_verdict(folder):
    run = vera(folder, "--json", VERA_CPU_ISA="portable")
    told = json.loads(run.stdout)
    assert run.returncode == told["exit_code"] in (0, 3), run.stderr
    assert told["machine"]["isa"] == "portable"
    assert told["model"]["head_dim"] == 16 and told["rates"]["disk"]["folder"]
    assert "an exact page" in run.stderr and "\x1b" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "message"),
    [(["/nowhere/at/all"], {}, 1, "/nowhere/at/all"), ([], {"VERA_CPU_ISA": "mmx"}, 2, "mmx")],
)
def test_mistake_gives_one_clear_message_and_its_exit_code(arguments, environment, code, message):
    run = vera(*arguments, **environment)
    assert run.returncode == code, run.stderr
    assert message in " ".join((run.stdout + run.stderr).split())
    assert "Traceback" not in run.stderr
