// A sentence through a trained model: a level for every head, the weights of the one that is chosen with and without its
// division, and the ways to a sentence and a model of the reader's own.

import { make } from "./dom.js";
import { display, frac, root, row, sub, subsup, sup, sum } from "./formulas.js";
import { vial } from "./gauge.js";
import { weight } from "./plot.js";

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
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
  const title = make("h3");
  const sides = [side("divided", "root", tools), side("undivided", "nothing", tools)];
  const show = (layer, head) => {
    title.replaceChildren(...words.nodes(own("words", "one"), { layer: String(layer), head: String(head) }));
    for (const one of sides) one.set(data.layers[layer][head]);
  };
  place.append(
    make("h3", {}, own("words", "all")), levels(tools, show), // first, so that what it changes is in sight on a phone
    title, make("div", { class: "two" }, ...sides.map(({ element }) => element)),
    make("p", { class: "real-own" }, link("#sentence", "own_sentence", tools), link("#heads", "own_model", tools)),
  );
}

/** In a saved page, that it runs no model; the lab bench says so, too. */
export function more({ words, own }) {
  return saved ? [make("p", {}, ...words.nodes(own("words", "saved")))] : [];
}

function link(href, name, { own }) {
  return make("a", { href }, own("words", name));
}

/** The level of a head under one divisor, and the weights of "it"; `set(head)` shows another head. */
function side(name, colour, { data, words, own, plot }) {
  const level = plot.gauge("recorded");
  const bars = plot.bars({ rows: [], about: "", source: "recorded", colour });
  const set = (head) => {
    const { row, gauge } = head[name];
    const most = Math.max(...row);
    level.set(gauge);
    const list = data.tokens.map((label, i) => `${label} ${weight(row[i])}`).join(", ");
    const about = words.plain(own("charts", "weights", "about"), { head: words.plain(own("words", name)), list });
    bars.set(data.tokens.map((label, i) => ({ label, value: row[i], chosen: row[i] === most })), about);
  };
  return { element: make("section", { class: "head" }, make("h3", { class: `by-${colour}` }, ...words.nodes(own("words", name))), level.element, bars.element), set };
}

/** A level for every head, a line per layer; `show(layer, head)` draws the one that is chosen, and a sentence says what
 * it does. One stop for the Tab key: in the table the arrow keys choose. */
function levels({ data, words, own }, show) {
  const said = make("p", { class: "real-chosen", role: "status" });
  let at = data.first;
  const choose = (layer, head) => {
    const { divided, undivided } = data.layers[layer][head];
    const most = Math.max(...divided.row);
    const mark = (x) => words.marked(weight(x), "recorded", data.where);
    const to = make("b", {}, data.tokens[divided.row.indexOf(most)]);
    said.replaceChildren(...words.nodes(own("words", "chosen"), { layer: String(layer), head: String(head), level: divided.gauge.level, to, weight: mark(most), undivided: mark(Math.max(...undivided.row)) }));
    checked(cells[at[0]][at[1]], false);
    checked(cells[layer][head], true);
    at = [layer, head];
    show(layer, head);
  };
  const cells = data.layers.map((heads, layer) => heads.map(({ divided: { gauge } }, head) => {
    const label = words.plain(own("words", "cell"), { layer, head, level: gauge.level });
    return make("button", { type: "button", role: "radio", class: "real-cell", "aria-checked": "false", tabindex: "-1", "aria-label": label, title: label, click: () => choose(layer, head) }, vial(gauge.level, gauge.bubble));
  }));
  const lines = cells.map((line, layer) => make("div", { class: "real-layer" }, make("span", { class: "soft" }, String(layer)), make("div", { class: "real-heads" }, ...line)));
  const keydown = (event) => {
    const [down, across] = MOVES[event.key] ?? [0, 0];
    const next = cells[at[0] + down]?.[at[1] + across];
    if (event.altKey || event.ctrlKey || event.metaKey || !MOVES[event.key]) return;
    event.preventDefault(); // the story's arrows are for chapters
    event.stopPropagation();
    next?.focus();
    next?.click();
  };
  choose(...at);
  return make("div", { class: "real-levels" }, make("div", { role: "radiogroup", "aria-label": own("words", "all"), keydown }, ...lines), said);
}

function checked(cell, is) {
  cell.setAttribute("aria-checked", String(is));
  cell.setAttribute("tabindex", is ? "0" : "-1");
}
