// Formulas in MathML, which have no language. The helpers build a chapter's own: `formulas` in its scene.

import { make } from "./dom.js";

const SPACE = "http://www.w3.org/1998/Math/MathML";

/** An element of MathML; texts become what they look like: letters <mi>, digits <mn>, everything else <mo>. */
export function m(tag, ...children) {
  const element = document.createElementNS(SPACE, tag);
  element.append(...children.flatMap((child) => (typeof child === "string" ? tokens(child) : [child])));
  return element;
}

export const row = (...parts) => m("mrow", ...parts);
export const sub = (base, index) => m("msub", row(base), row(index));
export const sup = (base, power) => m("msup", row(base), row(power));
export const subsup = (base, index, power) => m("msubsup", row(base), row(index), row(power));
export const frac = (above, below) => m("mfrac", row(above), row(below));
export const root = (...parts) => m("msqrt", ...parts);
export const sum = (below, above) => (above ? m("munderover", row("∑"), row(below), row(above)) : m("munder", row("∑"), row(below)));
export const gap = (width = "1.2em") => {
  const element = m("mspace");
  element.setAttribute("width", width);
  return element;
};

const LOWERED = 0.25; // of the height of a letter: a font for mathematics lowers an index by more
let probed = false;

/** Without a font for mathematics, as on many phones, browsers hardly lower an index, and √d_k looks like √dk. Then the
 * style sheet lowers it. */
function probe() {
  if (probed) return;
  probed = true;
  const sample = m("math", sub("x", "x"));
  sample.setAttribute("class", "unseen");
  document.body.append(sample);
  const [letter, index] = [...sample.firstChild.children].map((one) => one.getBoundingClientRect());
  document.documentElement.classList.toggle("flat-indices", index.bottom - letter.bottom < LOWERED * letter.height);
  sample.remove();
}

const BREAKS = ["=", "≈", "≤", "<", "⟹", "+"];

/** A formula on a line of its own; `spoken` is its text alternative, in symbols that have no language. Browsers do not
 * break formulas: this one is in pieces, which go on in the next line where there is no room. A list of equations breaks
 * between them, any other formula before a relation or a plus. */
export function display(spoken, ...parts) {
  const ends = (part) => part === "," || part.localName === "mspace";
  const list = parts.some(ends);
  const pieces = [[]];
  parts.forEach((part, i) => {
    if (list ? i && ends(parts[i - 1]) : i && BREAKS.includes(part)) pieces.push([]);
    if (part.localName !== "mspace") pieces[pieces.length - 1].push(part);
  });
  const drawn = pieces.filter((piece) => piece.length).map((piece) => {
    const element = m("math", ...piece);
    element.setAttribute("displaystyle", "true");
    if (BREAKS.includes(piece[0])) element.firstChild.setAttribute("form", "infix"); // or it has no space around it
    return element;
  });
  probe();
  return make("div", { class: `equation${list ? " list" : ""}`, role: "math", "aria-label": spoken }, ...drawn);
}

const TOKEN = /(\p{L}+)|(\d+(?:\.\d+)?)|(\S)/gu;

function tokens(text) {
  return [...text.matchAll(TOKEN)].map(([found, letters, digits]) => {
    const element = document.createElementNS(SPACE, letters ? "mi" : digits ? "mn" : "mo");
    element.textContent = found;
    return element;
  });
}

/** Formulas that several chapters use. */
export const SHARED = {
  softmax: () => display("p_i = exp(s_i) / sum_j exp(s_j)", sub("p", "i"), "=", frac(sup("e", sub("s", "i")), row(sum("j"), sup("e", sub("s", "j"))))),
  attention: () =>
    display(
      "Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V",
      "Attention", row("(", "Q", ",", "K", ",", "V", ")"), "=", "softmax", row("(", frac(row("Q", sup("K", "⊤")), root(sub("d", "k"))), ")"), "V",
    ),
};
