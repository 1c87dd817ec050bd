// Formulas in MathML, which have no language. The helpers build a chapter's own: `formulas` in its scene.

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

/** A formula on a line of its own; `spoken` is its text alternative, in symbols that have no language. */
export function display(spoken, ...parts) {
  const element = m("math", ...parts);
  element.setAttribute("display", "block");
  element.setAttribute("aria-label", spoken);
  return element;
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
