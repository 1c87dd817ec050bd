// Speed: a recorded run, until the reader asks for one on this machine.

import { make } from "./dom.js";
import { askSpeed, grid } from "./source.js";
import { say } from "./spoken.js";

const SECONDS = 10; // about

export class Speed {
  constructor(panel) {
    if (grid) return; // a saved page has no server
    this.panel = panel;
    this.button = say(make("button", { type: "button", class: "run", click: () => this.#run() }), "bench.speed.run", { seconds: SECONDS });
    panel.drawing.above.append(this.button);
  }

  async #run() {
    this.button.disabled = true;
    say(this.button, "bench.speed.running");
    await this.panel.ask(() => askSpeed());
    this.button.disabled = false;
    say(this.button, "bench.speed.again", { seconds: SECONDS });
  }
}
