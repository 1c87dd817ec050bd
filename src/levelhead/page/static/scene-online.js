// The softmax without the matrix: tiles of keys arrive, the parts of the sum shrink together when the maximum grows, and
// a table holds all that is kept. The order of the tiles can be shuffled.

import { make, number } from "./dom.js";
import { sideways } from "./edges.js";
import { display, frac, gap, row, sub, sup, sum } from "./formulas.js";
import { weight } from "./plot.js";

const e = (...power) => sup("e", row(...power));
const s = () => sub("s", "j");
const larger = () => row("m", "′");
export const formulas = {
  sums: () => display("l = sum_j exp(s_j − m), a = sum_j exp(s_j − m) v_j", "l", "=", sum("j"), e(s(), "−", "m"), ",", gap(), "a", "=", sum("j"), e(s(), "−", "m"), sub("v", "j")),
  factor: () => display("exp(s − m′) = exp(m − m′) exp(s − m)", e("s", "−", larger()), "=", e("m", "−", larger()), "·", e("s", "−", "m")),
  update: () => display("l′ = exp(m − m′) l + sum_(j in T) exp(s_j − m′)", row("l", "′"), "=", e("m", "−", larger()), "l", "+", sum(row("j", "∈", "T")), e(s(), "−", larger())),
  entropy: () => display("H = m + ln(l) − b / l", "H", "=", "m", "+", "ln", "(", "l", ")", "−", frac("b", "l"), ",", gap(), "b", "=", sum("j"), e(s(), "−", "m"), s()),
};

const SUMS = ["l", "a", "b"];
const COLUMNS = ["kept", "rescaled", "added", "now"];
const short = (x) => number(Number(x.toPrecision(3)));

/** Before the answer: half of the keys have arrived, and what is kept of them. */
export function setup(place, tools) {
  const { data, words, own } = tools;
  const tiles = new Tiles(tools);
  tiles.show(data.orders[0].tiles, data.half);
  const { m, l } = data.orders[0].steps[data.half - 1].now;
  place.append(
    make("h3", {}, ...words.nodes(own("words", "tiles"))), tiles.element,
    make("p", { class: "online-half" }, ...words.nodes(own("words", "half"), { m: words.marked(number(m), "live"), l: words.marked(short(l), "live") })),
  );
}

export function scene(place, tools) {
  const { data, words, own, plot } = tools;
  let [order, step] = [0, 0];
  const tiles = new Tiles(tools);
  const ledger = new Ledger(tools);
  const said = make("p", { class: "online-said" });
  const kept = sideways(make("div", { class: "scroll" }, ledger.element), own("words", "ledger"));
  const chart = plot.bars({ rows: parts(data.orders[0], 0, tools), about: "", colour: "plain" });
  const named = make("span", { class: "soft", role: "status" });
  const show = () => {
    const one = data.orders[order];
    const rows = parts(one, step, tools);
    tiles.show(one.tiles, step);
    chart.set(rows, words.plain(own("charts", "parts", "about"), { list: rows.map(({ label, text }) => `${label}: ${text}`).join(", ") }));
    said.replaceChildren(...happened(one, step, tools));
    kept.hidden = !step; // the steps say what its sums are
    if (step) ledger.show(one.steps[step - 1]);
    named.textContent = words.plain(own("words", "order"), { order: letters(one.tiles, data) });
  };
  const shuffle = () => {
    order = (order + 1) % data.orders.length;
    show();
  };
  place.append(
    make("h3", {}, ...words.nodes(own("words", "tiles"))), tiles.element,
    make("h3", {}, ...words.nodes(own("words", "parts"))), chart.element,
    said, kept,
    make("p", { class: "scene-tools" }, make("button", { type: "button", class: "online-shuffle", click: shuffle }, own("words", "shuffle")), named),
  );
  show();
  return {
    go(at) {
      step = at;
      show();
    },
  };
}

const letters = (tiles, { names }) => tiles.map((tile) => names[tile]).join(", ");

/** One bar per key, in the order of arrival; keys to come have none. */
function parts({ tiles, steps }, step, { data, own }) {
  const found = step ? steps[step - 1].parts : [];
  const keys = tiles.flatMap((tile) => Array.from({ length: data.tile }, (_, i) => [tile, tile * data.tile + i]));
  return keys.map(([tile, key], i) => ({
    label: `${data.names[tile]}, ${number(data.scores[key]).replace("-", "−")}`, value: found[i] ?? 0, chosen: Math.floor(i / data.tile) === step - 1,
    text: i < found.length ? weight(found[i]) : own("words", "waits"),
  }));
}

function happened({ tiles, steps }, step, { data, words, own }) {
  if (!step) return [own("words", "none")];
  const { before, factor, now } = steps[step - 1];
  const mark = (x) => words.marked(short(x), "live");
  const name = before === null ? "begins" : factor < 1 ? "grew" : "stays";
  return words.nodes(own("words", name), { tile: data.names[tiles[step - 1]], old: before && mark(before.m), new: mark(now.m), factor: mark(factor) });
}

/** The tiles in a row: those that have arrived, the one that arrives, those to come. */
class Tiles {
  constructor({ data, words, own }) {
    Object.assign(this, { data, words, own });
    this.element = make("div", { class: "online-tiles", role: "img" });
  }

  show(order, step) {
    const { data, words, own } = this;
    this.element.replaceChildren(
      ...order.map((tile, at) => {
        const keys = Array.from({ length: data.tile }, (_, i) => tile * data.tile + i);
        const said = (key) => make("span", { class: "online-key" }, ...words.nodes(own("words", "score"), { score: make("b", {}, number(data.scores[key]).replace("-", "−")), value: number(data.values[key]) }));
        return make("div", { class: `online-tile${at < step - 1 ? " gone" : at === step - 1 ? " now" : ""}` }, make("b", { class: "online-name" }, data.names[tile]), ...keys.map(said));
      }),
    );
    this.element.setAttribute("aria-label", words.plain(own("words", "about"), { order: letters(order, data), arrived: step, tiles: order.length }));
  }
}

/** All that is kept: three sums before, rescaled, what the tile adds, and now; output and entropy from them. */
class Ledger {
  constructor(tools) {
    const { words, own } = tools;
    this.words = words;
    const head = (name) => make("th", { scope: "col" }, own("words", name));
    const line = (name) => {
      this.cells[name] = COLUMNS.map(() => make("td"));
      return make("tr", {}, make("th", { scope: "row" }, ...words.nodes(own("words", name))), ...this.cells[name]);
    };
    const result = (name) => {
      this.results[name] = make("td", {});
      return make("tr", { class: "online-result" }, make("th", { scope: "row", colspan: COLUMNS.length }, ...words.nodes(own("words", name))), this.results[name]);
    };
    this.cells = {};
    this.results = {};
    this.element = make(
      "table", { class: "online-ledger" },
      make("thead", {}, make("tr", {}, make("td"), ...COLUMNS.map(head))),
      make("tbody", {}, ...SUMS.map(line), ...["output", "entropy"].map(result)),
    );
  }

  show(step) {
    const mark = (x) => this.words.marked(short(x).replace("-", "−"), "live");
    for (const name of SUMS) {
      const values = [step.before?.[name] ?? 0, step.rescaled[name], step.added[name], step.now[name]];
      this.cells[name].forEach((cell, i) => cell.replaceChildren(mark(values[i])));
    }
    for (const [name, cell] of Object.entries(this.results)) cell.replaceChildren(this.words.marked(number(step.now[name]), "live"));
  }
}
