// The lab bench: its panels and its claims, and in what order they are drawn.

import { Attack } from "./attack.js";
import { Claims } from "./claims.js";
import { Controls } from "./controls.js";
import { NEEDS } from "./declared.js";
import { make } from "./dom.js";
import { vial } from "./gauge.js";
import { Heads } from "./heads.js";
import { inLanguage, languageOf, selector, spoken } from "./languages.js";
import { plotly } from "./library.js";
import { Online } from "./online.js";
import { Panel, first } from "./panel.js";
import { Prediction } from "./predict.js";
import { Sentence } from "./sentence.js";
import { askAbout } from "./source.js";
import { Speed } from "./speed.js";
import { fill, label, learn, mixed, number, say, text } from "./spoken.js";
import { keep } from "./storage.js";
import { Store } from "./store.js";
import { LANGUAGES } from "./story-data.js";
import { onChange } from "./theme.js";
import { Training } from "./training.js";

const SHARED = NEEDS.logits; // the controls of the strip
const OWN = { training: Training, attack: Attack, online: Online, sentence: Sentence, heads: Heads, speed: Speed };
const LATER = 150; // ms of rest before figures that are out of sight are requested
const $ = (id) => document.getElementById(id);

const store = new Store();
let story = "#/"; // the last address of the other view
let language = null;
await speak(); // everything below has words
const controls = new Controls(store);
const panels = Object.entries(NEEDS).map(([id, needs]) => {
  const place = document.querySelector(`[data-figure="${id}"]`);
  return new Panel(place, { needs, hero: id === "logits" });
});
const [hero] = panels;
const prediction = new Prediction(panels.filter((panel) => panel.needs.includes("seed")), announce);
const seen = new Set();
const claims = new Claims($("claims-list"));
const languages = selector(text("shell.language"), language, (lang) => store.set({ lang }));
$("languages").append(label(languages, "label", "shell.language"));
fill($("bench"));

async function begin() {
  if (store.state.predict === "1") prediction.cover(); // before there is anything to see
  plotly().catch(() => {}); // it loads beside the figures; the first chart reports what fails
  notes();
  const about = askAbout();
  for (const panel of panels) {
    const Own = OWN[panel.id];
    if (Own) panel.own = new Own(panel, store, about);
  }
  const opened = hero.load(store.state).then(announce);
  first(opened);
  for (const panel of panels) panel.load(store.state);
  watch();
  claims.listen();
  footer(await about);
}

/** Figures in sight follow a slider; the others wait until it rests. */
let later = 0;
store.listen((state, names) => {
  if (names.includes("lang")) speak().then(dress);
  controls.show(state);
  notes();
  if (state.predict !== "1") prediction.lift();
  else if (names.some((name) => name === "predict" || SHARED.includes(name))) prediction.cover();
  hero.load(state).then(announce);
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
  onChange(redraw);
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

/** Takes the words of the language that the address asks for, of the story that the reader comes from, or of the reader. */
async function speak() {
  const wanted = spoken(store.state.lang ?? languageOf(story));
  if (wanted === language) return;
  const before = language;
  language = wanted;
  try {
    const take = await learn(wanted);
    if (language === wanted) take(); // and no other was asked for meanwhile
  } catch (error) {
    if (language !== wanted) return;
    if (!before) throw error;
    console.error(error);
    language = before;
    keep("language", before);
    store.set({ lang: before });
    store.notes = [["failed", { given: LANGUAGES[wanted] }]];
  }
}

/** Puts everything on the page into the language that is spoken now. */
function dress() {
  show();
  fill($("bench"));
  notes();
  claims.say();
  announce();
  redraw();
}

/** What the document says of itself, and links to the story in its language. */
function show() {
  document.documentElement.lang = language;
  document.title = `${text("bench.title")} · levelhead`;
  languages.value = language;
  $("english").hidden = !mixed();
  for (const link of document.querySelectorAll("#bench a[data-story]")) link.href = inLanguage(story, store.state.lang);
}

function redraw() {
  for (const panel of [...panels, ...claims.panels]) if (panel.figure) panel.show(panel.figure);
}

/** The level in words, for screen readers, and as a small gauge in the strip. */
function announce() {
  const gauge = hero.figure?.gauges[0];
  if (!gauge) return;
  const covered = prediction.waiting;
  $("strip-gauge").replaceChildren(
    ...(covered ? [vial("none", null)] : [vial(gauge.level, gauge.bubble), make("span", {}, gauge.level)]),
  );
  if (!covered) $("said").textContent = text("bench.said", { level: gauge.level, entropy: number(gauge.normalised_entropy) });
}

function notes() {
  $("notes").textContent = store.notes.map(note).join(" ");
  $("notes").hidden = !store.notes.length;
}

function note([kind, { wanted, usual, ...rest }]) {
  if (kind === "language" || kind === "failed") return text(`shell.notes.${kind}`, rest);
  const expected = wanted && text(`bench.notes.wanted.${wanted[0]}`, wanted[1]);
  return text(`bench.notes.${kind}`, { ...rest, wanted: expected, usual: usual || text("bench.notes.as_it_was") });
}

function footer(about) {
  say($("about"), `bench.about.${about.export ? "saved" : "served"}`, about);
}

/** Shows the bench; a place in the address is gone to, a claim is opened. Settings in the address are the store's. */
export async function open(hash, last) {
  const before = language;
  story = last.story;
  await speak();
  if (language === before) show();
  else dress();
  begun ??= begin();
  claims.open(hash.replace(/^#claim-/, ""));
  const place = /^#[\w-]+$/.test(hash) && hash !== "#bench" && $(hash.slice(1));
  if (!place || place.matches(".claim")) return;
  place.scrollIntoView();
  await Promise.allSettled(panels.map((panel) => panel.settled)); // figures above it have grown
  if (location.hash === hash) place.scrollIntoView();
}

let begun = null;
