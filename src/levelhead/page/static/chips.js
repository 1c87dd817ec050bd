// A claim in two words, its id and its verdict: on panels a link into the list of claims.

import { CLAIMS } from "./declared.js";
import { make } from "./dom.js";
import { text, translated } from "./spoken.js";

/** The claims that a figure shows. */
export function chips(shown) {
  if (!shown.length) return [];
  const links = shown.map(({ id, verdict }) =>
    make("a", { class: "chip", href: `#claim-${id}`, title: CLAIMS[id] && translated(CLAIMS[id].claim), "data-claim": id }, make("b", {}, id), " ", mark(verdict)),
  );
  return [make("span", {}, text(`bench.claims.${links.length > 1 ? "several" : "one"}`)), ...links];
}

/** A verdict in its colour. */
export function mark(verdict) {
  return make("span", { class: `verdict ${verdict}` }, verdict);
}
