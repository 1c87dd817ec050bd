// Texts of the lab's figures in another language. The lab writes them in English, for terminals and notebooks too. A
// catalogue has them by the English text, with {names} where numbers and other texts stand:
//   "{line}: {first} to {last}": "{line}: {first} se {last} tak"
// What a name holds is translated itself. A Name stays as it is, and a NAME is a single word that does. The first pattern
// that fits is taken. A text made of several, with ". ", "; " or ", " between them, is translated part by part.

const NAME = /\{(\w+)\}/;
export const SENTENCE = /(?<=\.) (?=[A-Z√]|\S+ →)/; // between two of them
const BETWEEN = [SENTENCE, /(?<=;) /, /(?<=,) /];
const NUMBER = /(?<![\w.]|[A-Za-z]-)\d[\d.]*(?:e[+-]?\d+)?/g; // float16 and top-1 are words
const WORD = /[^\W\d_][\w-]*/g;

export class Translation {
  /** `entries` by English text; `terms` are words that stay as they are. */
  constructor(entries, terms) {
    this.found = new Map(Object.entries(entries));
    this.terms = new Set(terms);
    this.patterns = Object.keys(entries).filter((key) => NAME.test(key)).map((key) => [key, pattern(key)]);
  }

  /** The text in the other language; null where the catalogue does not have it. */
  of(text) {
    if (!this.found.has(text)) this.found.set(text, this.#same(text) ? text : (this.#joined(text) ?? this.#matched(text)));
    return this.found.get(text);
  }

  /** Nothing to translate: numbers, formulas, technical terms. */
  #same(text) {
    const words = text.replace(NUMBER, " ").match(WORD) ?? [];
    return words.every((word) => word.length === 1 || this.terms.has(word.toLowerCase()));
  }

  #joined(text) {
    for (const between of BETWEEN) {
      const parts = text.split(between);
      if (parts.length === 1) continue;
      const own = parts.map((part, i) => this.#part(part, i < parts.length - 1));
      if (!own.includes(null)) return own.join(" ");
    }
    return null;
  }

  /** A part keeps the sign after which it was cut. */
  #part(part, cut) {
    const sign = cut ? (/[;,]$/.exec(part)?.[0] ?? "") : "";
    const found = this.of(part.slice(0, part.length - sign.length));
    return found === null ? null : found + sign;
  }

  #matched(text) {
    for (const [key, { names, whole }] of this.patterns) {
      const held = whole.exec(text)?.slice(1);
      const own = held?.map((part, i) => (/^[A-Z]/.test(names[i]) ? part : this.of(part)));
      if (own && !own.includes(null)) return this.found.get(key).replace(new RegExp(NAME, "g"), (_, name) => own[names.indexOf(name)]);
    }
    return null;
  }
}

function pattern(key) {
  const [first, ...rest] = key.split(NAME); // text, name, text, …
  const names = rest.filter((_, i) => i % 2 === 0);
  const literal = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return { names, whole: new RegExp(`^${literal(first)}${rest.map((part, i) => (i % 2 ? literal(part) : /^[A-Z]{2}/.test(part) ? "(\\S+)" : "(.+)")).join("")}$`, "s") };
}
