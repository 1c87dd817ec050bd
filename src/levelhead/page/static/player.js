// The player of a scene: one step back, one forward, play and pause, a slider. Where the reader wants no motion it never
// plays by itself: the button is not there.

import { make, shape } from "./dom.js";

const PAUSE = 1400; // ms between steps
const SHAPES = { back: "M14 4L6 10l8 6zM4 4h2v12H4z", forward: "M6 4l8 6-8 6zM14 4h2v12h-2z", play: "M5 3l12 7-12 7z", pause: "M5 3h4v14H5zM11 3h4v14h-4z" };
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  /** `changed` is called with the step, 0 to steps − 1. */
  constructor(steps, words, changed) {
    this.steps = steps;
    this.words = words;
    this.changed = changed;
    this.step = 0;
    this.timer = 0;
    this.at = make("output", { class: "player-at" });
    this.slider = make("input", { type: "range", min: 0, max: steps - 1, step: 1, "aria-label": this.#said("label"), input: () => this.go(Number(this.slider.value)) });
    this.play = this.#button("play", () => (this.timer ? this.stop() : this.#start()));
    this.play.hidden = still.matches;
    this.ends = [this.#button("back", () => this.move(-1)), this.#button("forward", () => this.move(1))];
    const [back, forward] = this.ends;
    this.element = make("div", { class: "player" }, back, this.play, forward, this.slider, this.at);
  }

  /** Goes to a step and announces it. */
  go(step) {
    this.stop();
    this.#take(step);
  }

  /** One step forward or back; false where there is none. */
  move(by) {
    const step = this.step + by;
    if (step < 0 || step >= this.steps) return false;
    this.go(step);
    return true;
  }

  /** Shows a step without announcing it. */
  show(step) {
    this.step = step;
    this.slider.value = step;
    this.at.textContent = this.words.plain(this.#said("at"), { step: step + 1, steps: this.steps });
    this.slider.setAttribute("aria-valuetext", this.at.textContent);
    // Not `disabled`: a button that has the focus keeps it, and arrow keys still go on from there.
    [0, this.steps - 1].forEach((end, i) => this.ends[i].setAttribute("aria-disabled", String(step === end)));
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.#face("play");
  }

  #start() {
    if (this.step === this.steps - 1) this.#take(0);
    this.#face("pause");
    this.timer = setInterval(() => {
      if (!this.play.isConnected) return this.stop();
      this.#take(this.step + 1);
      if (this.step === this.steps - 1) this.stop();
    }, PAUSE);
  }

  #take(step) {
    this.show(step);
    this.changed(step);
  }

  #said(name) {
    return this.words.of("shell", "player", name);
  }

  #button(name, click) {
    return make("button", { type: "button", class: `player-${name}`, "aria-label": this.#said(name), title: this.#said(name), click }, icon(name));
  }

  #face(name) {
    this.play.setAttribute("aria-label", this.#said(name));
    this.play.setAttribute("title", this.#said(name));
    this.play.replaceChildren(icon(name));
  }
}

function icon(name) {
  return shape("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, shape("path", { d: SHAPES[name] }));
}
