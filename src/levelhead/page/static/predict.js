// Predict, then see. With predict=1 in the link, figures are covered at the start and after every change, until the
// reader has said where the bubble will go.

import { piece } from "./spoken.js";

const QUESTION = document.getElementById("question");
const ANSWER = document.getElementById("answer");

export class Prediction {
  /** `covered` are the panels; the first is the one that has the bubble. */
  constructor(covered, revealed) {
    this.panels = covered;
    this.revealed = revealed;
    this.waiting = false;
    for (const button of QUESTION.querySelectorAll("button")) {
      button.addEventListener("click", () => this.#reveal(button.value));
    }
  }

  cover() {
    this.waiting = true;
    QUESTION.hidden = false;
    ANSWER.hidden = true;
    this.#each(true);
  }

  /** Without an answer: the reader has left the game. */
  lift() {
    this.waiting = false;
    QUESTION.hidden = ANSWER.hidden = true;
    this.#each(false);
  }

  async #reveal(guess) {
    const [hero] = this.panels;
    await hero.settled;
    const { level } = hero.figure.gauges[0];
    this.lift();
    ANSWER.replaceChildren(piece(`bench.predict.${guess === level ? "right" : "wrong"}`, { guess, level }));
    ANSWER.hidden = false;
    this.revealed();
  }

  #each(covered) {
    for (const { place } of this.panels) {
      place.classList.toggle("covered", covered);
      place.inert = covered;
    }
  }
}
