// The online softmax, scrubbed: which keys have been seen, and what the row's state holds after each tile. All steps
// come with the figure; moving between them sends no request.

import { slider } from "./inputs.js";
import { badge, make, shape } from "./dom.js";
import { saved } from "./saved.js";
import { grid } from "./source.js";
import { number, piece, text } from "./spoken.js";

const WIDTH = 720;

export class Online {
  constructor(panel, store) {
    this.panel = panel;
    this.at = 0;
    const disabled = grid !== null;
    this.scrub = slider({ label: piece("bench.online.seen"), min: 1, max: 1, step: 1, value: 1, shown: String, changed: (at) => this.#go(at) });
    this.tile = slider({
      label: piece("bench.online.tile"), min: 0, max: 8, step: 1, value: Math.log2(store.state.tile), disabled,
      shown: (x) => String(Math.round(2 ** x)), changed: (x) => store.set({ tile: Math.min(2 ** x, store.state.keys) }),
    });
    const another = () => store.set({ order: store.state.order + 1 });
    this.shuffle = make("button", { type: "button", disabled, click: another }, piece("bench.online.shuffle"));
    this.sorted = make("button", { type: "button", disabled, click: () => store.set({ order: 0 }) }, piece("bench.online.sort"));
    const buttons = make("div", { class: "control actions" }, this.shuffle, this.sorted);
    this.tiles = shape("svg", { viewBox: `0 0 ${WIDTH} 42`, class: "drawn tiles", role: "img" });
    this.numbers = make("dl", { class: "facts", "aria-live": "off" });
    this.same = make("p", { class: "soft" });
    panel.drawing.above.append(
      make("div", { class: "controls" }, this.scrub.element, this.tile.element, buttons), ...(disabled ? [saved("online")] : []),
      this.tiles, this.numbers, this.same,
    );
    store.listen((state) => this.tile.set(Math.log2(Math.min(state.tile, state.keys))));
  }

  async drawn({ extra, charts }) {
    const whole = this.at === 0 || this.at === Number(this.scrub.input.max);
    this.steps = extra.steps;
    this.scrub.input.max = this.steps.length;
    this.keys = Math.max(...this.steps.map((step) => step.keys[1]));
    this.tile.input.max = Math.log2(this.keys);
    this.tile.set(Math.log2(extra.tile));
    this.scrub.set(whole ? this.steps.length : Math.min(this.at, this.steps.length));
    this.source = charts[0].series[0].source;
    const inOrder = this.steps.every((step, i) => i === 0 || step.keys[0] > this.steps[i - 1].keys[0]);
    this.shuffle.disabled = grid !== null || this.steps.length < 2;
    const same = this.steps.length < 2 ? "one" : inOrder ? "in_order" : "shuffled";
    this.same.replaceChildren(piece(`bench.online.${same}`, { difference: number(extra.difference) }), badge(this.source));
    await this.#go(Number(this.scrub.input.value));
  }

  #go(at) {
    this.at = at;
    const step = this.steps[at - 1];
    const path = (part, steps) => shape("path", { class: part, d: steps.map((one) => block(one.keys, this.keys)).join("") });
    this.tiles.replaceChildren(
      path("tile", this.steps), path("tile seen", this.steps.slice(0, at)), path("tile now", [step]),
      shape("text", { x: 0, y: 40 }, text("bench.online.key", { place: 0 })), shape("text", { x: WIDTH, y: 40, "text-anchor": "end" }, text("bench.online.key", { place: this.keys - 1 })),
    );
    this.tiles.setAttribute("aria-label", text("bench.online.tiles", { seen: at, tiles: this.steps.length, first: step.keys[0], last: step.keys[1] - 1 }));
    const fact = (name, ...value) => make("div", {}, make("dt", {}, piece(`bench.online.${name}`)), make("dd", {}, ...value, badge(this.source)));
    this.numbers.replaceChildren(
      fact("maximum", make("b", {}, number(step.m))), fact("sum", make("b", {}, number(step.l))),
      fact("entropy", make("b", {}, number(step.entropy))), fact("output", outputs(step.output)),
    );
    return this.panel.drawing.mark((chart) => chart.series[0].x[at - 1]);
  }
}

/** The outline of a tile, where its keys stand among all. */
function block([from, to], keys) {
  const wide = ((to - from) / keys) * WIDTH - Math.min(1, WIDTH / keys / 4);
  return `M${(from / keys) * WIDTH} 4h${wide}v20h${-wide}z`;
}

/** The first numbers of the output as bars up and down. */
function outputs(values) {
  const most = Math.max(...values.map(Math.abs), 1e-9);
  const bars = values.map((value, i) => {
    const high = (Math.abs(value) / most) * 13;
    return shape("rect", { class: value < 0 ? "minus" : "plus", x: i * 12, y: value < 0 ? 14 : 14 - high, width: 9, height: high });
  });
  const label = text("bench.online.entries", { count: values.length, list: values.map(number).join(", ") });
  return shape("svg", { viewBox: "0 0 96 28", class: "outputs", role: "img", "aria-label": label }, shape("title", {}, label), ...bars);
}
