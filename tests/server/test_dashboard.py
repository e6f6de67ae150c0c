"""The monitoring page: its files, and in Chromium what it shows and does over a service whose figures are known."""

from __future__ import annotations

import http.client
import json
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from dashboard_page import DashboardPage
from fake_admin import KEY, running_fake

from vera.server.page import FILES

FOLDER = files("vera.server") / "dashboard"
OURS = [name for name in FILES if not name.startswith("uPlot")]


@pytest.fixture
def fake():
    with running_fake() as started:
        yield started


# -- files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    with running_fake() as started, httpx.Client(base_url=started.url) as client:
        yield client


def test_page_needs_no_key_and_may_load_nothing_from_elsewhere(client):
    page = client.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"


def test_page_names_no_other_host_and_has_no_inline_script_or_style():
    page = (FOLDER / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


@pytest.mark.parametrize("name", FILES)
def test_file_has_its_content_type_and_is_asked_for_again_each_time(client, name):
    answer = client.get(f"/dashboard/{name}")
    kind = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}[name.rpartition(".")[2]]
    assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["cache-control"] == "no-cache"
    unchanged = client.get(f"/dashboard/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert client.get(f"/dashboard/{name}", headers={"If-None-Match": '"another"'}).status_code == 200


def test_every_file_of_the_folder_is_served_and_no_other():
    assert {entry.name for entry in FOLDER.iterdir() if entry.is_file()} == {*FILES, "index.html"}


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "../page.py",
        "..%2fpage.py",
        "%2e%2e/page.py",
        "..%5cpage.py",
        "%2fetc%2fpasswd",
        "index.html",
        "app.js/",
        "app.js%00",
    ],
)
def test_nothing_but_the_listed_files_is_served(client, path):
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=5)
    connection.putrequest("GET", f"/dashboard/{path}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 404
    assert b"FastAPI" not in body and b"root:" not in body


def texts():
    source = (FOLDER / "texts.js").read_text()
    return json.loads(source[source.index("{") :].rstrip().rstrip(";"))


def test_every_text_is_there_in_both_languages_with_the_same_values():
    for key, (english, chinese) in texts().items():
        assert english and chinese, key
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", chinese)), key
        if re.search(r"[a-z]{4}", re.sub(r"\{\w+\}|vera|Vera", "", english)):
            assert re.search(r"[一-鿿]", chinese), f"{key} is not in Chinese"


def test_every_text_that_is_used_exists_and_every_one_that_exists_is_used():
    source = "".join((FOLDER / name).read_text() for name in [*OURS, "index.html"] if name != "texts.js")
    known = set(texts())
    literal = {name for name in re.findall(r"[\"'`]([a-z][\w.-]*)[\"'`]", source) if name in known}
    asked = set(re.findall(r'data-text="([^"]+)"|(?<![\w.])t\("([^"]+)"', source))
    assert {one or other for one, other in asked} <= known
    groups = set(re.findall(r"`([\w.]+)\.\$\{", source)) | set(re.findall(r'word\("([\w.]+)"', source))
    made = {key for key in known for group in groups if key.startswith(f"{group}.")}
    actions = {f"{name}.{part}" for name in re.findall(r'name: "([\w.]+)"', source) for part in ("effect", "done")}
    titles = {key for key in known if key.endswith(".title")}
    assert known - literal - made - actions - titles == set()


# -- in a browser --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tab(chromium, fake):
    """Opens tabs; at the end no script has failed in any, and the policy has stopped nothing."""
    opened = []

    def open_tab(key=KEY, **options):
        opened.append(DashboardPage(chromium, fake.url, **options))
        return opened[-1].open(key)

    yield open_tab
    problems = [problem for page in opened for problem in page.problems]
    for page in opened:
        page.close()
    assert problems == []


def test_every_panel_shows_what_the_service_says(fake, tab):
    page = tab()
    fake.service.advance()
    page.tab.locator("#chart-throughput b").first.filter(has_not_text="–").wait_for()
    assert page.text("#model") == "SmolLM2-135M-Instruct"
    assert page.text("#service-state") == "ready"
    assert page.text("#uptime").startswith("up 2 h 14 min")
    assert page.serving == "closed"
    assert page.text("#degrade-reason") == "all well for 61 s and 24 adaptive requests"
    assert page.text("#version-ref") == "long-document@2"
    assert "jonas" in page.text("#version-facts")
    assert page.text("#tiles > [data-key=ttft]").split("\n") == ["TTFT P99", "1.84 s", "P50 640 ms"]
    assert page.text("#tiles > [data-key=error]").split("\n") == ["True error, mean", "0.0125", "estimated 0.0176"]
    assert page.text("#tiers-bars > [data-key=hot]").split("\n")[:3] == ["Fast memory (cpu)", "768 MiB of 1.00 GiB", "75.0%"]
    assert page.text("#tiers-bars > [data-key=warm]").split("\n")[:3] == ["Warm store (host)", "1.00 GiB of 4.00 GiB", "25.0%"]
    assert page.text("#tiers-pages > [data-key=cold]").split("\n")[:3] == ["cold", "23,000 pages", "14.4%"]
    assert ["TTFT P99", "1.60 s", "1.84 s", "1.15×"] in page.rows("#modes-table")
    assert ["ITL P99", "62.0 ms", "65.1 ms", "1.05×"] in page.rows("#arms")
    assert page.rows("#requests-table")[0] == [
        *("req-1", "Shown", "answering", "adaptive", "candidate", "long-document@3", "bounded", "4,096", "97", "12 s"),
    ]
    assert page.rows("#audit-table")[0][2:] == [
        *("rollout.step", "long-document@3", "guard", "within all limits after 61 requests of the candidate"),
    ]
    page.tab.locator("#heat-body").wait_for()
    for canvas in (
        "#heat-map",
        *(f"#chart-{name} canvas" for name in ("throughput", "ttft", "itl", "hits", "recompute", "errors")),
    ):
        assert page.pixels(canvas) > 1000, canvas


def test_rollout_is_shown_step_by_step_with_its_verdict(fake, tab):
    page = tab()
    assert page.rollout() == {
        "state": "running",
        "weights": ["5%", "25%", "50%", "100%"],
        "steps": ["passed", "current", "ahead", "ahead"],
        "verdict": "Wait: too few samples: 12 more requests of the candidate",
    }
    rollout = fake.service.stats["operations"]["rollout"]
    rollout["rollout"] |= {"state": "aborted", "weight": 0.0, "reason": "beyond a hard limit: audit_error 0.9"}
    page.wait_for_text("#rollout-state", "aborted")
    assert page.rollout()["steps"] == ["passed", "ended", "ahead", "ahead"]
    assert page.text("#rollout-verdict") == "Ended: beyond a hard limit: audit_error 0.9"
    assert not page.tab.locator("#rollout-actions").is_visible()


HISTORY = """async (polls) => {
    const { History } = await import("/dashboard/history.js");
    const history = new History();
    const counters = ["hits", "cold_hits", "uncovered_hits", "decode_steps", "recompute_steps"];
    return polls.map(([clock, tokens, finished, steps, ...tiers]) => {
        const engine = { generated_tokens: tokens, finished: { stop: finished }, steps };
        const cache = { counters: Object.fromEntries(counters.map((name, index) => [name, tiers[index]])) };
        const restarted = history.add({ engine, cache }, 1000 + clock, clock);
        return { restarted, length: history.times.length, ...history.latest };
    });
}"""


def test_rates_are_differences_between_polls(tab):
    first, second, third = tab().tab.evaluate(
        HISTORY, [[0, 100, 5, 10, 50, 4, 1, 20, 2], [2, 340, 9, 40, 150, 14, 2, 70, 4], [3, 360, 9, 42, 150, 14, 2, 70, 4]]
    )
    assert (first["tokens"], first["qps"], first["recompute"]) == (None, None, None)
    assert (second["tokens"], second["qps"]) == (120, 2)
    assert (second["hits"], second["cold_hits"], second["uncovered"], second["recompute"]) == (2, 0.2, 0.02, 0.04)
    assert third["tokens"] == pytest.approx(260 / 3)


def test_counter_that_falls_is_a_restart_and_a_gap_is_not_drawn_through(tab):
    tiers = [0, 0, 0, 0, 0]
    polls = [
        [0, 100, 5, 10, *tiers],
        [1, 200, 5, 20, *tiers],
        [2, 40, 0, 5, *tiers],
        [3, 50, 0, 9, *tiers],
        [63, 90, 0, 9, *tiers],
    ]
    told = tab().tab.evaluate(HISTORY, polls)
    assert [one["restarted"] for one in told] == [False, False, True, False, False]
    assert [one["length"] for one in told] == [1, 2, 1, 2, 4], "the fourth is a break"
    assert told[2]["tokens"] is None
    assert told[3]["tokens"] == 10
    assert told[4]["tokens"] is None


def test_numbers_have_units_and_three_figures(tab):
    written = tab().tab.evaluate(
        """async () => {
            const f = await import("/dashboard/format.js");
            return [f.milliseconds(61.94), f.milliseconds(1234), f.seconds(0.0025), f.bytes(1536), f.bytes(0), f.percent(0.0312),
                    f.count(1234567), f.number(0.00042), f.duration(3725), f.number(null), f.number("inf"), f.ratio(1.05)];
        }"""
    )
    assert written == [
        *("61.9 ms", "1.23 s", "2.50 ms", "1.50 KiB", "0 B", "3.12%"),
        *("1,234,567", "4.2e-4", "1 h 2 min", "–", "inf", "1.05×"),
    ]


def test_language_follows_the_browser_and_a_choice_is_remembered(tab):
    page = tab(language="zh-CN")
    assert page.text("#degrade-state") == "自适应"
    assert page.tab.locator("html").get_attribute("lang") == "zh-CN"
    page.tab.select_option("#language", "en")
    page.wait_for_text("#degrade-state", "Adaptive")
    assert page.text("#chart-ttft h2") == "Time to first token"
    assert page.text("#key-button") == "Forget key"
    page.tab.reload()
    page.wait_for_phase("locked")
    assert page.text("#notice-title") == "The admin key opens this page"


def test_theme_follows_the_system_and_a_choice_is_remembered(tab):
    page = tab(theme="dark")

    def brightness():
        colour = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    assert brightness() < 60
    page.tab.select_option("#theme", "light")
    assert brightness() > 200
    page.tab.reload()
    page.wait_for_phase("locked")
    assert brightness() > 200


def test_key_is_asked_for_kept_in_memory_alone_and_forgotten(tab):
    page = tab(key=None)
    page.wait_for_phase("locked")
    page.give_key("ключ")
    page.wait_for_text("#key-error", "visible ASCII")
    page.give_key("wrong-key")
    page.wait_for_text("#key-error", "does not know this key")
    page.give_key(KEY)
    page.wait_for_phase("live")
    kept = page.tab.evaluate(
        "JSON.stringify([location.href, {...localStorage}, {...sessionStorage}, document.cookie, document.body.outerHTML])"
    )
    assert KEY not in kept
    assert page.tab.locator("#key-input").input_value() == ""
    page.tab.locator("#key-button").click()
    page.wait_for_phase("locked")
    assert not page.tab.locator("#panels").is_visible()


def test_answer_that_was_on_its_way_when_the_key_was_forgotten_is_not_shown(tab):
    page = tab()
    page.tab.route("**/admin/stats", lambda route: (page.tab.wait_for_timeout(700), route.continue_()))
    with page.tab.expect_request("**/admin/stats"):
        pass
    page.tab.locator("#key-button").click()
    page.tab.wait_for_timeout(1500)
    assert page.tab.locator("body").get_attribute("data-phase") == "locked"


@pytest.mark.parametrize(
    ("fault", "phase", "said"),
    [
        ((403, "no_admin_key", "the admin routes are shut"), "shut", "This server has no admin key"),
        ((403, "foreign_host", "a server without keys is reached by its address"), "refused", "a server without keys"),
        ((503, "unavailable", "the server is loading"), "unreached", "the server is loading"),
    ],
)
def test_refusal_is_told_and_can_be_tried_again(fake, tab, fault, phase, said):
    fake.service.fault = fault
    page = tab(key=None)
    page.wait_for_phase(phase)
    assert said in page.text("#notice")
    fake.service.fault = None
    page.tab.locator("#notice-button").click()
    page.wait_for_phase("locked")


def test_api_key_is_told_from_a_wrong_one(fake, tab):
    page = tab(key=None)
    page.wait_for_phase("locked")
    fake.service.fault = (403, "admin_key_required", "this key does not open the admin routes")
    page.give_key("an-api-key")
    page.wait_for_text("#key-error", "needs the admin key")


MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>"\'><b>bold</b>'


def test_markup_in_data_is_text_everywhere(fake, tab):
    service = fake.service
    operations = service.stats["operations"]
    service.stats["model"] = MARKUP
    service.stats["requests"][0] |= {
        "request_id": MARKUP,
        "arm": MARKUP,
        "params_version": MARKUP,
        "fidelity": MARKUP,
        "phase": MARKUP,
    }
    service.stats["cache"]["bytes"]["hot"]["device"] = MARKUP
    operations["version"] |= {"ref": MARKUP, "author": MARKUP, "reason": MARKUP, "time": MARKUP}
    operations["degrade"] |= {"reason": MARKUP, "failure": MARKUP}
    operations["refusal"] = MARKUP
    operations["rollout"]["rollout"] |= {"baseline": MARKUP, "candidate": MARKUP}
    operations["rollout"]["verdict"]["reason"] = MARKUP
    operations["events"][0] |= {"kind": MARKUP, "ref": MARKUP, "author": MARKUP, "reason": MARKUP, "time": MARKUP}
    service.refusal = (409, "conflict", MARKUP)
    page = tab()
    page.press("#rollout-abort", author=MARKUP, reason=MARKUP, wait=False)
    page.tab.locator("#confirm-error").wait_for()
    assert page.tab.locator("#confirm-error").text_content() == MARKUP
    shown = page.tab.evaluate("document.body.textContent")
    assert shown.count(MARKUP) >= 18
    assert page.tab.locator("img, body script, b >> text=bold").count() == 0
    assert page.tab.evaluate("window.hit") is None


def test_silence_is_told_with_the_age_of_the_figures_and_ends(fake, tab):
    page = tab()
    fake.stop()
    page.tab.locator("#offline").wait_for()
    assert page.text("#link") == "Offline"
    assert re.search(r"What is shown is \d+ s old", page.text("#offline-detail"))
    assert page.text("#version-ref") == "long-document@2", "the latest figures stay"
    page.wait_for_text("#offline-next", "Next try in")
    fake.start()
    page.tab.locator("#retry").click()
    page.tab.locator("#offline").wait_for(state="hidden")
    assert page.text("#link") == "Live"


def test_hidden_tab_asks_nothing_and_asks_at_once_when_seen(fake, tab):
    page = tab()
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.tab.evaluate(hide, True)
    page.tab.wait_for_timeout(1200)
    before = fake.service.polls
    page.tab.wait_for_timeout(1600)
    assert fake.service.polls == before
    with page.tab.expect_response("**/admin/stats"):
        page.tab.evaluate(hide, False)


def test_degrade_is_confirmed_posted_and_shown(fake, tab):
    page = tab()
    page.tab.locator("#degrade").click()
    page.tab.locator("#confirm-submit").click()
    assert page.tab.locator("#confirm-dialog").is_visible(), "author and reason are missing"
    page.tab.locator("#confirm-author").fill("mei")
    page.tab.locator("#confirm-reason").fill("   ")
    page.tab.locator("#confirm-submit").click()
    page.wait_for_text("#confirm-error", "Give an author and a reason.")
    page.tab.keyboard.press("Escape")
    page.tab.locator("#confirm-dialog").wait_for(state="hidden")
    assert fake.service.posts == []
    assert page.tab.evaluate("document.activeElement.id") == "degrade"

    page.degrade(author="mei", reason="latency alarm")
    page.wait_for_serving("open")
    assert fake.service.posts == [("degrade", {"override": "degraded", "author": "mei", "reason": "latency alarm"})]
    assert page.text("#degrade-state") == "Degraded to native"
    assert page.text("#degrade-reason") == "latency alarm"
    assert page.text("#done") == "Degraded. Running requests moved: 2."
    assert page.tab.locator("#degrade").is_disabled()

    page.press("#auto", author="mei", reason="all is well")
    page.wait_for_serving("half-open")
    page.press("#adaptive", author="mei", reason="sure")
    page.wait_for_serving("closed")
    assert [body["override"] for _, body in fake.service.posts] == ["degraded", "auto", "adaptive"]


def test_rollout_buttons_post_what_they_say(fake, tab):
    page = tab()
    page.press("#rollout-hold", author="mei", reason="wait for the night")
    page.wait_for_text("#rollout-state", "held")
    page.press("#rollout-resume", author="mei", reason="go on")
    page.wait_for_text("#rollout-state", "running")
    page.press("#rollout-next", author="mei", reason="enough seen")
    page.tab.locator("#rollout-steps li:nth-child(3).current").wait_for()
    page.press("#rollout-promote", author="mei", reason="good")
    page.wait_for_text("#rollout-state", "promoted")
    assert [(path, body.get("full")) for path, body in fake.service.posts] == [
        *(("rollout/hold", None), ("rollout/resume", None), ("rollout/promote", False), ("rollout/promote", True)),
    ]


def test_refused_change_stays_in_its_dialog_with_the_servers_reason(fake, tab):
    fake.service.refusal = (409, "conflict", "no rollout is running")
    page = tab()
    page.press("#rollout-abort", author="mei", reason="bad", wait=False)
    page.wait_for_text("#confirm-error", "no rollout is running")
    assert page.tab.locator("#confirm-reason").input_value() == "bad"


def test_heat_map_tells_of_the_cell_under_the_pointer_and_by_the_keys(fake, tab):
    page = tab()
    canvas = page.tab.locator("#heat-map")
    canvas.wait_for()
    canvas.hover(position={"x": 2, "y": 2})
    page.wait_for_text("#heat-tells", "Layer 0, block 0 (tokens 0–63): exact, not tiered yet")
    canvas.focus()
    page.tab.keyboard.press("ArrowRight")
    page.wait_for_text("#heat-tells", "Layer 0, block 1 (tokens 64–127): warm, heat 0.370")
    page.tab.keyboard.press("ArrowDown")
    page.wait_for_text("#heat-tells", "Layer 1, block 1 (tokens 64–127): warm, heat 0.480")


def test_another_request_can_be_chosen_and_one_that_ends_keeps_its_last_map(fake, tab):
    page = tab()
    page.tab.get_by_role("button", name="Show the heat map of req-3").click()
    page.wait_for_text("#heat-empty", "This request has no pages to show")
    page.tab.get_by_role("button", name="Show the heat map of req-2").click()
    page.wait_for_text("#heat-blocks", "30 layers × 3 blocks")
    assert page.text("#heat-request") == "req-2"
    fake.service.stats["requests"] = []
    fake.service.pages.clear()
    page.wait_for_text("#heat-request", "ended; its last map")
    assert page.pixels("#heat-map") > 0
    assert page.text("#requests-empty") == "Nothing runs and nothing waits."


def test_requests_with_the_same_id_are_rows_of_their_own(fake, tab):
    requests = fake.service.stats["requests"]
    requests[1]["request_id"] = requests[2]["request_id"] = "req-1"
    page = tab()
    for seconds in (20, 21):
        requests[0]["seconds"] = seconds
        page.wait_for_text("#requests-table", f"{seconds} s")
    assert [row[0] for row in page.rows("#requests-table")] == ["req-1"] * 3


def test_long_map_is_merged_into_columns_that_fit(fake, tab):
    fake.service.pages["req-1"] = {
        **{"request_id": "req-1", "tokens": 640_000, "page_size": 64, "layers": 2, "blocks": 10_000},
        **{"tier": [["c"] * 10_000, ["h"] * 10_000], "heat": [[0.5] * 10_000, [1.0] * 10_000]},
    }
    page = tab(width=390)
    canvas = page.tab.locator("#heat-map")
    canvas.hover(position={"x": 1, "y": 1})
    page.wait_for_text("#heat-tells", "mostly cold, mean heat 0.500")
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 390


def test_native_service_has_nothing_to_operate_and_still_figures(fake, tab):
    stats = fake.service.stats
    stats |= {"operations": None, "errors": None}
    stats["cache"] |= {"counters": {}, "page_moves": {}}
    del stats["cache"]["bytes"]["warm"]
    page = tab()
    assert page.serving == "native"
    assert "nothing to degrade" in page.text("#degrade-reason")
    for panel in ("#degrade-actions", "#version", "#rollout", "#modes", "#audit", "#chart-hits", "#chart-errors"):
        assert not page.tab.locator(panel).is_visible(), panel
    assert page.text("#tiles > [data-key=running]").split("\n") == ["Running", "2", "max 16"]


def test_service_without_profile_has_the_switch_alone(fake, tab):
    fake.service.stats["operations"] |= {"profile": None, "store": None, "version": None, "rollout": None, "events": []}
    page = tab()
    assert page.text("#version-ref") == "The service follows no profile"
    assert "--profile" in page.text("#rollout-empty")
    assert page.text("#audit-empty") == "Nothing has been changed yet."
    assert page.tab.locator("#degrade").is_enabled()


def test_service_that_loads_its_model_is_told_and_then_shown(fake, tab):
    loaded = fake.service.stats
    fake.service.stats = {
        **loaded,
        "state": "loading",
        "model": None,
        "engine": None,
        "cache": None,
        "requests": [],
        "operations": None,
    }
    page = tab(key=None)
    page.wait_for_phase("locked")
    page.give_key(KEY)
    page.wait_for_text("#notice-title", "The model is loading")
    assert page.text("#service-state") == "loading"
    fake.service.stats = loaded
    page.tab.locator("#panels").wait_for()


@pytest.mark.parametrize(("width", "language"), [(390, "en-US"), (390, "zh-CN"), (768, "en-US"), (1440, "zh-CN")])
def test_page_fits_its_window(tab, width, language):
    page = tab(width=width, language=language)
    page.tab.locator("#heat-body").wait_for()
    assert page.tab.evaluate("document.documentElement.scrollWidth") == width


def test_everything_that_acts_can_be_reached_by_the_keyboard(tab):
    page = tab()
    page.tab.locator(".skip").focus()
    reached = []
    while len(reached) < 30:
        page.tab.keyboard.press("Tab")
        if page.tab.evaluate("document.activeElement === document.body"):
            break
        reached.append(page.tab.evaluate("document.activeElement.id"))
        outline = page.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
    wanted = [
        "key-button",
        "language",
        "theme",
        "degrade",
        "adaptive",
        "rollout-next",
        "rollout-promote",
        "rollout-hold",
        "rollout-abort",
    ]
    assert [name for name in reached if name in wanted] == wanted
    assert "heat-map" in reached


def test_folder_has_the_licence_of_what_it_was_given():
    assert "MIT License" in Path(str(FOLDER / "uPlot.LICENSE.txt")).read_text()
