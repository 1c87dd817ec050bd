// A sentence through one head: its tokens coloured by what the chosen one gives them, with the scale and without.
// Recorded until the reader asks for a run; after that every choice is answered by the model on this machine.

import { choose } from "./inputs.js";
import { badge, make } from "./dom.js";
import { askSentence, grid } from "./source.js";
import { saved } from "./saved.js";
import { number, piece, say, text, told } from "./spoken.js";
import { LONGEST } from "./state.js";

const DEEPEST = 80; // % of the colour at weight 1: the word on it stays readable
const MODELS = { minilm: () => "MiniLM", smollm2: () => "SmolLM2", random: () => text("bench.sentence.random") };
const WIDTH = 512; // of the model with random weights

export class Sentence {
  constructor(panel, store, about) {
    this.panel = panel;
    this.store = store;
    this.text = make("input", { type: "text" });
    this.text.value = store.state.text;
    this.model = choose(piece("bench.sentence.model"), [], () => this.#again());
    this.installed = {};
    this.#offer();
    this.layer = choose(piece("bench.sentence.layer"), [], () => this.#again());
    this.head = choose(piece("bench.sentence.head"), [], () => this.#again());
    this.button = make("button", { type: "submit", class: "run" }, piece("bench.sentence.run"));
    const form = make(
      "form", { class: "ask", submit: (event) => this.#submit(event) },
      make("label", { class: "wide" }, piece("bench.sentence.label"), this.text), this.model.element, this.layer.element, this.head.element, this.button,
    );
    this.tokens = make("div", { class: "tokens" });
    this.block = panel.place.querySelector(".block");
    this.steps = make("div", { class: "scroll" });
    this.it = make("div", { class: "scroll" });
    this.progress = make("p", { class: "soft progress", role: "status", hidden: true });
    panel.drawing.above.append(form, ...(grid ? [saved("sentence")] : []), panel.trouble, this.progress, this.tokens);
    panel.drawing.below.append(make("div", { class: "pair" }, make("div", {}, make("div", { class: "scroll" }, this.block), this.steps), this.it));
    if (grid) [this.text, this.button, ...form.querySelectorAll("select")].forEach((input) => (input.disabled = true));
    about.then(({ models }) => {
      this.installed = models;
      this.#offer();
    });
  }

  /** The models, in words; those that are not installed cannot be chosen. */
  #offer() {
    const { value } = this.model.select;
    const options = Object.entries(MODELS).map(([name, called]) => {
      const model = text(`bench.sentence.models.${name}`, { model: called(), width: WIDTH });
      const absent = this.installed[name] === false;
      return [name, absent ? text("bench.sentence.absent", { model }) : model, absent];
    });
    this.model.put(options);
    if (value) this.model.select.value = value;
  }

  drawn({ extra, gauges, charts }) {
    this.extra = extra;
    this.source = charts[0]?.series[0]?.source ?? gauges[0]?.source ?? "recorded";
    this.#offer();
    this.model.select.value = extra.model;
    this.layer.fill(extra.layers, extra.layer);
    this.head.fill(extra.heads, extra.head);
    this.#colour(extra.token);
    this.steps.replaceChildren(table(["step", "shape", null], extra.steps.map((step) => [told(step.name), step.shape, told(step.about)])));
    const looks = extra.it.map((one) => [one.layer, one.head, one.to, number(one.weight)]);
    const where = make("p", {}, say(make("b"), "bench.sentence.looks", { token: extra.tokens[extra.token] }), badge(this.source));
    this.it.replaceChildren(...(looks.length ? [where, table(["layer", "head", "to", "weight"], looks)] : []));
  }

  /** Two lines of tokens; choosing one shows what it attends to, from weights that are already here. */
  #colour(row) {
    const { tokens, weights, unscaled } = this.extra;
    const line = (name, all) =>
      make(
        "div", { class: "line", role: "group", "aria-label": text(`bench.sentence.${name}`) }, make("span", { class: "soft" }, piece(`bench.sentence.${name}`), badge(this.source)),
        make("span", {}, ...tokens.map((token, i) => this.#token(token, i, row, all[row][i]))),
      );
    this.tokens.replaceChildren(
      make("p", { class: "soft" }, piece("bench.sentence.choose")),
      line("divided", weights), line("undivided", unscaled),
    );
  }

  #token(token, i, row, weight) {
    const label = text("bench.sentence.gets", { token, weight: number(weight) });
    const button = make(
      "button", { type: "button", class: i === row ? "token chosen" : "token", title: label, "aria-pressed": String(i === row), click: () => this.#choose(i) },
      token,
    );
    button.style.setProperty("--weight", `${Math.round(DEEPEST * (weight ?? 0))}%`);
    return button;
  }

  #choose(token) {
    this.#colour(token);
    this.tokens.querySelector(".chosen").focus();
    if (this.source === "live") this.#run(token);
  }

  #submit(event) {
    event.preventDefault();
    if (!this.text.value.trim()) {
      this.panel.tell(text("bench.sentence.empty"));
      this.text.focus();
      return;
    }
    if (this.text.value.length <= LONGEST) this.store.set({ text: this.text.value });
    this.#run();
  }

  /** Another head or model: at once, if the reader has asked for a run before. */
  #again() {
    if (this.source === "live") this.#run();
  }

  async #run(token = null) {
    const body = { text: this.text.value, model: this.model.select.value };
    const same = body.text === this.extra?.text && body.model === this.extra.model;
    if (same) Object.assign(body, { layer: this.layer.number(), head: this.head.number(), token: token ?? this.extra.token });
    else body.token = this.#kept(body.text);
    this.button.disabled = true;
    const done = this.#waiting(MODELS[body.model]());
    await this.panel.ask((signal) => askSentence(body, signal));
    done();
    this.button.disabled = false;
  }

  /** The word that is chosen now, where the new sentence has it too; else "it", or null for the server's choice. */
  #kept(text) {
    const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    const chosen = this.extra?.tokens[this.extra.token]?.toLowerCase();
    return [chosen, "it"].find((word) => words.includes(word)) ?? null;
  }

  /** Says what is waited for, with the seconds so far; what it returns takes it back. */
  #waiting(model) {
    const begun = performance.now();
    const seconds = make("span", { "aria-hidden": "true" });
    const tick = () => (seconds.textContent = ` ${Math.round((performance.now() - begun) / 1000)} s`);
    this.progress.replaceChildren(piece("bench.sentence.waiting", { model }), seconds);
    this.progress.hidden = false;
    this.panel.tell("");
    tick();
    const timer = setInterval(tick, 1000);
    return () => {
      clearInterval(timer);
      this.progress.hidden = true;
    };
  }
}

/** Names are keys of the panel's words; null: a column without one. */
function table(names, rows) {
  const cells = (tag, row) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell instanceof Node ? cell : String(cell))));
  return make("table", {}, make("thead", {}, cells("th", names.map((name) => (name ? piece(`bench.sentence.${name}`) : "")))), make("tbody", {}, ...rows.map((row) => cells("td", row))));
}
