// The formulas of the lab bench in MathML, which have no language: those on a line of their own, and those in a text.

import { display, frac, gap, m, root, row, sub, subsup, sum, sup } from "./formulas.js";

const d_k = () => sub("d", "k");
const primed = (letter) => {
  const prime = m("mo");
  prime.textContent = "′";
  prime.setAttribute("lspace", "0");
  prime.setAttribute("rspace", "0");
  return row(letter, prime);
};

export const FORMULAS = {
  variance: () =>
    display(
      "Var(q·k) = sum_i Var(q_i k_i) = d_k",
      "Var", row("(", "q", "·", "k", ")"), "=", sum("i=1", d_k()), "Var", row("(", sub("q", "i"), sub("k", "i"), ")"), "=", d_k(),
    ),
  power: () =>
    display("Var(q·k / d_k^p) = d_k^(1 − 2p)", "Var", row("(", frac(row("q", "·", "k"), subsup("d", "k", "p")), ")"), "=", subsup("d", "k", row("1", "−", "2", "p"))),
  jacobian: () => display("∂p/∂s = J = diag(p) − p p^T", frac(row("∂", "p"), row("∂", "s")), "=", "J", "=", "diag", row("(", "p", ")"), "−", "p", sup("p", "⊤")),
  additive: () =>
    display(
      "s = v^T tanh(W_q q + W_k k), |s| ≤ ‖v‖_1",
      "s", "=", sup("v", "⊤"), "tanh", row("(", sub("W", "q"), "q", "+", sub("W", "k"), "k", ")"), ",", gap(), row("|", "s", "|"), "≤", sub(row("‖", "v", "‖"), "1"),
    ),
  correlated: () => display("E[q·k] = ρ σ^2 d_k", "E", row("[", "q", "·", "k", "]"), "=", "ρ", sup("σ", "2"), d_k()),
  online: () =>
    display(
      "m' = max(m, s), l' = l exp(m − m') + exp(s − m')",
      primed("m"), "=", "max", row("(", "m", ",", "s", ")"), ",", gap(),
      primed("l"), "=", "l", sup("e", row("m", "−", primed("m"))), "+", sup("e", row("s", "−", primed("m"))),
    ),
};

/** In a text, by the name of their place. */
export const INLINE = {
  root: () => m("math", root(d_k())),
  entropy: () => m("math", "H", "=", "−", "∑", "p", gap("0.2em"), "ln", gap("0.2em"), "p"),
  largest: () => m("math", "ln", gap("0.2em"), "n"),
};
