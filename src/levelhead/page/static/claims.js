// The claims: a line for each with its verdict; open, its text, its numbers and its curves. Panels name the claims they
// show, as links into this list.

import { mark } from "./chips.js";
import { CLAIMS } from "./declared.js";
import { make } from "./dom.js";
import { Panel } from "./panel.js";
import { spelled } from "./spelled.js";
import { foreign, piece, told } from "./spoken.js";

export class Claims {
  constructor(list) {
    this.panels = [];
    list.append(...Object.entries(CLAIMS).map(([id, claim]) => this.#entry(id, claim)));
    this.say();
  }

  /** The claims' sentences, in the language of the page. */
  say() {
    for (const [id, { claim }] of Object.entries(CLAIMS)) document.querySelector(`#claim-${id} > summary > :last-child`).replaceChildren(told(claim));
  }

  /** Links open their claim. The address after the # is the state's, so they do not change it. */
  listen() {
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-claim]");
      if (!link) return;
      event.preventDefault();
      this.open(link.dataset.claim);
    });
  }

  /** Unfolds a claim and goes there. */
  open(id) {
    if (!Object.hasOwn(CLAIMS, id)) return;
    const entry = document.getElementById(`claim-${id}`);
    entry.open = true;
    entry.scrollIntoView();
    entry.firstElementChild.focus();
  }

  #entry(id, { verdict }) {
    const place = make("figure", { "data-figure": id });
    const summary = make("summary", {}, make("b", {}, id), mark(verdict), make("span"));
    return make("details", { class: "claim", id: `claim-${id}`, toggle: ({ target }) => target.open && this.#open(place) }, summary, place);
  }

  #open(place) {
    if (place.dataset.opened !== undefined) return;
    place.dataset.opened = "";
    const panel = new Panel(place, { needs: [] });
    panel.own = { drawn: ({ extra }) => panel.drawing.above.replaceChildren(texts(extra)) };
    this.panels.push(panel);
    panel.load({});
  }
}

function texts({ derivation, params, seed }) {
  const given = Object.entries({ ...params, seed }).map(([name, value]) => `${name} ${JSON.stringify(value).replaceAll(",", ", ")}`);
  const part = (title, content) => [make("dt", {}, piece(`bench.claims.${title}`)), foreign(make("dd", {}, spelled(content)))];
  return make("dl", { class: "texts" }, ...part("derivation", derivation), ...part("parameters", given.join(", ")));
}
