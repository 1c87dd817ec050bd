// What surrounds a chapter: the bar with contents, language and the way to the lab bench; notes; back and next.

import { make } from "./dom.js";
import { vial } from "./gauge.js";
import { inLanguage, selector } from "./languages.js";
import { CARDS, write } from "./router.js";
import { documentation } from "./share.js";
import { CHAPTERS } from "./story-data.js";

export class Shell {
  constructor(place, { go, speak }) {
    this.place = place;
    this.go = go;
    this.speak = speak;
    this.bench = "#bench";
    this.where = make("p", { class: "where", role: "status", hidden: true });
    place.addEventListener("click", ({ target }) => this.#where(target.closest(".number[title]")));
    addEventListener("keydown", ({ key }) => key === "Escape" && (this.#close(), this.#where(null)));
    addEventListener("click", ({ target }) => !target.closest?.(".contents") && this.#close());
  }

  /** Draws everything around the chapter's element. */
  show({ words, language, state, view, notes }) {
    this.words = words;
    document.documentElement.lang = language;
    document.title = `${words.plain(words.of(state.chapter, "title"))} · levelhead`;
    this.state = state;
    this.where.hidden = true;
    this.noted = notes.length > 0;
    const said = notes.map(([key, given]) => words.plain(words.of("shell", "notes", key), { given }));
    this.main = make("main", { id: "chapter", tabindex: "-1" }, view);
    this.place.replaceChildren(
      this.#skip(), this.#bar(language),
      ...(said.length ? [make("p", notes.some(([key]) => key === "failed") ? { class: "notes trouble", role: "alert" } : { class: "notes", role: "status" }, said.join(" "))] : []),
      this.main, this.#ends(), this.where,
    );
  }

  /** The state has changed, but not what is drawn: links follow. */
  follow(state) {
    this.state = state;
    for (const link of this.place.querySelectorAll("a[data-to]")) link.href = write({ ...state, chapter: link.dataset.to, step: 0 });
    this.#lead();
    this.place.querySelector(".notes")?.remove();
    this.noted = false;
  }

  /** The bench's last address. */
  leadTo(bench) {
    this.bench = bench;
    this.#lead();
  }

  /** Whether something is being loaded. */
  busy(loading) {
    if (loading) this.place.setAttribute("aria-busy", "true");
    else this.place.removeAttribute("aria-busy");
  }

  /** What a reader calls a chapter. */
  named(id) {
    return this.words ? `“${this.words.plain(this.words.of(id, "title"))}”` : `“${id}”`;
  }

  /** Nothing can be shown: there are no words either. */
  fail(missing) {
    this.place.replaceChildren(make("p", { class: "notes trouble", role: "alert" }, `${missing} did not load. Reload the page.`));
  }

  #skip() {
    const click = (event) => {
      event.preventDefault(); // the address after the # is the story's
      this.main.focus();
    };
    return make("a", { class: "skip", href: "#chapter", click }, this.words.of("shell", "to_chapter"));
  }

  #bar(language) {
    const say = (name) => this.words.of("shell", name);
    const select = selector(say("language"), language, this.speak);
    return make(
      "header", { class: "top-bar" },
      make("a", { class: "sign", href: this.#address(CHAPTERS[0].id), "data-to": CHAPTERS[0].id }, vial("level", 0.5), make("b", {}, "levelhead")),
      this.#contents(),
      make("span", { class: "bar-end" }, ...this.#documentation(), select, make("a", { class: "to-bench", href: inLanguage(this.bench, this.state.lang), "data-bench": true }, say("bench"))),
    );
  }

  /** On a site, or with one set; in the bar where there is room, else in the contents. */
  #documentation() {
    const href = documentation();
    return href ? [make("a", { class: "to-docs", href }, this.words.of("shell", "documentation"))] : [];
  }

  /** The table of contents: dots in the bar, titles when it is open. */
  #contents() {
    const now = CHAPTERS.findIndex(({ id }) => id === this.state.chapter);
    const title = (id) => this.words.nodes(this.words.of(id, "title"));
    const dots = CHAPTERS.map(({ id }, i) => make("span", { class: `dot${this.state.answers[id] ? " done" : ""}${i === now ? " now" : ""}`, title: this.words.plain(this.words.of(id, "title")) }));
    const number = now + 1; // 0: the cards
    const at = number ? this.words.plain(this.words.of("shell", "chapter"), { number, count: CHAPTERS.length }) : this.words.of("shell", "cards");
    const items = CHAPTERS.map(({ id }, i) =>
      make(
        "li", {},
        make("a", { href: this.#address(id), "data-to": id, "aria-current": i === now ? "page" : null }, make("span", { class: `dot${this.state.answers[id] ? " done" : ""}` }), make("span", { class: "place" }, String(i + 1)), make("span", {}, ...title(id))),
      ),
    );
    const label = `${this.words.of("shell", "contents")}. ${at}`;
    return make(
      "details", { class: "contents" },
      make("summary", { "aria-label": label }, make("span", { class: "contents-title" }, this.words.of("shell", "contents")), make("span", { class: "contents-at", "aria-hidden": "true" }, number ? `${number} / ${CHAPTERS.length}` : ""), make("span", { class: "dots", "aria-hidden": "true" }, ...dots)),
      make("nav", { "aria-label": this.words.of("shell", "contents") }, make("ol", {}, ...items), this.#cards(), ...this.#documentation(), make("p", { class: "soft" }, this.words.of("shell", "keys"))),
    );
  }

  /** The way to all cards, below the chapters. */
  #cards() {
    return make("a", { class: "to-cards", href: this.#address(CARDS), "data-to": CARDS, "aria-current": this.state.chapter === CARDS ? "page" : null }, this.words.of("shell", "cards"));
  }

  #ends() {
    const now = CHAPTERS.findIndex(({ id }) => id === this.state.chapter);
    if (now < 0) return make("footer", { class: "ends cards-view" }, this.#kinds());
    const link = (by, name) => {
      const chapter = CHAPTERS[now + by];
      if (!chapter) return make("span");
      const title = make("span", { class: "end-title" }, ...this.words.nodes(this.words.of(chapter.id, "title")));
      return make("a", { class: `end ${name}`, href: this.#address(chapter.id), "data-to": chapter.id }, make("span", { class: "soft" }, this.words.of("shell", name)), title);
    };
    const last = now === CHAPTERS.length - 1 ? make("a", { class: "end next", href: inLanguage(this.bench, this.state.lang), "data-bench": true }, make("span", { class: "soft" }, this.words.of("shell", "bench")), make("span", { class: "end-title" }, this.words.of("shell", "end"))) : link(1, "next");
    return make("footer", { class: "ends" }, make("nav", {}, link(-1, "previous"), last), this.#kinds());
  }

  /** Numbers say where they come from; the line below them says what kind they are. */
  #kinds() {
    const kinds = Object.entries(this.words.of("shell", "kinds")).map(([kind, said]) => [kind, make("span", { class: `number ${kind}` }, said)]);
    return make("p", { class: "soft" }, ...this.words.nodes(this.words.of("shell", "numbers"), Object.fromEntries(kinds)));
  }

  #lead() {
    for (const link of this.place.querySelectorAll("a[data-bench]")) link.href = inLanguage(this.bench, this.state.lang);
  }

  #address(id) {
    return write({ ...this.state, chapter: id, step: 0 });
  }

  #where(number) {
    this.where.hidden = !number;
    if (number) this.where.replaceChildren(make("b", {}, number.textContent), " ", number.title);
  }

  #close() {
    const open = this.place.querySelector(".contents[open]");
    if (open) open.open = false;
  }
}
