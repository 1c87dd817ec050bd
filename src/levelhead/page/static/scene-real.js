// A sentence through a trained model: the weights of one head with and without its division, a level for every head,
// and the ways to a sentence and a model of the reader's own.

import { make } from "./dom.js";
import { display, frac, root, row, sub, subsup, sup, sum } from "./formulas.js";
import { vial } from "./gauge.js";
import { weight } from "./plot.js";

// A page saved to a file has an import map. Its figures may not have arrived yet: source.js must not look for them here.
const saved = document.querySelector('script[type="importmap"]') !== null;
const e = (...power) => sup("e", row(...power));
const p = (index) => subsup("p", index, "c");
export const formulas = {
  divided: () => display("p_i = exp(s_i / c) / sum_j exp(s_j / c), c = sqrt(d_k)", sub("p", "i"), "=", frac(e(sub("s", "i"), "/", "c"), row(sum("j"), e(sub("s", "j"), "/", "c"))), ",", "c", "=", root(sub("d", "k"))),
  power: () => display("e^s_i / sum_j e^s_j = p_i^c / sum_j p_j^c", frac(e(sub("s", "i")), row(sum("j"), e(sub("s", "j")))), "=", frac(p("i"), row(sum("j"), p("j")))),
};

/** Before the answer: what the model reads. */
export function setup(place, { data, words, own }) {
  const word = (token, i) => make("span", { class: `word${i === data.query ? " query" : data.special[i] ? " real-mark" : ""}` }, make("b", {}, token));
  place.append(make("h3", {}, ...words.nodes(own("words", "sentence"))), make("div", { class: "sentence" }, ...data.tokens.map(word)));
}

export function scene(place, tools) {
  const { data, words, own } = tools;
  const [layer, head] = data.first;
  place.append(
    make("h3", {}, ...words.nodes(own("words", "one"), { layer, head })),
    make("div", { class: "two" }, side("divided", "root", tools), side("undivided", "nothing", tools)),
    make("h3", {}, own("words", "all")), levels(tools),
    make("p", { class: "real-own" }, link("#sentence", "own_sentence", tools), link("#heads", "own_model", tools)),
  );
  if (saved) place.append(make("p", { class: "soft" }, ...words.nodes(own("words", "saved"))));
}

function link(href, name, { own }) {
  return make("a", { href }, own("words", name));
}

/** The weights of "it" under one divisor. */
function side(name, colour, { data, words, own, plot }) {
  const title = words.plain(own("words", name));
  const level = plot.gauge("recorded");
  level.set(data.gauges[name]);
  const rows = data.tokens.map((label, i) => ({ label, value: data.rows[name][i], chosen: data.rows[name][i] === Math.max(...data.rows[name]) }));
  const about = words.plain(own("charts", "weights", "about"), { head: title, list: rows.map(({ label, value }) => `${label} ${weight(value)}`).join(", ") });
  return make("section", { class: "head" }, make("h3", { class: `by-${colour}` }, ...words.nodes(own("words", name))), level.element, plot.bars({ rows, about, source: "recorded", colour }).element);
}

/** A level for every head, a line per layer; the one that is chosen is described below. */
function levels({ data, words, own }) {
  const said = make("p", { class: "real-chosen", role: "status" });
  let pressed = null;
  const cell = (one, layer, head) => {
    const choose = () => {
      pressed?.setAttribute("aria-pressed", "false");
      pressed = button;
      button.setAttribute("aria-pressed", "true");
      const mark = (x) => words.marked(weight(x), "recorded", "sentence.json");
      said.replaceChildren(...words.nodes(own("words", "chosen"), { layer: String(layer), head: String(head), level: one.level, to: make("b", {}, one.to), weight: mark(one.weight), undivided: mark(one.undivided) }));
    };
    const label = words.plain(own("words", "cell"), { layer, head, level: one.level });
    const button = make("button", { type: "button", class: "real-cell", "aria-pressed": "false", "aria-label": label, title: label, click: choose }, vial(one.level, one.bubble));
    if (layer === data.first[0] && head === data.first[1]) choose();
    return button;
  };
  const line = (heads, layer) =>
    make("div", { class: "real-layer", role: "group", "aria-label": words.plain(own("words", "layer"), { layer }) }, make("span", { class: "soft" }, String(layer)), make("div", { class: "real-heads" }, ...heads.map((one, head) => cell(one, layer, head))));
  const lines = data.layers.map(line);
  return make("div", { class: "real-levels" }, ...lines, said);
}
