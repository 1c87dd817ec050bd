// The story: its bar, its chapters, and how a reader moves: links, arrow keys, swipes. The address holds the state.

import { ChapterView } from "./chapter.js";
import { Kept } from "./kept.js";
import { FIRST, spoken } from "./languages.js";
import { CARDS, read, write } from "./router.js";
import { Shell } from "./shell.js";
import { keep } from "./storage.js";
import { CHAPTERS, DATA, LANGUAGES, SCENES, WORDS } from "./story-data.js";
import { Words } from "./words.js";

const SWIPE = 70; // pixels across, and at most half as many up or down
const TYPED = "input, select, textarea, pre, [role=slider], [contenteditable], .sideways[tabindex]";

let state = null;
let drawn = null; // the state in sight; the other one is ahead of it while a chapter is loaded
let notes = [];
let shown = null; // the chapter's view
let asked = 0; // the newest request to show; older ones are dropped
const shell = new Shell(document.getElementById("story"), { go, speak });

/** Shows what the address says. */
export function open(hash, { bench }) {
  shell.leadTo(bench);
  const found = read(hash);
  const before = state;
  const seen = before && history.state?.seen; // the reader went back or forward: the address is older than the answers
  state = seen ? { ...found.state, answers: before.answers, lang: before.lang } : found.state;
  notes = seen ? [] : found.notes;
  if (before?.chapter !== state.chapter) shown?.stop(); // it stays in sight until the next one is loaded
  history.replaceState({ seen: true }, "", seen ? write(state) : null);
  const same = before && shown && !notes.length && !shell.noted && before.chapter === state.chapter && before.lang === state.lang && String(before.answers[state.chapter]) === String(state.answers[state.chapter]);
  return same ? shown.go(state.step) : show({ focus: Boolean(before) });
}

/** Draws the state. What it needs is loaded first; until then the last chapter stays. */
async function show({ focus = false, top = focus, kept = null } = {}) {
  const turn = (asked += 1);
  const { chapter: id } = state;
  const language = spoken(state.lang);
  shell.busy(true);
  try {
    const [{ WORDS: catalogue }, view] = await Promise.all([needed({ language }, WORDS[language]()), needed({ id }, id === CARDS ? allCards() : chapterOf(id))]);
    if (turn !== asked) return;
    shown?.stop();
    shown = view(catalogue);
    shell.show({ words: new Words(catalogue), language, state, view: shown.element, notes });
    drawn = state;
    if (top) scrollTo({ top: 0, behavior: "instant" });
    if (focus) shown.focus();
    kept?.restore();
    const next = CHAPTERS[CHAPTERS.findIndex((one) => one.id === id) + 1];
    if (next) Promise.all([DATA[next.id](), SCENES[next.id]()]).catch(() => {}); // an error shows when it is opened
  } catch (error) {
    if (turn === asked) failed(error);
  } finally {
    if (turn === asked) shell.busy(false);
  }
}

/** A file that does not load fails with what it holds: a language, or the id of a chapter. */
function needed(what, loading) {
  return loading.catch((cause) => { throw Object.assign(new Error("a file did not load", { cause }), what); });
}

/** Back to what is in sight, in the address and everywhere else, with a note that names what is missing. */
function failed(error) {
  console.error(error);
  const { language, id = state.chapter } = error;
  const missing = language ? LANGUAGES[language] : shell.named(id);
  const back = drawn ?? (language && language !== FIRST ? { ...state, lang: FIRST } : null);
  if (!back) return shell.fail(missing);
  if (language) keep("language", drawn ? document.documentElement.lang : FIRST);
  const kept = drawn && new Kept(shell.place);
  [state, drawn, notes] = [back, null, [["failed", missing]]];
  history.replaceState({ seen: true }, "", write(state));
  show({ kept });
}

/** Loads a chapter; returns what makes its view. */
async function chapterOf(id) {
  const [{ CHAPTER: chapter }, module] = await Promise.all([DATA[id](), SCENES[id]()]);
  const place = CHAPTERS.findIndex((one) => one.id === id) + 1;
  return (catalogue) => new ChapterView({ chapter, catalogue, module, place, count: CHAPTERS.length, given: state.answers[id] ?? null, step: state.step, answered: (option) => state.chapter === id && answered(option), stepped: (step) => state.chapter === id && stepped(step) });
}

/** The same for the view of all cards. */
async function allCards() {
  const { CardsView } = await import("./cards.js");
  return (catalogue) => new CardsView({ catalogue, address });
}

/** Another chapter. */
function go(id) {
  location.hash = address(id);
}

function address(id) {
  return write({ ...state, chapter: id, step: 0 });
}

function answered(option) {
  const answers = { ...state.answers };
  if (option) answers[state.chapter] = option;
  else delete answers[state.chapter];
  replace({ answers, step: 0 });
  show({ focus: true, top: false });
}

function stepped(step) {
  replace({ step });
  drawn = { ...drawn, step };
}

function speak(language) {
  replace({ lang: language });
  show({ kept: new Kept(shell.place) });
}

function replace(changes) {
  state = { ...state, ...changes };
  notes = [];
  history.replaceState({ seen: true }, "", write(state));
  shell.follow(state);
}

/** To the next step, else to the next chapter. A key that is held goes through steps alone, and ends with its chapter. */
function move(by, held = false) {
  if (held && state.chapter !== pressed) return;
  pressed = state.chapter;
  if (shown?.move(by) || held) return;
  const next = CHAPTERS[CHAPTERS.findIndex(({ id }) => id === state.chapter) + by];
  if (next) go(next.id);
}
let pressed = null; // the chapter in which the key was pressed

const isHere = () => document.documentElement.dataset.view === "story";

addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const other = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
  if (!by || other || !isHere() || event.target.closest?.(TYPED)) return;
  event.preventDefault();
  move(by, event.repeat);
});

let touch = null;
addEventListener("touchstart", ({ touches, target }) => {
  const free = isHere() && touches.length === 1 && !target.closest?.(`${TYPED}, .story-bars, svg, .display, .fold .deck`);
  touch = free ? { x: touches[0].clientX, y: touches[0].clientY } : null;
}, { passive: true });
addEventListener("touchend", ({ changedTouches: [end] }) => {
  if (!touch) return;
  const [x, y] = [end.clientX - touch.x, end.clientY - touch.y];
  touch = null;
  if (Math.abs(x) > SWIPE && Math.abs(y) < Math.abs(x) / 2) move(x < 0 ? 1 : -1);
}, { passive: true });
