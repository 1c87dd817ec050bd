// When a card comes again. One that was missed: after a few other cards. One that was known: after days, more of them each
// time (Leitner's boxes). It is kept in the browser.

import { keep, recall } from "./storage.js";

export const SOON = 3; // other cards before one that was missed comes again; so has `levelhead cards`
export const DAYS = [1, 3, 7, 21]; // until a card comes again that was known once, twice, …
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

const known = (all, id) => Math.min(Math.max(all.get(id)?.[0] ?? 0, 0) + 1, DAYS.length);
const days = (times) => DAYS[Math.floor(times) - 1] ?? 0;

/** When the day begins that is so many days ahead: "tomorrow" is the next day, and not the same hour of it. */
function later(count) {
  const day = new Date();
  day.setHours(0, 0, 0, 0);
  day.setDate(day.getDate() + count);
  return day.getTime();
}

/** After how many days a card comes again if the reader knows it now. */
export function ahead(id) {
  return days(known(kept(), id));
}

/** Keeps whether the reader knew a card. */
export function learned(id, knew) {
  const all = kept();
  const times = knew ? known(all, id) : 0;
  all.set(id, [times, times ? later(days(times)) : Date.now()]);
  keep(NAME, JSON.stringify(Object.fromEntries(all)));
}

/** The cards that are due: those that were missed, then those whose days are over, then new ones. A day that no answer
 * leads to is a fault, of a clock or of what is stored: that card is due, too. */
export function due(cards) {
  const all = kept();
  const [now, latest] = [Date.now(), later(DAYS.at(-1) + 1)]; // a day more: the reader may have travelled
  const rank = ({ id }) => (all.has(id) ? (all.get(id)[0] ? 1 : 0) : 2);
  const found = cards.filter(({ id }) => !all.has(id) || all.get(id)[1] <= now || all.get(id)[1] > latest);
  return found.map((card, i) => [rank(card), i, card]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , card]) => card);
}

export function forget() {
  keep(NAME, "{}");
}
