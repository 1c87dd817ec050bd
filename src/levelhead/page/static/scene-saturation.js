// What saturation costs: the slope p(1 − p) under the reader's gap, the Jacobian of three scores, what is left by width.

import { make, number } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, gap, row, sub, sup } from "./formulas.js";
import { slider } from "./inputs.js";
import { softmax } from "./measure.js";
import { weight } from "./plot.js";

const moves = (weight, score) => frac(row("∂", sub("p", weight)), row("∂", sub("s", score)));
export const formulas = {
  slope: () => display("dp/ds = p (1 − p)", frac(row("∂", "p"), row("∂", "s")), "=", "p", "(", "1", "−", "p", ")"),
  jacobian: () => display("J = diag(p) − p p^T", "J", "=", "diag", "(", "p", ")", "−", "p", sup("p", "⊤")),
  entries: () => display("dp_i/ds_i = p_i (1 − p_i), dp_i/ds_j = −p_i p_j", moves("i", "i"), "=", sub("p", "i"), row("(", "1", "−", sub("p", "i"), ")"), ",", gap(), moves("i", "j"), "=", "−", sub("p", "i"), sub("p", "j")),
  quotient: () => display("p_1 = e^s_1 / (e^s_1 + rest)", sub("p", "1"), "=", frac(sup("e", sub("s", "1")), row(sup("e", sub("s", "1")), "+", "R"))),
};

const POINTS = 101;
const short = (x) => number(Number(x.toPrecision(2)));

export function scene(place, tools) {
  const { data, own, plot } = tools;
  const p = Array.from({ length: POINTS }, (_, i) => i / (POINTS - 1));
  const curve = { name: "law", kind: "line", x: p, y: p.map((x) => x * (1 - x)), colour: "ink", source: "theory" };
  const here = (x) => [curve, { name: "here", kind: "points", x: [x], y: [x * (1 - x)], colour: "root", source: "here" }];
  const slopes = plot.chart("slope", { x: { range: [0, 1] }, y: { range: [0, 0.3] }, height: 165, series: here(0.5) });
  const words = make("p", { class: "saturation-now", role: "status" });
  const table = make("tbody");
  const three = make("p", { class: "saturation-three", role: "status" });
  const show = (gap) => {
    const [first] = softmax([gap, 0]);
    slopes.set(here(first));
    words.replaceChildren(...tools.words.nodes(own("words", "now"), { p: tools.words.marked(weight(first), "here"), slope: tools.words.marked(short(first * (1 - first)), "here") }));
    const weights = softmax([gap, 0, -1]);
    const list = make("span", {}, ...weights.flatMap((p, i) => [i ? ", " : "", tools.words.marked(weight(p), "here")]));
    three.replaceChildren(...tools.words.nodes(own("words", "three"), { list }));
    fill(table, weights, tools);
  };
  const gap = slider({ label: own("words", "gap"), min: -data.widest, max: data.widest, step: 0.5, value: data.first, shown: number, changed: show });
  const left = Object.entries(data.curves).map(([colour, { x, y, stderr }]) => ({
    name: colour, kind: "line", x, y, low: y.map((one, i) => one - 2 * stderr[i]), high: y.map((one, i) => one + 2 * stderr[i]), colour, source: "recorded",
  }));
  place.append(
    gap.element, slopes.element, words,
    make("h3", {}, ...tools.words.nodes(own("words", "jacobian"))),
    make("div", { class: "saturation-three-j" }, sideways(make("div", { class: "scroll" }, make("table", { class: "saturation-j" }, table)), tools.words.plain(own("words", "jacobian"))), three),
    plot.chart("left", { x: { range: [1, 4096], log: true, ticks: [1, 4, 16, 64, 256, 1024, 4096] }, y: { range: [0, 1] }, height: 175, series: left }).element,
  );
  show(data.first);
}

/** diag(p) − p pᵀ; the fuller the cell, the larger the number, in one colour above zero and another below. */
function fill(table, p, { words, own }) {
  const lines = p.map((a, i) =>
    make(
      "tr", {}, make("th", { scope: "row" }, words.plain(own("words", "weight"), { place: i + 1 })),
      ...p.map((b, j) => {
        const value = i === j ? a * (1 - a) : -a * b;
        const cell = make("td", { class: value < 0 ? "below" : "" }, words.marked(short(value).replace("-", "−"), "here"));
        cell.style.setProperty("--share", `${Math.round(Math.abs(value) * 160)}%`);
        return cell;
      }),
    ),
  );
  table.replaceChildren(...lines);
}
