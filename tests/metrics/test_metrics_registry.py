"""The registry of metrics is what the server shows, what the document says, and what dashboard and alerts ask for."""

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engines import finish, greedy, make_engine, prompt_of
from tier_engines import tiered_engine
from vera.metrics.document import render
from vera.metrics.registry import FIGURES, METRICS, Kind
from vera.server.metrics import Overview, ServerMetrics
from vera.server.snapshot import take_snapshot

DOCS = Path(__file__).parents[2] / "docs"
OPS = files("vera.ops")
SAMPLES = {sample: metric for metric in METRICS.values() for sample in metric.samples}
SCRAPE_LABELS = {"instance", "job", "le"}
PROMTOOL = shutil.which("promtool")


def shown(engine):
    """The families of `/metrics` after some answers, without the times at which prometheus-client made its counters."""
    engine.add_request(prompt_of(200), greedy(20))
    updates = [update for answer in finish(engine).values() for update in answer]
    metrics = ServerMetrics()
    metrics.count_response("/v1/completions", 200)
    metrics.observe_end(1.0, updates[-1])
    overview = Overview("chat", "chat@2", 25.0, 0.0, 1, 0) if engine.cache.adaptive else None
    text = metrics.render(take_snapshot(engine), overview).decode()
    return {family.name: family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")}


@pytest.fixture(scope="module")
def adaptive():
    return shown(tiered_engine())


def family_name(metric):
    return metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name


def test_server_shows_exactly_the_registered_families(adaptive):
    assert set(adaptive) == {family_name(metric) for metric in METRICS.values()}


def test_native_server_shows_them_but_for_those_of_an_adaptive_cache():
    missing = {family_name(metric) for metric in METRICS.values()} - set(shown(make_engine()))
    assert missing == {
        family_name(metric) for metric in METRICS.values() if metric.adaptive and metric.kind is not Kind.HISTOGRAM
    }


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_family_has_the_registered_kind_labels_and_meaning(adaptive, metric):
    family = adaptive[family_name(metric)]
    assert (family.type, family.documentation) == (metric.kind, metric.meaning)
    assert {sample.name for sample in family.samples} - {f"{family.name}_created"} == set(metric.samples)
    assert {label for sample in family.samples for label in sample.labels} - {"le"} == set(metric.labels)


def test_names_follow_the_conventions():
    for metric in METRICS.values():
        assert metric.name.startswith("vera_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        if metric.unit in ("seconds", "bytes"):
            assert metric.unit in metric.name


def test_document_is_current():
    assert (DOCS / "metrics.md").read_text() == render(), "run: python -m vera.metrics.document > docs/metrics.md"


def test_document_of_the_server_names_every_metric():
    text = (DOCS / "server.md").read_text()
    assert [metric.name for metric in METRICS.values() if metric.name.removeprefix("vera_") not in text] == []


# -- queries -----------------------------------------------------------------------------------------------------------


def alert_rules():
    return [rule for group in yaml.safe_load((OPS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((OPS / "grafana.json").read_text())


def dashboard_queries():
    """Each with the filter and the interval of the dashboard taken out."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield (
                re.sub(r'(, |(?<={))instance=~"\$instance"', "", target["expr"])
                .replace("{}", "")
                .replace("$__rate_interval", "5m")
            )


def queries():
    yield from (figure.promql for figure in FIGURES.values())
    yield from (rule["expr"] for rule in alert_rules())
    yield from dashboard_queries()


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_query_asks_for_registered_metrics_and_labels(query):
    names = re.findall(r"\bvera_\w+", query)
    assert names and set(names) <= set(SAMPLES)
    known = {label for name in names for label in SAMPLES[name].labels} | SCRAPE_LABELS
    for selector in re.findall(r"\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= known
    for grouping in re.findall(r"\b(?:by|ignoring|on|without)\s*\(([^)]*)\)", query):
        assert {label.strip() for label in grouping.split(",")} <= known


def test_dashboard_draws_figures_and_plain_gauges():
    formulas = {figure.promql for figure in FIGURES.values()} | {m.name for m in METRICS.values() if m.kind is Kind.GAUGE}
    assert set(dashboard_queries()) <= formulas
    assert {figure.promql for figure in FIGURES.values()} <= set(dashboard_queries()), "a figure has no panel"


def test_dashboard_asks_for_its_data_source_and_can_choose_servers():
    board = dashboard()
    assert {variable["name"]: variable["type"] for variable in board["templating"]["list"]} == {
        "datasource": "datasource",
        "instance": "query",
    }
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    assert {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    assert all(
        target["expr"].count('instance=~"$instance"') == len(re.findall(r"vera_\w+", target["expr"])) for target in targets
    )


def test_dashboard_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_alert_watches_the_figure_that_it_names_and_says_what_to_do(rule):
    if figure := rule["annotations"].get("figure"):
        assert rule["expr"].startswith(f"{FIGURES[figure].promql} > ")
        assert rule["labels"]["team"] in FIGURES[figure].watchers
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_the_alerts_and_every_formula(tmp_path):
    formulas = [{"record": f"vera:{figure.name}", "expr": figure.promql} for figure in FIGURES.values()]
    (tmp_path / "figures.yml").write_text(yaml.safe_dump({"groups": [{"name": "figures", "rules": formulas}]}))
    for path in (str(OPS / "alerts.yml"), str(tmp_path / "figures.yml")):
        run = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
