// Where the pages of one running request are, and how hot: layers down, blocks across. Colour is the tier, strength the heat.
import { $, colour, keyed, make, say, show } from "./dom.js";
import * as format from "./format.js";
import { t } from "./preferences.js";

const TIERS = [["h", "--hot", "tier.hot"], ["w", "--warm", "tier.warm"], ["c", "--cold", "tier.cold"], ["e", "--exact", "tier.exact"]];
const WEAKEST = 0.25;
const LEAST_CELL = 2;
const WIDEST_CELL = 26;
const TALLEST_CELL = 14;
const HEIGHT = 230;

export class HeatMap {
  constructor() {
    this._canvas = $("heat-map");
    this._cursor = null;
    this._map = null;
    this._canvas.addEventListener("pointermove", (event) => this._point(event));
    this._canvas.addEventListener("pointerleave", () => this._move(null));
    this._canvas.addEventListener("keydown", (event) => this._key(event));
    new ResizeObserver(() => this.draw()).observe($("heat-frame"));
  }

  /** `map`: the answer of the pages' route, or null. `note`: what is said in its place, or beside it. */
  set(map, note, request) {
    const drawn = map !== null && map.blocks > 0;
    if (this._map?.request_id !== map?.request_id) this._cursor = null;
    this._map = drawn ? map : null;
    say($("heat-request"), request === null ? "" : note && drawn ? `${request} · ${note}` : request);
    show($("heat-body"), drawn);
    show($("heat-empty"), !drawn);
    say($("heat-empty"), map !== null && !drawn ? t("heat.untiered") : note);
    if (drawn) this.draw();
  }

  draw() {
    const map = this._map;
    if (map === null) return;
    const width = $("heat-frame").clientWidth;
    if (width === 0) return;
    this._merged = Math.max(1, Math.ceil((map.blocks * LEAST_CELL) / width));
    this._columns = Math.ceil(map.blocks / this._merged);
    this._cellWidth = Math.min(WIDEST_CELL, width / this._columns);
    this._cellHeight = Math.max(LEAST_CELL, Math.min(TALLEST_CELL, Math.floor(HEIGHT / map.layers)));
    const sharpness = devicePixelRatio || 1;
    const [across, down] = [this._cellWidth * this._columns, this._cellHeight * map.layers];
    this._canvas.width = Math.round(across * sharpness);
    this._canvas.height = Math.round(down * sharpness);
    this._canvas.style.width = `${across}px`;
    this._canvas.style.height = `${down}px`;
    const context = this._canvas.getContext("2d");
    context.scale(sharpness, sharpness);
    const colours = Object.fromEntries(TIERS.map(([code, name]) => [code, colour(name)]));
    const gap = this._cellWidth >= 6 ? 1 : 0;
    for (let layer = 0; layer < map.layers; layer += 1) {
      for (let column = 0; column < this._columns; column += 1) {
        const cell = this._cell(layer, column);
        context.globalAlpha = cell.tier === "e" || cell.heat === null ? 0.8 : WEAKEST + (1 - WEAKEST) * cell.heat;
        context.fillStyle = colours[cell.tier] ?? colours.e;
        context.fillRect(column * this._cellWidth, layer * this._cellHeight, this._cellWidth - gap, this._cellHeight - (this._cellHeight > 4 ? 1 : 0));
      }
    }
    this._outline(context);
    this._texts(map);
  }

  /** Several blocks share a column where there are more than fit: the tier that most of them have, and their mean heat. */
  _cell(layer, column) {
    const map = this._map;
    const first = column * this._merged;
    const codes = [...map.tier[layer].slice(first, first + this._merged)];
    const heats = (map.heat?.[layer]?.slice(first, first + this._merged) ?? []).filter((heat) => typeof heat === "number");
    const often = (code) => codes.filter((other) => other === code).length;
    const tier = codes.reduce((best, code) => (often(code) > often(best) ? code : best), codes[0]);
    const heat = heats.length ? Math.min(1, Math.max(0, heats.reduce((sum, part) => sum + part, 0) / heats.length)) : null;
    return { tier, heat, first, last: first + codes.length - 1 };
  }

  _outline(context) {
    if (this._cursor === null) return;
    const { layer, column } = this._cursor;
    context.globalAlpha = 1;
    context.strokeStyle = colour("--text");
    context.lineWidth = 2;
    context.strokeRect(column * this._cellWidth, layer * this._cellHeight, Math.max(3, this._cellWidth - 1), Math.max(3, this._cellHeight - 1));
  }

  _texts(map) {
    this._canvas.setAttribute("aria-label", t("heat.label", { layers: map.layers, blocks: map.blocks }));
    say($("heat-blocks"), t("heat.blocks", { layers: map.layers, blocks: format.count(map.blocks) }));
    say(document.querySelector(".axis [data-text]"), t("heat.axes", { size: map.page_size }));
    say($("heat-tells"), this._cursor === null ? t("heat.hint") : this._tells(map));
    const legend = [...TIERS].map(([code]) => ({ code }));
    keyed($("heat-legend"), [...legend, { code: "scale" }], (item) => item.code,
      (item) => make("li", "", [make("i", `swatch tier-${item.code}`), make("span")]),
      (element, item) => say(element.lastChild, t(`heat.legend.${item.code}`)));
  }

  _tells(map) {
    const { layer, column } = this._cursor;
    const cell = this._cell(layer, column);
    const known = TIERS.find(([code]) => code === cell.tier);
    const values = {
      layer, block: cell.first, until: cell.last, tier: known ? t(known[2]) : cell.tier, heat: format.number(cell.heat),
      first: format.count(cell.first * map.page_size), last: format.count(Math.min(map.tokens, (cell.last + 1) * map.page_size) - 1),
    };
    if (cell.last > cell.first) return t("heat.tells.many", values);
    return t(cell.tier === "e" ? "heat.tells.exact" : "heat.tells", values);
  }

  _point(event) {
    const column = Math.floor(event.offsetX / this._cellWidth);
    const layer = Math.floor(event.offsetY / this._cellHeight);
    if (this._map !== null && column < this._columns && layer < this._map.layers && column >= 0 && layer >= 0) this._move({ layer, column });
  }

  _key(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step === undefined || this._map === null) return;
    event.preventDefault();
    const { layer, column } = this._cursor ?? { layer: 0, column: 0 };
    const [down, across] = this._cursor === null ? [0, 0] : step;
    this._move({
      layer: Math.min(this._map.layers - 1, Math.max(0, layer + down)),
      column: Math.min(this._columns - 1, Math.max(0, column + across)),
    });
  }

  _move(cursor) {
    if (cursor?.layer === this._cursor?.layer && cursor?.column === this._cursor?.column) return;
    this._cursor = cursor;
    this.draw();
  }
}
