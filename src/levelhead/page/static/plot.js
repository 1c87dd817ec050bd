// Charts of the story: bars, a chart with two axes, a gauge. Small drawings of its own, without a library. Axes are
// fixed by whoever calls: when data change, marks move and the axes stay. Text alternatives come from the catalogue.

import { make, number, shape } from "./dom.js";
import { Spirit } from "./gauge.js";
import { axis, place } from "./axes.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const MOVING = 450; // ms
const SYMBOLS = { circle: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", diamond: "M0 -5l5 5l-5 5l-5 -5z", square: "M-4 -4h8v8h-8z", triangle: "M0 -5l5 9h-10z" };
const DASHES = { live: "none", here: "none", recorded: "0.1 6", theory: "7 5" };
const MARGIN = { left: 46, right: 20, top: 10, bottom: 34 };

const LEAST = 0.0005; // what is below is rounding

/** A weight as a column shows it: three digits; it is never 0, and 1 only if it is. */
export function weight(p) {
  if (p < LEAST) return "< 0.001";
  return p < 1 && p >= 0.9995 ? String(1 - Number((1 - p).toPrecision(1))).slice(0, 14) : p.toFixed(3);
}

/** Horizontal bars over a fixed axis from 0 to `most`. Rows: {label, value, text?, colour?}. `set(rows, about)` moves them. */
export function bars({ rows, most = 1, about, source = "live", colour = "root", shown = weight }) {
  const element = make("div", { class: "story-bars", role: "img" });
  const made = [];
  const set = (next, said = about) => {
    while (made.length > next.length) made.pop().line.remove();
    while (made.length < next.length) {
      const one = { name: make("span", { class: "bar-name" }), fill: make("span", { class: "bar-fill" }), value: make("span", { class: "bar-value" }) };
      one.line = make("div", { class: "story-bar" }, one.name, make("span", { class: "bar-track" }, one.fill), one.value);
      made.push(one);
      element.append(one.line);
    }
    next.forEach((row, i) => {
      const share = Math.min(Math.max(row.value / most, 0), 1);
      made[i].name.replaceChildren(row.label);
      made[i].fill.style.setProperty("--share", share);
      made[i].fill.className = `bar-fill by-${row.colour ?? colour} ${source}`;
      made[i].line.classList.toggle("chosen", Boolean(row.chosen));
      made[i].value.textContent = row.text ?? shown(row.value);
    });
    element.setAttribute("aria-label", said);
  };
  set(rows);
  return { element, set };
}

/** A spirit level with its word, its meaning and H / ln n. */
export function gauge(words, source = "live") {
  const spirit = new Spirit();
  const word = make("strong");
  const meaning = make("span", { class: "soft" });
  const value = make("span", { class: "gauge-value soft" });
  const element = make("div", { class: "gauge" }, spirit.svg, make("p", { class: "gauge-words" }, word, " ", meaning, value));
  const set = (next) => {
    spirit.set(next, words.plain(words.of("shell", "gauge"), { level: next.level }));
    word.textContent = next.level;
    meaning.textContent = words.of("shell", "levels", next.level);
    value.replaceChildren(...words.nodes(words.of("shell", "entropy")), " ", words.marked(next.normalised_entropy < LEAST ? weight(0) : number(next.normalised_entropy), source));
  };
  return { element, set };
}

/** Lines, points with error bars, bands and bars over two fixed axes.
 *
 * `words`: {title, x, y, about, series: {name: words}} of the catalogue, through `say` to nodes and `text` to a text.
 * `x`, `y`: {range: [from, to], log?, ticks?: [numbers], shown?: number => text}.
 * `series`: [{name, kind: "line" | "points" | "bars" | "band", x, y, low?, high?, colour, source, symbol?, quiet?}].
 * `outside`: {left?, right?, above?}: the share of the numbers that the frame does not show.
 */
export class Chart {
  constructor({ words, library, x, y, series, outside = {}, height = 240 }) {
    Object.assign(this, { words, library, x, y, series, outside, height, marked: null, width: 0, frame: 0 });
    this.svg = shape("svg", { class: "chart-svg", role: "img", height });
    this.title = make("h3", {}, ...library.nodes(words.title));
    this.legend = make("ul", { class: "legend" });
    this.outsideWords = make("p", { class: "soft outside" });
    this.element = make("div", { class: "story-chart" }, this.title, this.legend, this.svg, this.outsideWords);
    this.seen = new ResizeObserver(() => this.#fit());
    this.seen.observe(this.element);
    this.#describe();
  }

  /** Other data on the same axes. Lines and points of the same length move there. */
  set(series, { outside = this.outside, about } = {}) {
    const before = this.series;
    this.outside = outside;
    this.series = series;
    this.#describe(about);
    this.#move(before, series);
  }

  /** A vertical line at x: where the reader is; null: none. */
  mark(x) {
    this.marked = x;
    this.#draw(this.series);
  }

  #describe(about = this.library.plain(this.words.about)) {
    this.svg.setAttribute("aria-label", `${this.library.plain(this.words.title)}. ${about}`);
    const loud = this.series.filter((one) => !one.quiet && this.words.series?.[one.name]);
    this.legend.replaceChildren(...loud.map((one) => make("li", {}, swatch(one), make("span", {}, ...this.library.nodes(this.words.series[one.name])))));
    const all = Object.values(this.outside).reduce((a, b) => a + b, 0);
    const share = `${number(Number((100 * all).toPrecision(2)))} %`;
    const said = all > 0 ? [this.library.plain(this.words.outside ?? this.library.of("shell", "outside"), { share })] : [];
    this.outsideWords.textContent = [...said, ...this.#beyond()].join("; ");
  }

  /** Where a band ends that goes beyond the frame; for charts whose words have a place for it. */
  #beyond() {
    const bands = this.words.beyond ? this.series.filter((one) => one.kind === "band") : [];
    const ends = bands.map(({ low, high }) => [Math.min(...low), Math.max(...high)]);
    const [from, to] = this.y.range;
    const short = (y) => number(Number(y.toPrecision(3)));
    return ends.filter(([low, high]) => low < from || high > to).map(([low, high]) => this.library.plain(this.words.beyond, { low: short(low), high: short(high) }));
  }

  #fit() {
    const width = Math.floor(this.element.clientWidth);
    if (!width || width === this.width) return;
    this.width = width;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.#draw(this.series);
  }

  #move(before, after) {
    cancelAnimationFrame(this.frame);
    const alike = before.length === after.length && before.every((one, i) => one.kind === after[i].kind && one.y.length === after[i].y.length);
    if (still.matches || !alike) return this.#draw(after);
    const begun = performance.now();
    const mixed = (a, b, t) => b?.map((value, i) => (a?.[i] ?? value) + (value - (a?.[i] ?? value)) * t);
    const step = (now) => {
      const t = Math.min((now - begun) / MOVING, 1);
      const eased = t * t * (3 - 2 * t);
      const part = (one, i, name) => mixed(before[i][name], one[name], eased);
      this.#draw(after.map((one, i) => ({ ...one, x: part(one, i, "x"), y: part(one, i, "y"), low: part(one, i, "low"), high: part(one, i, "high") })));
      if (t < 1) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  #draw(series) {
    if (!this.width) return;
    const box = { left: MARGIN.left, right: this.width - MARGIN.right, top: MARGIN.top, bottom: this.height - MARGIN.bottom };
    const [across, up] = [place(this.x, box.left, box.right), place(this.y, box.bottom, box.top)];
    const parts = [
      ...axis(this.x, across, box, "x", this.library.plain(this.words.x ?? "")),
      ...axis(this.y, up, box, "y", this.library.plain(this.words.y ?? "")),
      shape("clipPath", { id: `${this.#id()}-clip` }, shape("rect", { x: box.left - 6, y: box.top - 6, width: box.right - box.left + 12, height: box.bottom - box.top + 12 })),
      shape("g", { "clip-path": `url(#${this.#id()}-clip)` }, ...series.flatMap((one) => drawn(one, across, up, box))),
      ...this.#arrows(box),
    ];
    if (this.marked !== null) parts.push(shape("path", { class: "mark-place", d: `M${across(this.marked)} ${box.top}V${box.bottom}` }));
    this.svg.replaceChildren(...parts);
  }

  #arrows({ left, right, top }) {
    const arrow = { left: `M${left + 16} ${top + 4}l-12 0m5 -5l-5 5l5 5`, right: `M${right - 16} ${top + 4}l12 0m-5 -5l5 5l-5 5`, above: `M${(left + right) / 2} ${top + 10}l0 -12m-5 5l5 -5l5 5` };
    return Object.keys(this.outside).filter((side) => this.outside[side] > 0).map((side) => shape("path", { class: "arrow", d: arrow[side] }));
  }

  #id() {
    this.id ??= `chart-${(count += 1)}`;
    return this.id;
  }
}
let count = 0;

