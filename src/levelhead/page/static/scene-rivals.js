// The rivals, one picture a step: spread by width, eight terms on a tanh, time, and an angle with the lengths taken out.

import { make, number, shape } from "./dom.js";
import { display, frac, row, root, sub, sup, sum } from "./formulas.js";
import { slider } from "./inputs.js";

const norm = (x) => row("‖", x, "‖");
const wide = () => root(sub("d", "k"));
export const formulas = {
  additive: () => display("s = v^T tanh(W_q q + W_k k)", "s", "=", sup("v", "⊤"), "tanh", row("(", sub("W", "q"), "q", "+", sub("W", "k"), "k", ")")),
  bounded: () => display("|s| = |sum_i v_i tanh(a_i)| < sum_i |v_i| = ‖v‖_1", row("|", "s", "|"), "≤", sum("i"), row("|", sub("v", "i"), "|"), row("|", "tanh", sub("a", "i"), "|"), "<", sum("i"), row("|", sub("v", "i"), "|"), "=", sub(norm("v"), "1")),
  inside: () => display("Var((W_q q)_i) = d_k · 1/d_k = 1", "Var", row("(", sub(row("(", sub("W", "q"), "q", ")"), "i"), ")"), "=", sub("d", "k"), "·", frac("1", sub("d", "k")), "=", "1"),
  lengths: () => display("q·k / sqrt(d_k) = ‖q‖ ‖k‖ cos θ / sqrt(d_k)", frac(row("q", "·", "k"), wide()), "=", frac(row(norm("q"), norm("k")), wide()), "cos", "θ"),
  cosine: () => display("‖q‖ = ‖k‖ = sqrt(d_k): q·k / sqrt(d_k) = sqrt(d_k) cos θ", norm("q"), "=", norm("k"), "=", wide(), "⟹", frac(row("q", "·", "k"), wide()), "=", wide(), "cos", "θ"),
};

const REACH = 14; // of the tanh's axis
const TURN = 5; // degrees of the slider
const short = (x) => number(Number(x.toPrecision(2)));

export function scene(place, tools) {
  const pictures = [spreads, terms, times, angle].map((draw) => make("div", { class: "rivals-picture" }, ...draw(tools)));
  place.append(...pictures);
  return { go: (step) => pictures.forEach((picture, i) => (picture.hidden = i !== step)) };
}

const errors = ({ y, stderr }) => ({ y, low: y.map((x, i) => x - 2 * stderr[i]), high: y.map((x, i) => x + 2 * stderr[i]) });

/** Before the answer: the dot product alone. */
export function setup(place, { data, plot }) {
  place.append(plot.chart("before", { ...axes(data), series: products(data) }).element);
}

const axes = ({ widths }) => ({ x: { range: [4, 1024], log: true, ticks: widths }, y: { range: [0.25, 64], log: true, ticks: [0.25, 1, 4, 16, 64] }, height: 260 });

const products = ({ widths: x, dot }) => [
  { name: "dot-law", kind: "line", x, y: x.map(Math.sqrt), colour: "nothing", source: "theory" },
  { name: "dot", kind: "points", x, ...errors(dot), colour: "nothing", source: "recorded" },
];

function spreads({ data, plot }) {
  const x = data.widths;
  const series = [
    ...products(data),
    { name: "divided-law", kind: "line", x, y: x.map(() => 1), colour: "root", source: "theory" },
    { name: "additive-law", kind: "line", x, y: data.law, colour: "plain", source: "theory" },
    { name: "additive", kind: "points", x, ...errors(data.additive), colour: "plain", source: "recorded", symbol: "diamond" },
  ];
  return [plot.chart("spread", { ...axes(data), series }).element];
}

