// The strip of shared controls. Native inputs: the keyboard works by itself.

import { copied } from "./clipboard.js";
import { PARAMETERS, POWER } from "./declared.js";
import { saved } from "./saved.js";
import { shared } from "./share.js";
import { grid } from "./source.js";
import { label, say } from "./spoken.js";

const powers = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => 2 ** (from + i));
const D_K = grid?.d_k ?? powers(0, 12);
const KEYS = grid?.keys ?? powers(1, 12);
const $ = (id) => document.getElementById(id);

export class Controls {
  constructor(store) {
    this.store = store;
    this.steps = { d_k: D_K, keys: KEYS };
    const strip = $("strip");
    strip.addEventListener("submit", (event) => event.preventDefault());
    for (const name of ["d_k", "keys"]) this.#stepped(name);
    this.radios = [...strip.elements.scale];
    for (const radio of this.radios) radio.addEventListener("change", () => store.set({ scale: radio.value }));
    $("power").addEventListener("input", () => store.set({ power: Number($("power").value) }));
    $("seed").addEventListener("change", () => this.#seed());
    $("resample").addEventListener("click", () => store.set({ seed: store.state.seed >= 2 ** 32 - 1 ? 0 : store.state.seed + 1 }));
    $("reset").addEventListener("click", () => store.reset());
    $("copy-link").addEventListener("click", () => this.#copy());
    if (grid) this.#confine();
    this.show(store.state);
  }

  /** Sets the inputs to this state. */
  show(state) {
    for (const name of ["d_k", "keys"]) {
      $(name).value = nearest(this.steps[name], state[name]);
      $(name).setAttribute("aria-valuetext", state[name]);
      $(`${name}-now`).textContent = state[name];
    }
    for (const radio of this.radios) radio.checked = radio.value === state.scale;
    document.querySelector(".power").hidden = state.scale !== POWER;
    $("power").value = state.power;
    $("power-now").textContent = state.power.toFixed(2);
    $("seed").value = state.seed;
    const hidden = state.hide.split(",");
    for (const control of document.querySelectorAll("[data-control]")) {
      control.hidden = hidden.includes(control.dataset.control);
    }
  }

  #stepped(name) {
    const input = $(name);
    input.max = this.steps[name].length - 1;
    input.addEventListener("input", () => this.store.set({ [name]: this.steps[name][Number(input.value)] }));
  }

  #seed() {
    const input = $("seed");
    if (input.value !== "" && input.checkValidity()) this.store.set({ seed: Number(input.value) });
    else input.value = this.store.state.seed;
  }

  async #copy() {
    const button = $("copy-link");
    const link = shared(this.store.hash());
    history.replaceState(null, "", this.store.hash());
    const said = link.startsWith("#") ? "bench.strip.copied_end" : "shell.copied"; // for any page of levelhead
    say(button, (await copied(link)) ? said : "bench.strip.not_copied");
    setTimeout(() => say(button, "bench.strip.copy"), 1500);
  }

  /** A saved page holds figures for some values only. */
  #confine() {
    for (const id of ["seed", "resample"]) {
      $(id).disabled = true;
      label($(id), "title", "bench.strip.one_seed");
    }
    for (const radio of this.radios) {
      radio.disabled = !grid.scale.includes(radio.value);
      if (radio.disabled) label(radio.parentElement, "title", "bench.strip.absent");
    }
    $("strip").after(saved("strip"));
    const { state } = this.store;
    const snapped = { d_k: D_K[nearest(D_K, state.d_k)], keys: KEYS[nearest(KEYS, state.keys)] };
    if (!grid.scale.includes(state.scale)) snapped.scale = PARAMETERS.scale.default;
    if (state.seed !== 0) snapped.seed = 0;
    this.store.state = { ...state, ...snapped };
  }
}

/** The place of the value that is nearest on a logarithmic scale. */
function nearest(values, x) {
  const far = values.map((value) => Math.abs(Math.log(value / x)));
  return far.indexOf(Math.min(...far));
}
