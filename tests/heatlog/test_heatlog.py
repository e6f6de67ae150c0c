"""The heat log: what is written is what the cache saw, within its limits, whatever happens to the disk; and how it is read."""

import asyncio
import io
import json
import logging
import os
import resource
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from engines import finish, greedy, prompt_of
from tier_engines import tiered_engine
from vera.cache import TierStats
from vera.cache.features import HISTOGRAM_BINS, HeatSummary
from vera.errors import ConfigError, VeraError
from vera.heatlog.history import read_heat_log
from vera.heatlog.log import MIN_BYTES, HeatLog, follow, rotated
from vera.heatlog.picture import save_history
from vera.heatlog.terminal import draw_history

ABOUT = {"model": "tiny", "hot_score_threshold": 0.7}


def summary(hot=1, warm=8, cold=1):
    counts = [0] * HISTOGRAM_BINS
    counts[10], counts[15] = warm + cold, hot
    return HeatSummary(hot, warm, cold, tuple(counts))


class Cache:
    """Recalibrates when told to, and forgets all but the latest distributions."""

    def __init__(self, kept=64):
        self.stats = TierStats(heat=deque(maxlen=kept))

    def recalibrate(self, times=1, **pages):
        for _ in range(times):
            self.stats.recalibrations += 1
            self.stats.heat.append(summary(**pages))
        return self.stats.snapshot()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "heat.jsonl"


@pytest.fixture
def make(path):
    logs = []

    def opened(**options):
        logs.append(HeatLog(path, **{"about": ABOUT, "clock": lambda: 1000.0, **options}))
        return logs[-1]

    yield opened
    for log in logs:
        log.close()


def fill(log, cache, files):
    """Writes until so many files are full."""
    before = log.path.stat().st_ino
    for _ in range(files):
        while log.path.stat().st_ino == before:
            log.take(cache.recalibrate(32))
        before = log.path.stat().st_ino


# -- writing -----------------------------------------------------------------------------------------------------------


def test_each_recalibration_is_written_once(make, path):
    log, cache = make(), Cache()
    assert log.take(cache.stats.snapshot()) == 0
    assert log.take(cache.recalibrate(3, hot=5)) == 3
    assert log.take(cache.stats.snapshot()) == 0
    assert log.take(cache.recalibrate(2, hot=6)) == 2
    assert read_heat_log(path).tiers[:, 0].tolist() == [5, 5, 5, 6, 6]
    assert (log.num_lines, log.num_dropped) == (5, 0)


def test_log_of_an_engine_has_what_its_cache_saw(make, path):
    log, engine = make(), tiered_engine()
    engine.add_request(prompt_of(200), greedy(60))
    finish(engine)
    log.take(engine.cache.tier_stats.snapshot())
    written, seen = read_heat_log(path), engine.cache.tier_stats.heat
    assert len(seen) > 3
    assert written.histograms.tolist() == [list(each.histogram) for each in seen]
    assert written.tiers.tolist() == [[each.num_hot, each.num_warm, each.num_cold] for each in seen]
    assert (written.tiers.sum(axis=1) == written.histograms.sum(axis=1)).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20))
def test_nothing_is_written_twice_and_what_is_missed_is_told(tmp_path_factory, bursts):
    path = tmp_path_factory.mktemp("log") / "heat.jsonl"
    log, cache, written = HeatLog(path, about={}), Cache(kept=4), 0
    for burst in [1, *bursts]:
        written += log.take(cache.recalibrate(burst))
    log.close()
    history = read_heat_log(path)
    assert len(history.times) == written == log.num_lines
    assert written + history.num_missed == cache.stats.recalibrations


def test_full_files_are_renamed_and_the_oldest_is_dropped(make, path):
    log = make(max_bytes=MIN_BYTES, max_files=3)
    fill(log, Cache(), 5)
    assert sorted(file.name for file in path.parent.iterdir()) == ["heat.jsonl", "heat.jsonl.1", "heat.jsonl.2"]
    for file in (path, rotated(path, 1), rotated(path, 2)):
        assert file.stat().st_size <= MIN_BYTES
        first = json.loads(file.read_text().splitlines()[0])
        assert first == {"heat_log": 1, "time": 1000.0, **ABOUT}


