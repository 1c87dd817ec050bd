// Which language the page speaks, the control that changes it, and addresses that carry it from one view to the other.

import { make } from "./dom.js";
import { keep, recall } from "./storage.js";
import { LANGUAGES } from "./story-data.js";
import { view } from "./view.js";

export const FIRST = Object.keys(LANGUAGES)[0];

/** The language to speak: the given one, the one that was chosen last, or the first. */
export function spoken(given) {
  return known(given) ?? known(recall("language")) ?? FIRST;
}

/** The text if it names a language, else null. */
export function known(language) {
  return Object.hasOwn(LANGUAGES, language ?? "") ? language : null;
}

/** The control. A choice is kept for the next visit. */
export function selector(label, language, speak) {
  const options = Object.entries(LANGUAGES).map(([id, name]) => make("option", { value: id, lang: id, selected: id === language }, name));
  const change = () => {
    keep("language", select.value);
    speak(select.value);
  };
  const select = make("select", { class: "languages", "aria-label": label, change }, ...options);
  return select;
}

/** The language of an address of either view; null where it has none. */
export function languageOf(hash) {
  return known(new URLSearchParams(hash.replace(/^#(\/[^?]*\??)?/, "")).get("lang"));
}

/** The same address in this language; null leaves it as it is. A place of the bench, `#walk`, holds no language. */
export function inLanguage(hash, language) {
  if (!language || languageOf(hash) === language) return hash;
  const rest = hash.replace(/([?&#])lang=[^&]*&?/, "$1").replace(/[?&]$/, "");
  if (view(hash) === "story") return `${rest.startsWith("#/") ? rest : "#/"}${rest.includes("?") ? "&" : "?"}lang=${language}`;
  if (rest.includes("=")) return `${rest}&lang=${language}`;
  return rest === "#bench" || rest === "#" ? `#lang=${language}` : hash;
}
