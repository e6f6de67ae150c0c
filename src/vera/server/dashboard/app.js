// The page: asks the service once a second, hands the answer to the panels, and carries out what the buttons say.
import * as api from "./api.js";
import { Charts } from "./charts.js";
import { askKey, confirm, connectDialogs } from "./dialogs.js";
import { $, say, show } from "./dom.js";
import * as format from "./format.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { drawHeader, drawPanels } from "./panels.js";
import { connectPreferences, t } from "./preferences.js";

const POLL_MS = 1000;
const MAP_MS = 2000;
const LONGEST_WAIT_MS = 30_000;
const STALE_MS = 10_000;
const NEWS_MS = 30_000;

const history = new History();
const charts = new Charts(history);
const heat = new HeatMap();
const page = {
  /** `loading`, `locked` (no key yet), `shut` (the server has no admin key), `refused`, `unreached` or `live`. */
  phase: "loading",
  stats: null,
  /** When the latest answer came, by a clock that does not jump. */
  heardAt: null,
  failures: 0,
  said: "",
  nextAt: null,
  timer: null,
  /** The number of the latest poll: an answer to an earlier one, or of before the key was forgotten, is not taken. */
  turn: 0,
  /** Whose map is asked for. What is shown until it comes is the map of the one before. */
  followed: null,
  map: null,
  mapAt: -Infinity,
  mapNote: "",
  /** When the outcome of the latest change is no longer news. */
  newsUntil: 0,
};

// -- asking --------------------------------------------------------------------------------------------------------------

async function poll() {
  const turn = (page.turn += 1);
  clearTimeout(page.timer);
  if (document.hidden) return;
  page.nextAt = null;
  const begun = performance.now();
  try {
    const stats = await api.getStats();
    if (turn !== page.turn) return;
    take(stats);
    page.failures = 0;
    plan(Math.max(0, POLL_MS - (performance.now() - begun)));
  } catch (error) {
    if (turn !== page.turn) return;
    fail(error);
  }
  drawLink();
  if (page.phase === "live") await pollMap();
}

function plan(milliseconds) {
  page.nextAt = performance.now() + milliseconds;
  clearTimeout(page.timer);
  page.timer = setTimeout(poll, milliseconds);
}

function take(stats) {
  page.stats = stats;
  page.heardAt = performance.now();
  if (history.add(stats, Date.now() / 1000, performance.now() / 1000)) tell(t("restarted"));
  follow();
  if (page.phase !== "live") {
    enter("live");
    charts.build();
  }
  draw();
}

/** A key that is missing or wrong stops the asking; silence and the server's own failures do not. */
function fail(error) {
  if (!(error instanceof api.Refusal)) console.error(error);
  if (error.status === 401) {
    const tried = api.hasKey();
    forget();
    if (tried) askKey(t("key.wrong"));
    return;
  }
  if (error.status === 403) {
    const wanted = error.code === "admin_key_required";
    forget();
    if (wanted) askKey(t("key.api"));
    else enter(error.code === "no_admin_key" ? "shut" : "refused", error.message);
    return;
  }
  page.failures += 1;
  page.said = error.status === 0 ? "" : t(error instanceof api.Refusal ? "offline.said" : "offline.failed", { message: error.message });
  if (page.stats === null) enter("unreached", page.said);
  plan(Math.min(LONGEST_WAIT_MS, POLL_MS * 2 ** (page.failures - 1)));
}

/** The longest-running request, adaptive ones first, unless a person chose one. One that ended keeps its last map until there is another. */
function follow() {
  const requests = page.stats.requests ?? [];
  if (requests.some((request) => request.request_id === page.followed)) return;
  const rank = (request) => [request.mode === "adaptive" ? 1 : 0, request.seconds];
  const running = requests
    .filter((request) => request.phase === "answering")
    .sort((one, other) => rank(other)[0] - rank(one)[0] || rank(other)[1] - rank(one)[1]);
  if (running.length) choose(running[0].request_id, false);
}

function choose(request, byHand) {
  if (request === page.followed) return;
  Object.assign(page, { followed: request, mapAt: -Infinity, mapNote: t("heat.loading") });
  if (!byHand) return;
  page.map = null;
  draw();
  void pollMap();
}

function isRunning(request) {
  return page.stats.requests.some((other) => other.request_id === request);
}

async function pollMap() {
  const request = page.followed;
  if (request === null || page.stats?.engine == null || performance.now() - page.mapAt < MAP_MS) return;
  page.mapAt = performance.now();
  try {
    const map = await api.getPages(request);
    if (page.followed === request) page.map = map;
  } catch (error) {
    if (!(error instanceof api.Refusal)) throw error;
    if (page.followed !== request || error.status === 0) return;
    page.mapNote = error.status === 404 ? t("heat.nothing") : error.message;
  }
  drawMap();
}

// -- showing -------------------------------------------------------------------------------------------------------------

function draw() {
  drawLink();
  drawKey();
  if (page.phase !== "live") return drawNotice();
  drawHeader(page.stats);
  const loaded = page.stats.engine !== null;
  show($("panels"), loaded);
  show($("notice"), !loaded);
  if (!loaded) {
    say($("notice-title"), t(page.stats.state === "failed" ? "loading.failed" : "loading.model"));
    say($("notice-detail"), "");
    return show($("notice-button"), false);
  }
  drawPanels(page.stats, history, { followed: page.followed, follow: (request) => choose(request, true) });
  charts.draw(Date.now() / 1000);
  return drawMap();
}

