// The spirit level. Bubble left: flat; between the marks: level; right: saturated. A place is all it is told; the marks
// are where stats.bubble begins and ends the level. The level tilts as a real one would: its bubble goes to the higher end.

import { shape } from "./dom.js";

const ZONES = [["flat", 0.09], ["level", 0.44], ["sharp", 0.81], ["saturated", 1]]; // where their words stand
const TICKS = [1.5 / 8, 5.5 / 8, 7.5 / 8]; // between the cells of the levels, as stats.bubble deals them out
const BOUNDS = TICKS.slice(0, 2); // where level begins and ends: a bubble between these marks is level
const [LEFT, RIGHT, TOP, HIGH] = [44, 676, 14, 58]; // of the tube, in a drawing 720 wide
const BUBBLE = 40; // half its width
const TILT = 3.2; // degrees from end to end
let count = 0;

/** A large level that moves, without words beside it: level.js has those of figures, plot.js those of the story. */
export class Spirit {
  constructor() {
    const id = `level${(count += 1)}`;
    this.bubble = shape("g", { class: "bubble" }, ...bubble(id));
    this.tube = shape("rect", { class: "liquid", x: LEFT, y: TOP, width: RIGHT - LEFT, height: HIGH, rx: HIGH / 2 });
    this.body = shape("g", { class: "tilt" }, ...frame(id, this.tube), this.bubble, ...glass(id));
    this.svg = shape("svg", { viewBox: "0 -12 720 132", class: "spirit", role: "img" }, gradients(id), this.body);
  }

  /** `label` is the text alternative. */
  set(gauge, label) {
    const share = Math.min(Math.max(gauge.bubble ?? 0.5, 0), 1);
    this.bubble.style.transform = `translateX(${across(share)}px)`;
    this.body.style.transform = `rotate(${(0.5 - share) * TILT}deg)`;
    this.tube.setAttribute("class", `liquid ${gauge.level}`);
    this.svg.setAttribute("aria-label", label);
  }
}

/** A small level that stands still: one of many, or beside a number. */
export function vial(level, place) {
  const marks = shape("path", { class: "mark", d: BOUNDS.map((at) => `M${8 + at * 32} 0V18`).join("") });
  const still = [
    shape("rect", { class: `liquid ${level}`, width: 48, height: 18, rx: 9 }),
    shape("rect", { class: "gloss", x: 5, y: 2, width: 38, height: 5, rx: 2.5 }),
    marks,
  ];
  if (place !== null && place !== undefined) {
    still.push(shape("ellipse", { class: "air", cx: 8 + place * 32, cy: 8.5, rx: 6, ry: 5.5 }));
  }
  return shape("svg", { viewBox: "-1 -1 50 20", class: "vial", role: "img", "aria-label": level }, ...still);
}

function frame(id, tube) {
  const words = ZONES.map(([word, at]) => {
    const end = at === 1;
    const x = end ? RIGHT - 4 : across(at);
    return shape("text", { x, y: 97, "text-anchor": end ? "end" : "middle" }, word);
  });
  return [
    shape("rect", { class: "wood", x: 4, y: 2, width: 712, height: 104, rx: 16 }),
    shape("rect", { class: "sheen", x: 4, y: 2, width: 712, height: 104, rx: 16, fill: `url(#${id}-sheen)` }),
    shape("rect", { class: "bed", x: LEFT - 5, y: TOP - 5, width: RIGHT - LEFT + 10, height: HIGH + 10, rx: HIGH / 2 + 5 }),
    tube,
    shape("rect", { x: LEFT, y: TOP, width: RIGHT - LEFT, height: HIGH, rx: HIGH / 2, fill: `url(#${id}-depth)` }),
    shape("path", { class: "mark", d: BOUNDS.map((at) => `M${across(at)} ${TOP}v${HIGH}`).join("") }),
    ...TICKS.map((at) => shape("path", { class: "tick", d: `M${across(at)} ${TOP + HIGH + 7}v6` })),
    ...words,
  ];
}

/** Where a share of the way from flat to saturated is. */
function across(share) {
  return LEFT + BUBBLE + 6 + share * (RIGHT - LEFT - 2 * BUBBLE - 12);
}

function bubble(id) {
  const cy = TOP + HIGH / 2 - 3;
  return [
    shape("ellipse", { class: "shadow", cx: 2, cy: cy + 4, rx: BUBBLE, ry: 20 }),
    shape("ellipse", { class: "edge", cx: 0, cy, rx: BUBBLE, ry: 20, fill: `url(#${id}-air)` }),
    shape("ellipse", { class: "glint", cx: -13, cy: cy - 10, rx: 15, ry: 4.5 }),
    shape("ellipse", { class: "glint faint", cx: 18, cy: cy + 11, rx: 9, ry: 2.5 }),
  ];
}

function glass(id) {
  return [shape("rect", { x: LEFT + 16, y: TOP + 4, width: RIGHT - LEFT - 32, height: 13, rx: 6.5, fill: `url(#${id}-gloss)` })];
}

function gradients(id) {
  const fade = (name, ...stops) =>
    shape(
      "linearGradient", { id: `${id}-${name}`, x1: 0, y1: 0, x2: 0, y2: 1 },
      ...stops.map(([offset, part, opacity]) => shape("stop", { offset, class: part, "stop-opacity": opacity })),
    );
  return shape(
    "defs", {},
    fade("sheen", [0, "light", 0.5], [0.5, "light", 0], [1, "dark", 0.12]),
    fade("depth", [0, "dark", 0.22], [0.3, "dark", 0], [0.75, "dark", 0], [1, "dark", 0.25]),
    fade("gloss", [0, "light", 0.75], [1, "light", 0.05]),
    fade("air", [0, "light", 0.98], [0.5, "light", 0.62], [0.8, "light", 0.7], [1, "light", 0.95]),
  );
}
