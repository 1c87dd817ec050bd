// Three words through one head, step by step. Long rows are strips, 3×3 tables are written out, one score is summed up.

import { make } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, root, row, sub, sum, sup } from "./formulas.js";
import { fixed, heats } from "./heat.js";
import { weight } from "./plot.js";
import { runner } from "./runner.js";

const LOVE = 0;
const APPLE = 1;
const PACE = 350; // ms from a term to the next
const FLOW = ["X", "QKV", "scores", "divided", "weights", "output", "layer"];
const PARTS = [0, 1, 1, 2, 2, 3, 4, 5, 6]; // of the flow, by step

export const formulas = {
  projected: () => display("Q = X W_Q, K = X W_K, V = X W_V", "Q", "=", "X", sub("W", "Q"), ",", "K", "=", "X", sub("W", "K"), ",", "V", "=", "X", sub("W", "V")),
  score: () => display("s_ij = sum_l Q_il K_jl", sub("s", row("i", "j")), "=", sum(row("l", "=", "1"), sub("d", "k")), sub("Q", row("i", "l")), sub("K", row("j", "l"))),
  weight: () => display("p_ij = exp(s_ij / sqrt(d_k)) / sum_m exp(s_im / sqrt(d_k))", sub("p", row("i", "j")), "=", frac(sup("e", row(sub("s", row("i", "j")), "/", root(sub("d", "k")))), row(sum("m"), sup("e", row(sub("s", row("i", "m")), "/", root(sub("d", "k"))))))),
  mixed: () => display("o_i = sum_j p_ij V_j", sub("o", "i"), "=", sum("j"), sub("p", row("i", "j")), sub("V", "j")),
  variance: () => display("Var(Q_il) = sum_c Var(X_ic) Var(W_cl) = d · 1 · 1/d = 1", "Var", row("(", sub("Q", row("i", "l")), ")"), "=", sum(row("c", "=", "1"), "d"), "Var", row("(", sub("X", row("i", "c")), ")"), "Var", row("(", sub("W", row("c", "l")), ")"), "=", "d", "·", "1", "·", frac("1", "d"), "=", "1"),
  layer: () => display("layer = [O^1 … O^h] W_O", "layer", "=", row("[", sup("O", "1"), "…", sup("O", "h"), "]"), sub("W", "O")),
};

/** Before the answer: the three words as rows of numbers. */
export function setup(place, tools) {
  place.append(make("h3", {}, ...tools.words.nodes(tools.own("words", "X"))), strips("X", tools));
}

export function scene(place, tools) {
  const { words, own } = tools;
  const flow = FLOW.map((name) => make("li", {}, make("span", {}, ...words.nodes(own("words", "flow", name)))));
  const stage = make("div", { class: "hand-stage" });
  let running = null;
  place.append(make("ol", { class: "hand-flow" }, ...flow), stage);
  const shows = [
    () => [title("X", tools), strips("X", tools)],
    () => entry(tools),
    () => [make("div", { class: "hand-three" }, ...["Q", "K", "V"].flatMap((name) => [title(name, tools), strips(name, tools)]))],
    () => {
      running = product(tools);
      return running.elements;
    },
    () => [title("scores", tools), table("scores", tools, { at: [APPLE, LOVE] })],
    () => [title("divided", tools), table("divided", tools, { at: [APPLE, LOVE] })],
    () => [title("weights", tools), table("weights", tools, { totals: tools.data.totals }), title("undivided", tools), table("undivided", tools, { shown: weight })],
    () => mixture(tools),
    () => [title("joined", tools), one("joined", tools, tools.numbers.d_k.value), title("projected", tools), one("projected", tools)],
  ];
  const stop = () => running?.stop();
  const go = (step) => {
    stop();
    running = null;
    flow.forEach((part, i) => (i === PARTS[step] ? part.setAttribute("aria-current", "step") : part.removeAttribute("aria-current")));
    stage.replaceChildren(...shows[step]());
  };
  return { go, stop };
}

function title(name, { words, own }) {
  return make("h3", {}, ...words.nodes(own("words", name)));
}

/** A strip per word. */
function strips(name, tools) {
  return drawn(tools.data[name].map((values, i) => ({ of: name, word: tools.data.words[i], values })), tools);
}

const one = (name, tools, framed) => drawn([{ of: name, word: tools.data.words[APPLE], values: tools.data[name], framed }], tools);

function drawn(rows, { words, own }) {
  const about = (row) => ({ name: words.plain(own("words", "names", row.of)), word: row.word });
  const named = rows.map((row) => ({ label: row.word, name: words.plain(own("words", "strip"), about(row)), ...row }));
  return heats(named, (row, place, value) => words.plain(own("words", "reads"), { ...about(row), place, value }));
}

