// What the browser computes itself, from numbers of the reader: a softmax, and the level it gives. Mark such numbers
// "here". The bounds of the levels are levelhead's.

import { LEVELS } from "./story-data.js";

export function softmax(logits) {
  const most = Math.max(...logits);
  const powers = logits.map((x) => Math.exp(x - most));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / total);
}

/** H / ln n of weights. */
export function normalisedEntropy(weights) {
  const terms = weights.map((p) => (p > 0 ? -p * Math.log(p) : 0));
  return terms.reduce((a, b) => a + b, 0) / Math.log(weights.length);
}

/** The gauge of one row of weights, as levelhead.stats has it. */
export function gaugeOf(weights) {
  const entropy = normalisedEntropy(weights);
  const level = levelOf(entropy, Math.max(...weights) >= LEVELS.saturated_row);
  const [low, high] = LEVELS.cells[level];
  const place = Math.min(Math.max(between(entropy, LEVELS.entropies, LEVELS.places), low), high);
  return { level, bubble: place / 8, normalised_entropy: entropy };
}

function levelOf(entropy, saturated) {
  if (saturated || entropy < LEVELS.saturated) return "saturated";
  if (entropy < LEVELS.sharp) return "sharp";
  return entropy >= LEVELS.flat ? "flat" : "level";
}

/** Linear between points. */
function between(x, xs, ys) {
  const at = Math.min(Math.max(xs.findIndex((one) => one > x), 1), xs.length - 1);
  const last = xs.every((one) => one <= x) ? xs.length - 1 : at;
  const share = Math.min(Math.max((x - xs[last - 1]) / (xs[last] - xs[last - 1]), 0), 1);
  return ys[last - 1] + share * (ys[last] - ys[last - 1]);
}
