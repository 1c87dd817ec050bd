// A chart of a figure as what Plotly draws: traces and a layout. Solid is live, dots are recorded, dashes are
// theory, everywhere; series of one name share one colour. Numbers pass through untouched;
// names are the lab's own until they are written.

import { INDEX } from "./spelled.js";
import { number, text, translated } from "./spoken.js";
import { faded } from "./theme.js";

export const DASHES = { live: "solid", recorded: "dot", theory: "dash" };
const BARS = 400; // more than that are drawn as one outline: thousands of rectangles are slow and look the same
const KNOWN = [ // divisors have the same colour in every figure
  [/\b(undivided|unscaled|not divided)\b|^nothing\b/, 1],
  [/√d_k(?![\w^])/, 0],
  [/√\(8 d_k\)/, 3],
  [/\bd_k\^/, 4],
  [/\bd_k(?![\w^])/, 2],
];
const EDGE = 0.02; // of a decade, so that the last tick of a logarithmic axis is on it
const LONG = 16; // letters of a row's name
const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "star", "pentagon", "hourglass"];

/** What is drawn in one colour: the name without the word for its source. */
export function key(series) {
  return bare(series.name) || series.name;
}

/** A name without the word for where its numbers come from. */
export function bare(name) {
  return name.replace(/[\s,(]*\b(in theory|theory|measured|live|recorded)\b[:)]?/, "").trim();
}

/** A colour for every key of a chart; a formula that stands alone is ink. */
export function palette(chart, theme) {
  const loud = chart.series.filter((series) => !series.quiet);
  const taken = new Map();
  const known = (name) => KNOWN.find(([pattern]) => pattern.test(name))?.[1];
  for (const series of loud) {
    const hue = known(key(series));
    if (hue !== undefined) taken.set(key(series), theme.hues[hue]);
  }
  const free = theme.hues.filter((hue) => ![...taken.values()].includes(hue));
  for (const series of [...loud].sort((a, b) => (a.source === "theory") - (b.source === "theory"))) {
    if (taken.has(key(series))) continue;
    taken.set(key(series), series.source === "theory" ? theme.ink : (free.shift() ?? theme.soft));
  }
  return taken;
}

export function traces(chart, theme) {
  const colour = palette(chart, theme);
  return chart.series.flatMap((series, i) => drawn(series, colour.get(key(series)) ?? theme.hues[0], theme, i));
}

function drawn(series, colour, theme, i) {
  const name = plain(translated(series.name));
  const common = { name, x: words(series.x), y: words(series.y), meta: series.source };
  const hover = `%{x:.4~g}, %{y:.4~g}<extra>${name}, ${series.source}</extra>`;
  if (series.shape === "heat") return [heat(series, common, theme)];
  if (series.shape === "bars") return [bars(series, common, colour, hover)];
  if (series.shape === "points") {
    const marker = { color: colour, size: 9, symbol: symbol(series, i), line: { color: colour, width: 1.8 } };
    return [{ ...common, type: "scatter", mode: "markers", hovertemplate: hover, marker, error_y: errorBars(series, colour) }];
  }
  const width = series.quiet ? 1 : series.source === "recorded" ? 3 : 2.2;
  const line = { color: series.quiet ? faded(colour, 0.3) : colour, width, dash: DASHES[series.source] };
  const trace = { ...common, type: "scatter", mode: "lines", line, hovertemplate: hover, showlegend: !series.quiet };
  if (series.quiet) trace.hoverinfo = "skip";
  return series.low && series.high ? [...band(series, colour), trace] : [trace];
}

/** Filled is live, hollow is recorded; a shape for each of several. */
export function symbol(series, i) {
  const name = SYMBOLS[i % SYMBOLS.length];
  return series.source === "live" ? name : `${name}-open`;
}

function errorBars({ y, low, high }, color) {
  if (!low || !high) return undefined;
  return { type: "data", symmetric: false, array: y.map((at, i) => high[i] - at), arrayminus: y.map((at, i) => at - low[i]), color, thickness: 1.5, width: 3 };
}

