// The numbers of a figure as tables: a row per x, a column per series. Nothing is rounded here but the display.

import { badge, make } from "./dom.js";
import { number, text, told, translated } from "./spoken.js";

const MOST = 1000; // rows; a longer table says what it leaves out

/** A table of anything: a caption, names of columns, rows of cells. */
export function rows(caption, names, cells) {
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const body = cells.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row" }, number(first)), ...rest.map((cell) => make("td", {}, number(cell)))),
  );
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}

/** A table for every chart, or several where its series have different x. */
export function tables(figure) {
  return figure.charts.flatMap((chart) => [...byX(chart).values()].map((all) => table(chart, all)));
}

function byX(chart) {
  const found = new Map();
  for (const series of chart.series) {
    const x = series.shape === "heat" ? series : JSON.stringify(series.x);
    found.set(x, [...(found.get(x) ?? []), series]);
  }
  return found;
}

function table(chart, all) {
  const columns = all[0].shape === "heat" ? matrix(chart, all[0]) : lines(chart, all);
  const length = columns[0].values.length;
  const head = make("tr", {}, ...columns.map((column) => make("th", { scope: "col" }, told(column.name), column.source ? badge(column.source) : null)));
  const body = [];
  for (let i = 0; i < Math.min(length, MOST); i += 1) {
    const [first, ...rest] = columns.map((column) => number(column.values[i]));
    body.push(make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell))));
  }
  const title = translated(chart.title);
  const caption = length > MOST ? text("bench.figure.cut", { title, shown: MOST, all: length }) : told(chart.title);
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}

function lines(chart, all) {
  const columns = [{ name: chart.x.title, values: all[0].x }];
  for (const series of all) {
    columns.push({ name: series.name, source: series.source, values: series.y });
    if (series.low) columns.push({ name: () => text("bench.figure.from"), values: series.low }, { name: () => text("bench.figure.to"), values: series.high });
  }
  return columns;
}

function matrix(chart, series) {
  const names = { name: () => `${translated(chart.y.title)} \\ ${translated(chart.x.title)}`, source: series.source, values: series.y };
  return [names, ...series.x.map((x, i) => ({ name: () => String(x), values: series.z.map((row) => row[i]) }))];
}
