// Where a reader is in a chapter, so that the same chapter in another language opens there: the place in the window, what
// is unfolded, what was set in the scene, and the keyboard's focus on the choice of the language.

const BLOCKS = ".chapter-head > *, .chapter-text > *, .fold";
const FOLDS = ".fold";
const INPUTS = ".scene input:not(.player input)";

export class Kept {
  /** Reads what is drawn in `place`; `restore` is called when it is drawn anew. */
  constructor(place) {
    this.place = place;
    this.focused = Boolean(document.activeElement?.closest(".languages"));
    this.open = this.#all(FOLDS).map((fold) => fold.open);
    this.inputs = this.#all(INPUTS).map(({ value, checked }) => ({ value, checked }));
    const tops = this.#tops();
    this.block = tops.findLastIndex((top) => top < innerHeight / 3);
    this.top = tops[this.block];
  }

  restore() {
    this.#each(FOLDS, this.open, (fold, open) => { fold.open = open; });
    this.#each(INPUTS, this.inputs, (input, { value, checked }) => {
      if (input.type === "radio") return checked && !input.checked && input.click();
      if (input.value === value) return;
      input.value = value;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    });
    if (this.focused) this.place.querySelector(".languages").focus({ preventScroll: true });
    if (this.block >= 0) scrollBy({ top: this.#tops()[this.block] - this.top, behavior: "instant" });
  }

  /** Nothing where another number of them is drawn: they cannot be told apart. */
  #each(selector, before, set) {
    const now = this.#all(selector);
    if (now.length === before.length) now.forEach((one, i) => set(one, before[i]));
  }

  #tops() {
    return this.#all(BLOCKS).map((block) => block.getBoundingClientRect().top);
  }

  #all(selector) {
    return [...this.place.querySelectorAll(selector)];
  }
}
