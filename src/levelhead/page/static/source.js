// Where figures come from: the server that sent the page, or, in a page saved to a file, the data inside it.
// The only module that sends requests, and only to its own address.

import { Said, text } from "./spoken.js";

const embedded = document.getElementById("levelhead-data");
const data = embedded ? JSON.parse(embedded.textContent) : null;

/** What the controls of a saved page can be set to; null: a server is there, and they are free. */
export const grid = data?.grid ?? null;

export async function askAbout() {
  return data ? data.about : answer(await fetch("/api/about"));
}

/** A figure under these settings. */
export async function askFigure(id, settings, signal) {
  if (data) return saved(id, settings);
  return answer(await fetch(`/api/figure/${id}?${new URLSearchParams(settings)}`, { signal }));
}

/** A sentence through a model, on the server. */
export function askSentence(body, signal) {
  return post("/api/sentence", body, signal);
}

/** The benchmark, on the server; takes about ten seconds. */
export function askSpeed() {
  return post("/api/speed", {});
}

/** Calls back with the heads of the run that the server follows, whenever they change; what it returns ends that. */
export function followRun(changed) {
  const events = new EventSource("/api/run/events");
  events.addEventListener("message", (event) => changed(JSON.parse(event.data)));
  return () => events.close();
}

async function post(address, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return answer(await fetch(address, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

async function answer(response) {
  const found = await response.json().catch(() => null);
  if (response.ok && found) return found;
  if (found?.error) throw new Error(found.error);
  throw new Said(text("bench.server", { status: `${response.status} ${response.statusText}` }));
}

function saved(id, settings) {
  const figures = data.figures[id] ?? {};
  const key = Object.keys(grid).filter((name) => name in settings).map((name) => settings[name]).join(" ");
  if (!Object.hasOwn(figures, key)) throw new Said(text("bench.saved.absent"));
  return figures[key];
}
