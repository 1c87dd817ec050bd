// A level for every head of a model: the recorded sample, the run the server follows, or a file of the reader's own,
// which is read here and sent nowhere.

import { layout, traces } from "./chart.js";
import { badge, make, shape } from "./dom.js";
import { vial } from "./gauge.js";
import { plotly } from "./library.js";
import { readRun } from "./runfile.js";
import { followRun } from "./source.js";
import { Said, foreign, number, piece, say, text } from "./spoken.js";
import { rows } from "./table.js";
import { colours } from "./theme.js";

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const ENTROPY = () => "H / ln n";
const HISTORY = [["normalised_entropy", ENTROPY, [0, 1.02]], ["max_logit", () => text("bench.heads.logit")]]; // name, title, fixed axis
const PLACES = 8; // of one kind of finding that are listed
const LARGEST = 256e6; // bytes of a file that a browser reads without complaint

export class Heads {
  constructor(panel, store, about) {
    this.panel = panel;
    this.at = null; // row and head that is looked at
    this.file = make("input", { type: "file", accept: ".json,.jsonl,application/json", class: "unseen", id: "run-file" });
    this.file.addEventListener("change", () => this.#take(this.file.files[0]));
    this.said = say(make("span", { class: "soft", role: "status" }), "bench.heads.drop");
    const choose = make("p", { class: "choose" }, this.file, make("label", { for: "run-file", class: "button" }, piece("bench.heads.choose")), this.said);
    this.grid = make("div", { class: "scroll" });
    this.one = make("div", { class: "one" });
    this.found = make("div", { class: "findings" });
    panel.drawing.above.append(choose, panel.trouble, this.grid, this.one, this.found);
    panel.drawing.own = this;
    for (const name of ["dragover", "dragleave", "drop"]) panel.place.addEventListener(name, (event) => this.#dropped(event));
    about.then(({ run }) => run && this.#follow());
  }

  drawn({ extra, gauges, charts }) {
    this.source = charts[0]?.series[0]?.source ?? gauges[0]?.source ?? "recorded";
    this.extra = extra;
    this.bounds = extra.bounds ?? this.bounds ?? null; // where levels begin, as the core has it
    this.grid.replaceChildren(this.#table());
    this.found.replaceChildren(...told(extra.findings));
    const [row, head] = this.at ?? [0, 0];
    if (this.at && extra.rows[row]?.heads[head]) return this.#look(row, head);
    this.one.replaceChildren();
    return null;
  }

  #table() {
    const most = Math.max(0, ...this.extra.rows.map(({ heads }) => heads.length));
    const names = Array.from({ length: most }, (_, i) => make("th", { scope: "col" }, String(i)));
    this.cells = this.extra.rows.map(({ heads }, row) => heads.map((head, i) => this.#cell(head, row, i)));
    const body = this.extra.rows.map(({ module }, row) =>
      make("tr", {}, make("th", { scope: "row", title: module }, short(module)), ...this.cells[row].map((cell) => make("td", {}, cell))),
    );
    const [row, head] = this.at ?? [0, 0];
    (this.cells[row]?.[head] ?? this.cells[0]?.[0])?.setAttribute("tabindex", "0");
    const caption = make("caption", {}, piece("bench.heads.caption", { model: this.#model() }), badge(this.source));
    return make("table", { class: "levels" }, caption, make("thead", {}, make("tr", {}, make("td"), ...names)), make("tbody", {}, ...body));
  }

  #cell(head, row, i) {
    const layer = short(this.extra.rows[row].module);
    const words = text("bench.heads.cell", { layer, head: i, level: head.level, entropy: number(head.normalised_entropy) });
    const label = head.finding ? `${words}, ${head.finding}` : words;
    return make(
      "button",
      {
        type: "button", class: `cell ${head.finding}`, tabindex: "-1", title: words, "aria-label": label,
        click: () => this.#look(row, i), keydown: (event) => this.#move(event, row, i),
      },
      head.bubble === null ? make("span", { class: "plain" }, number(head.normalised_entropy)) : vial(head.level, head.bubble),
    );
  }

  #move(event, row, i) {
    const move = MOVES[event.key];
    const to = move && this.cells[row + move[0]]?.[i + move[1]];
    if (!to) return;
    event.preventDefault();
    this.cells[row][i].setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    to.focus();
  }

  /** One head: words, numbers, what was found about it, and its history. */
  async #look(row, i) {
    this.at = [row, i];
    const { rows, history, findings } = this.extra;
    const { module, heads } = rows[row];
    const head = heads[i];
    this.cells.flat().forEach((cell) => cell.classList.remove("chosen"));
    this.cells[row][i].classList.add("chosen");
    const fact = (name, value) => make("div", {}, make("dt", {}, name()), make("dd", {}, make("b", {}, number(value)), badge(this.source)));
    const plot = make("div", { class: "plots" });
    const ours = findings.filter((one) => one.module === module && (one.head === null || [one.head].flat().includes(i)));
    this.one.replaceChildren(
      make("h3", {}, piece("bench.heads.one", { module: module || text("bench.heads.the_model"), head: i, level: head.level }), make("span", { class: "soft" }, ` ${text(`shell.levels.${head.level}`)}`)),
      make(
        "dl", { class: "facts" }, fact(ENTROPY, head.normalised_entropy), fact(() => text("bench.heads.top"), head.top1),
        fact(() => text("bench.heads.logit"), head.max_logit), fact(() => text("bench.heads.saturated"), head.saturated),
      ),
      ...told(ours), plot,
    );
    await this.#history(plot, history[`${module}/${i}`]);
  }

  async #history(plot, past) {
    if (!past || past.step.length < 2) return;
    const library = await plotly();
    const theme = colours();
    const charts = HISTORY.map(([name, called, range]) => {
      const title = called();
      const series = [{ name: title, source: this.source, shape: "line", x: past.step, y: past[name], quiet: false }];
      return { title, x: { title: text("bench.heads.step") }, y: { title, range }, series };
    });
    const places = charts.map(({ title }) => make("div", { role: "img", "aria-label": text("bench.heads.by_step", { title }) }));
    plot.append(...places); // all of them before one is drawn: a drawing keeps the width that it finds
    for (const [i, chart] of charts.entries()) {
      const place = places[i];
      await library.newPlot(place, traces(chart, theme), layout(chart, theme, { height: 190 }), { displayModeBar: false, responsive: true });
    }
  }

  /** Every head in a row of numbers. */
  tables() {
    const said = (name) => text(`bench.heads.${name}`);
    const names = [...["module", "head", "level"].map(said), ENTROPY(), ...["top", "logit", "saturated"].map(said)];
    const cells = this.extra.rows.flatMap(({ module, heads }) =>
      heads.map((head, i) => [module, i, head.level, head.normalised_entropy, head.top1, head.max_logit, head.saturated]),
    );
    return [rows(text("bench.heads.every", { model: this.#model() }), names, cells)];
  }

  /** The levels as one drawing. */
  picture() {
    const most = Math.max(1, ...this.extra.rows.map(({ heads }) => heads.length));
    const vials = this.extra.rows.flatMap(({ heads }, row) =>
      heads.map((head, i) => {
        const one = vial(head.level, head.bubble);
        for (const [name, value] of Object.entries({ x: 60 + 54 * i, y: 24 * row, width: 50, height: 20 })) one.setAttribute(name, value);
        return one;
      }),
    );
    const words = this.extra.rows.map(({ module }, row) => shape("text", { x: 50, y: 24 * row + 15, "text-anchor": "end" }, short(module)));
    return shape("svg", { viewBox: `0 0 ${60 + 54 * most} ${24 * this.extra.rows.length}`, class: "drawn" }, ...words, ...vials);
  }

  #model() {
    return this.extra.model || text("bench.heads.a_model");
  }

  #dropped(event) {
    event.preventDefault();
    this.panel.place.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop" && event.dataTransfer.files.length) this.#take(event.dataTransfer.files[0]);
  }

  /** Reads a file here, in the browser. */
  async #take(file) {
    if (!file) return;
    try {
      if (file.size > LARGEST) throw new Said(text("bench.heads.large"));
      const extra = readRun(await file.text(), this.bounds);
      this.at = null;
      this.leave?.();
      await this.panel.show({
        ...this.panel.figure, extra, charts: [], facts: [], gauges: [], note: extra.note, recorded: () => text("bench.heads.in_file", { file: file.name }),
        title: () => text("bench.heads.file", { file: file.name }),
        python: `import levelhead as lh\n\nprint(lh.lab.figure("heads", run=${JSON.stringify(file.name)}))\n`,
      });
      say(this.said, "bench.heads.read", { file: file.name });
    } catch (error) {
      this.panel.tell(text("bench.heads.trouble", { file: file.name, why: error.message }));
    }
  }

  #follow() {
    say(this.said, "bench.heads.following");
    this.leave = followRun((figure) => this.panel.show(figure));
  }
}

/** Findings in words, those of one kind together: why it matters, what to try, and where it is. The words are those of
 * `diagnose`, in English. */
function told(findings) {
  const kinds = new Map();
  for (const found of findings) {
    const kind = `${found.severity}: ${found.kind}`;
    kinds.set(kind, [...(kinds.get(kind) ?? []), found]);
  }
  return [...kinds].map(([kind, all]) =>
    make(
      "div", { class: `finding ${all[0].severity}` },
      foreign(make("span", {}, make("b", {}, kind), ` ${all[0].why} `, make("i", {}, all[0].advice))),
      make("ul", {}, ...all.slice(0, PLACES).map((found) => foreign(make("li", {}, place(found))))),
      all.length > PLACES ? piece("bench.heads.more", { count: all.length - PLACES }) : null,
    ),
  );
}

function place({ module, head, evidence }) {
  const heads = head === null ? "" : `, head ${[head].flat().join(", ")}`;
  const numbers = Object.entries(evidence ?? {}).map(([name, x]) => `${name.replaceAll("_", " ")} ${number(x)}`);
  return `${module || text("bench.heads.the_model")}${heads}: ${numbers.join(", ")}`;
}

/** The number of a layer, where a module's name has one. */
function short(module) {
  const layer = module.match(/(?:^|\.)(\d+)(?=\.|$)/);
  return layer ? layer[1] : module.slice(-16) || text("bench.heads.unnamed");
}
