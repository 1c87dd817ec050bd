// Words of a catalogue as elements. Markup: {number}, *emphasis*, `code`, $formula in a line$, and [[formula]] alone.
// Text only ever goes in as text.

import { make } from "./dom.js";
import { sideways } from "./edges.js";
import { spelled } from "./spelled.js";

const MARKUP = /(`[^`]+`)|(\$[^$]+\$)|(\*[^*]+\*)|(\{\w+\})/;
const CHOSEN = "chosen"; // `where` of a number that somebody chose: it needs no source
const FORMULA = /^\[\[([\w-]+)\]\]$/;
const MATH = /([A-Za-z]+|\p{L})|([_^])(\([^)]*\)|[−-]?[\p{L}\d]+)|(.)/gsu;

export class Words {
  /** `numbers` are those of the chapter, `formulas` make its MathML, by name. */
  constructor(catalogue, { numbers = {}, formulas = {} } = {}) {
    this.catalogue = catalogue;
    this.numbers = numbers;
    this.formulas = formulas;
  }

  /** A part of the catalogue, for example `of("shell", "player", "play")`. */
  of(...path) {
    const found = path.reduce((part, name) => part?.[name], this.catalogue);
    if (found === undefined) throw new Error(`no words for ${path.join(".")}`);
    return found;
  }

  /** A text with {names} replaced, by the values or by the chapter's numbers; for labels, which hold text alone. */
  plain(text, values = {}) {
    const filled = text.replace(/\{(\w+)\}/g, (_, name) => this.#value(name, values));
    return filled.replace(/[`*$]/g, "");
  }

  /** A text as nodes. `values` are texts or nodes for {names} that are no numbers of the chapter. */
  nodes(text, values = {}) {
    return text.split(MARKUP).filter(Boolean).map((part) => {
      if (/^`.+`$/.test(part)) return make("code", {}, part.slice(1, -1));
      if (/^\$.+\$$/.test(part)) return math(part.slice(1, -1));
      if (/^\*.+\*$/s.test(part)) return make("em", {}, ...this.nodes(part.slice(1, -1), values));
      const name = /^\{(\w+)\}$/.exec(part)?.[1];
      if (!name) return spelled(part);
      if (Object.hasOwn(values, name)) return values[name];
      return this.number(name);
    });
  }

  /** Paragraphs; a line that is a formula stands alone. */
  paragraphs(texts, values = {}) {
    return texts.map((text) => {
      const formula = FORMULA.exec(text)?.[1];
      return formula ? this.formula(formula) : make("p", {}, ...this.nodes(text, values));
    });
  }

  formula(name) {
    if (!Object.hasOwn(this.formulas, name)) throw new Error(`no formula ${name}`);
    const formula = this.formulas[name]();
    return sideways(make("div", { class: "display" }, formula), formula.getAttribute("aria-label"));
  }

  /** A number of the chapter, which says where it comes from. */
  number(name) {
    if (!Object.hasOwn(this.numbers, name)) throw new Error(`no number ${name}`);
    const { text, source, where } = this.numbers[name];
    if (where === CHOSEN) return make("span", { class: "number chosen" }, text);
    return this.marked(text, source, where);
  }

  /** Any number with its source: live, recorded, theory, or here, where the browser has computed it. */
  marked(text, source, where = "") {
    const title = this.of("shell", "sources", source) + (where ? ` (${where})` : "");
    return make("span", { class: `number ${source}`, title }, text);
  }

  #value(name, values) {
    if (Object.hasOwn(values, name)) return values[name];
    if (Object.hasOwn(this.numbers, name)) return this.numbers[name].text;
    throw new Error(`nothing for {${name}}`);
  }
}

/** A short formula: single letters slanted, _ and ^ set low and high. */
function math(text) {
  const found = make("span", { class: "math" });
  for (const [, letters, sign, raised, other] of text.matchAll(MATH)) {
    if (letters) found.append(letters.length === 1 ? make("i", {}, letters) : letters);
    else if (sign) found.append(make(sign === "^" ? "sup" : "sub", {}, ...math(raised.replace(/^\(|\)$/g, "")).childNodes));
    else found.append(other);
  }
  return found;
}
