// The drawing library: plotly.js as the installed package carries it, loaded beside this program.

/** The drawing library, as soon as it is here. */
export function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  const script = document.querySelector('script[src$="plotly.js"]');
  return new Promise((resolve, reject) => {
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("The drawing library did not load; reload the page.")));
  });
}
