// One chapter: its question; after the answer its scene and its text; then what there is to unfold.

import { make } from "./dom.js";
import { downwards } from "./edges.js";
import { SHARED } from "./formulas.js";
import { Player } from "./player.js";
import { Chart, bars, gauge } from "./plot.js";
import { question } from "./question.js";
import { unfolds } from "./unfold.js";
import { Words } from "./words.js";

export class ChapterView {
  /** `module` is the chapter's scene; the chapter is number `place` of `count`, from 1; `answered(option)` and `stepped(step)` tell the story what the reader did. */
  constructor({ chapter, catalogue, module, place, count, given, step, answered, stepped }) {
    this.chapter = chapter;
    this.module = module;
    this.given = given;
    this.stepped = stepped;
    this.words = new Words(catalogue, { numbers: chapter.numbers, formulas: { ...SHARED, ...module.formulas } });
    this.player = null;
    const own = catalogue[chapter.id];
    this.place = make("div", { class: "scene" });
    const at = this.words.plain(this.words.of("shell", "chapter"), { number: place, count });
    const head = [make("p", { class: "course" }, ...this.words.nodes(this.words.of("shell", "title")), make("span", { class: "soft" }, at)), make("h1", { tabindex: "-1" }, ...this.words.nodes(own.title)), ...this.words.paragraphs(own.intro ?? [])];
    head.push(question({ chapter, words: this.words, given, answered }));
    const rest = given ? [...this.words.paragraphs(own.text), this.#takeaway(own), ...unfolds(chapter, this.words, () => module.more?.(this.#tools()) ?? []), ...this.#pause(own)] : [];
    this.element = make(
      "article", { class: `chapter${given ? " open" : ""}`, "data-chapter": chapter.id },
      make("div", { class: "chapter-head" }, ...head),
      make("div", { class: "chapter-scene" }, this.place),
      make("div", { class: "chapter-text" }, ...rest),
    );
    this.#scene(step);
    this.sized = downwards(this.place, this.words.plain(own.title));
  }

  /** One step forward or back; false where the scene has none. */
  move(by) {
    return this.player?.move(by) ?? false;
  }

  /** The step of another address. */
  go(step) {
    if (!this.player || this.player.step === step) return;
    this.player.stop();
    this.player.show(step);
    this.#step(step);
  }

  focus() {
    (this.element.querySelector(".is") ?? this.element.querySelector("h1")).focus({ preventScroll: true });
  }

  stop() {
    this.sized();
    this.player?.stop();
    this.shown?.stop?.();
  }

  /** What a scene is made with. */
  #tools() {
    const { words, chapter } = this;
    return {
      data: chapter.data, numbers: chapter.numbers, words, own: (...path) => words.of(chapter.id, ...path),
      plot: {
        bars, gauge: (source) => gauge(words, source),
        chart: (name, options) => new Chart({ ...options, words: words.of(chapter.id, "charts", name), library: words }),
      },
    };
  }

  #scene(step) {
    const { words, chapter, module } = this;
    const tools = this.#tools();
    if (!this.given) {
      const covered = make("p", { class: "covered-words" }, words.of("shell", "covered"));
      if (module.setup) module.setup(this.place, tools);
      this.place.append(covered);
      this.place.classList.add("before");
      return;
    }
    this.shown = module.scene(this.place, tools) ?? {};
    if (!chapter.steps) return;
    this.said = make("p", { class: "step-words", "aria-live": "polite" });
    this.player = new Player(chapter.steps, words, (at) => {
      this.#step(at);
      this.#begin();
      this.stepped(at);
    });
    // The controls stand above all that changes, and under them the longest sentence has its room: nothing moves them.
    const room = words.of(chapter.id, "steps").map((text) => make("p", { class: "step-room", "aria-hidden": "true" }, ...words.nodes(text)));
    this.place.prepend(this.player.element, make("div", { class: "step-lines" }, this.said, ...room));
    this.place.classList.add("stepped");
    this.player.show(step);
    this.#step(step);
  }

  #step(step) {
    this.said.replaceChildren(...this.words.nodes(this.words.of(this.chapter.id, "steps")[step]));
    this.shown.go?.(step);
  }

  /** The sentence of a step may have been scrolled under the controls: a new step begins in sight, and they stay where
   * they are. Beside the text the scene does not scroll with it, and the text stays. */
  #begin() {
    const { top, bottom } = this.place.getBoundingClientRect();
    const least = parseFloat(getComputedStyle(this.player.element).top);
    const above = top + this.place.clientTop - least;
    if (above < 0 && bottom > 0 && getComputedStyle(this.place).position === "static") scrollBy({ top: above, behavior: "instant" });
  }

  /** A place to rest between two chapters: what is known so far, what follows. Most chapters have none. */
  #pause(own) {
    if (!own.pause) return [];
    return [make("section", { class: "pause", "aria-labelledby": "pause" }, make("h2", { id: "pause" }, this.words.of("shell", "pause")), ...this.words.paragraphs(own.pause))];
  }

  #takeaway(own) {
    return make("div", { class: "takeaway" }, make("p", { class: "kicker" }, this.words.of("shell", "takeaway")), make("p", {}, ...this.words.nodes(own.takeaway)));
  }
}