/** Eight points on the tanh, under the reader's growth of q and k, and of v. */
function terms({ data, words, own, plot }) {
  const { dot, inside, v } = data.pair;
  const x = Array.from({ length: 141 }, (_, i) => -REACH + (2 * REACH * i) / 140);
  const curve = { name: "law", kind: "line", x, y: x.map(Math.tanh), colour: "ink", source: "theory" };
  const state = { growth: 1, v: 1 };
  const at = () => [curve, { name: "terms", kind: "points", x: inside.map((a) => state.growth * a), y: inside.map((a) => Math.tanh(state.growth * a)), colour: "plain", source: "here", symbol: "diamond" }];
  const chart = plot.chart("tanh", { x: { range: [-REACH, REACH] }, y: { range: [-1.2, 1.2], ticks: [-1, 0, 1] }, height: 220, series: at() });
  const said = make("p", { class: "rivals-now", role: "status" });
  const show = () => {
    const here = (y) => words.marked(short(y), "here");
    const score = state.v * inside.reduce((all, a, i) => all + v[i] * Math.tanh(state.growth * a), 0);
    const bound = state.v * v.reduce((all, one) => all + Math.abs(one), 0);
    chart.set(at());
    said.replaceChildren(...words.nodes(own("words", "now"), { dot: here(state.growth ** 2 * dot), additive: here(score), bound: here(bound) }));
  };
  const times = (y) => `${number(y)} ×`;
  const control = (name, most) => {
    const changed = (value) => {
      state[name] = value;
      show();
    };
    return slider({ label: words.plain(own("words", name)), min: 1, max: most, step: 0.5, value: 1, shown: times, changed }).element;
  };
  show();
  return [make("div", { class: "controls" }, control("growth", data.pair.growth), control("v", 2 * data.pair.growth)), chart.element, said];
}

function times({ data, plot }) {
  const { tokens, ...ratio } = data.time;
  const series = [
    { name: "equal", kind: "line", x: [tokens[0], tokens[tokens.length - 1]], y: [1, 1], colour: "ink", source: "theory" },
    { name: "additive", kind: "points", x: tokens, ...errors(ratio), colour: "plain", source: "recorded", symbol: "diamond" },
  ];
  return [plot.chart("time", { x: { range: [48, 2730], log: true, ticks: tokens }, y: { range: [0, 10] }, height: 260, series }).element];
}

/** Two arrows: an angle, and the length of k. The scaled dot product sees both, the cosine only the angle. */
function angle({ data, words, own, plot }) {
  const state = { angle: 60, length: 1 };
  const arrow = (className) => shape("path", { class: `rivals-arrow ${className}` });
  const [q, k] = [arrow("q"), arrow("k")];
  const name = (letter) => shape("text", { class: "rivals-letter" }, letter);
  const [qName, kName] = [name("q"), name("k")];
  const circle = shape("path", { class: "rivals-circle", d: "M30 170m-0 -80a80 80 0 0 1 80 80" });
  const drawing = shape("svg", { class: "rivals-angle", viewBox: "0 0 240 200", role: "img" }, circle, q, k, qName, kName);
  const chart = plot.bars({ rows: [], most: data.root * data.longest, about: "", source: "here", colour: "root", shown: short });
  const show = () => {
    const turn = (state.angle * Math.PI) / 180;
    const end = (length, by) => [30 + 80 * length * Math.cos(by), 170 - 80 * length * Math.sin(by)];
    for (const [path, label, length, by] of [[q, qName, 1, 0], [k, kName, state.length, turn]]) {
      const [x, y] = end(length, by);
      path.setAttribute("d", head(x, y, by));
      label.setAttribute("x", x + 6 * Math.cos(by) + 4);
      label.setAttribute("y", y + (by ? -4 : 16));
    }
    const cosine = Math.abs(Math.cos(turn)) < 1e-9 ? 0 : Math.cos(turn);
    const rows = [["scaled", state.length, "root"], ["cosine", 1, "plain"]].map(([label, length, colour]) => {
      const value = data.root * length * cosine;
      return { label: make("span", {}, ...words.nodes(own("words", label))), value, text: short(value), colour };
    });
    const about = words.plain(own("charts", "angle", "about"), { angle: state.angle, length: number(state.length), scaled: rows[0].text, cosine: rows[1].text });
    drawing.setAttribute("aria-label", about);
    chart.set(rows, about);
  };
  const control = (which, min, max, step, shown) => {
    const changed = (value) => {
      state[which] = value;
      show();
    };
    const label = make("span", {}, ...words.nodes(own("words", which)));
    return slider({ label, min, max, step, value: state[which], shown, changed }).element;
  };
  show();
  return [
    make("h3", {}, ...words.nodes(own("words", "lengths"))),
    make("div", { class: "controls" }, control("angle", 0, 90, TURN, (x) => `${x}°`), control("length", 0.5, data.longest, 0.25, number)),
    drawing, make("div", { class: "rivals-scores" }, chart.element),
  ];
}

/** From the corner to (x, y), with an arrow's head. */
function head(x, y, by) {
  const side = (off) => `${(x - 9 * Math.cos(by + off)).toFixed(1)} ${(y + 9 * Math.sin(by + off)).toFixed(1)}`;
  return `M30 170L${x.toFixed(1)} ${y.toFixed(1)}M${side(0.45)}L${x.toFixed(1)} ${y.toFixed(1)}L${side(-0.45)}`;
}
