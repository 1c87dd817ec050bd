// Elements, and numbers as text. Text only ever goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are true, false or a function mean what they say. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Where a number comes from, as a small label in the line style of its kind. */
export function badge(source) {
  return make("b", { class: `badge ${source}` }, source);
}

/** Four digits at most, the way a person would write them. */
export function number(x) {
  if (typeof x !== "number") return String(x);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) return scientific(x);
  const text = size >= 1000 && Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4)));
  return text.replace("-", "−");
}

function scientific(x) {
  const [digits, power] = x.toExponential(2).split("e");
  const raised = [...String(Number(power))].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("");
  return `${Number(digits)}·10${raised}`.replace("-", "−");
}

/** Rests until what has been changed is on the screen, so that a long row of drawings never freezes the page. */
export function breath() {
  return new Promise((resolve) => setTimeout(resolve, 0));
}
