// Does training care: which of the recorded trainings is shown.

import { make } from "./dom.js";
import { choose } from "./inputs.js";
import { grid } from "./source.js";
import { piece } from "./spoken.js";

export class Training {
  constructor(panel, store) {
    this.store = store;
    this.place = make("div", { class: "ask" });
    if (!grid) panel.drawing.above.append(this.place); // a saved page holds one of them
  }

  drawn({ extra }) {
    const several = Object.entries(extra.choices ?? {}).filter(([, values]) => values.length > 1);
    this.place.replaceChildren(...several.map(([name, values]) => this.#select(name, values, extra.chosen[name])));
  }

  #select(name, values, chosen) {
    const one = choose(piece(`bench.training.choices.${name}`), values.map((value) => [value, String(value)]), () =>
      this.store.set({ [name]: values.find((value) => String(value) === one.select.value) }),
    );
    one.select.value = chosen;
    return one.element;
  }
}
