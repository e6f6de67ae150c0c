// What each panel shows of one answer of /admin/stats. Nothing here asks the server or remembers.
import { $, fillTable, keyed, make, say, show } from "./dom.js";
import * as format from "./format.js";
import { t, word } from "./preferences.js";

const MOST_ROWS = 200;
const TIERS = ["hot", "warm", "cold"];

/** `followed`: the request whose heat map is shown, or null; `follow(id)` chooses another. */
export function drawPanels(stats, history, { followed, follow }) {
  drawServing(stats.operations);
  drawVersion(stats.operations);
  drawTiles(stats, history.latest);
  // Nothing of a native service could ever be in these.
  for (const chart of ["hits", "recompute", "errors"]) show($(`chart-${chart}`), stats.operations !== null);
  drawRollout(stats.operations);
  drawModes(stats.operations);
  drawTiers(stats.cache);
  drawRequests(stats.requests ?? [], followed, follow);
  drawAudit(stats.operations);
}

export function drawHeader(stats) {
  document.title = stats.model ? t("title", { model: stats.model }) : "Vera";
  say($("model"), stats.model ?? "");
  pill($("service-state"), word("service", stats.state), { ready: "good", loading: "fair", draining: "fair" }[stats.state] ?? "bad");
  say($("uptime"), stats.uptime_seconds === undefined ? "" : t("uptime", { time: format.duration(stats.uptime_seconds) }));
}

// -- state ---------------------------------------------------------------------------------------------------------------

/** Where the switch stands, in this page's words: `open`, `closed` or `half-open`; who decides: `auto`, `degraded` or `adaptive`. */
export function switchOf(operations) {
  const degrade = operations?.degrade;
  if (!degrade) return null;
  const override = { none: "auto", open: "degraded", closed: "adaptive" }[degrade.override] ?? degrade.override;
  return { ...degrade, state: degrade.state.replace("_", "-"), override };
}

function drawServing(operations) {
  const degrade = switchOf(operations);
  show($("degrade-actions"), degrade !== null);
  $("serving").dataset.state = degrade?.state ?? "native";
  if (degrade === null) {
    say($("degrade-state"), t("serving.native"));
    say($("degrade-reason"), operations === null ? t("serving.native.detail") : "");
    say($("degrade-facts"), "");
    return;
  }
  say($("degrade-state"), word("serving", degrade.state));
  say($("degrade-reason"), degrade.failure ? `${degrade.reason} · ${t("serving.failure", { message: degrade.failure })}` : degrade.reason);
  const facts = [t("serving.since", { time: format.duration(degrade.seconds) }), t(degrade.override === "auto" ? "serving.auto" : "serving.hand")];
  if (degrade.trips) facts.push(t("serving.trips", { count: degrade.trips }));
  if (degrade.unrecorded) facts.push(t("serving.unrecorded", { count: degrade.unrecorded }));
  say($("degrade-facts"), facts.join(" · "));
  $("degrade").disabled = degrade.override === "degraded";
  $("adaptive").disabled = degrade.override === "adaptive";
  $("auto").disabled = degrade.override === "auto";
}

function drawVersion(operations) {
  show($("version"), operations !== null);
  if (operations === null) return;
  const { version, profile, refusal, store } = operations;
  say($("version-ref"), version ? version.ref : t(profile ? "version.none" : "version.no-profile"));
  say($("version-reason"), version ? version.reason : t(profile ? "version.started" : "version.no-profile.detail"));
  const facts = version ? [t("version.by", { author: version.author, time: format.moment(version.time) })] : [];
  if (profile) facts.push(t("version.profile", { name: profile }), store ? t("version.store", { path: store }) : t("version.memory"));
  say($("version-facts"), facts.join(" · "));
  show($("version-refusal"), Boolean(refusal));
  say($("version-refusal"), refusal ? t("version.refusal", { reason: refusal }) : "");
}

