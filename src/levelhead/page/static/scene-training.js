// Does training care: losses of recorded trainings, the gradient at the first step, and four ratios that resolve it.

import { make } from "./dom.js";
import { display, frac, row, sub, sup, sum } from "./formulas.js";

const gradient = (of) => frac(row("∂", "L"), row("∂", of));
export const formulas = {
  chain: () => display("dL/dW_Q = c sum_ij x_i dL/ds_ij k_j", gradient(sub("W", "Q")), "=", "c", sum(row("i", "j")), sub("x", "i"), gradient(sub("s", row("i", "j"))), sup(sub("k", "j"), "⊤")),
  through: () => display("dL/ds_j = p_j (g_j − sum_i p_i g_i)", gradient(sub("s", "j")), "=", sub("p", "j"), row("(", sub("g", "j"), "−", sum("i"), sub("p", "i"), sub("g", "i"), ")")),
};

export function scene(place, tools) {
  const { data, words, own, plot } = tools;
  const { d_k, ratio, stderr } = data.first;
  const last = data.step[data.step.length - 1];
  const first = [
    { name: "bound", kind: "line", x: d_k, y: d_k.map(Math.sqrt), colour: "ink", source: "theory" },
    {
      name: "measured", kind: "points", x: d_k, y: ratio, colour: "nothing", source: "recorded",
      low: ratio.map((y, i) => y - 2 * stderr[i]), high: ratio.map((y, i) => y + 2 * stderr[i]),
    },
  ];
  const losses = Object.entries(data.losses).flatMap(([colour, { y, low, high }]) => [
    { name: `${colour}-seeds`, kind: "band", x: data.step, y, low, high, colour, source: "recorded", quiet: true },
    { name: colour, kind: "line", x: data.step, y, colour, source: "recorded" },
  ]);
  place.append(
    plot.chart("first", {
      x: { range: [4, 1024], log: true, ticks: d_k }, y: { range: [1, 32], log: true, ticks: [1, 2, 4, 8, 16, 32] }, height: 200, series: first,
    }).element,
    plot.chart("loss", { x: { range: [0, last], ticks: [0, 60, 120, 180, 240, last] }, y: { range: [0, 4] }, height: 220, series: losses }).element,
    make("h3", {}, ...words.nodes(own("words", "ratios"))),
    ratios(tools),
  );
}

/** Undivided over divided by √d_k: four bars, one unit for all, and a line where both are equal. */
function ratios({ data, numbers, words, own, plot }) {
  const most = Math.max(...data.ratios.map((name) => numbers[name].value));
  const rows = data.ratios.map((name) => ({ label: words.plain(own("words", name)), value: numbers[name].value, text: `${numbers[name].text} ×` }));
  const about = words.plain(own("charts", "ratios", "about"), { list: rows.map(({ label, text }) => `${label} ${text}`).join(", ") });
  const chart = plot.bars({ rows, most: Math.ceil(most), mark: 1, about, source: "recorded", colour: "nothing" }).element;
  return make("div", { class: "training-ratios" }, chart, make("p", { class: "soft training-equal" }, own("words", "equal")));
}
