"use strict";
// Finished runs side by side.

const DATA = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const CELLS = DATA.cells, SETTINGS = [...new Set(CELLS.map((cell) => cell.setting))];
const METHODS = [...new Set(CELLS.map((cell) => cell.method))];
const hasValues = (outcome) => CELLS.some((cell) => cell.outcomes[outcome].count > 0);
const SHOWN = Object.keys(DATA.outcomes).filter(hasValues);

function withInterval(e) {
  if (!e.count) return "-";
  return e.low === null ? figureText(e.mean) : `${figureText(e.mean)} [${figureText(e.low)}, ${figureText(e.high)}]`;
}

const inSetting = (setting) => CELLS.filter((cell) => cell.setting === setting);
const heading = (text, setting) => (SETTINGS.length > 1 ? `${text}: ${setting}` : text);

function lines(cells, of, options) {
  const series = cells.map((cell) => {
    const index = METHODS.indexOf(cell.method), rows = of(cell);
    return { name: cell.method, color: category(index), index, points: rows.map((r) => [r[0], r[1], `${r[4]} seeds`]), band: rows.filter((r) => r[2] !== null).map((r) => [r[0], r[2], r[3]]) };
  });
  return lineChart({ wholeX: true, series, ...options });
}

function verdicts() {
  const told = SHOWN.map((outcome) => [element("h2", {}, `Verdicts: ${DATA.outcomes[outcome]}`), DATA.contrasts.filter((contrast) => contrast.outcome === outcome).map((contrast) => element("p", { class: contrast.separable ? "verdict separable" : "verdict" }, contrast.verdict))]);
  return element("div", {}, DATA.warnings.map((warning) => element("p", { class: "status bad" }, warning)),
    ...told.flat(2),
    element("h2", {}, "By method"), dataTable([{ title: "method", text: true, of: (c) => c.method }, { title: "setting", text: true, of: (c) => c.setting || "-" }, { title: "seeds", of: (c) => c.seeds.length }, ...SHOWN.map((name) => ({ title: DATA.outcomes[name], meaning: "mean over seeds, 95% Student interval", of: (c) => withInterval(c.outcomes[name]) })), { title: "collapsed", meaning: DATA.collapse_rule, of: (c) => `${c.collapses} of ${c.seeds.length}` }], CELLS),
    element("div", { class: "notes" }, element("p", {}, DATA.note), element("p", {}, DATA.collapse_rule)));
}

function curves() {
  return element("div", { class: "grid" }, SETTINGS.map((setting) => lines(inSetting(setting), (cell) => cell.curve, { title: heading("Mean reward", setting), definition: "mean over seeds of the step's mean reward; band: 95% Student interval", xLabel: "step", yLabel: "reward", wide: true })));
}

function byTurn() {
  const names = { log_ratio_abs_mean: ["Mean |d| by turn", "nats"], k3: ["k3 by turn", "nats"], changed_share: ["Gradients SAT changed, by turn", "share"] };
  return element("div", { class: "grid" }, SETTINGS.flatMap((setting) => Object.entries(names).map(([name, [title, unit]]) => lines(inSetting(setting), (cell) => cell.turns[name], { title: heading(title, setting), xLabel: "tool turn", yLabel: unit, yUnit: unit, errorBars: true, definition: "mean over seeds; bars: 95% Student interval" }))));
}

function runs() {
  const rows = CELLS.flatMap((cell) => cell.runs.map((run) => ({ cell, run })));
  return dataTable([{ title: "method", text: true, of: (r) => r.cell.method }, { title: "setting", text: true, of: (r) => r.cell.setting || "-" }, { title: "seed", of: (r) => r.run.seed }, { title: "state", text: true, of: (r) => r.run.state }, ...SHOWN.map((name) => ({ title: DATA.outcomes[name], of: (r) => r.run.outcomes[name] })), { title: "collapse", of: (r) => (r.run.collapse_step < 0 ? "no" : `step ${r.run.collapse_step}`) }, { title: "gradient spikes", of: (r) => r.run.spikes }, { title: "run", text: true, of: (r) => r.run.path }], rows);
}

const PAGES = { verdicts, "learning curves": curves, "by turn": byTurn, runs };
const body = element("div");
const head = element("header", { class: "top" }, element("h1", {}, "Comparison of runs"), element("p", { class: "sub" }, `${CELLS.length} cells, ${CELLS.reduce((n, cell) => n + cell.seeds.length, 0)} runs`));
main.append(head);
tabs(head, Object.keys(PAGES), (name) => body.replaceChildren(PAGES[name]()));
main.append(body);
