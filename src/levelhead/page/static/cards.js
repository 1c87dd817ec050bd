// The cards of the course: all that are due, as a view of its own, or a chapter's, in its fold.

import { Deck } from "./deck.js";
import { make } from "./dom.js";
import { DAYS, SOON, due, forget } from "./leitner.js";
import { lasting } from "./storage.js";
import { Words } from "./words.js";

const { CARDS } = await import("./cards-data.js"); // so that a saved page can have it after its first chapter

const TYPED = "input, select, textarea";

/** The view of all cards. It has what the story needs of a chapter's view: element, move, go, focus, stop. */
export class CardsView {
  constructor({ catalogue, address }) {
    const words = new Words(catalogue);
    const say = (name) => words.of("cards", "words", name);
    const end = (deck) => [make("p", { class: "card-front" }, say("done")), button(words.plain(say("all"), { count: CARDS.length }), () => restart(deck, CARDS))];
    this.deck = new Deck({ cards: due(CARDS), catalogue, address, end });
    const rule = words.nodes(say("rule"), { soon: String(SOON), days: DAYS.join(", ") });
    this.element = make(
      "article", { class: "cards-view", "data-chapter": "cards" },
      make("h1", { tabindex: "-1" }, ...words.nodes(words.of("cards", "title"))),
      make("p", {}, ...words.nodes(say("about"))),
      this.deck.element,
      make("div", { class: "card-notes soft" }, make("p", {}, ...words.nodes(say("keys"))), make("p", {}, ...rule, " ", ...words.nodes(say(lasting() ? "kept" : "not_kept"))), this.#reset(say)),
    );
    this.pressed = (event) => {
      const other = event.altKey || event.ctrlKey || event.metaKey;
      if (!other && !event.target.closest?.(TYPED) && this.deck.key(event)) event.preventDefault();
    };
    addEventListener("keydown", this.pressed);
  }

  /** Arrow keys and swipes stay among the cards. */
  move(by) {
    this.deck.move(by);
    return true;
  }

  go() {}

  focus() {
    this.element.querySelector("h1").focus({ preventScroll: true });
  }

  stop() {
    removeEventListener("keydown", this.pressed);
  }

  /** Forgets what was known, at the second press. */
  #reset(say) {
    const said = make("span", { role: "status" });
    const reset = button(say("reset"), () => {
      if (reset.dataset.sure === undefined) {
        reset.dataset.sure = "";
        reset.textContent = say("sure");
        return;
      }
      forget();
      delete reset.dataset.sure;
      reset.textContent = say("reset");
      said.textContent = say("forgotten");
      this.deck.begin(due(CARDS));
    });
    reset.classList.add("card-reset");
    return make("p", {}, reset, " ", said);
  }
}

/** The cards of one chapter, all of them. */
export function chapterCards({ chapter, catalogue, all }) {
  const words = new Words(catalogue);
  const say = (name) => words.of("cards", "words", name);
  const cards = CARDS.filter((card) => card.chapter === chapter);
  const end = (deck) => [make("p", { class: "card-front" }, say("done_chapter")), button(say("more"), () => restart(deck, cards))];
  const deck = new Deck({ cards, catalogue, address: null, end });
  deck.element.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.altKey || event.ctrlKey || event.metaKey || (!by && !deck.key(event))) return;
    if (by) deck.move(by);
    event.preventDefault();
    event.stopPropagation(); // the story's arrows are for steps and chapters
  });
  return [deck.element, make("p", {}, make("a", { class: "to-cards", href: all, "data-to": "cards" }, say("to_all")))];
}

function restart(deck, cards) {
  deck.begin(cards);
  deck.face.focus();
}

function button(words, click) {
  return make("button", { type: "button", click }, words);
}
