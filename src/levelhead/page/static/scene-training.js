// Does training care, in three steps: the gradient at step zero, losses of recorded trainings, where the gradient of one
// head goes. Behind "more", every ratio with its optimiser.

import { make, shape } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, row, sub, sup, sum } from "./formulas.js";

const gradient = (of) => frac(row("∂", "L"), row("∂", of));
export const formulas = {
  chain: () => display("dL/dW_Q = c sum_ij x_i dL/ds_ij k_j", gradient(sub("W", "Q")), "=", "c", sum(row("i", "j")), sub("x", "i"), gradient(sub("s", row("i", "j"))), sup(sub("k", "j"), "⊤")),
  through: () => display("dL/ds_j = p_j (g_j − sum_i p_i g_i)", gradient(sub("s", "j")), "=", sub("p", "j"), row("(", sub("g", "j"), "−", sum("i"), sub("p", "i"), sub("g", "i"), ")")),
};

const COLOURS = { undivided: "nothing", divided: "root" };

export function scene(place, tools) {
  const { data, numbers, plot } = tools;
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
  const ratios = plot.chart("first", {
    x: { range: [4, 1024], log: true, ticks: d_k }, y: { range: [1, 32], log: true, ticks: [1, 2, 4, 8, 16, 32] }, height: 300, series: first,
  });
  ratios.mark(numbers.d_k.value); // the heads that are trained in the next step
  const loss = plot.chart("loss", { x: { range: [0, last], ticks: [0, 60, 120, 180, 240, last] }, y: { range: [0, 4] }, height: 300, series: losses });
  const parts = [ratios.element, loss.element, push(tools)];
  place.append(...parts);
  return { go: (step) => parts.forEach((part, i) => (part.hidden = i !== step)) };
}

/** The push on every score of one head, without the division and with it, each as shades of its own mean. */
function push({ data, words, own }) {
  const heads = Object.entries(data.push).map(([name, rows]) => {
    const about = words.plain(own("charts", "push", name));
    const drawing = shape("svg", { class: `training-push by-${COLOURS[name]}`, viewBox: `0 0 ${rows[0].length} ${rows.length}`, role: "img", "aria-label": about }, ...shades(rows, data.shades));
    return make("section", {}, make("h4", { class: `by-${COLOURS[name]}` }, ...words.nodes(own("words", name))), drawing);
  });
  return make(
    "div", {}, make("h3", {}, ...words.nodes(own("words", "push"))), make("div", { class: "training-pushes" }, ...heads),
    make("p", { class: "soft training-shades" }, ...words.nodes(own("words", "shades"))),
  );
}

/** One path per shade: a few elements instead of thousands. */
function shades(rows, most) {
  const places = Array.from({ length: most + 1 }, () => []);
  rows.forEach((row, y) => [...row].forEach((shade, x) => places[shade].push(`M${x} ${y}h1v1h-1z`)));
  return places.map((all, shade) => (shade && all.length ? shape("path", { d: all.join(""), "fill-opacity": (shade / most).toFixed(2) }) : null));
}

/** Every ratio of the chapter: what, with which optimiser, how many times. */
export function more({ data, words, own }) {
  const head = ["ratio", "optimiser", "times"].map((name) => make("th", { scope: "col" }, own("words", name)));
  const lines = Object.entries(data.ratios).map(([name, optimiser]) =>
    make("tr", { "data-ratio": name }, make("th", { scope: "row" }, ...words.nodes(own("words", "ratios", name))), make("td", {}, own("words", "optimisers", optimiser)), make("td", {}, words.number(name))),
  );
  const table = make("table", { class: "training-ratios" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
  return [sideways(make("div", { class: "scroll" }, table), own("words", "ratio"))];
}