function band(series, colour) {
  const edge = { type: "scatter", mode: "lines", x: words(series.x), line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, y: series.low }, { ...edge, y: series.high, fill: "tonexty", fillcolor: faded(colour, 0.16) }];
}

function bars(series, common, colour, hovertemplate) {
  const fill = faded(colour, 0.72);
  if (series.x.length > BARS) {
    const line = { color: colour, width: 1, shape: "hvh" };
    return { ...common, type: "scatter", mode: "lines", line, fill: "tozeroy", fillcolor: fill, hovertemplate };
  }
  const pattern = series.source === "recorded" ? { shape: ".", size: 5, fgcolor: colour, bgcolor: faded(colour, 0.2) } : {};
  return { ...common, type: "bar", hovertemplate, marker: { color: fill, pattern, line: { width: 0 } } };
}

function heat(series, common, theme) {
  const numbers = series.z.flat().filter((x) => x !== null);
  const [low, high] = numbers.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [0, 0]);
  const most = series.shades?.[1] ?? (Math.max(-low, high) || 1);
  const signed = (series.shades?.[0] ?? low) < 0;
  const [blue, orange] = theme.hues;
  return {
    ...common,
    type: "heatmap",
    z: series.z,
    zmin: signed ? -most : 0,
    zmax: most,
    colorscale: signed ? [[0, orange], [0.5, theme.card], [1, blue]] : [[0, theme.card], [1, blue]],
    colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: theme.soft, size: 11 }, len: 1 },
    xgap: series.x.length <= 40 ? 1 : 0,
    ygap: series.y.length <= 40 ? 1 : 0,
    hovertemplate: `${text("bench.figure.heat", { row: "%{y}", column: "%{x}", value: "%{z:.4~g}" })}<extra>${series.source}</extra>`,
  };
}

/** How the chart stands on the page; `whole` is for a drawing that leaves it, with title and legend. */
export function layout(chart, theme, { whole = false, height = 260 } = {}) {
  const matrix = chart.series.some((series) => series.shape === "heat");
  const [x, y] = [axis(chart, "x", theme), axis(chart, "y", theme)];
  if (matrix) Object.assign(y, { autorange: "reversed", showgrid: false }, squares(chart, "y"));
  if (matrix) Object.assign(x, { showgrid: false }, squares(chart, "x"));
  return {
    xaxis: x,
    yaxis: y,
    height,
    bargap: chart.series.some((series) => series.shape === "bars" && series.x.length > 40) ? 0.04 : 0.15,
    barmode: "overlay",
    margin: { l: 58, r: 18, t: whole ? 44 : 8, b: 46 },
    paper_bgcolor: whole ? theme.card : "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: theme.font, color: theme.ink, size: 13 },
    hoverlabel: { bgcolor: theme.card, bordercolor: theme.line, font: { family: theme.font, color: theme.ink } },
    annotations: outside(chart, theme),
    dragmode: false,
    hovermode: "closest",
    showlegend: whole && !matrix,
    legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, traceorder: "normal" },
    title: whole ? { text: plain(translated(chart.title)), x: 0.02, xanchor: "left", font: { size: 16 } } : undefined,
  };
}

/** What the frame does not show, in the frame: an arrow with the share of the data beyond it, or with the peak. */
function outside(chart, theme) {
  const { left, right, above } = chart.outside ?? {};
  const common = { xref: "paper", yref: "paper", showarrow: false, font: { size: 13, color: theme.ink }, bgcolor: faded(theme.card, 0.8) };
  const found = [];
  if (left) found.push({ ...common, x: 0, y: 0.97, xanchor: "left", yanchor: "top", text: `← ${text("bench.figure.outside", { share: percent(left) })}` });
  if (right) found.push({ ...common, x: 1, y: 0.97, xanchor: "right", yanchor: "top", text: `${text("bench.figure.outside", { share: percent(right) })} →` });
  if (above) found.push({ ...common, x: 0.5, y: 1, xanchor: "left", yanchor: "top", xshift: 10, text: `↑ ${text("bench.figure.above", { value: number(Number(above.toPrecision(2))) })}` });
  return found;
}

