// Speed: a recorded run, until the reader asks for one on this machine.

import { make } from "./dom.js";
import { askSpeed, grid } from "./source.js";

export class Speed {
  constructor(panel) {
    if (grid) return; // a saved page has no server
    this.panel = panel;
    this.button = make("button", { type: "button", class: "run", click: () => this.#run() }, "run here (about 10 s)");
    panel.drawing.above.append(this.button);
  }

  async #run() {
    this.button.disabled = true;
    this.button.textContent = "running …";
    await this.panel.ask(() => askSpeed());
    this.button.disabled = false;
    this.button.textContent = "run again (about 10 s)";
  }
}
