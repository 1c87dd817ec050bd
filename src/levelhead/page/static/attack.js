// Attack the assumption: sliders for what training does to q and k, and a choice of cures.

import { segments, slider } from "./inputs.js";
import { make } from "./dom.js";
import { saved } from "./saved.js";
import { grid } from "./source.js";
import { number, piece } from "./spoken.js";

const CURES = [["1/d_k", "1/dₖ"], ["qk-norm", "QK-norm"], ["softcap", "softcap"]];

export class Attack {
  constructor(panel, store) {
    const disabled = grid !== null; // a saved page holds one attack
    const { state } = store;
    const factor = (name) => ({
      value: Math.log2(state[name]), step: 0.25, disabled,
      shown: (x) => number(2 ** x), changed: (x) => store.set({ [name]: Number((2 ** x).toFixed(6)) }),
    });
    this.inputs = {
      sigma: slider({ label: piece("bench.attack.sigma"), min: -2, max: 2, ...factor("sigma") }),
      rho: slider({
        label: piece("bench.attack.rho"), min: 0, max: 1, step: 0.05, value: state.rho, disabled,
        shown: (x) => x.toFixed(2), changed: (rho) => store.set({ rho }),
      }),
      growth: slider({ label: piece("bench.attack.growth"), min: -1, max: 3, ...factor("growth") }),
      cure: segments({ label: piece("bench.attack.cure"), name: "cure", options: [["none", piece("bench.attack.none")], ...CURES], value: state.cure, disabled, changed: (cure) => store.set({ cure }) }),
      cap: slider({
        label: piece("bench.attack.cap"), min: 1, max: 100, step: 1, value: state.cap, disabled,
        shown: String, changed: (cap) => store.set({ cap }),
      }),
    };
    panel.drawing.above.append(make("div", { class: "controls" }, ...Object.values(this.inputs).map((input) => input.element)));
    if (disabled) panel.drawing.above.append(saved("attack"));
    this.#show(state);
    store.listen((now) => this.#show(now));
  }

  #show(state) {
    for (const name of ["sigma", "growth"]) this.inputs[name].set(Math.log2(state[name]));
    for (const name of ["rho", "cure", "cap"]) this.inputs[name].set(state[name]);
    this.inputs.cap.element.hidden = state.cure !== "softcap";
  }
}