def test_reading_goes_on_through_the_files_in_order(make, path):
    log, cache = make(max_bytes=MIN_BYTES, max_files=4), Cache()
    for hot in range(1500):
        log.take(cache.recalibrate(hot=hot))
    assert rotated(path, 1).exists()
    assert read_heat_log(path).tiers[:, 0].tolist() == list(range(1500))


def test_restarted_server_appends(make, path):
    first = make()
    first.take(Cache().recalibrate(2))
    first.close()
    with path.open("a") as file:
        file.write('{"time": 12, "ho')  # killed in the middle of a line
    make(about={"model": "other"}).take(Cache().recalibrate(hot=7))
    history = read_heat_log(path)
    assert history.tiers[:, 0].tolist() == [1, 1, 7]
    assert (history.num_damaged, history.about) == (1, {"model": "other"})


def test_facts_may_change_while_it_is_written(make, path):
    log, cache = make(), Cache()
    log.take(cache.recalibrate())
    log.describe({"model": "tiny", "hot_score_threshold": 0.62})
    log.take(cache.recalibrate())
    assert read_heat_log(path).hot_score_threshold == 0.62


def test_server_is_followed_until_it_ends(make, path):
    log, cache = make(), Cache()

    async def statistics():
        return cache.recalibrate() if log.num_lines < 3 else None

    async def serve():
        task = asyncio.create_task(follow(log, statistics, every_seconds=0.0))
        while log.num_lines < 3:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(serve())
    log.close()
    assert len(read_heat_log(path).times) == 3


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_full_disk_ends_the_log_says_so_once_and_leaves_whole_lines(make, path, caplog):
    room = 20_000

    def write(file, data):
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = data[:room]
        room -= len(taken)
        return os.write(file, taken)

    log, cache = make(write=write), Cache()
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert log.take(cache.recalibrate(50)) == 50
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        f"the heat log {path} ends after {log.num_lines} recalibrations, because it cannot be written (No space left on device); "
        "make room, then restart the server"
    ]
    assert log.num_lines + log.num_dropped == 500 and log.num_dropped >= 50
    history = read_heat_log(path)
    assert (len(history.times), history.num_damaged) == (log.num_lines, 0)
    assert path.read_bytes().endswith(b"}\n")


