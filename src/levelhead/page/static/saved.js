// What a saved page says beside controls that cannot move in it.

import { make } from "./dom.js";
import { say } from "./spoken.js";

/** `what` stands still: a key of the words. */
export function saved(what) {
  return say(make("p", { class: "soft saved" }), `bench.saved.${what}`);
}
