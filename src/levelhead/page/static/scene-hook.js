// Two heads over one sentence: the same scores, one head divides by 8. Bars of weights, gauges, the sum of the slopes.

import { make, number } from "./dom.js";
import { display, subsup, sum } from "./formulas.js";
import { weight } from "./plot.js";

export const formulas = {
  apart: () => display("1 − sum_i p_i^2", "1", "−", sum("i"), subsup("p", "i", "2")),
};

/** Before the answer: the sentence, and the scores that both heads share. */
export function setup(place, { data, words, own }) {
  const { scores } = data.draws[0];
  const list = data.words.map((word, i) => `${word} ${number(scores[i])}`).join(", ");
  const chips = data.words.map((word, i) =>
    make("span", { class: `word${i === data.query ? " query" : ""}` }, make("b", {}, word), words.marked(number(Number(scores[i].toPrecision(2))), "live")),
  );
  place.append(make("h3", {}, own("words", "setup")), make("div", { class: "sentence", role: "group", "aria-label": words.plain(own("charts", "scores", "about"), { list }) }, ...chips));
}

export function scene(place, { data, words, own, plot }) {
  let at = 0;
  const heads = [["undivided", "nothing"], ["divided", "root"]].map(([name, colour]) => head(name, colour, { data, words, own, plot }));
  const counted = make("span", { class: "soft", role: "status" });
  const show = () => {
    heads.forEach((one) => one.show(data.draws[at]));
    counted.textContent = words.plain(own("words", "draw"), { draw: at + 1, draws: data.draws.length });
  };
  const another = () => {
    at = (at + 1) % data.draws.length;
    show();
  };
  place.append(
    make("p", { class: "soft" }, own("words", "asks")),
    make("p", { class: "soft" }, own("words", "bubble")),
    make("p", { class: "scene-tools" }, make("button", { type: "button", click: another }, own("words", "another")), counted), // above all that it changes
    make("div", { class: "two" }, ...heads.map((one) => one.element)),
  );
  show();
}

function head(name, colour, { data, words, own, plot }) {
  const title = words.plain(own("words", name));
  const level = plot.gauge("live");
  const left = make("p", { class: "left" });
  const rows = (weights) => {
    const top = Math.max(...weights);
    return data.words.map((word, i) => ({ label: word, value: weights[i], chosen: weights[i] === top }));
  };
  const about = (weights) => words.plain(own("charts", "weights", "about"), { head: title, list: data.words.map((word, i) => `${word} ${weight(weights[i])}`).join(", ") });
  const chart = plot.bars({ rows: rows(data.draws[0][name].weights), about: about(data.draws[0][name].weights), colour });
  const element = make("section", { class: "head" }, make("h3", { class: `by-${colour}` }, title), level.element, chart.element, left);
  const show = (draw) => {
    const { weights, gauge } = draw[name];
    level.set(gauge);
    chart.set(rows(weights), about(weights));
    left.replaceChildren(words.marked(number(Number(draw[name].left.toPrecision(2))), "live", "1 − Σp²"), " ", ...words.nodes(own("words", "left")));
  };
  return { element, show };
}
