// The state of the page: its fields, their defaults, and how they are written in the address after the #. A value out
// of its range is refused with a note, and the field keeps its default. The parameters of figures are the lab's.

import { CLAIMS, OLD_SCALES, PARAMETERS, POWER } from "./declared.js";
import { FIRST, known } from "./languages.js";

const CONTROLS = ["d_k", "scale", "keys", "seed"];
export const DEFAULT_TEXT = "The dog chased the ball because it was fast.";

export const LONGEST = 1000; // characters of a sentence

const KINDS = {
  whole: ({ low, high }) => ({
    wanted: ["whole", { low, high }],
    read: (text) => within(/^\d{1,10}$/.test(text) ? Number(text) : NaN, low, high),
  }),
  real: ({ low, high }) => ({
    wanted: ["real", { low, high }],
    read: (text) => within(/^\d{1,4}(\.\d{1,6})?$/.test(text) ? Number(text) : NaN, low, high),
  }),
  choice: ({ options }) => ({
    wanted: ["choice", { options: options.join(", ") }],
    read: (text) => (options.includes(text) ? text : undefined),
  }),
};
const field = (parameter) => ({ usual: parameter.default, ...KINDS[parameter.kind](parameter) });

const FIELDS = {
  ...Object.fromEntries(Object.entries(PARAMETERS).map(([name, parameter]) => [name, field(parameter)])),
  // for teachers
  hide: {
    usual: "",
    wanted: ["controls", { options: CONTROLS.join(", ") }],
    read: (text) => {
      const names = text.split(",").map((name) => (name === "divide" ? "scale" : name));
      return names.every((name) => CONTROLS.includes(name)) ? names.join(",") : undefined;
    },
  },
  predict: field({ kind: "choice", options: ["0", "1"], default: "0" }),
  // null: none is given, and the reader's own is spoken; one that is not there falls back to the first
  lang: { usual: null, otherwise: FIRST, read: (text) => known(text) ?? undefined },
  // sentence
  text: {
    usual: DEFAULT_TEXT,
    wanted: ["text", { low: 1, high: LONGEST }],
    read: (text) => (text.length >= 1 && text.length <= LONGEST ? text : undefined),
  },
};

function within(x, low, high) {
  return x >= low && x <= high ? x : undefined;
}

export function usual() {
  return Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.usual]));
}

/** The state of an address, and a note for every value in it that could not be used: [key of the words, what they hold]. */
export function read(hash) {
  const state = usual();
  const notes = [];
  const text = hash.replace(/^#/, "");
  const claim = /^claim-(.+)$/.exec(text)?.[1];
  if (claim && !Object.hasOwn(CLAIMS, claim)) notes.push(["claim", { given: shown(claim) }]);
  if (!text.includes("=") || claim) return { state, notes }; // nothing, or a place on the page
  for (const pair of new URLSearchParams(text)) {
    const [name, value] = renamed(...pair);
    const field = Object.hasOwn(FIELDS, name) ? FIELDS[name] : null;
    const found = field?.read(value);
    if (!field) notes.push(["unknown", { name: shown(name) }]);
    else if (found !== undefined) state[name] = found;
    else {
      state[name] = field.otherwise ?? field.usual;
      notes.push([name === "lang" ? "language" : "refused", { name: pair[0], wanted: field.wanted, given: shown(value), usual: field.usual }]);
    }
  }
  return { state, notes };
}

/** The parameters of a request for a figure with these needs. */
export function settings(state, needs) {
  const found = Object.fromEntries(needs.map((name) => [name, state[name]]));
  if (state.scale !== POWER) delete found.power;
  if (needs.includes("tile")) found.tile = Math.min(state.tile, state.keys);
  return found;
}

/** The address of a state. */
export function write(state) {
  const pairs = new URLSearchParams();
  // Controls are written even at their defaults: a link holds what it shows.
  for (const [name, field] of Object.entries(FIELDS)) {
    if (CONTROLS.includes(name) || state[name] !== field.usual) pairs.set(name, state[name]);
  }
  if (state.scale !== POWER) pairs.delete("power");
  return `#${String(pairs).replace(/%2F|%28|%29/g, decodeURIComponent)}`; // which a fragment may hold: 1/sqrt(d_k)
}

/** Links from before scales had the names of levelhead's rules. */
function renamed(name, value) {
  if (name !== "divide") return [name, value];
  return ["scale", Object.hasOwn(OLD_SCALES, value) ? OLD_SCALES[value] : value];
}

function shown(text) {
  return JSON.stringify(text.length > 40 ? `${text.slice(0, 40)}…` : text);
}
