// What the lab bench says, in the language that is chosen: the words of the catalogue, and the lab's texts in translation.
// An element that was given words by `say` or `label`, or by `data-words` in the index, gets them again in another language.

import { FORMULAS, INLINE } from "./bench-formulas.js";
import { WORDS } from "./bench-data.js";
import { HEADS } from "./declared.js";
import { badge, make, number as written } from "./dom.js";
import { SHARED } from "./formulas.js";
import { spelled } from "./spelled.js";
import { SENTENCE, Translation } from "./translation.js";
import { Words } from "./words.js";

const FOREIGN = "en"; // the lab's language
const ATTRIBUTES = { label: "aria-label", title: "title", covered: "data-cover" };
const given = new WeakMap(); // element → what its words are filled with
let words = null;
let lab = null; // null: English, which needs no translation

/** Takes the words of another language. What stands on the page follows with `fill`. */
export async function learn(language) {
  const { WORDS: catalogue } = await WORDS[language]();
  return () => {
    words = new Words(catalogue, { formulas: { ...SHARED, ...FORMULAS } });
    lab = catalogue.figures ? new Translation(catalogue.figures, catalogue.terms) : null;
  };
}

/** Whether some texts of the bench are in another language than the rest. */
export const mixed = () => lab !== null;

/** The words at a path of the catalogue as plain text. */
export function text(path, values = {}) {
  return words.plain(at(path), values);
}

/** An element with these words. */
export function say(element, path, values = {}) {
  element.dataset.words = path;
  given.set(element, values);
  write(element);
  return element;
}

/** The same for an attribute: `label`, `title`, or `covered`, which stands on a covered figure. */
export function label(element, name, path, values = {}) {
  element.dataset[name] = path;
  given.set(element, { ...given.get(element), ...values });
  element.setAttribute(ATTRIBUTES[name], text(path, values));
  return element;
}

/** A piece of text with these words. */
export const piece = (path, values = {}) => say(make("span"), path, values);

/** Gives every element below its words. */
export function fill(root) {
  root.querySelectorAll("[data-words]").forEach(write);
  for (const [name, attribute] of Object.entries(ATTRIBUTES)) {
    for (const element of root.querySelectorAll(`[data-${name}]`)) element.setAttribute(attribute, text(element.dataset[name], given.get(element)));
  }
}

function write(element) {
  const found = at(element.dataset.words);
  if (Array.isArray(found)) element.replaceChildren(...words.paragraphs(found, shared()));
  else element.replaceChildren(...words.nodes(found, { ...shared(), ...given.get(element) }));
}

/** What any text of the bench may hold. */
function shared() {
  const badges = ["live", "recorded", "theory"].map((source) => [source, badge(source)]);
  const inline = Object.entries(INLINE).map(([name, formula]) => [name, formula()]);
  return { heads: String(HEADS), ...Object.fromEntries([...badges, ...inline]) };
}

function at(path) {
  return words.of(...path.split("."));
}

// ---- the lab's texts. Where the browser itself makes a part of a figure, the text is a function that returns words.

/** A text of a figure as plain text. */
export function translated(text) {
  if (typeof text === "function") return text();
  return lab?.of(text) ?? text;
}

/** A text of a figure as an element, which says so where it is not translated. */
export function told(text) {
  const own = typeof text === "function" || !lab ? translated(text) : lab.of(text);
  const found = spelled(own ?? text);
  if (own === null) found.lang = FOREIGN;
  return found;
}

/** A longer text as elements, one per sentence. */
export function sentences(text) {
  return typeof text === "function" ? [told(text)] : text.split(SENTENCE).map(told);
}

/** A number as words. */
export function number(x) {
  return x === null || x === undefined ? text("bench.figure.not_finite") : written(x);
}

/** An element whose words come from elsewhere, in English. */
export function foreign(element) {
  if (lab) element.lang = FOREIGN;
  return element;
}

/** An error with words of the catalogue. Others are the server's or the browser's, in English. */
export class Said extends Error {}
