// A slider that can also run by itself, step after step, at a pace to follow. Without motion there is only the slider.

import { make } from "./dom.js";
import { slider } from "./inputs.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");

/** `words` are {run, rest}: what the button says. `changed` is called with every number from `min` to `max`. */
export function runner({ words, pause, min, max, value, changed, ...options }) {
  let [at, timer] = [value, 0];
  const control = slider({
    ...options, min, max, step: 1, value,
    changed: (x) => {
      stop();
      changed((at = x));
    },
  });
  const button = make("button", { type: "button", click: () => (timer ? stop() : start()) }, words.run);
  button.hidden = still.matches;
  const take = (x) => {
    at = x;
    control.set(x);
    changed(x);
  };
  function start() {
    button.textContent = words.rest;
    if (at === max) take(min);
    timer = setInterval(() => {
      if (!button.isConnected) return stop();
      take(at + 1);
      if (at >= max) stop();
    }, pause);
  }
  function stop() {
    clearInterval(timer);
    timer = 0;
    button.textContent = words.run;
  }
  return { element: make("div", { class: "runner" }, button, control.element), stop };
}