function drawMap() {
  if (page.map === null) return heat.set(null, page.followed === null ? t("heat.none") : page.mapNote, page.followed);
  const { request_id: request } = page.map;
  return heat.set(page.map, isRunning(request) ? "" : t("heat.ended"), request);
}

function tell(news) {
  say($("done"), news);
  page.newsUntil = performance.now() + NEWS_MS;
}

function enter(phase, detail = "") {
  page.phase = phase;
  page.detail = detail;
  document.body.dataset.phase = phase;
  show($("notice"), phase !== "live");
  show($("panels"), phase === "live");
  show($("key-button"), phase !== "shut");
  drawKey();
  drawNotice();
}

function drawKey() {
  say($("key-button"), t(api.hasKey() ? "key.forget" : "key.enter"));
}

function drawNotice() {
  if (page.phase === "live") return;
  const titled = page.phase === "loading" ? "loading" : `${page.phase}.title`;
  const details = { locked: t("locked.detail"), shut: t("shut.detail"), unreached: t("unreached.detail"), loading: "" };
  say($("notice-title"), t(titled));
  say($("notice-detail"), [details[page.phase], page.detail].filter(Boolean).join(" "));
  show($("notice-button"), page.phase !== "loading");
  say($("notice-button"), t(page.phase === "locked" ? "key.enter" : "retry"));
}

/** Whether what is shown is of now; called each second, so that an age grows while nobody answers. */
function drawLink() {
  if (performance.now() > page.newsUntil) say($("done"), "");
  const age = page.heardAt === null ? null : (performance.now() - page.heardAt) / 1000;
  const offline = page.phase === "live" && (page.failures > 0 || (!document.hidden && age * 1000 > STALE_MS));
  const state = page.phase !== "live" ? "waiting" : offline ? "offline" : "live";
  say($("link"), page.phase === "locked" || page.phase === "shut" || page.phase === "refused" ? "" : t(`link.${state}`));
  $("link").dataset.state = state;
  say($("age"), age === null || page.phase !== "live" ? "" : t("age", { time: format.duration(age) }));
  document.body.classList.toggle("stale", offline);
  show($("offline"), offline);
  if (!offline) return;
  say($("offline-title"), t("offline.title"));
  say($("offline-detail"), [page.said, t("offline.detail", { age: format.duration(age) })].filter(Boolean).join(" "));
  const left = page.nextAt === null ? 0 : Math.ceil((page.nextAt - performance.now()) / 1000);
  say($("offline-next"), left > 0 ? t("offline.next", { seconds: left }) : t("offline.now"));
}

// -- doing ---------------------------------------------------------------------------------------------------------------

function forget() {
  api.setKey(null);
  page.turn += 1;
  clearTimeout(page.timer);
  history.clear();
  Object.assign(page, { stats: null, heardAt: null, failures: 0, said: "", followed: null, map: null });
  enter("locked");
  drawLink();
}

function open(key) {
  api.setKey(key);
  enter("loading");
  void poll();
}

/** A button that asks who and why, then posts. `body` and `effect` are made when it is pressed. */
function connectAction(id, { name, path, body = {}, danger = false, values = () => ({}) }) {
  const act = async (signature) => {
    const answer = await api.post(path, { ...body, ...signature });
    tell(t(`${name}.done`, { moved: format.count(answer.moved ?? 0) }));
    void poll();
  };
  $(id).addEventListener("click", () => {
    tell("");
    confirm({ title: $(id).textContent, effect: t(`${name}.effect`, values()), danger, act });
  });
}

function connectActions() {
  const rollout = () => page.stats?.operations?.rollout?.rollout ?? {};
  connectAction("degrade", { name: "degrade", path: "admin/degrade", body: { override: "degraded" }, danger: true });
  connectAction("adaptive", { name: "adaptive", path: "admin/degrade", body: { override: "adaptive" } });
  connectAction("auto", { name: "auto", path: "admin/degrade", body: { override: "auto" } });
  connectAction("rollout-next", { name: "rollout.next", path: "admin/rollout/promote", body: { full: false } });
  connectAction("rollout-promote", {
    name: "rollout.promote", path: "admin/rollout/promote", body: { full: true }, values: () => ({ candidate: rollout().candidate }),
  });
  connectAction("rollout-hold", { name: "rollout.hold", path: "admin/rollout/hold" });
  connectAction("rollout-resume", { name: "rollout.resume", path: "admin/rollout/resume" });
  connectAction("rollout-abort", {
    name: "rollout.abort", path: "admin/rollout/abort", danger: true, values: () => ({ baseline: rollout().baseline ?? t("rollout.native") }),
  });
}

connectPreferences(() => {
  if (page.phase === "live") charts.build();
  draw();
});
connectDialogs(open);
connectActions();
$("key-button").addEventListener("click", () => (api.hasKey() ? forget() : askKey()));
$("notice-button").addEventListener("click", () => (page.phase === "locked" ? askKey() : poll()));
$("retry").addEventListener("click", poll);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !["locked", "shut", "refused"].includes(page.phase)) void poll();
});
setInterval(drawLink, 1000);
draw();
void poll();