/** A share that is neither nothing nor everything is not shown as such. */
function percent(share) {
  const points = 100 * share;
  if (points < 0.1) return "< 0.1 %";
  return points > 99.9 && points < 100 ? "> 99.9 %" : `${number(Number(points.toPrecision(points > 99 ? 3 : 2)))} %`;
}

function axis(chart, which, theme) {
  const { log, range } = chart[which];
  const title = plain(translated(chart[which].title));
  const found = {
    title: { text: which === "y" ? broken(title) : title, standoff: 8, font: { size: 13, color: theme.soft } },
    type: log ? "log" : undefined,
    gridcolor: theme.line,
    zerolinecolor: theme.line,
    linecolor: theme.line,
    tickfont: { color: theme.soft, size: 12 },
    automargin: true,
    fixedrange: true,
    ticklabeloverflow: "allow",
    nticks: 7,
  };
  if (range) found.range = log ? [Math.log10(range[0]) - EDGE, Math.log10(range[1]) + EDGE] : range;
  return { ...found, ...(log ? ticks(chart, which) : counted(chart, which)) };
}

/** Powers of two get ticks at powers of two or four; other logarithmic axes at powers of ten, or finer. */
function ticks(chart, which) {
  const bands = (series) => (which === "y" ? [...(series.low ?? []), ...(series.high ?? [])] : []);
  const values = chart.series.flatMap((series) => [...series[which], ...bands(series)]).filter((x) => x > 0);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const binary = values.every((x) => Number.isInteger(Math.log2(x)));
  const tickvals = [];
  if (binary) {
    const step = high / low > 2 ** 7 ? 4 : 2;
    for (let tick = low; tick <= high; tick *= step) tickvals.push(tick);
  } else {
    const digits = high / low > 40 ? [1] : [1, 2, 5];
    const step = high / low > 1e7 ? 2 : 1;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1; power += step) {
      tickvals.push(...digits.map((digit) => Number(`${digit}e${power}`)));
    }
  }
  return { tickvals, ticktext: tickvals.map(number) };
}

/** A long title of a y axis in two lines. */
function broken(title) {
  if (title.length <= 30) return title;
  const middle = title.indexOf(" ", Math.floor(title.length / 2) - 3);
  return middle < 0 ? title : `${title.slice(0, middle)}<br>${title.slice(middle + 1)}`;
}

/** A few whole numbers get a tick each, and none between them. */
function counted(chart, which) {
  const values = chart.series.filter((series) => series.shape !== "heat").flatMap((series) => series[which]);
  const few = values.length > 0 && values.every(Number.isInteger) && Math.max(...values) - Math.min(...values) <= 10;
  return few && which === "x" ? { dtick: 1 } : {};
}

/** Words label every row; numbers only some. */
function squares(chart, which) {
  const values = chart.series[0][which];
  if (typeof values[0] !== "string") return {};
  const named = { type: "category", tickvals: values.map((_, i) => i), ticktext: distinct(values).map(escaped) };
  return { ...named, tickangle: which === "x" ? -45 : 0 };
}

/** Long names without what they all begin and end with. */
function distinct(names) {
  if (names.length < 2 || Math.max(...names.map((name) => name.length)) <= LONG) return names;
  const shared = (at) => names.every((name) => name.length > 1 && name.at(at) === names[0].at(at));
  const shortest = Math.min(...names.map((name) => name.length));
  let [begin, end] = [0, 0];
  while (begin < shortest - 1 && shared(begin)) begin += 1;
  while (end < shortest - begin - 1 && shared(-end - 1)) end += 1;
  return names.map((name) => name.slice(begin, name.length - end));
}

/** Plotly reads a little HTML in texts: ours is subscripts, theirs is none. */
function plain(words) {
  return escaped(words).replace(INDEX, "$1<sub>$2</sub>");
}

function words(values) {
  return typeof values[0] === "string" ? values.map((value, i) => unique(escaped(value), i, values)) : values;
}

/** A word that comes twice would share a row: a zero-width mark for each time it came before keeps them apart. */
function unique(word, i, values) {
  return word + "\u200b".repeat(values.slice(0, i).filter((other) => other === values[i]).length);
}

function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}