function drawTiles({ engine, errors, settings, operations }, latest) {
  const finished = Object.values(engine.finished ?? {}).reduce((sum, part) => sum + part, 0);
  const most = settings?.engine?.max_num_seqs;
  const adaptive = operations !== null;
  const tiles = [
    ["running", format.count(engine.running), most === undefined ? t("tile.steps", { count: format.count(engine.steps) }) : t("tile.max", { limit: format.count(most) })],
    ["waiting", format.count(engine.waiting), t("tile.preemptions", { count: format.count(engine.preemptions) })],
    ["tokens", format.tokensPerSecond(latest.tokens), t("tile.total", { count: format.count(engine.generated_tokens) })],
    ["qps", format.perSecond(latest.qps), t("tile.total", { count: format.count(finished) })],
    ["ttft", format.milliseconds(engine.ttft_ms_p99), t("tile.p50", { value: format.milliseconds(engine.ttft_ms_p50) })],
    ["itl", format.milliseconds(engine.itl_ms_p99), t("tile.p50", { value: format.milliseconds(engine.itl_ms_p50) })],
    ["e2e", format.milliseconds(engine.e2e_ms_p99), t("tile.p50", { value: format.milliseconds(engine.e2e_ms_p50) })],
    ...(adaptive ? [
      ["recompute", format.percent(latest.recompute), t("tile.mean10")],
      ["error", format.number(errors?.true_mean), t("tile.estimated", { value: format.number(errors?.estimated_mean) })],
    ] : []),
  ];
  $("tiles").setAttribute("aria-label", t("tiles"));
  keyed($("tiles"), tiles, ([key]) => key,
    () => make("div", "tile", [make("span", "quiet small"), make("b"), make("span", "quiet small")]),
    (tile, [key, value, note]) => [t(`tile.${key}`), value, note].forEach((text, index) => say(tile.children[index], text)));
}

// -- rollout and comparison ----------------------------------------------------------------------------------------------

function drawRollout(operations) {
  show($("rollout"), operations !== null);
  if (operations === null) return;
  const status = operations.rollout;
  const rollout = status?.rollout ?? null;
  show($("rollout-body"), rollout !== null);
  show($("rollout-empty"), rollout === null);
  say($("rollout-empty"), t(status === null || status === undefined ? "rollout.no-profile" : "rollout.none"));
  if (rollout === null) return;
  const over = rollout.state === "promoted" || rollout.state === "aborted";
  pill($("rollout-state"), word("rollout", rollout.state), { running: "good", promoted: "good", paused: "fair" }[rollout.state] ?? "bad");
  say($("rollout-refs"), t("rollout.refs", { baseline: rollout.baseline ?? t("rollout.native"), candidate: rollout.candidate }));
  drawSteps(rollout, over);
  say($("rollout-facts"), factsOf(operations, rollout, over).join(" · "));
  say($("rollout-verdict"), verdictOf(status, rollout, over));
  $("rollout-verdict").dataset.decision = over ? rollout.state : status.verdict?.decision ?? "";
  show($("rollout-actions"), !over);
  $("rollout-next").disabled = rollout.step + 1 >= rollout.plan.steps.length;
  const held = (rollout.held ?? []).length > 0;
  show($("rollout-hold"), !held);
  show($("rollout-resume"), held);
  drawComparison($("arms"), t("arms"), ["stable", "candidate"].map((arm) => [word("arm", arm), status.arms?.[arm] ?? null]));
}

function drawSteps(rollout, over) {
  const stateOf = (index) => {
    if (rollout.state === "promoted" || index < rollout.step) return "passed";
    if (index > rollout.step) return "ahead";
    return over ? "ended" : "current";
  };
  keyed($("rollout-steps"), rollout.plan.steps.map((step, index) => ({ ...step, index })), ({ index }) => `${rollout.id}.${index}`,
    () => make("li", "", [make("i", "knot"), make("span")]),
    (element, { weight, index }) => {
      element.className = stateOf(index);
      say(element.lastChild, format.plainPercent(weight / 100));
      if (index === rollout.step && !over) element.setAttribute("aria-current", "step");
      else element.removeAttribute("aria-current");
    });
}

function factsOf({ rollout: status, shadow }, rollout, over) {
  const facts = [t("rollout.at", { weight: format.plainPercent(rollout.weight / 100) })];
  if (over) return facts;
  const step = rollout.plan.steps[rollout.step];
  facts.push(t("rollout.in-step", { time: format.duration(status.step_seconds) }), t("rollout.pause", { time: format.duration(step.pause_seconds) }));
  facts.push(t("rollout.samples", { count: format.count(step.min_samples) }));
  if (shadow) facts.push(t("rollout.shadow", { replayed: format.count(shadow.replayed), waiting: format.count(shadow.waiting) }));
  return [...facts, ...(rollout.held ?? []).map((cause) => word("rollout.held", cause))];
}

