// The page: the story, or the lab bench. A view is loaded when it is first opened.

import { make } from "./dom.js";
import { view } from "./view.js";

const LOAD = { story: () => import("./story.js"), bench: () => import("./bench.js") };
const places = { story: document.getElementById("story"), bench: document.getElementById("bench") };
const last = { story: "#/", bench: "#bench" }; // addresses, to come back to

/** There may be no words yet: this is said in English. */
function fail(place, error) {
  place.prepend(make("p", { class: "notes trouble", role: "alert" }, "The page did not load. Reload it."));
  throw error;
}

async function show() {
  const name = view(location.hash);
  for (const [other, place] of Object.entries(places)) place.hidden = other !== name;
  document.documentElement.dataset.view = name;
  const module = await LOAD[name]().catch((error) => fail(places[name], error));
  if (name !== view(location.hash)) return; // the reader has gone on
  module.open(location.hash, last);
}

addEventListener("hashchange", (event) => {
  const before = new URL(event.oldURL).hash;
  last[view(before)] = before || "#/";
  show();
});
show();