function drawn(one, across, up, box) {
  const points = one.x.map((x, i) => [across(x), up(one.y[i])]);
  const look = { class: `mark-${one.kind} by-${one.colour ?? "root"} ${one.source ?? "live"}${one.quiet ? " quiet" : ""}` };
  const dash = { "stroke-dasharray": DASHES[one.source ?? "live"] };
  if (one.kind === "bars") {
    const wide = Math.max(((box.right - box.left) / one.x.length) * 0.8, 1);
    const higher = points.filter(([, y]) => y < box.top - 1).map(([x]) => shape("path", { class: "arrow", d: `M${x} ${box.top + 8}v-10m-4 4l4 -4l4 4` }));
    const columns = points.map(([x, y]) => [x, Math.min(Math.max(y, box.top), box.bottom)]);
    return [...columns.map(([x, y]) => shape("rect", { ...look, x: x - wide / 2, y, width: wide, height: box.bottom - y })), ...higher];
  }
  if (one.kind === "points") {
    const bars = one.low ? points.map(([x], i) => shape("path", { ...look, class: `${look.class} error`, d: `M${x} ${up(one.low[i])}V${up(one.high[i])}` })) : [];
    const symbol = SYMBOLS[one.symbol ?? "circle"];
    return [...bars, ...points.map(([x, y]) => shape("path", { ...look, d: symbol, transform: `translate(${x} ${y})` }))];
  }
  if (one.kind === "band") {
    const back = one.x.map((x, i) => [across(x), up(one.low[i])]).reverse();
    return [shape("path", { ...look, d: `${line(one.x.map((x, i) => [across(x), up(one.high[i])]))}L${back.join("L")}Z` })];
  }
  return [shape("path", { ...look, ...dash, d: line(points) })];
}

function line(points) {
  return `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
}

function swatch(one) {
  const look = `by-${one.colour ?? "root"} ${one.source ?? "live"}`;
  const inside =
    one.kind === "points"
      ? shape("path", { class: `mark-points ${look}`, d: SYMBOLS[one.symbol ?? "circle"], transform: "translate(14 6)" })
      : one.kind === "line"
        ? shape("path", { class: `mark-line ${look}`, d: "M2 6H26", "stroke-dasharray": DASHES[one.source ?? "live"] })
        : shape("rect", { class: `mark-${one.kind} ${look}`, x: 6, y: 0, width: 16, height: 12 });
  return shape("svg", { viewBox: "0 0 28 12", class: "swatch", "aria-hidden": "true" }, inside);
}
