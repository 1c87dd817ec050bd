// Inputs with their labels, for panels and scenes. Native inputs: the keyboard works by itself.

import { make } from "./dom.js";

let sliders = 0;

/** A labelled slider with its value beside it; `changed` is called with the number while it moves. */
export function slider({ label, min, max, step, value, shown, changed, disabled = false }) {
  const id = `slider-${(sliders += 1)}`;
  const output = make("output", { for: id }, shown(value));
  const input = make("input", { id, type: "range", min, max, step, disabled });
  input.value = value;
  input.addEventListener("input", () => {
    output.textContent = shown(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
    changed(Number(input.value));
  });
  const element = make("div", { class: "control" }, make("label", { for: id }, label), output, input);
  const set = (to) => {
    input.value = to;
    output.textContent = shown(to);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  return { element, input, set };
}

/** Radio buttons side by side; `changed` is called with the value that is chosen. */
export function segments({ label, name, options, value, changed, disabled = false }) {
  const radios = options.map(([option, words]) => {
    const input = make("input", { type: "radio", name, value: option, disabled, change: () => changed(option) });
    return [input, make("label", {}, input, make("span", {}, words))];
  });
  const set = (to) => radios.forEach(([input]) => (input.checked = input.value === to));
  set(value);
  const group = make("div", { class: "segments" }, ...radios.map(([, element]) => element));
  return { element: make("fieldset", { class: "control" }, make("legend", {}, label), group), set };
}

/** A labelled list to choose from; `put` gives it other options, `fill` the numbers from 0. */
export function choose(label, options, changed) {
  const select = make("select", { change: changed });
  const put = (pairs) => select.replaceChildren(...pairs.map(([value, words, disabled = false]) => make("option", { value, disabled }, words)));
  put(options);
  return {
    select,
    put,
    element: make("label", {}, label, select),
    number: () => Number(select.value),
    fill: (count, chosen) => {
      put(Array.from({ length: count }, (_, i) => [i, String(i)]));
      select.value = chosen;
    },
  };
}
