// Letters with an index, d_k, W_Q, ‖J‖_F, as they should look.

import { make } from "./dom.js";

/** A letter with an index. */
export const INDEX = /([\p{L}‖])_(\p{L})(?!\p{L})/gu;

/** A text with its indices set low. */
export function spelled(text) {
  const found = make("span");
  const [first, ...rest] = String(text).split(INDEX); // text, letter, index, text, …
  found.append(first);
  for (let i = 0; i < rest.length; i += 3) {
    const index = make("sub", {}, make("i", {}, rest[i + 1]));
    found.append(rest[i] === "‖" ? rest[i] : make("i", {}, rest[i]), index, rest[i + 2]);
  }
  return found;
}
