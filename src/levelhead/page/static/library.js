// The drawing library: plotly.js as the installed package carries it, loaded with the first chart of the lab bench.

import { Said, text } from "./spoken.js";

const SAVED = document.getElementById("levelhead-plotly"); // in a page saved to a file, as text that does not run yet
let loading = null;

/** The drawing library, as soon as it is here. */
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Said(text("bench.library"))));
    if (SAVED) script.textContent = SAVED.textContent;
    else script.src = "/assets/plotly.js";
    document.head.append(script); // a script with its text inside runs at once
    if (SAVED) resolve(window.Plotly);
  });
  return loading;
}
