// The axes of a chart: where a number stands, ticks, labels.

import { number, shape } from "./dom.js";
import { INDEX } from "./spelled.js";

const LETTER = 7; // pixels of a tick's character, about

/** A function from numbers to pixels. */
export function place({ range: [from, to], log = false }, low, high) {
  const scale = log ? (x) => Math.log(Math.max(x, 1e-300)) : (x) => x;
  const [a, b] = [scale(from), scale(to)];
  return (x) => low + ((scale(x) - a) / (b - a)) * (high - low);
}

/** Grid, ticks and the label of one axis. */
export function axis(one, at, box, which, label) {
  const text = one.shown ?? number;
  const all = one.ticks ?? even(one.range);
  const ticks = which === "x" ? apart(all, at, text) : all;
  const words = ticks.map(text);
  if (which === "x") {
    return [
      ...ticks.map((x) => shape("path", { class: "grid", d: `M${at(x)} ${box.top}V${box.bottom}` })),
      ...ticks.map((x, i) => shape("text", { class: "tick-word", x: at(x), y: box.bottom + 15, "text-anchor": "middle" }, words[i])),
      shape("text", { class: "axis-word", x: (box.left + box.right) / 2, y: box.bottom + 31, "text-anchor": "middle" }, ...lowered(label)),
    ];
  }
  return [
    ...ticks.map((x) => shape("path", { class: "grid", d: `M${box.left} ${at(x)}H${box.right}` })),
    ...ticks.map((x, i) => shape("text", { class: "tick-word", x: box.left - 6, y: at(x) + 4, "text-anchor": "end" }, words[i])),
    shape("text", { class: "axis-word", transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, ...lowered(label)),
  ];
}

/** Without the ticks whose words would touch those before them; the last one stays. */
function apart(ticks, at, text) {
  const width = (x) => (text(x).length + 1) * LETTER;
  const kept = [];
  for (const x of [...ticks].reverse()) {
    const next = kept[0];
    if (next === undefined || Math.abs(at(next) - at(x)) >= (width(x) + width(next)) / 2) kept.unshift(x);
  }
  return kept;
}

/** A label with its indices set low: d_k. */
function lowered(label) {
  const [first, ...rest] = label.split(INDEX); // text, letter, index, text, …
  const parts = [first];
  for (let i = 0; i < rest.length; i += 3) {
    const low = shape("tspan", { dy: 3, "font-size": "0.8em", "font-style": "italic" }, rest[i + 1]);
    parts.push(shape("tspan", { "font-style": "italic" }, rest[i]), low, shape("tspan", { dy: -3 }, rest[i + 2] || "\u200b"));
  }
  return parts;
}

/** About five round numbers in a range. */
function even([from, to]) {
  const rough = (to - from) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}
