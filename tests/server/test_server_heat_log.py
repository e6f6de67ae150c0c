"""The heat log of a running server."""

from servers import NAME, adaptive_engine, running

from vera.heatlog.history import read_heat_log
from vera.heatlog.log import HeatLog


def test_recalibrations_of_a_server_are_in_its_heat_log_when_it_has_ended(tmp_path):
    file = tmp_path / "heat.jsonl"
    with running(lambda: adaptive_engine(recalibrate_every=8), heat_log=HeatLog(file, about={})) as server:
        server.complete(list(range(5, 120)), max_tokens=40, ignore_eos=True)
        done = server.inspect(lambda engine: engine.cache.tier_stats.recalibrations)
    history = read_heat_log(file)
    assert done > 1
    text = file.read_text()
    assert NAME in text and text.count("histogram") == done
    assert history.to_dict()
