// The state as it is now. A change goes into the address at once, and to those who listen once per frame.

import { read, usual, write } from "./state.js";
import { view } from "./view.js";

export class Store {
  constructor() {
    this.listeners = [];
    this.changed = new Set();
    this.due = false;
    this.#take(location.hash);
    addEventListener("hashchange", () => {
      if (view(location.hash) !== "bench") return;
      const before = this.state;
      this.#take(location.hash);
      this.#announce(Object.keys(this.state).filter((name) => this.state[name] !== before[name]));
    });
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  set(changes) {
    const names = Object.keys(changes).filter((name) => this.state[name] !== changes[name]);
    this.state = { ...this.state, ...changes };
    this.notes = [];
    history.replaceState(null, "", write(this.state));
    this.#announce(names);
  }

  /** Back to how the page opens; the language and what a teacher has set in the link stay. */
  reset() {
    const { hide, predict, lang } = this.state;
    this.set({ ...usual(), hide, predict, lang });
  }

  hash() {
    return write(this.state);
  }

  #take(hash) {
    const { state, notes } = read(hash);
    this.state = state;
    this.notes = notes;
  }

  #announce(names) {
    for (const name of names) this.changed.add(name);
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      const all = [...this.changed];
      this.changed.clear();
      this.due = false;
      for (const listener of this.listeners) listener(this.state, all);
    });
  }
}