function verdictOf(status, rollout, over) {
  if (over) return t("rollout.ended", { reason: rollout.reason });
  if (!status.verdict) return t("rollout.begun", { reason: rollout.reason });
  return t("rollout.verdict", { decision: word("verdict", status.verdict.decision), reason: status.verdict.reason });
}

function drawModes(operations) {
  show($("modes"), operations !== null);
  if (operations === null) return;
  const modes = operations.modes ?? null;
  show($("modes-body"), modes !== null);
  show($("modes-empty"), modes === null);
  say($("modes-empty"), t("modes.none"));
  if (modes !== null) drawComparison($("modes-table"), t("modes"), ["native", "adaptive"].map((mode) => [word("mode", mode), modes[mode] ?? null]));
}

const FIGURES = [
  ["requests", format.count], ["error_rate", format.percent], ["ttft_p99", format.seconds], ["itl_p99", format.seconds],
  ["recompute_share", format.percent], ["uncovered_hits", format.count], ["audit_error", format.number], ["audit_ratio", format.number],
  ["shadow_kl", format.number], ["shadow_agreement", format.percent], ["nonfinite", format.count],
];

/** Two columns of the same figures, and the second by the first. */
function drawComparison(table, name, [[firstName, first], [secondName, second]]) {
  table.setAttribute("aria-label", name);
  const value = (summary, key) => summary?.[key] ?? null;
  const columns = [
    { name: t("figure"), fill: (cell, [key]) => say(cell, t(`figure.${key}`)) },
    { name: firstName, className: "number", fill: (cell, [key, write]) => say(cell, write(value(first, key))) },
    { name: secondName, className: "number", fill: (cell, [key, write]) => say(cell, write(value(second, key))) },
    { name: t("ratio"), className: "number", fill: (cell, [key, write]) => say(cell, write === format.count ? "" : format.ratio(quotient(value(second, key), value(first, key)))) },
  ];
  fillTable(table, columns, FIGURES, ([key]) => key);
}

function quotient(part, whole) {
  return typeof part === "number" && typeof whole === "number" && whole !== 0 ? part / whole : null;
}

// -- memory --------------------------------------------------------------------------------------------------------------

function drawTiers(cache) {
  const tiers = Object.entries(cache?.bytes ?? {});
  show($("tiers-empty"), tiers.length === 0);
  say($("tiers-empty"), t("loading.model"));
  keyed($("tiers-bars"), tiers, ([tier]) => tier, createBar, (bar, [tier, { device, used, capacity }]) => {
    const note = tier === "hot" && cache.idle_bytes ? t("tiers.idle", { bytes: format.bytes(cache.idle_bytes) }) : "";
    const idle = tier === "hot" ? cache.idle_bytes ?? 0 : 0;
    updateBar(bar, {
      name: `${word("tiers", tier)} (${device})`, note, tier, most: capacity, parts: [Math.max(0, used - idle), idle],
      text: t("tiers.of", { used: format.bytes(used), capacity: format.bytes(capacity) }), share: capacity ? used / capacity : null,
    });
  });
  const pages = cache?.pages ?? {};
  const all = TIERS.reduce((sum, tier) => sum + (pages[tier] ?? 0), 0);
  keyed($("tiers-pages"), TIERS.filter((tier) => tier in pages), (tier) => tier, createBar, (bar, tier) => updateBar(bar, {
    name: word("tier", tier), note: "", tier, most: all, parts: [pages[tier], 0],
    text: t("unit.pages", { count: format.count(pages[tier]) }), share: all ? pages[tier] / all : null,
  }));
  drawCounts(cache);
}

function createBar() {
  const meter = make("div", "meter", [make("i"), make("i", "idle")]);
  meter.setAttribute("role", "meter");
  return make("div", "bar", [make("span", "bar-name"), make("span", "bar-text"), make("span", "bar-share"), meter, make("span", "bar-note quiet small")]);
}

