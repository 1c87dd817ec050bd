// The address of the story, `#/softmax?lang=hi-Latn&answers=hook:divided,softmax:skip&step=3`, and the state it holds.
// What cannot be used is replaced by a default, with a note.

import { CHAPTERS, LANGUAGES } from "./story-data.js";

export const CARDS = "cards"; // the view of all cards, `#/cards`, has a chapter's place in the address
export const SKIPPED = "skip"; // the answer of a reader who did not want to say
const LONGEST = 40; // characters of a note's quotation
const NONE = { chapter: CHAPTERS[0].id, lang: null, answers: {}, step: 0 };

/** The state of an address, and notes: [key of shell.notes, what was given]. `lang` is null where none is given. */
export function read(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const state = { ...NONE, answers: {} };
  const notes = [];
  if (find(path)) state.chapter = path;
  else if (path) notes.push(["chapter", shown(path)]);
  for (const [name, value] of new URLSearchParams(query)) {
    const found = Object.hasOwn(READ, name) ? READ[name](value, state) : undefined;
    if (found === undefined) notes.push([Object.hasOwn(READ, name) ? NOTES[name] : "address", shown(Object.hasOwn(READ, name) ? value : name)]);
    else state[name] = found;
    if (found === undefined && name === "lang") state.lang = Object.keys(LANGUAGES)[0]; // as the note says, whatever was chosen last
  }
  return { state, notes };
}

const NOTES = { lang: "language", answers: "answers", step: "step" };
const READ = {
  lang: (value) => (Object.hasOwn(LANGUAGES, value) ? value : undefined),
  step: (value, { chapter }) => {
    const step = /^\d{1,3}$/.test(value) ? Number(value) : NaN;
    return step < Math.max(find(chapter).steps, 1) ? step : undefined;
  },
  answers: (value) => {
    const pairs = value.split(",").map((pair) => pair.split(":"));
    const known = ([id, answer, ...more]) => !more.length && id !== CARDS && (answer === SKIPPED || find(id)?.options.includes(answer)) && find(id);
    const answers = Object.fromEntries(pairs); // a chapter has one
    return pairs.every(known) && Object.keys(answers).length === pairs.length ? answers : undefined;
  },
};

export function write({ chapter, lang, answers, step }) {
  const pairs = [];
  if (lang) pairs.push(`lang=${lang}`);
  const given = CHAPTERS.filter(({ id }) => answers[id]).map(({ id }) => `${id}:${answers[id]}`);
  if (given.length) pairs.push(`answers=${given.join(",")}`);
  if (step) pairs.push(`step=${step}`);
  return `#/${chapter}${pairs.length ? `?${pairs.join("&")}` : ""}`;
}

/** What the story knows of a chapter before it is loaded. */
export function find(id) {
  return id === CARDS ? { id, options: [], steps: 0 } : CHAPTERS.find((chapter) => chapter.id === id);
}

function shown(text) {
  return `“${text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text}”`;
}
