// Draws a figure in its place on the page: title, what to see, gauges, charts with their legends, facts, tools.
// It draws whatever numbers it is given, and makes none.

import { chips } from "./chips.js";
import { DASHES, bare, key, layout, palette, traces } from "./chart.js";
import { badge, make, shape } from "./dom.js";
import { Level, line } from "./level.js";
import { plotly } from "./library.js";
import { foreign, number, say, sentences, text, told, translated } from "./spoken.js";
import { colours } from "./theme.js";
import { Tools } from "./tools.js";

const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true };
const SOURCES = ["live", "recorded", "theory"];
const OUTLINES = [ // of the symbols of chart.js, in their order
  "M3 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M7 1.5l4 4.5l-4 4.5l-4 -4.5z", "M3 2h8v8h-8z", "M7 2l4.5 8h-9z",
  "M5.5 2h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5z", "M7 1l1.4 3.4l3.6 .3l-2.7 2.4l.8 3.5l-3.1 -1.9l-3.1 1.9l.8 -3.5l-2.7 -2.4l3.6 -.3z",
  "M7 1.5l4.5 3.3l-1.7 5.2h-5.6l-1.7 -5.2z", "M3 2h8l-8 8h8z",
];
const LONG = 420; // letters of a note that are shown at once
const HEIGHT = { hero: 236, chart: 260, matrix: 340 };

export class Drawing {
  constructor(place, { hero = false } = {}) {
    this.place = place;
    this.hero = hero;
    this.figure = null;
    this.own = null; // what a panel adds to the tables and the drawing
    this.level = hero ? new Level() : null;
    this.caption = make("figcaption");
    this.claims = make("p", { class: "claims" });
    this.above = make("div", { class: "own" }); // for panels with something of their own
    this.gauges = make("div", { class: "gauges" });
    this.charts = make("div", { class: "charts" });
    this.below = make("div", { class: "own" });
    this.facts = make("dl", { class: "facts" });
    this.recorded = make("p", { class: "recorded-by soft" });
    this.tools = new Tools(this);
    place.prepend(...(hero ? [this.level.element] : [this.caption]));
    this.caption.after(this.claims);
    place.append(this.above, this.gauges, this.charts, this.below, this.facts, this.recorded);
    if (hero) place.append(this.caption, this.claims);
    place.append(this.tools.element);
  }

  async show(figure) {
    this.figure = figure;
    const title = this.hero || this.#headed(figure.title) ? [] : [make("b", {}, told(figure.title))];
    this.caption.replaceChildren(...title, ...noted(figure.note));
    this.claims.replaceChildren(...chips(figure.claims));
    this.level?.set(figure.gauges[0]);
    this.gauges.replaceChildren(...(this.hero ? figure.gauges.slice(1) : figure.gauges).map(line));
    this.facts.replaceChildren(...grouped(figure.facts));
    this.#origin(figure.recorded);
    this.tools.changed();
    await this.plot();
  }

  /** Draws the charts again, for example in other colours. */
  async plot() {
    const { charts } = this.figure;
    while (this.charts.children.length > charts.length) this.#drop(this.charts.lastElementChild);
    while (this.charts.children.length < charts.length) this.charts.append(emptyChart());
    const library = await plotly();
    const theme = colours();
    for (const [i, chart] of charts.entries()) {
      const [title, legend, plot] = this.charts.children[i].children;
      const named = chart.series.some((series) => series.shape === "bars" && typeof series.x[0] === "string");
      this.charts.children[i].classList.toggle("wide", named);
      title.replaceChildren(told(chart.title));
      legend.replaceChildren(...entries(chart, theme));
      plot.setAttribute("aria-label", `${translated(chart.title)}. ${translated(chart.about)}`);
      await library.react(plot, traces(chart, theme), layout(chart, theme, { height: this.height(chart) }), CONFIG);
    }
  }

  height(chart) {
    if (this.hero) return HEIGHT.hero;
    return chart.series.some((series) => series.shape === "heat") ? HEIGHT.matrix : HEIGHT.chart;
  }

  /** Marks a place on the x axis of every chart: where the reader is. */
  async mark(at) {
    const library = await plotly();
    const line = { color: colours().ink, width: 1.5 };
    for (const [i, chart] of this.figure.charts.entries()) {
      const x = at(chart);
      const shapes = x === undefined ? [] : [{ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line }];
      await library.relayout(this.charts.children[i].lastElementChild, { shapes });
    }
  }

