// Attack the assumption: a match of correlation ρ in rows whose entries have standard deviation σ, under four cures.

import { make, number } from "./dom.js";
import { display, frac, row, root, sub, sup } from "./formulas.js";
import { segments, slider } from "./inputs.js";

const dk = () => sub("d", "k");
const E = (...parts) => row("E", row("[", ...parts, "]"));
const Var = (...parts) => row("Var", row("(", ...parts, ")"));
const term = () => row(sub("q", "i"), sub("k", "i"));
export const formulas = {
  match: () => display("k_i = ρ q_i + sqrt(1 − ρ^2) z_i", sub("k", "i"), "=", "ρ", sub("q", "i"), "+", root("1", "−", sup("ρ", "2")), sub("z", "i")),
  term: () => display("E[q_i k_i] = ρ E[q_i^2] = ρ σ^2", E(term()), "=", "ρ", E(sup(sub("q", "i"), "2")), "=", "ρ", sup("σ", "2")),
  parts: () => display("Var(q_i k_i) = ρ^2 Var(q_i^2) + (1 − ρ^2) Var(q_i z_i)", Var(term()), "=", sup("ρ", "2"), Var(sup(sub("q", "i"), "2")), "+", row("(", "1", "−", sup("ρ", "2"), ")"), Var(sub("q", "i"), sub("z", "i"))),
  fourth: () => display("Var(q_i^2) = E[q_i^4] − E[q_i^2]^2 = 3 σ^4 − σ^4 = 2 σ^4", Var(sup(sub("q", "i"), "2")), "=", E(sup(sub("q", "i"), "4")), "−", sup(E(sup(sub("q", "i"), "2")), "2"), "=", "3", sup("σ", "4"), "−", sup("σ", "4"), "=", "2", sup("σ", "4")),
  spread: () => display("Var(q_i k_i) = 2 ρ^2 σ^4 + (1 − ρ^2) σ^4 = (1 + ρ^2) σ^4", Var(term()), "=", "2", sup("ρ", "2"), sup("σ", "4"), "+", row("(", "1", "−", sup("ρ", "2"), ")"), sup("σ", "4"), "=", row("(", "1", "+", sup("ρ", "2"), ")"), sup("σ", "4")),
  mean: () => display("E[q·k] = ρ σ^2 d_k", E("q", "·", "k"), "=", "ρ", sup("σ", "2"), dk()),
  divided: () => display("E[q·k / sqrt(d_k)] = ρ σ^2 sqrt(d_k)", E(frac(row("q", "·", "k"), root(dk()))), "=", "ρ", sup("σ", "2"), root(dk())),
  capped: () => display("f(s) = c tanh(s / c)", "f", row("(", "s", ")"), "=", "c", "tanh", row("(", frac("s", "c"), ")")),
  bent: () => display("df/ds = 1 − tanh^2(s / c)", frac(row("d", "f"), row("d", "s")), "=", "1", "−", sup("tanh", "2"), row("(", frac("s", "c"), ")")),
};

const RANGE = [-32, 40]; // of the scores: a cap of 30 and its negative are inside
const COLOURS = { root: "root", width: "width", norm: "ink", cap: "plain" };
const short = (x) => number(Number(x.toPrecision(2)));

export function scene(place, tools) {
  const { data, words, own, plot } = tools;
  const state = { ...data.steps[0] };
  const x = data.rhos;
  const series = () => {
    const { mean, error, law, others } = data.grid[state.cure][state.sigma];
    const colour = COLOURS[state.cure];
    return [
      { name: "others", kind: "band", x, y: x.map(() => 0), low: others.map((y) => -y), high: others, colour: "ink", source: "live" },
      { name: "law", kind: "line", x, y: law, colour, source: "theory" },
      { name: "match", kind: "points", x, y: mean, low: mean.map((y, i) => y - 2 * error[i]), high: mean.map((y, i) => y + 2 * error[i]), colour, source: "live" },
    ];
  };
  const outside = () => ({ above: data.grid[state.cure][state.sigma].mean.filter((y) => y > RANGE[1]).length / x.length });
  const scores = plot.chart("scores", { x: { range: [0, 0.9], ticks: [0, 0.3, 0.6, 0.9] }, y: { range: RANGE, ticks: [-20, 0, 20, 40] }, height: 158, series: series() });
  const gauge = plot.gauge("live");
  const bars = plot.bars({ rows: [], most: 1, about: "", source: "live" });
  const said = make("p", { class: "attack-now", role: "status" });
  const show = () => {
    const found = data.grid[state.cure][state.sigma];
    const at = (name) => found[name][state.rho];
    scores.set(series(), { outside: outside() });
    scores.mark(x[state.rho]);
    gauge.set({ level: at("level"), bubble: at("bubble"), normalised_entropy: at("entropy") });
    const [key, top] = x[state.rho] ? ["match", "match"] : ["none", "top"]; // without correlation there is no match
    const rows = [[key, top], ["left", "left"]].map(([said, name]) => ({ label: words.plain(own("words", said)), value: at(name), colour: COLOURS[state.cure] }));
    bars.set(rows, words.plain(own("charts", "row", "about"), { name: rows[0].label, weight: short(at(top)), left: short(at("left")) }));
    const live = (name) => words.marked(short(at(name)), "live");
    said.dataset.verdict = at("verdict");
    said.replaceChildren(...words.nodes(own("words", "verdicts", at("verdict")), { key: own("words", "keys", key), pinned: live("pinned"), weight: live("match"), top: live("top") }));
  };
  const control = (name, values) => {
    const label = words.plain(own("words", name));
    const changed = (value) => {
      state[name] = value;
      show();
    };
    return slider({ label, min: 0, max: values.length - 1, step: 1, value: state[name], shown: (i) => number(values[i]), changed });
  };
  const changed = (cure) => {
    state.cure = cure;
    show();
  };
  const options = Object.keys(COLOURS).map((cure) => [cure, make("span", {}, ...words.nodes(own("words", cure)))]);
  const inputs = {
    rho: control("rho", data.rhos), sigma: control("sigma", data.sigmas),
    cure: segments({ label: own("words", "cure"), name: "attack-cure", options, value: state.cure, changed }),
  };
  const growth = widths(tools);
  const match = make(
    "div", {}, make("div", { class: "controls" }, inputs.rho.element, inputs.sigma.element), inputs.cure.element,
    scores.element, make("div", { class: "two attack-row" }, gauge.element, bars.element), said,
  );
  place.append(growth, match);
  const go = (step) => {
    growth.hidden = step > 0;
    match.hidden = step === 0;
    Object.assign(state, data.steps[step]);
    Object.entries(inputs).forEach(([name, input]) => input.set(state[name]));
    show();
  };
  return { go };
}

/** The mean score of a match by width: recorded, and its law. */
function widths({ data, plot }) {
  const x = data.widths;
  const all = Object.entries(data.grown);
  const series = [
    ...all.map(([colour, { theory }]) => ({ name: `${colour}-law`, kind: "line", x, y: theory, colour, source: "theory" })),
    ...all.map(([colour, { measured, stderr }]) => ({
      name: colour, kind: "points", x, y: measured, low: measured.map((y, i) => y - 2 * stderr[i]), high: measured.map((y, i) => y + 2 * stderr[i]), colour, source: "recorded",
    })),
  ];
  const axes = { x: { range: [16, 1024], log: true, ticks: [16, 64, 256, 1024] }, y: { range: [0.25, 1024], log: true, ticks: [0.25, 1, 4, 16, 64, 256, 1024] } };
  return plot.chart("widths", { ...axes, height: 280, series }).element;
}
