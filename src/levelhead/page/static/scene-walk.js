// One product as a walk: one walk term by term, then many, where they end, and how far that is at every width.

import { make } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, root, row, sub, subsup, sum } from "./formulas.js";
import { fixed } from "./heat.js";
import { segments } from "./inputs.js";
import { runner } from "./runner.js";

const PACE = 250; // ms from a term to the next
const SOME = 10; // walks of the second step
const FRAME = { x: { range: [0, 64], ticks: [0, 16, 32, 48, 64] }, y: { range: [-28, 28], ticks: [-24, -16, -8, 0, 8, 16, 24] } };

const E = (...parts) => row("E", row("[", ...parts, "]"));
const Var = (...parts) => row("Var", row("(", ...parts, ")"));
const [q, k] = [sub("q", "i"), sub("k", "i")];
const again = (element) => element.cloneNode(true);
export const formulas = {
  product: () => display("q·k = sum_i q_i k_i", "q", "·", "k", "=", sum(row("i", "=", "1"), sub("d", "k")), again(q), again(k)),
  mean: () => display("E[q_i k_i] = E[q_i] E[k_i] = 0", E(again(q), again(k)), "=", E(again(q)), E(again(k)), "=", "0", "·", "0", "=", "0"),
  term: () => display("Var(q_i k_i) = E[q_i^2] E[k_i^2] = 1", Var(again(q), again(k)), "=", E(subsup("q", "i", "2")), E(subsup("k", "i", "2")), "=", "1", "·", "1", "=", "1"),
  total: () => display("Var(q·k) = sum_i Var(q_i k_i) = d_k", Var("q", "·", "k"), "=", sum(row("i", "=", "1"), sub("d", "k")), Var(again(q), again(k)), "=", sub("d", "k")),
  back: () => display("Var(q·k / sqrt(d_k)) = d_k / d_k = 1", Var(frac(row("q", "·", "k"), root(sub("d", "k")))), "=", frac(sub("d", "k"), sub("d", "k")), "=", "1"),
};

/** Before the answer: one walk. */
export function setup(place, tools) {
  place.append(...one(tools).elements);
}

export function scene(place, tools) {
  const stage = make("div");
  let running = null;
  place.append(stage);
  const shows = [
    () => {
      running = one(tools);
      return running.elements;
    },
    () => [many(SOME, tools)],
    () => [many(tools.data.walks.length, tools, true)],
    () => ends(tools),
    () => [spread(tools)],
  ];
  const stop = () => running?.stop();
  const go = (step) => {
    stop();
    running = null;
    stage.replaceChildren(...shows[step]());
  };
  return { go, stop };
}

const upTo = (walk, t) => ({ x: Array.from({ length: t + 1 }, (_, i) => i), y: [0, ...walk.slice(0, t)] });

/** A walk, a term at a time: the first one, then others. */
function one({ data, words, own, plot }) {
  let [at, t] = [0, 0];
  const sum = () => (t ? data.walks[at][t - 1] : 0);
  const series = () => [
    { name: "walk", kind: "line", ...upTo(data.walks[at], t), colour: "nothing", source: "live" },
    { name: "here", kind: "points", x: [t], y: [sum()], colour: "ink", source: "live" },
  ];
  const chart = plot.chart("walks", { ...FRAME, height: 260, series: series() });
  const said = make("p", { class: "hand-sum", role: "status" });
  const show = (place) => {
    t = place;
    chart.set(series());
    const values = { place: String(t), term: fixed(t ? data.terms[at][t - 1] : 0), sum: words.marked(fixed(sum()), "live") };
    said.replaceChildren(...words.nodes(own("words", t ? "term" : "start"), values));
  };
  const next = () => {
    at = (at + 1) % data.walks.length;
    show(t);
  };
  const run = runner({ label: own("words", "added"), words: { run: own("words", "run"), rest: own("words", "rest") }, pause: PACE, min: 0, max: data.walks[0].length, value: 0, shown: String, changed: show });
  show(0);
  const another = make("button", { type: "button", class: "walk-another", click: next }, own("words", "another"));
  return { elements: [chart.element, said, run.element, another], stop: run.stop };
}

