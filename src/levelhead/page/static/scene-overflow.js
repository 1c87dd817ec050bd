// Overflow: one score through both softmaxes, rows that a softmax without a shift loses, scores that overflow themselves.

import { make, number } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, row, sub, sup, sum } from "./formulas.js";
import { slider } from "./inputs.js";

const e = (...power) => sup("e", row(...power));
export const formulas = {
  shifted: () => display("p_i = exp(s_i − m) / sum_j exp(s_j − m)", sub("p", "i"), "=", frac(e(sub("s", "i"), "−", "m"), row(sum("j"), e(sub("s", "j"), "−", "m"))), ",", "m", "=", sub("max", "j"), sub("s", "j")),
};

export function scene(place, tools) {
  const { data, own, plot } = tools;
  const widths = { x: { range: [4, 4096], log: true, ticks: [4, 16, 64, 256, 1024, 4096] }, y: { range: [0, 1] } };
  const naive = Object.entries({ float16: "nothing", float32: "ink" }).flatMap(([name, colour]) => both(name, data.widths, data.naive[name], colour));
  const grown = { x: { range: [0, 100], ticks: [1, 16, 32, 48, 64, 96] }, y: { range: [0, 1] } };
  place.append(
    make("h3", {}, own("words", "one")), single(tools),
    plot.chart("naive", { ...widths, height: 162, series: naive }).element,
    plot.chart("score", { ...grown, height: 152, series: both("score", data.grown.growths, data.grown, "nothing") }).element,
  );
}

/** What was measured, with its error, and the law. */
function both(name, x, { measured, stderr, theory }, colour) {
  const low = measured.map((y, i) => Math.max(0, y - 2 * stderr[i]));
  const high = measured.map((y, i) => Math.min(1, y + 2 * stderr[i]));
  return [
    { name: `${name}-law`, kind: "line", x, y: theory, colour, source: "theory" },
    { name, kind: "points", x, y: measured, low, high, colour, source: "recorded" },
  ];
}

/** A slider for the largest score: its exponential with and without the shift, in two types. */
function single({ data, words, own }) {
  const cells = {};
  const here = (x) => words.marked(x, "here");
  const line = (name) => {
    cells[name] = { plain: make("td"), shifted: make("td") };
    return make("tr", {}, make("th", { scope: "row" }, name), cells[name].plain, cells[name].shifted);
  };
  const head = (name) => make("th", { scope: "col" }, ...words.nodes(own("words", name)));
  const table = make(
    "table", { class: "overflow-table" },
    make("thead", {}, make("tr", {}, make("td"), head("plain"), head("shifted"))),
    make("tbody", {}, ...Object.keys(data.largest).map(line)),
  );
  const show = (score) => {
    for (const [name, largest] of Object.entries(data.largest)) {
      const lost = Math.exp(score) > largest;
      const { plain, shifted } = cells[name];
      plain.replaceChildren(here(lost ? "∞" : number(Number(Math.exp(score).toPrecision(3)))), " ", words.plain(own("words", lost ? "lost" : "fine")));
      plain.classList.toggle("overflow-lost", lost);
      shifted.replaceChildren(here("1"), " ", words.plain(own("words", "fine")));
    }
  };
  const score = slider({ label: own("words", "score"), min: 0, max: data.farthest, step: 1, value: data.large, shown: number, changed: show });
  show(data.large);
  return make("div", { class: "overflow-single" }, score.element, sideways(make("div", { class: "scroll" }, table), own("words", "one")));
}
