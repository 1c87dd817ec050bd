// What a reader can take away from a figure: the Python that makes it again, a drawing, a table.

import { layout, traces } from "./chart.js";
import { copied } from "./clipboard.js";
import { make, shape } from "./dom.js";
import { plotly } from "./library.js";
import { label, piece, translated } from "./spoken.js";
import { tables } from "./table.js";
import { colours } from "./theme.js";

const [WIDTH, GAP] = [760, 16];

export class Tools {
  constructor(drawing) {
    this.drawing = drawing;
    this.code = label(make("pre", { class: "python", hidden: true, tabindex: "0" }), "label", "bench.tools.python");
    this.said = make("span", { class: "soft", role: "status" });
    this.rows = label(make("div", { class: "scroll", tabindex: "0", role: "region" }), "label", "bench.tools.numbers");
    this.table = make("details", { class: "table", toggle: () => this.#fill() }, make("summary", {}, piece("bench.tools.table")), this.rows);
    this.element = make(
      "div", { class: "tools" },
      make("button", { type: "button", class: "copy", click: () => this.copy() }, piece("bench.tools.copy")),
      make("button", { type: "button", class: "svg", click: () => this.download() }, piece("bench.tools.svg")),
      this.said, this.table, this.code,
    );
  }

  /** The figure is another one: what was said about the last is taken back. */
  changed() {
    this.said.replaceChildren();
    this.code.textContent = this.drawing.figure.python;
    this.#fill();
  }

  async copy() {
    this.code.hidden = false;
    this.said.replaceChildren(piece((await copied(this.drawing.figure.python)) ? "shell.copied" : "bench.tools.select"));
  }

  async download() {
    const drawn = await picture(this.drawing);
    const address = URL.createObjectURL(new Blob([drawn], { type: "image/svg+xml" }));
    make("a", { href: address, download: `levelhead-${this.drawing.figure.id}.svg` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    this.said.replaceChildren(piece("bench.tools.saved"));
  }

  #fill() {
    const { own, figure } = this.drawing;
    this.rows.replaceChildren(...(this.table.open ? [...(own?.tables?.() ?? []), ...tables(figure)] : []));
  }
}

/** The whole figure as one SVG: its charts below each other, and what the panel has drawn by itself. */
async function picture(drawing) {
  const { figure, place } = drawing;
  const theme = colours();
  const parts = [];
  for (const chart of figure.charts) {
    parts.push(await charted(chart, theme, drawing.height(chart) + 110));
  }
  const composed = drawing.own?.picture?.();
  if (composed) place.append(composed); // it has no look before it stands on the page
  for (const svg of place.querySelectorAll("svg.drawn")) parts.push(frozen(svg));
  composed?.remove();
  let y = 0;
  for (const part of parts) {
    part.setAttribute("y", y);
    y += Number(part.getAttribute("height")) + GAP;
  }
  const about = figure.charts.map((chart) => translated(chart.about)).join(" ");
  const whole = shape(
    "svg", { viewBox: `0 0 ${WIDTH} ${y}`, width: WIDTH, height: y, "font-family": theme.font },
    shape("title", {}, translated(figure.title)), shape("desc", {}, `${translated(figure.note)} ${about}`),
    shape("rect", { width: WIDTH, height: y, fill: theme.card }), ...parts,
  );
  return new XMLSerializer().serializeToString(whole);
}

async function charted(chart, theme, height) {
  const library = await plotly();
  const drawn = { data: traces(chart, theme), layout: layout(chart, theme, { whole: true, height }) };
  const address = await library.toImage(drawn, { format: "svg", width: WIDTH, height });
  const text = decodeURIComponent(address.slice(address.indexOf(",") + 1));
  return new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
}

/** A copy of a drawing of ours that keeps its look without the page's style sheet. */
function frozen(svg) {
  const copy = svg.cloneNode(true);
  const [theirs, ours] = [copy.querySelectorAll("*"), svg.querySelectorAll("*")];
  ours.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const name of ["fill", "stroke", "stroke-width", "font-size", "text-anchor"]) {
      theirs[i].setAttribute(name, style.getPropertyValue(name));
    }
  });
  const box = svg.viewBox.baseVal;
  copy.setAttribute("width", WIDTH);
  copy.setAttribute("height", (WIDTH * box.height) / box.width);
  return copy;
}
