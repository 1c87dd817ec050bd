// The spirit level of a figure, with its words: a large one that moves, or one in a line.

import { badge, make } from "./dom.js";
import { Spirit, vial } from "./gauge.js";
import { number, text, told, translated } from "./spoken.js";

/** A large level with its word, its meaning and its number. */
export class Level {
  constructor() {
    this.spirit = new Spirit();
    this.word = make("strong");
    this.meaning = make("span", { class: "soft" });
    this.value = make("span", { class: "value" });
    this.element = make(
      "div", { class: "level-big" },
      make("p", { class: "level-word" }, this.word, this.meaning),
      this.spirit.svg,
      make("p", { class: "level-number" }, this.value),
    );
  }

  set(gauge) {
    this.spirit.set(gauge, text("shell.gauge", { level: gauge.level }));
    this.word.textContent = gauge.level;
    this.word.className = gauge.level;
    this.meaning.textContent = text(`shell.levels.${gauge.level}`);
    const entropy = make("b", {}, number(gauge.normalised_entropy));
    this.value.replaceChildren(entropy, make("span", { class: "soft" }, `H / ln n, ${translated(gauge.label)}`), badge(gauge.source));
  }
}

/** A gauge of a figure as a line: its label, a vial, the word, the number. */
export function line(gauge) {
  return make(
    "div", { class: "gauge-line" },
    make("span", { class: "soft" }, told(gauge.label)), vial(gauge.level, gauge.bubble),
    make("b", {}, gauge.level), make("span", { class: "soft" }, `H / ln n ${number(gauge.normalised_entropy)}`), badge(gauge.source),
  );
}