function updateBar(bar, { name, note, tier, most, parts, text, share }) {
  const [label, amount, part, meter, told] = bar.children;
  [[label, name], [amount, text], [part, format.percent(share)], [told, note]].forEach(([element, value]) => say(element, value));
  show(told, note !== "");
  bar.dataset.tier = tier;
  meter.setAttribute("aria-label", name);
  meter.setAttribute("aria-valuemin", "0");
  meter.setAttribute("aria-valuemax", String(most));
  meter.setAttribute("aria-valuenow", String(parts[0] + parts[1]));
  meter.setAttribute("aria-valuetext", text);
  parts.forEach((value, index) => {
    meter.children[index].style.width = most ? `${Math.min(100, (100 * value) / most)}%` : "0";
  });
}

function drawCounts(cache) {
  const counters = cache?.counters ?? {};
  const facts = Object.entries(cache?.page_moves ?? {}).map(([move, pages]) => {
    const [from, to] = move.split("->");
    return [t("count.moves", { from: word("tier", from), to: word("tier", to) }), format.count(pages)];
  });
  if ("restored_blocks" in counters) {
    const reads = counters.pages_exact + counters.pages_sketched;
    facts.push([t("count.restored"), format.count(counters.restored_blocks)]);
    facts.push([t("count.restore_time"), format.seconds(quotient(counters.restore_seconds, counters.restored_blocks))]);
    facts.push([t("count.exact_reads"), format.percent(quotient(counters.pages_exact, reads))]);
    facts.push([t("count.skipped"), format.percent(quotient(counters.values_skipped, reads))]);
  }
  keyed($("tiers-counts"), facts, (fact, index) => fact[0], () => make("div", "", [make("dt"), make("dd")]), (element, [name, value]) => {
    say(element.children[0], name);
    say(element.children[1], value);
  });
}

// -- requests and the audit trail ----------------------------------------------------------------------------------------

function drawRequests(requests, followed, follow) {
  const shown = [...requests].sort((one, other) => other.seconds - one.seconds).slice(0, MOST_ROWS);
  const name = shown.length < requests.length ? t("requests.shown", { shown: shown.length, count: format.count(requests.length) }) : format.count(requests.length);
  say($("requests-count"), name);
  show($("requests-empty"), requests.length === 0);
  show($("requests-body"), requests.length > 0);
  say($("requests-empty"), t("requests.none"));
  const text = (key, className, write) => ({ name: t(`column.${key}`), className, fill: (cell, request) => say(cell, write(request)) });
  const map = {
    name: t("column.map"),
    fill: (cell, { request_id: id }) => {
      const button = cell.firstChild ?? cell.appendChild(Object.assign(make("button", "small"), { type: "button", onclick: () => follow(id) }));
      button.setAttribute("aria-pressed", String(id === followed));
      button.setAttribute("aria-label", t("heat.show.of", { id }));
      say(button, t(id === followed ? "heat.shown" : "heat.show"));
    },
  };
  const columns = [
    text("request", "mono clip", (request) => request.request_id),
    map,
    text("phase", "", (request) => word("phase", request.phase)),
    text("mode", "", (request) => word("value", request.mode)),
    text("arm", "", (request) => word("value", request.arm)),
    text("version", "mono", (request) => request.params_version ?? t("none")),
    text("fidelity", "", (request) => word("value", request.fidelity)),
    text("prompt", "number", (request) => format.count(request.prompt_tokens)),
    text("answer", "number", (request) => format.count(request.completion_tokens)),
    text("time", "number", (request) => format.duration(request.seconds)),
  ];
  fillTable($("requests-table"), columns, shown, (request) => request.request_id);
}

function drawAudit(operations) {
  const events = operations?.events ?? [];
  show($("audit"), operations !== null);
  show($("audit-empty"), events.length === 0);
  show($("audit-body"), events.length > 0);
  say($("audit-empty"), t("audit.none"));
  const text = (key, className, write) => ({ name: t(`column.${key}`), className, fill: (cell, event) => say(cell, write(event)) });
  const columns = [
    text("seq", "number", (event) => String(event.seq)),
    text("when", "nowrap", (event) => format.moment(event.time)),
    text("what", "mono nowrap", (event) => event.kind),
    text("ref", "mono nowrap", (event) => event.ref ?? event.profile ?? t("none")),
    text("author", "nowrap", (event) => event.author),
    text("reason", "reason-cell", (event) => event.reason),
  ];
  fillTable($("audit-table"), columns, events, (event) => event.seq);
}

function pill(element, text, tone) {
  say(element, text);
  element.dataset.tone = tone;
}
