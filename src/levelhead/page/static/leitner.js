// When a card comes again. One that was missed: after a few other cards. One that was known: after days, more of them each
// time (Leitner's boxes). It is kept in the browser.

import { keep, recall } from "./storage.js";

export const SOON = 3; // other cards before one that was missed comes again; so has `levelhead cards`
export const DAYS = [1, 3, 7, 21]; // until a card comes again that was known once, twice, …
const DAY = 86_400_000; // ms
const NAME = "cards";

/** By card: [how often it was known in a row, the time from which it is due]. What cannot be read counts as new. */
function kept() {
  try {
    const pairs = Object.entries(JSON.parse(recall(NAME) ?? "{}"));
    return new Map(pairs.filter(([, value]) => Array.isArray(value) && value.every(Number.isFinite) && value.length === 2));
  } catch {
    return new Map();
  }
}

/** Keeps whether the reader knew a card; returns after how many days it comes again. */
export function learned(id, knew) {
  const all = kept();
  const times = knew ? Math.min(Math.max(all.get(id)?.[0] ?? 0, 0) + 1, DAYS.length) : 0;
  const days = knew ? DAYS[Math.floor(times) - 1] : 0;
  all.set(id, [times, Date.now() + days * DAY]);
  keep(NAME, JSON.stringify(Object.fromEntries(all)));
  return days;
}

/** The cards that are due: those that were missed, then those whose days are over, then new ones. */
export function due(cards) {
  const all = kept();
  const now = Date.now();
  const rank = ({ id }) => (all.has(id) ? (all.get(id)[0] ? 1 : 0) : 2);
  const found = cards.filter(({ id }) => !all.has(id) || all.get(id)[1] <= now);
  return found.map((card, i) => [rank(card), i, card]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , card]) => card);
}

export function forget() {
  keep(NAME, "{}");
}