  /** Whether the heading above is the same text. */
  #headed(title) {
    const above = this.place.closest("details.claim")?.querySelector("summary > :last-child") ?? this.place.closest("section").querySelector("h2");
    return above?.textContent.trim() === translated(title).replaceAll("_", "");
  }

  #origin(recorded) {
    const origin = typeof recorded === "function" ? recorded() : foreign(make("span", {}, recorded));
    this.recorded.replaceChildren();
    if (recorded) say(this.recorded, "bench.figure.recorded", { origin });
    else delete this.recorded.dataset.words;
  }

  #drop(chart) {
    window.Plotly?.purge(chart.lastElementChild);
    chart.remove();
  }
}

/** What to see; of a long story the first sentences, and the rest on demand. */
function noted(note) {
  const all = sentences(note);
  const see = (some) => some.flatMap((one, i) => (i ? [" ", one] : [one]));
  const long = all.reduce((sum, one) => sum + one.textContent.length, 0) > LONG;
  let [shown, letters] = [0, 0];
  while (shown < all.length && letters < LONG / 2) letters += all[shown++].textContent.length;
  if (!long || shown === all.length) return [make("span", { class: "see" }, ...see(all))];
  const rest = make("details", { class: "rest" }, make("summary", {}, text("bench.figure.more")), ...see(all.slice(shown)));
  return [make("span", { class: "see" }, ...see(all.slice(0, shown))), rest];
}

function emptyChart() {
  return make(
    "div", { class: "chart" }, make("h3"), make("ul", { class: "legend" }), make("div", { class: "plot", role: "img" }),
  );
}

/** A legend in words: a swatch for every colour in all the styles it comes in, then where the numbers are from. */
function entries(chart, theme) {
  const found = new Map();
  for (const series of chart.series.filter((one) => !one.quiet && one.shape !== "heat")) {
    found.set(key(series), [...(found.get(key(series)) ?? []), series]);
  }
  const colour = palette(chart, theme);
  const items = [...found].map(([name, all]) =>
    make("li", {}, ...all.map((series) => swatch(series, colour.get(name), chart.series.indexOf(series))), make("span", {}, told(name))),
  );
  const sources = SOURCES.filter((source) => chart.series.some((series) => series.source === source));
  return [...items, make("li", {}, ...sources.map(badge))];
}

function swatch(series, colour, at) {
  if (series.shape === "bars") {
    const bar = shape("rect", { width: 14, height: 12, rx: 2, fill: colour });
    return shape("svg", { viewBox: "0 0 14 12", class: "swatch bar", "aria-hidden": "true" }, bar);
  }
  if (series.shape === "points") {
    const fill = series.source === "live" ? colour : "none";
    const outline = shape("path", { d: OUTLINES[at % OUTLINES.length], fill, stroke: colour, "stroke-width": 1.8 });
    return shape("svg", { viewBox: "0 0 14 12", class: "swatch bar", "aria-hidden": "true" }, outline);
  }
  const dashes = { solid: "none", dot: "0.1 5", dash: "6 4" }[DASHES[series.source]];
  const attributes = { d: "M2 6H26", stroke: colour, "stroke-width": 2.6, "stroke-dasharray": dashes, "stroke-linecap": "round", fill: "none" };
  return shape("svg", { viewBox: "0 0 28 12", class: "swatch", "aria-hidden": "true" }, shape("path", attributes));
}

/** Facts of one name side by side: measurement and theory. */
function grouped(facts) {
  const found = new Map();
  for (const fact of facts) {
    const label = bare(fact.label) || fact.label;
    found.set(label, [...(found.get(label) ?? []), fact]);
  }
  return [...found].map(([label, all]) =>
    make(
      "div", {}, make("dt", {}, told(label)),
      ...all.map((fact) =>
        make(
          "dd", {}, make("b", {}, ...measured(fact)), badge(fact.source),
          fact.formula ? make("span", { class: "soft" }, told(fact.formula)) : null,
        ),
      ),
    ),
  );
}

/** A measurement with its standard error, or what stands in its place. */
function measured({ value, stderr }) {
  if (typeof value === "string") return [told(value)];
  if (stderr === null || stderr === undefined) return [number(value)];
  return [`${number(value)} ± ${number(Number(stderr.toPrecision(2)))}`];
}
