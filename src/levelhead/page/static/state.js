// The state of the page: what may be set, what it is when nobody sets it, and how it is written in the
// address after the #. What does not fit is refused with a sentence and stands at its default.

const CONTROLS = ["d_k", "divide", "keys", "seed"];
export const DEFAULT_TEXT = "The dog chased the ball because it was fast.";

export const LONGEST = 1000; // characters of a sentence

const whole = (low, high, usual) => ({
  usual,
  wanted: `a whole number from ${low} to ${high}`,
  read: (text) => within(/^\d{1,10}$/.test(text) ? Number(text) : NaN, low, high),
});
const real = (low, high, usual) => ({
  usual,
  wanted: `a number from ${low} to ${high}`,
  read: (text) => within(/^\d{1,4}(\.\d{1,6})?$/.test(text) ? Number(text) : NaN, low, high),
});
const choice = (usual, ...options) => ({
  usual,
  wanted: `one of ${options.join(", ")}`,
  read: (text) => (options.includes(text) ? text : undefined),
});

const FIELDS = {
  d_k: whole(1, 4096, 64),
  divide: choice("sqrt", "none", "sqrt", "d_k", "width", "power"),
  power: real(0, 1, 0.5),
  keys: whole(2, 4096, 32),
  seed: whole(0, 2 ** 32 - 1, 0),
  // training: which record; null is the one the figure chooses
  task: { usual: null, wanted: "a word", read: (text) => (/^[a-z-]{1,20}$/.test(text) ? text : undefined) },
  width: whole(1, 4096, null),
  depth: whole(1, 64, null),
  // attack
  sigma: real(0.25, 4, 1),
  rho: real(0, 1, 0.5),
  growth: real(0.5, 8, 1),
  cure: choice("none", "none", "1/d_k", "qk-norm", "softcap"),
  cap: real(1, 100, 30),
  // online
  tile: whole(1, 4096, 8),
  order: whole(0, 2 ** 32 - 1, 0),
  // for teachers
  hide: {
    usual: "",
    wanted: `names of controls, ${CONTROLS.join(", ")}, with commas between`,
    read: (text) => (text.split(",").every((name) => CONTROLS.includes(name)) ? text : undefined),
  },
  predict: choice("0", "0", "1"),
  // sentence
  text: {
    usual: DEFAULT_TEXT,
    wanted: `a text of 1 to ${LONGEST} characters`,
    read: (text) => (text.length >= 1 && text.length <= LONGEST ? text : undefined),
  },
};
const ALWAYS = ["d_k", "divide", "keys", "seed"]; // written even where they are usual: a link says what it shows

function within(x, low, high) {
  return x >= low && x <= high ? x : undefined;
}

export function usual() {
  return Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.usual]));
}

/** What an address says: the state, and a sentence for everything in it that could not be used. */
export function read(hash) {
  const state = usual();
  const notes = [];
  const text = hash.replace(/^#/, "");
  if (!text.includes("=")) return { state, notes }; // nothing, or a place on the page
  for (const [name, value] of new URLSearchParams(text)) {
    const field = Object.hasOwn(FIELDS, name) ? FIELDS[name] : null;
    const found = field?.read(value);
    if (!field) notes.push(`The link sets ${shown(name)}, which this page does not have.`);
    else if (found === undefined) {
      notes.push(`${name}: expected ${field.wanted}, the link has ${shown(value)}; it stays ${field.usual || "as it was"}.`);
    } else state[name] = found;
  }
  return { state, notes };
}

/** What a figure with these needs is asked with. */
export function settings(state, needs) {
  const found = Object.fromEntries(needs.map((name) => [name, state[name]]));
  if (state.divide !== "power") delete found.power;
  for (const name of needs) if (found[name] === null) delete found[name];
  if (needs.includes("tile")) found.tile = Math.min(state.tile, state.keys);
  return found;
}

/** The address of a state. */
export function write(state) {
  const said = new URLSearchParams();
  for (const [name, field] of Object.entries(FIELDS)) {
    if (ALWAYS.includes(name) || state[name] !== field.usual) said.set(name, state[name]);
  }
  if (state.divide !== "power") said.delete("power");
  return `#${said}`;
}

function shown(text) {
  return JSON.stringify(text.length > 40 ? `${text.slice(0, 40)}…` : text);
}
