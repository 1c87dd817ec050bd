// A panel: a figure that is requested when a parameter it needs has changed, and drawn in its turn. One request at a
// time: a newer one cancels the older, and an answer that comes too late is dropped.

import { breath, make } from "./dom.js";
import { Drawing } from "./figure.js";
import { askFigure } from "./source.js";
import { Said, foreign, label } from "./spoken.js";
import { settings } from "./state.js";

let queue = Promise.resolve(); // drawings, one after the other, so that the page stays answerable in between

export class Panel {
  /** `needs` names the parts of the state that the figure depends on. */
  constructor(place, { needs, hero = false }) {
    this.id = place.dataset.figure;
    this.place = place;
    this.needs = needs;
    this.hero = hero;
    this.drawing = new Drawing(place, { hero });
    this.trouble = make("p", { class: "trouble", role: "alert", hidden: true });
    this.place.append(this.trouble);
    label(place, "covered", "bench.predict.covered");
    this.own = null; // what the panel draws by itself
    this.asked = null;
    this.aborter = null;
    this.settled = Promise.resolve();
  }

  get figure() {
    return this.drawing.figure;
  }

  /** Requests the figure of this state, unless it is the one that is shown or under way. */
  load(state) {
    const wanted = settings(state, this.needs);
    const asked = JSON.stringify(wanted);
    if (asked !== this.asked) {
      this.asked = asked;
      this.settled = this.ask((signal) => askFigure(this.id, wanted, signal));
    }
    return this.settled;
  }

  /** Shows the answer, unless another request was sent in the meantime. */
  async ask(question) {
    this.aborter?.abort();
    const { signal } = (this.aborter = new AbortController());
    this.place.setAttribute("aria-busy", "true");
    try {
      const figure = await question(signal);
      if (!signal.aborted) await this.show(figure, signal);
    } catch (error) {
      if (!signal.aborted) this.fail(error);
    } finally {
      if (!signal.aborted) this.place.removeAttribute("aria-busy");
    }
  }

  /** Draws a figure; at once if this is the hero, else when those before it are done. */
  show(figure, signal = null) {
    const draw = async () => {
      if (signal?.aborted) return;
      this.tell("");
      await this.drawing.show(figure);
      await this.own?.drawn?.(figure);
      this.place.dataset.drawn = "";
      await breath();
    };
    if (this.hero) return draw();
    const drawn = queue.then(draw);
    queue = drawn.catch(() => {}); // the caller gets the error
    return drawn;
  }

  /** What went wrong, in words of the page. */
  tell(words) {
    this.trouble.textContent = words;
    this.trouble.hidden = !words;
    this.trouble.removeAttribute("lang");
  }

  fail(error) {
    this.tell(error.message);
    if (!(error instanceof Said)) foreign(this.trouble);
  }
}

/** Lets no other panel draw before this is done. */
export function first(promise) {
  queue = promise.catch(() => {});
}