def test_limit_of_the_system_ends_the_log_as_a_full_disk_does(make, path):
    log, cache = make(), Cache()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for _ in range(5):
            log.take(cache.recalibrate(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.failure is not None and log.num_dropped > 0
    assert path.read_bytes().endswith(b"}\n") and path.stat().st_size <= 2000


def test_folder_that_is_taken_away_ends_the_log(make, path, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    log = HeatLog(folder / "heat.jsonl", about={}, max_bytes=MIN_BYTES)
    (folder / "heat.jsonl").unlink()
    folder.rmdir()
    cache = Cache()
    for _ in range(50):
        log.take(cache.recalibrate(32))
    assert log.failure is not None and log.num_dropped > 0
    log.close()


@pytest.mark.parametrize("prepare", ["no folder", "a folder", "a device", "another's file", "a log in use", "no room"])
def test_file_that_cannot_be_a_log_is_refused_at_once(make, path, prepare):
    options = {}
    match prepare:
        case "no folder":
            options["path"] = path / "deeper"
        case "a folder":
            path.mkdir()
        case "a device":
            options["path"] = type(path)("/dev/full")
        case "another's file":
            path.write_text("precious\n")
        case "a log in use":
            make()
        case "no room":

            def write(file, data):
                raise OSError(28, "No space left on device")

            options["write"] = write
    with pytest.raises(ConfigError, match=r"heat\.jsonl|/dev/full"):
        HeatLog(**{"path": path, "about": {}, **options})
    if prepare == "another's file":
        assert path.read_text() == "precious\n"


@pytest.mark.parametrize("options", [{"max_bytes": MIN_BYTES - 1}, {"max_files": 1}])
def test_limits_that_cannot_be_kept_are_refused(make, options):
    with pytest.raises(ConfigError, match="heat log"):
        make(**options)


def test_closed_log_takes_no_more_and_does_not_raise(make):
    log = make()
    log.close()
    log.close()
    assert log.take(Cache().recalibrate()) == 1
    assert log.num_dropped == 1


# -- reading -----------------------------------------------------------------------------------------------------------


def test_damaged_lines_are_left_out_and_counted(make, path):
    make().take(Cache().recalibrate(2))
    lines = [
        "",
        "nonsense",
        "[]",
        '{"time": 1}',
        '{"time": 1, "hot": -1, "warm": 1, "cold": 1, "histogram": []}',
        '{"heat_log": 99}',
    ]
    with path.open("ab") as file:
        file.write("\n".join(lines).encode() + b"\n\xff\xfe\n" + b'{"time": 1, "hot"')
    history = read_heat_log(path)
    assert (len(history.times), history.num_damaged) == (2, len(lines) + 1)


def test_last_recalibrations_alone_can_be_read(make, path):
    log, cache = make(), Cache()
    for hot in range(10):
        log.take(cache.recalibrate(hot=hot))
    assert read_heat_log(path, last=3).tiers[:, 0].tolist() == [7, 8, 9]


def test_log_without_recalibrations_and_no_log_are_told_apart(make, path, tmp_path):
    make()
    with pytest.raises(VeraError, match="no recalibration"):
        read_heat_log(path)
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=str(wrong)):
            read_heat_log(wrong)


def test_name_of_a_log_is_no_pattern(tmp_path):
    path = tmp_path / "heat[1]*.jsonl"
    log = HeatLog(path, about={}, max_bytes=MIN_BYTES)
    fill(log, Cache(), 1)
    log.close()
    assert len(read_heat_log(path).times) == log.num_lines


def test_summary_has_the_shares_and_how_far_the_distribution_moved(make, path):
    log, cache = make(), Cache()
    log.take(cache.recalibrate(8, hot=0, warm=10, cold=0))
    log.take(cache.recalibrate(8, hot=5, warm=4, cold=1))
    result = read_heat_log(path).to_dict()
    assert result["tiers"]["hot"] == {"pages": 5, "share": 0.5, "mean_share": 0.25, "least_share": 0.0, "most_share": 0.5}
    assert result["shift"] == pytest.approx(0.5)
    assert result["score"]["from_threshold_share"] == 0.5
    assert result["score"]["mean"] == pytest.approx(0.75 * 0.525 + 0.25 * 0.775)
    assert 0.5 <= result["score"]["p50"] <= 0.55 and 0.75 <= result["score"]["p90"] <= 0.8
    json.dumps(result, allow_nan=False)


def test_columns_keep_every_page(make, path):
    log, cache = make(), Cache()
    for hot in range(100):
        log.take(cache.recalibrate(hot=hot))
    history = read_heat_log(path)
    columns = history.columns(7)
    assert len(columns.times) == 7
    np.testing.assert_array_equal(columns.tiers.sum(axis=0), history.tiers.sum(axis=0))
    np.testing.assert_array_equal(columns.histograms.sum(axis=0), history.histograms.sum(axis=0))


@pytest.mark.parametrize("recalibrations", [1, 3, 500])
def test_text_and_picture_are_drawn(make, path, tmp_path, recalibrations):
    log, cache = make(), Cache()
    for hot in range(recalibrations):
        log.take(cache.recalibrate(hot=hot % 50))
    console = Console(width=100, file=io.StringIO())
    draw_history(read_heat_log(path), console)
    text = console.file.getvalue()
    assert f"{recalibrations} recalibrations" in text and "hot from 0.7" in text
    assert max(map(len, text.splitlines())) <= 100
    save_history(read_heat_log(path), tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_command_prints_a_summary(make, path):
    make().take(Cache().recalibrate(5))
    run = subprocess.run(
        [sys.executable, "-m", "vera.cli", "heat", str(path), "--json"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["recalibrations"] == 5
    assert "tiers" in run.stderr and "\x1b" not in run.stderr
