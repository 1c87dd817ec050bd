// Softmax and gaps: four rows of logits, then logits of the reader's own, which the browser computes.

import { make, number } from "./dom.js";
import { display, frac, gap, row, sub, sum, sup } from "./formulas.js";
import { slider } from "./inputs.js";
import { gaugeOf, softmax } from "./measure.js";

const e = (...power) => sup("e", row(...power));
export const formulas = {
  ratio: () => display("p_1 / p_2 = exp(s_1 − s_2)", frac(sub("p", "1"), sub("p", "2")), "=", frac(e(sub("s", "1")), e(sub("s", "2"))), "=", e(sub("s", "1"), "−", sub("s", "2"))),
  shift: () => display("exp(s + c) = exp(c) exp(s)", e("s", "+", "c"), "=", e("c"), "·", e("s")),
  entropy: () => display("H = −sum_i p_i ln p_i", "H", "=", "−", sum("i"), row(sub("p", "i"), gap(".17em"), "ln", gap(".17em"), sub("p", "i"))),
  two: () => display("p = 1 / (1 + exp(−g))", sub("p", "1"), "=", frac("1", row("1", "+", e("−", "g"))), ",", sub("p", "2"), "=", frac("1", row("1", "+", e("g")))),
};

/** Before the answer: the first row as it is. */
export function setup(place, tools) {
  place.append(rowOf(tools.data.rows[0], tools));
}

export function scene(place, tools) {
  const { own } = tools;
  place.append(
    make("h3", {}, own("words", "rows")),
    make("div", { class: "four" }, ...tools.data.rows.map((one) => rowOf(one, tools))),
    make("h3", {}, own("words", "own")),
    sandbox(tools),
  );
}

function rowOf({ logits, weights, texts }, { words, own, plot }) {
  const about = words.plain(own("charts", "weights", "about"), { logits: logits.map(number).join(", "), list: texts.join(", ") });
  const rows = logits.map((logit, i) => ({ label: number(logit), value: weights[i], text: texts[i] }));
  return plot.bars({ rows, about, source: "theory", colour: "plain" }).element;
}

/** Sliders of the reader's own. */
function sandbox({ data, words, own, plot }) {
  const state = { logits: [7, 3, 1], shift: 0 };
  const level = plot.gauge("here");
  const sliders = make("div", { class: "sliders" });
  const gap = make("p", { class: "gap-words", role: "status" });
  const chart = plot.bars({ rows: [], about: "", source: "here", colour: "plain" });
  const show = () => {
    const logits = state.logits.map((x) => x + state.shift);
    const weights = softmax(logits);
    const [first, second] = [...logits].sort((a, b) => b - a);
    chart.set(
      logits.map((logit, i) => ({ label: number(logit), value: weights[i] })),
      words.plain(own("charts", "weights", "about"), { logits: logits.map(number).join(", "), list: weights.map(number).join(", ") }),
    );
    level.set(gaugeOf(weights));
    const mark = (x) => words.marked(number(x), "here");
    gap.replaceChildren(...words.nodes(own("words", "gap"), { gap: mark(first - second), ratio: mark(Number(Math.exp(first - second).toPrecision(2))) }));
    more.disabled = state.logits.length >= data.most;
    less.disabled = state.logits.length <= data.fewest;
  };
  const one = (i) =>
    slider({
      label: words.plain(own("words", "logit"), { place: i + 1 }), min: data.low, max: data.high, step: 0.5, value: state.logits[i], shown: number,
      changed: (x) => {
        state.logits[i] = x;
        show();
      },
    }).element;
  const fill = () => {
    sliders.replaceChildren(...state.logits.map((_, i) => one(i)));
    show();
  };
  const button = (name, click) => make("button", { type: "button", click }, own("words", name));
  const more = button("add", () => (state.logits.push(0), fill()));
  const less = button("remove", () => (state.logits.pop(), fill()));
  const shift = slider({ label: own("words", "shift"), min: -data.shift, max: data.shift, step: 1, value: 0, shown: number, changed: (x) => ((state.shift = x), show()) });
  fill();
  return make("div", { class: "sandbox" }, sliders, make("div", { class: "own-tools" }, make("p", { class: "scene-tools" }, more, less), shift.element), chart.element, make("div", { class: "two" }, gap, level.element));
}
