// A file of a run, as `levelhead doctor --json`, `Run.save` and the JSON-lines sink write it, read into what the panel
// of heads shows. It divides stored sums by stored counts. Where a level begins, the core says (`bounds`); without
// that the numbers stand alone.

import { Said, text as said } from "./spoken.js";

const [RUN, LINES] = ["levelhead-run", "levelhead-snapshots"];

export function readRun(text, bounds) {
  const run = parsed(text);
  try {
    return shown(run, bounds);
  } catch {
    throw new Said(said("bench.heads.changed"));
  }
}

function parsed(text) {
  const run = json(text) ?? fromLines(text);
  if (!run) throw new Said(said("bench.heads.no_json"));
  if (run.format !== RUN && run.format !== LINES) throw new Said(said("bench.heads.other"));
  return run;
}

/** A header, then a line per snapshot; half a last line is one that is still being written. */
function fromLines(text) {
  const lines = text.split("\n").slice(0, -1).map(json);
  if (!lines.length || lines.includes(null)) return null;
  return { ...lines[0], snapshots: lines.filter((line) => !line.format) };
}

function json(text) {
  try {
    const found = JSON.parse(text);
    return typeof found === "object" ? found : null;
  } catch {
    return null;
  }
}

function shown({ columns, snapshots, model, findings }, bounds) {
  const latest = new Map();
  const history = {};
  for (const { step, records } of snapshots) {
    for (const { module, tally } of records) {
      const heads = tally.map((row) => head(row, columns, bounds));
      latest.set(module, heads);
      heads.forEach((one, i) => remember(history, `${module}/${i}`, step, one));
    }
  }
  const rows = [...latest].map(([module, heads]) => ({
    module,
    heads: heads.map((one, i) => ({ ...one, finding: gravest(findings ?? [], module, i) })),
  }));
  const counts = { modules: rows.length, steps: snapshots.length, findings: findings?.length };
  const note = () => said(`bench.heads.${findings ? "counted_found" : "counted"}`, counts);
  return { model, rows, findings: findings ?? [], steps: snapshots.length, history, note, bounds };
}

/** What a head's row of sums says. */
function head(row, columns, bounds) {
  const value = (name) => (typeof row[columns.indexOf(name)] === "number" ? row[columns.indexOf(name)] : null);
  const mean = (name, over) => (value(over) > 0 && value(name) !== null ? value(name) / value(over) : null);
  const entropy = mean("normalised_entropy", "several");
  const saturated = mean("saturated", "several");
  return {
    ...placed(entropy, saturated, bounds),
    normalised_entropy: entropy,
    saturated,
    top1: mean("top1", "rows"),
    max_logit: value("max_logit"),
  };
}

/** The level and the bubble's place, by the core's own bounds. */
function placed(entropy, saturated, bounds) {
  if (!bounds || entropy === null) return { level: "none", bubble: null };
  const level = named(entropy, saturated, bounds);
  const [low, high] = bounds.cells[level];
  return { level, bubble: Math.min(Math.max(between(entropy, bounds.entropies, bounds.places), low), high) };
}

function named(entropy, saturated, bounds) {
  if (saturated >= bounds.share || entropy < bounds.saturated) return "saturated";
  if (entropy < bounds.sharp) return "sharp";
  return entropy >= bounds.flat ? "flat" : "level";
}

/** The piecewise line through (xs, ys), at x. */
function between(x, xs, ys) {
  const above = xs.findIndex((one) => one > x);
  const i = above < 0 ? xs.length - 1 : Math.max(above, 1);
  const share = Math.min(Math.max((x - xs[i - 1]) / (xs[i] - xs[i - 1]), 0), 1);
  return ys[i - 1] + share * (ys[i] - ys[i - 1]);
}

function remember(history, name, step, { normalised_entropy, max_logit }) {
  history[name] ??= { step: [], normalised_entropy: [], max_logit: [] };
  history[name].step.push(step);
  history[name].normalised_entropy.push(normalised_entropy);
  history[name].max_logit.push(max_logit);
}

function gravest(findings, module, i) {
  const ours = findings.filter((one) => one.module === module && (one.head === null || [one.head].flat().includes(i)));
  return ["error", "warning", "note"].find((severity) => ours.some((one) => one.severity === severity)) ?? "";
}