/** Several walks, with the law ±√t where it is asked for. */
function many(count, { data, plot }, law = false) {
  const x = Array.from({ length: data.walks[0].length + 1 }, (_, i) => i);
  const edge = (sign) => ({ name: sign > 0 ? "law" : "below", kind: "line", x, y: x.map((t) => sign * Math.sqrt(t)), colour: "ink", source: "theory" });
  const walks = data.walks.slice(0, count).map((walk, i) => ({ name: i ? "another" : "walk", kind: "line", ...upTo(walk, walk.length), colour: "nothing", source: "live", quiet: i > 0 }));
  const last = { name: "end", kind: "points", x: data.walks.slice(0, count).map(() => 64), y: data.walks.slice(0, count).map((walk) => walk.at(-1)), colour: "nothing", source: "live" };
  return plot.chart("walks", { ...FRAME, height: 300, series: [...walks, last, ...(law ? [edge(1), edge(-1)] : [])] }).element;
}

/** Where all walks end, for a head of every width, on one axis. */
function ends({ data, words, own, plot }) {
  const series = (one) => [
    { name: "measured", kind: "bars", x: data.centres, y: one.density, colour: "nothing", source: "live" },
    { name: "law", kind: "line", x: data.centres, y: one.theory, colour: "ink", source: "theory" },
  ];
  const first = data.ends.find((one) => one.d_k === 64);
  const outside = ({ left, right }) => ({ left, right });
  const chart = plot.chart("ends", { x: { range: [-40, 40], ticks: [-40, -20, 0, 20, 40] }, y: { range: [0, 0.2] }, height: 240, series: series(first), outside: outside(first) });
  const said = make("p", { class: "hand-sum", role: "status" });
  const show = (one) => {
    const [measured, error, law] = [one.spread.toPrecision(3), one.error.toPrecision(1), Math.sqrt(one.d_k)].map(String);
    chart.set(series(one), { outside: outside(one), about: words.plain(own("words", "ends_about"), { d_k: one.d_k, spread: measured }) });
    said.replaceChildren(...words.nodes(own("words", "measured"), { walks: String(one.pairs), spread: words.marked(measured, "live"), error, law: words.marked(law, "theory", "√d_k") }));
  };
  const width = segments({
    label: make("span", {}, ...words.nodes(own("words", "width"))), name: "walk-width", options: data.ends.map((one) => [String(one.d_k), String(one.d_k)]), value: "64",
    changed: (value) => show(data.ends.find((one) => String(one.d_k) === value)),
  });
  show(first);
  return [make("div", { class: "walk-width" }, width.element), chart.element, said];
}

/** The vectors of the notes' examples, with their products. */
export function more({ data, own }) {
  const cell = (name, x, attributes = {}) => make(name, attributes, Array.isArray(x) ? x.join(", ") : String(x));
  const head = ["q", "k", "q·k"].map((name) => make("th", { scope: "col" }, name));
  const lines = data.examples.map(({ q, k, product }) => make("tr", {}, cell("td", q), cell("td", k), cell("td", product)));
  const table = make("table", { class: "walk-examples" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
  return [sideways(make("div", { class: "scroll" }, table), own("words", "examples"))];
}

/** The spread over d_k, undivided and divided by √d_k. */
function spread({ data: { spread: found }, plot }) {
  const { widths: x, measured, error } = found;
  const points = (name, colour, by) => {
    const y = measured.map((value, i) => value / by(x[i]));
    const away = error.map((value, i) => (2 * value) / by(x[i]));
    return { name, kind: "points", x, y, low: y.map((value, i) => value - away[i]), high: y.map((value, i) => value + away[i]), colour, source: "recorded" };
  };
  return plot.chart("spread", {
    x: { range: [1, 4096], log: true, ticks: [1, 4, 16, 64, 256, 1024, 4096] }, y: { range: [0.5, 100], log: true, ticks: [1, 2, 4, 8, 16, 32, 64] }, height: 280,
    series: [
      { name: "law", kind: "line", x, y: x.map(Math.sqrt), colour: "nothing", source: "theory" },
      points("measured", "nothing", () => 1),
      { name: "divided-law", kind: "line", x, y: x.map(() => 1), colour: "root", source: "theory" },
      points("divided", "root", Math.sqrt),
    ],
  }).element;
}