/** The first entry of Apple's query: a row of X times a column of W_Q. */
function entry(tools) {
  const { data, words } = tools;
  const [x, w] = [data.X[APPLE], data.column];
  const terms = [0, 1, 2].map((i) => `${i ? bracketed(fixed(x[i])) : fixed(x[i])} · ${bracketed(fixed(w[i], 3))}`).join(" + ");
  return [
    title("entry", tools),
    drawn([{ of: "X", word: data.words[APPLE], values: x }, { of: "column", word: data.words[APPLE], label: make("span", {}, ...words.nodes("W_Q")), values: w, full: 0.11, digits: 3 }], tools),
    make("p", { class: "hand-sum" }, `${terms} + … = `, words.number("q_first")),
  ];
}

const bracketed = (text) => (text.startsWith("−") ? `(${text})` : text);

/** One score, term by term: a table of the terms, the sum so far as a line. */
function product(tools) {
  const { data, words, own, plot } = tools;
  const [q, k, { terms, sums }] = [data.Q[APPLE], data.K[LOVE], data];
  const rows = terms.map((term, i) => make("tr", {}, ...[i + 1, fixed(q[i]), fixed(k[i]), fixed(term), fixed(sums[i])].map((x, j) => make(j ? "td" : "th", j ? {} : { scope: "row" }, String(x)))));
  const heads = ["place", "q", "k", "product", "sum"].map((name) => make("th", { scope: "col" }, ...words.nodes(own("words", name))));
  const list = make("div", { class: "hand-terms", tabindex: 0, role: "region", "aria-label": words.plain(own("words", "terms")) }, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
  const said = make("p", { class: "hand-sum", role: "status" });
  const series = (t) => [
    { name: "sum", kind: "line", x: Array.from({ length: t + 1 }, (_, i) => i), y: [0, ...sums.slice(0, t)], colour: "plain", source: "live" },
    { name: "here", kind: "points", x: [t], y: [sums[t - 1]], colour: "ink", source: "live", quiet: true },
  ];
  const chart = plot.chart("sum", { x: { range: [0, 64], ticks: [0, 16, 32, 48, 64] }, y: { range: [-8, 8], ticks: [-8, -4, 0, 4, 8] }, height: 190, series: series(1) });
  const show = (t) => {
    rows.forEach((line, i) => line.classList.toggle("here", i === t - 1));
    const line = rows[t - 1];
    list.scrollTop = line.offsetTop - list.clientHeight / 2;
    chart.set(series(t));
    said.replaceChildren(...words.nodes(own("words", "term"), { place: String(t), q: fixed(q[t - 1]), k: bracketed(fixed(k[t - 1])), product: fixed(terms[t - 1]), sum: words.marked(fixed(sums[t - 1]), "live") }));
  };
  const run = runner({ label: own("words", "added"), words: { run: own("words", "run"), rest: own("words", "rest") }, pause: PACE, min: 1, max: terms.length, value: 1, shown: String, changed: show });
  show(1);
  return { elements: [title("score", tools), said, run.element, make("div", { class: "two hand-product" }, chart.element, list)], stop: run.stop };
}

/** A table of 3×3: a row per word that asks, a column per word that is asked. */
function table(name, { data, words, own }, { at = [], totals = null, shown = fixed } = {}) {
  const head = (name) => make("th", { scope: "col" }, name);
  const total = (i) => (totals ? [make("td", { class: "soft" }, fixed(totals[i]))] : []);
  const lines = data[name].map((line, i) =>
    make("tr", {}, make("th", { scope: "row" }, data.words[i]), ...line.map((x, j) => make("td", { class: i === at[0] && j === at[1] ? "here" : "" }, shown(x))), ...total(i)),
  );
  const corner = make("td", { class: "soft" }, own("words", "corner"));
  const top = make("tr", {}, corner, ...data.words.map(head), ...(totals ? [head(own("words", "total"))] : []));
  const drawn = make("table", {}, make("thead", {}, top), make("tbody", {}, ...lines));
  return sideways(make("div", { class: "scroll hand-table" }, drawn), words.plain(own("words", "table"), { name: words.plain(own("words", name)) }));
}

/** Apple's output: a mixture of three rows of V. */
function mixture(tools) {
  const { data, words } = tools;
  const weights = data.weights[APPLE];
  const terms = weights.map((p, j) => `${fixed(p)} · ${bracketed(fixed(data.V[j][0]))}`).join(" + ");
  return [
    make("div", { class: "hand-three" }, title("V", tools), strips("V", tools), title("output", tools), strips("output", tools)),
    make("p", { class: "hand-sum" }, `${terms} = `, words.number("out_first")),
  ];
}
