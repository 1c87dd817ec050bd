// The lab bench: its panels and its claims, and in what order they are drawn.

import { Attack } from "./attack.js";
import { Claims } from "./claims.js";
import { Controls } from "./controls.js";
import { NEEDS } from "./declared.js";
import { make, number } from "./dom.js";
import { vial } from "./gauge.js";
import { Heads } from "./heads.js";
import { plotly } from "./library.js";
import { Online } from "./online.js";
import { Panel, first } from "./panel.js";
import { Prediction } from "./predict.js";
import { Sentence } from "./sentence.js";
import { askAbout } from "./source.js";
import { Speed } from "./speed.js";
import { Store } from "./store.js";
import { onChange } from "./theme.js";
import { Training } from "./training.js";

const SHARED = NEEDS.logits; // the controls of the strip
const OWN = { training: Training, attack: Attack, online: Online, sentence: Sentence, heads: Heads, speed: Speed };
const LATER = 150; // ms of rest before figures that are out of sight are requested
const $ = (id) => document.getElementById(id);

const store = new Store();
const controls = new Controls(store);
const panels = Object.entries(NEEDS).map(([id, needs]) => {
  const place = document.querySelector(`[data-figure="${id}"]`);
  return new Panel(place, { needs, hero: id === "logits" });
});
const [hero] = panels;
const prediction = new Prediction(panels.filter((panel) => panel.needs.includes("seed")), say);
const seen = new Set();
const claims = new Claims($("claims-list"));

async function begin() {
  if (store.state.predict === "1") prediction.cover(); // before there is anything to see
  plotly().catch(() => {}); // it loads beside the figures; the first chart reports what fails
  notes();
  const about = askAbout();
  for (const panel of panels) {
    const Own = OWN[panel.id];
    if (Own) panel.own = new Own(panel, store, about);
  }
  const opened = hero.load(store.state).then(say);
  first(opened);
  for (const panel of panels) panel.load(store.state);
  watch();
  claims.listen();
  footer(await about);
}

/** Figures in sight follow a slider; the others wait until it rests. */
let later = 0;
store.listen((state, names) => {
  controls.show(state);
  notes();
  if (state.predict !== "1") prediction.lift();
  else if (names.some((name) => name === "predict" || SHARED.includes(name))) prediction.cover();
  hero.load(state).then(say);
  clearTimeout(later);
  for (const panel of panels) if (seen.has(panel.place)) panel.load(state);
  later = setTimeout(() => panels.forEach((panel) => panel.load(state)), LATER);
});

function watch() {
  const eyes = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? seen.add(target) : seen.delete(target);
  });
  panels.forEach((panel) => eyes.observe(panel.place));
  followed();
  onChange(() => [...panels, ...claims.panels].filter((panel) => panel.figure).forEach((panel) => panel.show(panel.figure)));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address after the # is the state's
    $("logits").focus();
  });
}

/** The strip stays in sight beside figures that it drives, and leaves the screen to the others. */
function followed() {
  const driven = new Set(panels.filter(({ needs }) => needs.some((name) => SHARED.includes(name))).map(({ place }) => place.closest("section")));
  const line = new IntersectionObserver(
    (entries) => entries.filter((one) => one.isIntersecting).forEach(({ target }) => $("strip").classList.toggle("away", !driven.has(target))),
    { rootMargin: "-20% 0px -79% 0px" }, // what is just below the strip
  );
  document.querySelectorAll("#bench main > section").forEach((section) => line.observe(section));
}

/** The level in words, for screen readers, and as a small gauge in the strip. */
function say() {
  const gauge = hero.figure?.gauges[0];
  if (!gauge) return;
  const covered = prediction.waiting;
  $("strip-gauge").replaceChildren(
    ...(covered ? [vial("none", null)] : [vial(gauge.level, gauge.bubble), make("span", {}, gauge.level)]),
  );
  if (!covered) $("said").textContent = `${gauge.level}: H over ln n is ${number(gauge.normalised_entropy)}`;
}

function notes() {
  $("notes").textContent = store.notes.join(" ");
  $("notes").hidden = !store.notes.length;
}

function footer(about) {
  const where = about.export ? "A saved page: its controls move on a grid of settings computed on" : "Computed on";
  $("about").textContent = `levelhead ${about.version}. ${where} ${about.cpu}, ${about.isa}, ${about.threads} threads.`;
}

/** Shows the bench; a place in the address is gone to, a claim is opened. Settings in the address are the store's. */
export async function open(hash, { story }) {
  for (const link of document.querySelectorAll("#bench a[data-story]")) link.href = story;
  document.documentElement.lang = "en";
  document.title = "Scaling keeps the head level · levelhead";
  begun ??= begin();
  claims.open(hash.replace(/^#claim-/, ""));
  const place = /^#[\w-]+$/.test(hash) && hash !== "#bench" && $(hash.slice(1));
  if (!place || place.matches(".claim")) return;
  place.scrollIntoView();
  await Promise.allSettled(panels.map((panel) => panel.settled)); // figures above it have grown
  if (location.hash === hash) place.scrollIntoView();
}

let begun = null;
