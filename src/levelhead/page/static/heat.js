// A row of many numbers as a strip of colours: the first of them written out, every one readable by pointing at it, or
// with the arrow keys where the strip has the focus.

import { make, shape } from "./dom.js";

const FULL = 2.5; // a number of this size has the full colour
const WRITTEN = 8;

/** Two digits after the point, as columns of a table need them. */
export function fixed(x, digits = 2) {
  return x.toFixed(digits).replace("-", "−");
}

/** A strip for each row. `say(row, place, value)` is what is read out of a number. Rows: {name, label, values, full?,
 * digits?, framed?}: a text for who cannot see it, what stands before it, its numbers; the first `framed` have a frame. */
export function heats(rows, say) {
  const read = make("output", { class: "heat-read" }, "\u00a0");
  return make("div", { class: "heats" }, ...rows.map((row) => strip(row, say, read)), read);
}

function strip(row, say, read) {
  const { name, label, values, full = FULL, digits = 2, framed } = row;
  const at = shape("rect", { class: "heat-at", y: 0, height: 1, width: Math.max(1, values.length / 120), visibility: "hidden" });
  const cells = values.map((x, i) => shape("rect", { x: i, y: 0, width: 1.02, height: 1, class: x < 0 ? "minus" : "plus", "fill-opacity": Math.min(Math.abs(x) / full, 1).toFixed(2) }));
  const svg = shape("svg", { viewBox: `0 0 ${values.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...cells, at);
  if (framed) svg.append(shape("rect", { class: "heat-frame", width: framed, height: 1 }));
  const input = make("input", { type: "range", min: 1, max: values.length, step: 1, "aria-label": name });
  const said = (place) => say(row, place, fixed(values[place - 1], digits));
  const show = (place) => {
    input.value = place;
    read.textContent = said(place);
    input.setAttribute("aria-valuetext", read.textContent);
    at.setAttribute("x", place - 1);
    at.setAttribute("visibility", "visible");
  };
  input.value = 1;
  input.setAttribute("aria-valuetext", said(1));
  input.addEventListener("input", () => show(Number(input.value)));
  input.addEventListener("focus", () => show(Number(input.value)));
  input.addEventListener("pointermove", (event) => {
    const { left, width } = input.getBoundingClientRect();
    show(Math.min(Math.max(Math.floor(((event.clientX - left) / width) * values.length) + 1, 1), values.length));
  });
  const first = values.slice(0, WRITTEN).map((x, i) => make("span", {}, fixed(x, digits), i === WRITTEN - 1 ? " …" : "")); // the dots never stand alone
  return make("div", { class: "heat" }, make("b", {}, label), make("span", { class: "heat-first" }, ...first), make("div", { class: "heat-strip" }, svg, input));
}
