// A question before the answer: options, or skip. Afterwards what was said, what it is, and why. No score.

import { make } from "./dom.js";
import { SKIPPED } from "./router.js";

/** The question's element. `answered(option)` is called with an option, `"skip"`, or null: ask again. */
export function question({ chapter, words, given, answered }) {
  const text = (name) => words.of("shell", name);
  const own = (name) => words.of(chapter.id, name);
  const title = make("h2", { id: "question-of-chapter" }, ...words.nodes(own("question")));
  if (!given) {
    const option = (name) => make("button", { type: "button", class: "option", value: name, click: () => answered(name) }, make("span", {}, ...words.nodes(own("options")[name])));
    return make(
      "section", { class: "quiz", "aria-labelledby": title.id },
      make("p", { class: "kicker" }, text("think")), title,
      make("div", { class: "options" }, ...chapter.options.map(option)),
      make("button", { type: "button", class: "quiet skip-question", click: () => answered(SKIPPED) }, text("skip")),
    );
  }
  const named = (name) => make("b", {}, ...words.nodes(own("options")[name]));
  const said = given === SKIPPED ? [] : [make("p", { class: "said" }, ...words.nodes(text("said"), { option: named(given) }))];
  return make(
    "section", { class: "quiz answered", "aria-labelledby": title.id },
    title, ...said,
    make("p", { class: "is", tabindex: "-1" }, ...words.nodes(text("is"), { answer: named(chapter.answer) })),
    make("p", { class: "because" }, ...words.nodes(own("because"))),
    make("button", { type: "button", class: "quiet ask-again", click: () => answered(null) }, text("again")),
  );
}
