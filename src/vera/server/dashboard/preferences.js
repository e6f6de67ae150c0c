// Language and colours: the only things that the page remembers between visits.
import { TEXTS } from "./texts.js";

const LANGUAGES = ["en", "zh"];
const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;

let language = chosen("vera.language", LANGUAGES) ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

/** The text of a key in the chosen language, its `{names}` replaced. */
export function t(key, values = {}) {
  const texts = TEXTS[key];
  if (texts === undefined) throw new Error(`there is no text ${key}`);
  return texts[LANGUAGES.indexOf(language)].replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}

/** The same where the key may be a word that this page does not know: then the word itself. */
export function word(group, value) {
  if (value === null || value === undefined || value === "") return t("none");
  const key = `${group}.${value}`;
  return key in TEXTS ? t(key) : String(value);
}

/** `en` or `zh-CN`: what `Intl` is asked with. */
export function locale() {
  return language === "zh" ? "zh-CN" : "en";
}

/** Fits the two switches; `changed` is called after each change. */
export function connectPreferences(changed) {
  connect("language", language, (value) => {
    language = value;
    keep("vera.language", value);
    translate();
    changed();
  });
  const theme = chosen("vera.theme", THEMES) ?? "auto";
  root.dataset.theme = theme;
  connect("theme", theme, (value) => {
    root.dataset.theme = value;
    keep("vera.theme", value);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  translate();
}

function translate() {
  root.lang = locale();
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text);
}

function connect(id, value, change) {
  const select = document.getElementById(id);
  select.value = value;
  select.addEventListener("change", () => change(select.value));
}

// A browser may refuse to remember: then nothing is remembered.
function chosen(name, known) {
  try {
    const value = localStorage.getItem(name);
    return known.includes(value) ? value : null;
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // See above.
  }
}
