// Lines over the last ten minutes. Above each chart stand its series with their values: the latest, or those under the pointer.
import { $, colour, make, say } from "./dom.js";
import * as format from "./format.js";
import { SPAN_SECONDS } from "./history.js";
import { t } from "./preferences.js";

const HEIGHT = 132;
/** How much is shown: the least of these that has room for all that is known. */
const SPANS = [60, 120, 300, SPAN_SECONDS];
const FONT = "11px system-ui, sans-serif";
/** Of each series its name, how its values are written, and where its axis is if not on the left. */
const CHARTS = [
  { id: "throughput", axis: format.plain, series: [["tokens", format.tokensPerSecond], ["qps", format.perSecond, "right"]] },
  { id: "ttft", axis: format.plainMilliseconds, series: [["ttft_p50", format.milliseconds], ["ttft_p99", format.milliseconds]] },
  { id: "itl", axis: format.plainMilliseconds, series: [["itl_p50", format.milliseconds], ["itl_p99", format.milliseconds]] },
  { id: "hits", axis: format.plain, series: [["hits", format.number], ["cold_hits", format.number], ["uncovered", format.number]] },
  { id: "recompute", axis: format.plainPercent, series: [["recompute", format.percent]] },
  { id: "errors", axis: format.plain, series: [["estimated", format.number], ["true", format.number]] },
];
const COLOURS = ["--line-1", "--line-2", "--line-3"];

export class Charts {
  constructor(history) {
    this._history = history;
    this._charts = [];
    this._now = 0;
  }

  /** Builds all of them, in the language and theme of the moment. */
  build() {
    for (const chart of this._charts) chart.destroy();
    this._charts = CHARTS.map((plan) => new Chart(plan, this._history, () => this._now));
    this.draw(this._now);
  }

  draw(now) {
    this._now = now;
    for (const chart of this._charts) chart.draw();
  }
}

class Chart {
  constructor({ id, axis, series }, history, now) {
    this._history = history;
    this._names = series.map(([name]) => name);
    this._formats = series.map(([, write]) => write);
    const section = $(`chart-${id}`);
    const title = make("h2", "", t(`chart.${id}`));
    title.id = `chart-${id}-title`;
    section.setAttribute("aria-labelledby", title.id);
    this._values = series.map(() => make("b", "value"));
    const legend = make("ul", "series", series.map(([name], index) =>
      make("li", "", [make("i", `swatch line-${index + 1}`), make("span", "", t(seriesText(name))), this._values[index]])));
    const frame = make("div", "plot");
    frame.setAttribute("aria-hidden", "true");
    section.replaceChildren(make("div", "chart-head", [title, make("span", "quiet small", t(`chart.${id}.note`))]), legend, frame);
    this._plot = new uPlot(this._options(axis, series, frame, now), this._data(), frame);
    this._watch = new ResizeObserver(() => this._plot.setSize({ width: Math.max(120, frame.clientWidth), height: HEIGHT }));
    this._watch.observe(frame);
  }

  draw() {
    this._plot.setData(this._data());
    this._tell();
  }

  destroy() {
    this._watch.disconnect();
    this._plot.destroy();
  }

  _data() {
    return [this._history.times, ...this._names.map((name) => this._history.values[name])];
  }

  _span(now) {
    return SPANS.find((span) => now - (this._history.times[0] ?? now) <= span) ?? SPAN_SECONDS;
  }

  _tell() {
    const { values, times } = this._history;
    const index = this._plot.cursor.idx ?? times.length - 1;
    this._names.forEach((name, place) => say(this._values[place], this._formats[place](values[name][index] ?? null)));
  }

  _options(write, series, frame, now) {
    const quiet = colour("--quiet");
    const grid = { stroke: colour("--rule"), width: 1 };
    const axis = { stroke: quiet, font: FONT, grid, ticks: { show: false } };
    const right = series.some(([, , side]) => side === "right");
    const scale = { range: (plot, least, most) => [0, most > 0 ? most * 1.15 : 1] };
    const upright = (side) => ({ ...axis, scale: side, size: 54, gap: 4, space: 34, values: (plot, splits) => splits.map(write) });
    return {
      width: Math.max(120, frame.clientWidth),
      height: HEIGHT,
      padding: [8, right ? 0 : 26, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "vera" } },
      scales: { x: { time: true, range: () => [now() - this._span(now()), now()] }, left: scale, ...(right ? { right: scale } : {}) },
      axes: [
        { ...axis, size: 26, gap: 6, space: 70, values: (plot, splits) => splits.map((value) => format.clock(value).slice(0, this._span(now()) > SPANS[1] ? 5 : 8)) },
        upright("left"),
        ...(right ? [{ ...upright("right"), size: 34, side: 1, grid: { show: false } }] : []),
      ],
      series: [
        {},
        ...series.map(([, , side = "left"], index) => ({
          scale: side, stroke: colour(COLOURS[index]), width: 1.5, points: { show: false }, dash: index === 2 ? [4, 3] : undefined,
        })),
      ],
      hooks: { setCursor: [() => this._plot && this._tell()] },
    };
  }
}

function seriesText(name) {
  return name.endsWith("_p50") ? "series.p50" : name.endsWith("_p99") ? "series.p99" : `series.${name}`;
}
