// What a saved page says beside controls that cannot move in it.

import { make } from "./dom.js";

/** `holds`: what there is in the file; `still`: what it says of the controls beside it. */
export function saved(holds, still = "these controls stand still") {
  return make("p", { class: "soft saved" }, `This saved page holds ${holds}, so ${still}. `, make("code", {}, "levelhead page"), " serves a page on which they move.");
}
