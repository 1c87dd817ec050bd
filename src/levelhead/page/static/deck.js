// A row of cards, one at a time: turned by a click or a key, then "again" or "knew it".

import { make } from "./dom.js";
import { SOON, ahead, learned } from "./leitner.js";
import { Words } from "./words.js";

const CHOSEN = "chosen";
const CONTROL = "a, button, select, input, summary, .number[title]";

export class Deck {
  /** `cards` in their order; `address(chapter)` is a link to a chapter, null for none; `end(deck)` makes what is shown after the last card. */
  constructor({ cards, catalogue, address, end }) {
    this.catalogue = catalogue;
    this.words = new Words(catalogue);
    this.address = address;
    this.end = end;
    this.face = make("div", { class: "card-face", tabindex: "-1", role: "group", click: ({ target }) => this.#clicked(target) });
    this.tools = make("div", { class: "card-tools" });
    this.said = make("p", { class: "card-said soft", "aria-live": "polite" });
    this.element = make("div", { class: "deck" }, this.face, this.tools, this.said);
    this.begin(cards);
  }

  /** Starts with these cards. */
  begin(cards) {
    this.queue = [...cards];
    this.at = 0;
    this.turned = false;
    this.#draw();
  }

  /** To the next card or the one before; nothing is kept. */
  move(by) {
    const at = this.at + by;
    if (at < 0 || at > this.queue.length) return;
    this.at = at;
    this.turned = false;
    this.#draw();
    this.face.focus();
  }

  /** A key that was pressed; whether it was one of the deck's. */
  key({ key, target }) {
    const card = this.queue[this.at];
    if (!card) return false;
    if ((key === " " || key === "Enter") && !target.closest?.(CONTROL)) this.turn();
    else if (this.turned && key === "1") this.answer(false);
    else if (this.turned && key === "2") this.answer(true);
    else return false;
    return true;
  }

  turn() {
    this.turned = !this.turned;
    this.#draw();
    this.face.focus();
  }

  /** Whether the reader knew the card. One that was missed comes again in this row. */
  answer(knew) {
    const card = this.queue[this.at];
    learned(card.id, knew);
    if (!knew) {
      this.queue = this.queue.filter((one, i) => i <= this.at || one !== card);
      this.queue.splice(this.at + 1 + SOON, 0, card);
    }
    this.move(1);
  }

  #draw() {
    const card = this.queue[this.at];
    this.said.textContent = this.#left();
    if (!card) {
      this.face.setAttribute("aria-label", this.words.of("shell", "cards"));
      this.face.className = "card-face card-end";
      this.face.replaceChildren(...this.end(this));
      this.tools.replaceChildren();
      return;
    }
    const side = this.turned ? "answer" : "question";
    this.face.setAttribute("aria-label", this.#say(side));
    this.face.className = `card-face card-${this.turned ? "turned" : "asks"}`;
    this.face.dataset.card = card.id;
    this.face.replaceChildren(make("p", { class: "kicker" }, this.#say(side)), ...this.#content(card));
    const around = (name, by) => make("button", { type: "button", class: `card-${name}`, "aria-label": this.#say(name), title: this.#say(name), disabled: this.at + by < 0, click: () => this.move(by) }, by < 0 ? "←" : "→");
    const between = this.turned
      ? [this.#button("again", () => this.answer(false), this.#when(card, false)), this.#button("knew", () => this.answer(true), this.#when(card, true))]
      : [this.#button("turn", () => this.turn())];
    this.tools.replaceChildren(around("previous", -1), ...between, around("next", 1));
  }

  #content(card) {
    const words = new Words(this.catalogue, { numbers: card.numbers });
    const { front, back } = words.of("cards", "deck", card.id);
    const asked = make("p", { class: "card-front" }, ...words.nodes(front));
    return this.turned ? [asked, make("p", { class: "card-back" }, ...words.nodes(back)), this.#sources(card)] : [asked];
  }

  /** What the card rests on: its chapter, its claims, where its numbers come from. */
  #sources(card) {
    const title = this.catalogue[card.chapter]?.title;
    const lines = [];
    if (this.address && title) lines.push(make("a", { href: this.address(card.chapter), "data-to": card.chapter }, ...this.words.nodes(this.#say("chapter"), { title: this.words.plain(title) })));
    if (card.claims.length) {
      const claim = ({ id, verdict }) => make("a", { class: "card-claim", href: `#claim-${id}` }, make("b", {}, id), " ", this.words.of("shell", "verdicts", verdict));
      lines.push(make("span", {}, `${this.#say("claims")}: `, ...card.claims.map(claim)));
    }
    const places = new Set(Object.values(card.numbers).map(({ where }) => where).filter((where) => where !== CHOSEN));
    if (places.size) lines.push(make("span", {}, `${this.#say("measured")}: ${[...places].join("; ")}`));
    return make("div", { class: "card-sources soft" }, ...lines);
  }

  #clicked(target) {
    if (this.queue[this.at] && !target.closest(CONTROL) && !String(getSelection())) this.turn();
  }

  #left() {
    const left = this.queue.length - this.at;
    if (left < 1) return "";
    return left === 1 ? this.#say("last") : this.words.plain(this.#say("left"), { left });
  }

  /** When this card comes again, said before the reader answers: afterwards another card is there. */
  #when(card, knew) {
    const days = knew ? ahead(card.id) : 0;
    return this.words.plain(this.#say(!knew ? "soon" : days === 1 ? "tomorrow" : "later"), { days });
  }

  #button(name, click, when = "") {
    return make("button", { type: "button", class: `card-${name}`, click }, make("span", {}, this.#say(name)), when ? make("span", { class: "card-when" }, when) : null);
  }

  #say(name) {
    return this.words.of("cards", "words", name);
  }
}
