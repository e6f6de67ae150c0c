// Numbers for people: three figures, and a unit.
import { locale, t } from "./preferences.js";

const KIB = 1024;
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A number is given as such; the server writes infinities as text. */
function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function or(value, write) {
  if (known(value)) return write(value);
  return typeof value === "string" ? value : t("none");
}

function figures(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-2) return size >= 1e-3 ? value.toLocaleString(locale(), { maximumSignificantDigits: 3 }) : value.toExponential(1);
  const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return value.toLocaleString(locale(), { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const count = (value) => or(value, (number) => Math.round(number).toLocaleString(locale()));
export const number = (value) => or(value, figures);
export const ratio = (value) => or(value, (number) => `${figures(number)}×`);
export const milliseconds = (value) =>
  or(value, (number) => (number < 1000 ? t("unit.ms", { value: figures(number) }) : t("unit.s", { value: figures(number / 1000) })));
export const seconds = (value) => or(value, (number) => milliseconds(number * 1000));
export const percent = (value) => or(value, (number) => `${figures(number * 100)}%`);
export const perSecond = (value) => or(value, (number) => t("unit.qps", { value: figures(number) }));
export const tokensPerSecond = (value) => or(value, (number) => t("unit.tokens", { value: figures(number) }));

/** Round numbers, as on an axis or in a plan: no more digits than they need. */
export const plain = (value) => or(value, (number) => Number(number.toPrecision(3)).toLocaleString(locale(), { maximumSignificantDigits: 3 }));
export const plainPercent = (value) => or(value, (number) => `${plain(number * 100)}%`);
export const plainMilliseconds = (value) =>
  or(value, (number) => (number < 1000 ? t("unit.ms", { value: plain(number) }) : t("unit.s", { value: plain(number / 1000) })));

export const bytes = (value) =>
  or(value, (number) => {
    const power = number < 1 ? 0 : Math.min(BYTES.length - 1, Math.floor(Math.log(number) / Math.log(KIB)));
    const scaled = number / KIB ** power;
    return `${power === 0 ? Math.round(scaled) : figures(scaled)} ${BYTES[power]}`;
  });

/** How long something has been, in two units. */
export const duration = (value) =>
  or(value, (all) => {
    const whole = Math.floor(Math.max(0, all));
    const [d, h, min, s] = [whole / 86400, (whole / 3600) % 24, (whole / 60) % 60, whole % 60].map(Math.floor);
    if (d) return t("time.d", { d, h });
    if (h) return t("time.h", { h, min });
    return min ? t("time.min", { min, s }) : t("time.s", { s });
  });

/** A moment, given in ISO 8601, in the time of this place. */
export function moment(text) {
  const time = new Date(text);
  if (Number.isNaN(time.getTime())) return text ?? t("none");
  return time.toLocaleString(locale(), { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
}

/** Hours, minutes and seconds of a Unix time. */
export function clock(unix) {
  return new Date(unix * 1000).toTimeString().slice(0, 8);
}
