// Why the root, in three steps: four divisors in two models; a power of d_k of the reader's own, with the spread over d_k;
// entropy over d_k.

import { make, number } from "./dom.js";
import { display, frac, gap, root, row, sub, subsup, sup } from "./formulas.js";
import { segments, slider } from "./inputs.js";
import { gaugeOf, softmax } from "./measure.js";

const WIDTHS = Array.from({ length: 13 }, (_, i) => 2 ** i);
const X = { range: [1, 4096], log: true, ticks: [1, 4, 16, 64, 256, 1024, 4096] };
const Y = { range: [1 / 64, 64], log: true, ticks: [1 / 64, 1 / 8, 1, 8, 64], shown: (y) => (y < 1 ? `1/${Math.round(1 / y)}` : String(y)) };
const DIVISORS = ["nothing", "root", "width", "model"];

const Var = (...parts) => row("Var", row("(", ...parts, ")"));
export const formulas = {
  power: () => display("Var(q·k / d_k^p) = d_k / d_k^(2p) = d_k^(1 − 2p)", Var(frac(row("q", "·", "k"), subsup("d", "k", "p"))), "=", frac(sub("d", "k"), subsup("d", "k", row("2", "p"))), "=", subsup("d", "k", row("1", "−", "2", "p"))),
  model: () => display("d = h d_k, so Var(q·k / sqrt(d)) = d_k / d = 1 / h", "d", "=", "h", sub("d", "k"), gap(), Var(frac(row("q", "·", "k"), root("d"))), "=", frac(sub("d", "k"), row("h", sub("d", "k"))), "=", frac("1", "h")),
  near: () => display("p_i ≈ (1 + x_i) / n", sub("p", "i"), "≈", frac(row("1", "+", sub("x", "i")), "n")),
  entropy: () => display("H ≈ ln n − σ^2 / 2", "H", "≈", "ln", "n", "−", frac(sup("σ", "2"), "2")),
};

/** Before the answer: how a model's width is shared between its heads. */
export function setup(place, { data, words, own }) {
  const shared = Object.entries(data.models).map(([name, model]) => {
    const cells = Array.from({ length: model.heads }, (_, i) => make("span", { class: i ? "" : "first" }));
    return make("div", { class: "root-shared" }, make("p", {}, ...words.nodes(own("words", `shared_${name}`))), make("div", { class: "root-heads", role: "img", "aria-label": words.plain(own("words", `shared_${name}`)) }, ...cells));
  });
  place.append(make("h3", {}, own("words", "shared")), ...shared);
}

export function scene(place, tools) {
  const { data, words, own } = tools;
  const state = { model: "small", power: data.begins };
  const mine = power(tools);
  const four = gauges(tools);
  const show = () => {
    const model = data.models[state.model];
    mine.show(model, state.power);
    four.show(model);
  };
  const models = segments({
    label: own("words", "model"), name: "root-model", options: Object.keys(data.models).map((name) => [name, words.plain(own("words", name))]), value: state.model,
    changed: (name) => {
      state.model = name;
      show();
    },
  });
  const p = slider({
    label: make("span", {}, ...words.nodes(own("words", "power"))), min: 0, max: 1, step: 0.05, value: state.power, shown: number,
    changed: (x) => {
      state.power = x;
      show();
    },
  });
  show();
  const divisors = make("div", {}, make("p", { class: "soft root-rows" }, ...words.nodes(own("words", "four"))), four.element);
  const powers = make("div", {}, make("div", { class: "two root-own" }, make("section", {}, p.element, mine.said), make("section", {}, mine.level)), mine.chart);
  const parts = [divisors, powers, entropy(tools)];
  place.append(models.element, ...parts);
  const go = (step) => {
    models.element.hidden = step === parts.length - 1; // entropies are of no model
    parts.forEach((part, i) => (part.hidden = i !== step));
  };
  return { go };
}

/** The spread over d_k for the reader's power beside the four divisors, and the level of one row. */
function power({ data, words, own, plot }) {
  const level = plot.gauge("here");
  const said = make("p", { class: "root-said", role: "status" });
  const law = (name, at) => ({ name, kind: "line", x: WIDTHS, y: WIDTHS.map(at), colour: name, source: "theory" });
  const measured = (name, { x, y, stderr }) => ({ name: `${name}-measured`, kind: "points", x, y, low: y.map((v, i) => v - 2 * stderr[i]), high: y.map((v, i) => v + 2 * stderr[i]), colour: name, source: "recorded" });
  const series = ({ heads, recorded: { d_k, spread, error } }, p) => [
    law("nothing", Math.sqrt), law("root", () => 1), law("width", (d) => 1 / Math.sqrt(d)), law("model", () => 1 / Math.sqrt(heads)),
    ...["nothing", "root", "width"].map((name) => measured(name, data.spreads[name])), measured("model", { x: [d_k], y: [spread], stderr: [error] }),
    { name: "own", kind: "line", x: WIDTHS, y: WIDTHS.map((d) => d ** (0.5 - p)), colour: "ink", source: "here" },
  ];
  const chart = plot.chart("spread", { x: X, y: Y, height: 235, series: series(data.models.small, data.begins) });
  const show = (model, p) => {
    chart.set(series(model, p));
    chart.mark(model.d_k);
    const here = (x) => words.marked(number(Number(x.toPrecision(3))), "here");
    const values = { d_k: String(model.d_k), divisor: here(model.d_k ** p), spread: here(model.d_k ** (0.5 - p)), variance: here(model.d_k ** (1 - 2 * p)) };
    said.replaceChildren(...words.nodes(own("words", "own"), values));
    level.set(gaugeOf(softmax(model.row.map((s) => s / model.d_k ** p))));
  };
  return { chart: chart.element, level: level.element, said, show };
}

/** A level for each divisor. */
function gauges({ words, own, plot }) {
  const all = DIVISORS.map((name) => {
    const level = plot.gauge("live");
    const value = make("span", { class: "soft" });
    const element = make("section", {}, make("h3", { class: `by-${name}` }, ...words.nodes(own("words", "by", name)), " ", value), level.element);
    return { name, level, value, element };
  });
  const show = ({ divisors }) => {
    for (const { name, level, value } of all) {
      value.textContent = name === "nothing" ? "" : `= ${number(Number(divisors[name].divisor.toPrecision(3)))}`;
      level.set(divisors[name].gauge);
    }
  };
  return { element: make("div", { class: "two root-four" }, ...all.map((one) => one.element)), show };
}

/** H / ln n over d_k, with the region that the gauge calls level. */
function entropy({ data, plot }) {
  const { sharp, flat } = data.bounds;
  const both = [1, 4096];
  const series = [{ name: "level", kind: "band", x: both, y: both.map(() => sharp), low: both.map(() => sharp), high: both.map(() => flat), colour: "plain" }];
  for (const [name, { x, y, stderr, law }] of Object.entries(data.entropies)) {
    series.push(
      { name: `${name}-law`, kind: "line", x, y: law, colour: name, source: "theory" },
      { name, kind: "points", x, y, low: y.map((v, i) => v - 2 * stderr[i]), high: y.map((v, i) => v + 2 * stderr[i]), colour: name, source: "recorded" },
    );
  }
  return plot.chart("entropy", { x: X, y: { range: [0, 1] }, height: 240, series }).element;
}
