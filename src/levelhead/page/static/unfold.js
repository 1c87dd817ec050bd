// What a chapter has to unfold at its end: more, the derivation, code, the claims with their verdicts, the cards.

import { copied } from "./clipboard.js";
import { make } from "./dom.js";
import { CARDS, read, write } from "./router.js";
import { spelled } from "./spelled.js";

const LIBRARIES = ["numpy", "torch"];

/** `more` makes what the chapter shows behind "more", beside its words. */
export function unfolds(chapter, words, more = () => []) {
  const own = words.of(chapter.id);
  const found = [];
  const shown = [...more(), ...words.paragraphs(own.more ?? [])];
  if (shown.length) found.push(fold("more", words, ...shown));
  if (own.derivation) found.push(fold("derivation", words, ...words.paragraphs(own.derivation)));
  found.push(fold("code", words, ...code(chapter, words)));
  if (chapter.claims.length) found.push(fold("claims", words, ...claims(chapter, words)));
  found.push(cards(chapter, words));
  return [make("div", { class: "folds" }, ...found)];
}

/** The chapter's cards, which are loaded when the fold is opened. */
function cards(chapter, words) {
  const found = fold("cards", words);
  const load = async () => {
    const { chapterCards } = await import("./cards.js");
    const all = write({ ...read(location.hash).state, chapter: CARDS, step: 0 });
    found.lastChild.append(...chapterCards({ chapter: chapter.id, catalogue: words.catalogue, all }));
  };
  found.addEventListener("toggle", load, { once: true });
  return found;
}

/** A part that opens; its name is a key of the shell's words. */
export function fold(name, words, ...content) {
  return make("details", { class: `fold fold-${name}` }, make("summary", {}, words.of("shell", name)), make("div", { class: "fold-content" }, ...content));
}

// On paper nothing unfolds. Cards ask, so they stay closed.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll(".fold:not([open], .fold-cards)")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});

function code(chapter, words) {
  const say = (name) => words.of("shell", name);
  const text = make("pre", { class: "code", role: "group" });
  const said = make("span", { class: "soft", role: "status" });
  const tabs = LIBRARIES.map((library) =>
    make("button", { type: "button", class: "tab", "aria-pressed": "false", click: () => show(library) }, say(library)),
  );
  const show = (library) => {
    text.replaceChildren(...chapter.samples[library].split(/(?<=\n)/).map(line));
    text.setAttribute("aria-label", say(library));
    said.textContent = "";
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(LIBRARIES[i] === library)));
  };
  const copy = make("button", { type: "button", class: "copy-code", click: async () => (said.textContent = say((await copied(text.textContent)) ? "copied" : "select")) }, say("copy"));
  show("numpy");
  return [make("p", { class: "soft" }, say("code_about")), make("div", { class: "tabs" }, ...tabs, copy, said), text];
}

/** A line of code. Where it is too long it goes on in the next one, deeper than it began, so that both are seen as one. */
function line(text) {
  return make("span", { class: "code-line", style: `--deep: ${text.search(/\S|$/)}` }, text);
}

function claims(chapter, words) {
  const clauses = words.of(chapter.id).claims ?? {}; // which part of a claim holds
  const item = ({ id, verdict }) =>
    make(
      "li", {},
      make("a", { href: `#claim-${id}` }, make("b", {}, id), " ", make("span", { class: `verdict ${verdict}` }, words.of("shell", "verdicts", verdict))),
      make("span", {}, spelled(words.of("claims", id))),
      ...(clauses[id] ? [make("span", { class: "soft" }, ...words.nodes(clauses[id]))] : []),
    );
  return [make("p", { class: "soft" }, words.of("shell", "claims_about")), make("ul", { class: "claim-list" }, ...chapter.claims.map(item))];
}
