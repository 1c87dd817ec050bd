// The page's colours, read from its style sheet, so that drawings follow light and dark with everything else.

const NAMES = ["ink", "soft", "line", "card", "hue-1", "hue-2", "hue-3", "hue-4", "hue-5"];

/** The colours in force: ink, soft, line, card, and hues in the order in which lines take them. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const hues = NAMES.filter((name) => name.startsWith("hue")).map((name) => of[name]);
  return { ...of, hues, font: getComputedStyle(document.body).fontFamily };
}

/** Calls back when the reader changes between light and dark. */
export function onChange(changed) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

/** A #rrggbb colour, let through by this share. */
export function faded(colour, share) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${share})`;
}
