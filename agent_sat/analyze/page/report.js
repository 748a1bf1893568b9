"use strict";
// The report of one run: every view is computed from the same sums for the chosen steps and turns.

const DATA = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const BINS = DATA.bins, TURNS = [...new Set(DATA.sums.turn || [])].sort((a, b) => a - b);
const state = { from: 0, to: BINS.length - 1, turns: new Set(TURNS), measure: "log_ratio_abs_mean", log: false, page: "" };
const M = DATA.measures;

const turnName = (turn) => (turn === DATA.max_turns - 1 ? `turn ${turn}+` : `turn ${turn}`);
const turnColour = (turn) => ordered(TURNS.length > 1 ? TURNS.indexOf(turn) / (TURNS.length - 1) : 0);
const inWindow = (bin) => bin >= BINS[state.from] && bin <= BINS[state.to];
const inStep = (step) => !BINS.length || step >= BINS[state.from] && (state.to === BINS.length - 1 || step < BINS[state.to + 1]);
const whole = () => state.from === 0 && state.to === BINS.length - 1;
const chosen = (table) => (row) => inWindow(table.bin[row]) && state.turns.has(table.turn[row]);
const shownTurns = () => TURNS.filter((turn) => state.turns.has(turn));
const definition = (name) => `${M[name].meaning}${M[name].unit ? ` [${M[name].unit}]` : ""}`;
const axis = (name) => `${M[name].title}${M[name].unit && M[name].unit !== "share" ? ` (${M[name].unit})` : ""}`;

function byTurn() {
  return addUp(DATA.sums, (row) => DATA.sums.turn[row], chosen(DATA.sums));
}

function byTurnAndBin() {
  return addUp(DATA.sums, (row) => `${DATA.sums.turn[row]}/${DATA.sums.bin[row]}`, chosen(DATA.sums));
}

function overTraining(name, options = {}) {
  const sums = byTurnAndBin();
  const series = shownTurns().map((turn) => ({
    name: turnName(turn), color: turnColour(turn), index: TURNS.indexOf(turn),
    points: BINS.filter(inWindow).map((bin) => { const s = sums.get(`${turn}/${bin}`); return [bin, evaluate(M[name], s), s ? `n ${s.tokens}` : ""]; }),
  }));
  return lineChart({ title: `${M[name].title} over training`, definition: definition(name), xLabel: "step", yLabel: axis(name), yUnit: M[name].unit, logY: state.log, wholeX: true, series, ...options });
}

function perTurn(names, options = {}) {
  const sums = byTurn();
  const series = names.map((name, index) => ({ name: names.length > 1 ? M[name].title : "", quiet: names.length === 1, color: category(index), index, points: shownTurns().map((turn) => [turn, evaluate(M[name], sums.get(turn)), `n ${sums.get(turn) ? sums.get(turn).tokens : 0}`]) }));
  if (names.length === 1 && whole() && DATA.table[`${names[0]}_low`]) {
    series[0].band = DATA.table.turn.map((turn, row) => [turn, DATA.table[`${names[0]}_low`][row], DATA.table[`${names[0]}_high`][row]]).filter(([turn]) => state.turns.has(turn));
    options = { errorBars: true, note: "Bars: 95% by bootstrap over episodes.", ...options };
  }
  return lineChart({ title: `${M[names[0]].title} by turn`, definition: names.map((name) => `${M[name].title}: ${definition(name)}`).join("\n"), xLabel: "tool turn", yLabel: names.length > 1 ? "" : axis(names[0]), yUnit: M[names[0]].unit, wholeX: true, series, ...options });
}

function firstAgainstLater(name) {
  const sums = addUp(DATA.sums, (row) => `${DATA.sums.turn[row]}/${DATA.sums.first[row]}`, chosen(DATA.sums));
  const series = [["first token of the turn", true], ["later tokens", false]].map(([label, first], index) => ({ name: label, color: category(index), index, points: shownTurns().map((turn) => { const s = sums.get(`${turn}/${first}`); return [turn, evaluate(M[name], s), s ? `n ${s.tokens}` : ""]; }) }));
  return lineChart({ title: `${M[name].title}: first token against later ones`, definition: definition(name), xLabel: "tool turn", yLabel: axis(name), yUnit: M[name].unit, wholeX: true, series, note: DATA.notes[1] });
}

const grid = (...figures) => element("div", { class: "grid" }, figures);
const card = (value, label, bad) => element("div", { class: bad ? "card bad" : "card" }, element("b", {}, value), element("span", {}, label));

const MISMATCH = ["tokens", "missing", "log_ratio_abs_mean", "log_ratio_abs_max", "log_ratio_variance", "k1", "k3", "total_variation", "effective_share"];
const TAILS_AND_REGION = ["entropy_mean", "share_pi_below_1e-3", "share_mu_below_1e-3", "gradient_pi_below_1e-3", "pearson", "q_mean", "contraction_mean", "gate_rate", "clipped_share", "changed_share", "kept_share"];

// A table by turn; measures without any value, and a count of missing tokens that is 0, are left out.
function turnTable(sums, names, more = []) {
  const any = (test) => [...sums.values()].some(test);
  const used = names.filter((name) => any((one) => evaluate(M[name], one) !== null) && (name !== "missing" || any((one) => one.missing)));
  const few = (turn) => whole() && ofTable("episodes", turn) < DATA.few;
  const columns = [{ title: "turn", of: (turn) => turnName(turn).slice(5) + (few(turn) ? " *" : "") }, ...more];
  for (const name of used) columns.push({ title: M[name].title, meaning: definition(name), unit: M[name].unit, of: (turn) => evaluate(M[name], sums.get(turn)) });
  return dataTable(columns, shownTurns().filter((turn) => sums.has(turn)));
}

// A value of the table that Python made for the whole window, null where it has none.
function ofTable(name, turn) {
  const row = (DATA.table.turn || []).indexOf(turn);
  return row < 0 ? null : DATA.table[name][row];
}

function overview() {
  const s = DATA.stability, sums = byTurn();
  const total = [...sums.values()].reduce((n, one) => n + one.tokens, 0);
  const more = !whole() ? [] : [
    { title: "episodes", meaning: "episodes with a token in this turn", of: (turn) => ofTable("episodes", turn) },
    { title: "95% of mean |d|", meaning: "bootstrap over episodes [nats]", of: (turn) => `${figureText(ofTable("log_ratio_abs_mean_low", turn))} to ${figureText(ofTable("log_ratio_abs_mean_high", turn))}` },
    ...["p50", "p90", "p99"].map((name) => ({ title: `${name} |d|`, meaning: "exact quantile of |d| [nats]", of: (turn) => ofTable(`log_ratio_abs_${name}`, turn) })),
  ];
  return element("div", {},
    element("div", { class: "cards" }, card(figureText(DATA.metrics.step.length), "steps"), card(figureText(total), "sampled tokens, chosen"), card(figureText(s.best), `best reward, step ${s.best_step}`), card(figureText(s.last), "last reward"), card(s.collapsed ? `step ${s.collapse_step}` : "no", "collapse", s.collapsed), card(figureText(s.spikes.length), "gradient spikes", s.spikes.length > 0), card(figureText(s.skipped), "skipped steps", s.skipped > 0)),
    element("h2", {}, "Mismatch by tool turn"), turnTable(sums, MISMATCH, more),
    element("h2", {}, "Tails and trust region by tool turn"), turnTable(sums, TAILS_AND_REGION),
    element("p", { class: "note" }, whole() ? `* fewer than ${DATA.few} episodes: read with care. Hover a heading for its definition.` : "Counts of episodes, quantiles and intervals are given for the whole window of the report only."),
    element("div", { class: "notes" }, DATA.notes.map((note) => element("p", {}, note))),
    grid(overTraining("log_ratio_abs_mean"), rewardChart()));
}

function mismatch() {
  const select = element("select", { name: "measure", onchange: (event) => { state.measure = event.target.value; draw(); } }, Object.entries(M).map(([name, measure]) => element("option", { value: name, selected: name === state.measure }, `${measure.title} - ${measure.meaning}`)));
  const log = element("input", { type: "checkbox", name: "log", onchange: (event) => { state.log = event.target.checked; draw(); } });
  log.checked = state.log;
  return element("div", {}, element("div", { class: "controls" }, element("label", {}, "measure", select), element("label", {}, log, "logarithmic")),
    element("p", { class: "note" }, definition(state.measure)),
    grid(overTraining(state.measure), perTurn([state.measure]), firstAgainstLater(state.measure), perTurn(["policy_lag_abs_mean", "implementation_abs_mean"], { title: "Two parts of the mismatch by turn", yLabel: "nats", empty: "log mu~ was not recomputed in this run: set log.mismatch_causes=true to split the mismatch." })));
}

function tails() {
  const t = DATA.tail, counts = new Map();
  (t.turn || []).forEach((turn, row) => {
    if (!inWindow(t.bin[row]) || !state.turns.has(turn)) return;
    if (!counts.has(turn)) counts.set(turn, new Array(DATA.histogram.bins).fill(0));
    counts.get(turn)[t.size[row]] += t.count[row];
  });
  const edge = (bin) => 10 ** (DATA.histogram.low + bin / DATA.histogram.per_decade);
  const series = shownTurns().filter((turn) => counts.has(turn)).map((turn) => {
    const bins = counts.get(turn), total = bins.reduce((a, b) => a + b, 0);
    let above = total;
    const points = bins.map((count, bin) => { const point = [edge(bin), above / total, `${above} tokens`]; above -= count; return point; }).filter((p) => p[1] > 0);
    return { name: turnName(turn), color: turnColour(turn), index: TURNS.indexOf(turn), points };
  });
  const share = (who) => ["1e-2", "1e-3", "1e-4"].map((tail) => `share_${who}_below_${tail}`);
  const mass = (who) => ["1e-2", "1e-3", "1e-4"].map((tail) => `gradient_${who}_below_${tail}`);
  return grid(
    lineChart({ title: "Tail of |d| by turn", definition: "Share of tokens with |d| at least x. Bins of 1/8 decade.", xLabel: "|d| (nats)", yLabel: "share of tokens at or above", logX: true, logY: true, series }),
    overTraining("share_pi_below_1e-3"),
    perTurn(share("pi"), { title: "Unlikely tokens under pi" }), perTurn(share("mu"), { title: "Unlikely tokens under mu" }),
    perTurn(mass("pi"), { title: "Gradient mass on tokens unlikely under pi" }), perTurn(mass("mu"), { title: "Gradient mass on tokens unlikely under mu" }));
}

function klNames() {
  const bounds = ["0", ...DATA.kl_bounds.map((bound) => figureText(bound))];
  return bounds.map((bound, index) => (index < DATA.kl_bounds.length ? `k3 ${bound} to ${figureText(DATA.kl_bounds[index])}` : `k3 above ${bound}`));
}

function klGroups() {
  const perBin = addUp(DATA.sums, (row) => DATA.sums.bin[row], (row) => inWindow(DATA.sums.bin[row]));
  const groupOf = new Map([...perBin].map(([bin, sums]) => { const k3 = evaluate(M.k3, sums); return [bin, DATA.kl_bounds.filter((bound) => k3 > bound).length]; }));
  const sums = addUp(DATA.sums, (row) => `${groupOf.get(DATA.sums.bin[row])}/${DATA.sums.turn[row] > 0}`, (row) => inWindow(DATA.sums.bin[row]));
  const names = klNames(), rows = names.flatMap((name, group) => [false, true].map((later) => ({ name, group, later }))).filter((row) => sums.has(`${row.group}/${row.later}`));
  const of = (measure) => ({ title: M[measure].title, meaning: definition(measure), unit: M[measure].unit, of: (row) => evaluate(M[measure], sums.get(`${row.group}/${row.later}`)) });
  const steps = (group) => [...groupOf.values()].filter((other) => other === group).length;
  const table = dataTable([{ title: "steps with mean", of: (row) => row.name }, { title: "tokens of", of: (row) => (row.later ? "later turns" : "turn 0") }, { title: BINS.length === DATA.bin_of.length ? "steps" : "bins of steps", of: (row) => steps(row.group) }, ...["tokens", "k3", "probability_gap_mean", "pearson", "pearson_log"].map(of)], rows);
  const p = DATA.scatter, panels = [];
  for (let group = 0; group < names.length; group++) {
    const pick = (later) => (p.kl_group || []).map((_, row) => row).filter((row) => p.kl_group[row] === group && p.later[row] === later && inWindow(p.bin[row]) && state.turns.has(p.turn[row])).map((row) => [Math.log(p.m[row]), Math.log(p.p[row]), [`turn ${p.turn[row]}, steps from ${p.bin[row]}`, `d ${figureText(p.d[row])}`]]);
    const first = pick(false), later = pick(true);
    if (!first.length && !later.length) continue;
    const all = [...first, ...later], low = Math.min(...all.map((q) => Math.min(q[0], q[1])));
    panels.push(scatterChart({ title: `log pi over log mu: ${names[group]}`, definition: `A sample of at most ${first.length + later.length} sampled tokens of the steps in this group; on the line pi equals mu.`, xLabel: "log mu (nats)", yLabel: "log pi (nats)", xDomain: [low, 0], yDomain: [low, 0], groups: [{ name: "turn 0", color: category(0), index: 0, points: first }, { name: "later turns", color: category(1), index: 2, points: later }], curves: [{ name: "pi = mu", color: INK, points: [[low, low], [0, 0]], dash: "4 3" }] }));
  }
  return element("div", {}, element("h2", {}, "Steps grouped by their mean k3"), table, element("p", { class: "note" }, DATA.notes[0]), grid(...panels));
}

const FATES = [["untouched", category(5), 0], ["gated", category(4), 3], ["clipped", "#8a929a", 1], ["changed", category(1), 2]];

function satView() {
  const f = DATA.fates, rows = (f.fate || []).map((_, row) => row).filter((row) => inWindow(f.bin[row]) && state.turns.has(f.turn[row]));
  const groups = FATES.map(([fate, color, index]) => ({ name: { untouched: "untouched", gated: "gated, gradient kept", clipped: "clipped by the base region", changed: "gradient taken by SAT" }[fate], color, index, opacity: fate === "changed" ? 0.9 : 0.5, points: rows.filter((row) => f.fate[row] === fate && f.ratio[row] !== null).map((row) => [f.d[row], f.ratio[row], [`turn ${f.turn[row]}, advantage ${figureText(f.advantage[row])}`, `q ${figureText(f.q[row])}, c ${figureText(f.contraction[row])}`]]) }));
  const qs = rows.map((row) => f.q[row]).filter((q) => q !== null && q > 0).sort((a, b) => a - b);
  const all = groups.flatMap((group) => group.points), reach = Math.min(2, Math.max(1e-9, ...all.map((p) => 1.02 * Math.abs(p[0]))));
  const curves = [];
  if (qs.length) {
    const radius = (u, q, eps) => eps * (u > q ? 1 / (1 + (u / q) ** DATA.run.exponent) : 1);
    const xs = Array.from({ length: 401 }, (_, i) => -reach + (2 * reach * i) / 400);
    for (const [name, q, dash] of [["radii at the median q", qs[Math.floor(qs.length / 2)], ""], ["at the smallest q", qs[0], "5 3"], ["at the largest q", qs[qs.length - 1], "2 3"]]) {
      curves.push({ name: `${name} ${figureText(q)}`, color: INK, dash, points: xs.filter((x) => x >= 0).map((x) => [x, 1 + radius(x, q, DATA.run.eps_high)]) });
      curves.push({ name: "", quiet: true, color: INK, dash, points: xs.filter((x) => x <= 0).map((x) => [x, 1 - radius(-x, q, DATA.run.eps_low)]) });
    }
  }
  const ratios = all.filter((p) => Math.abs(p[0]) <= reach).map((p) => p[1]), yDomain = ratios.length ? [Math.min(1 - 1.25 * DATA.run.eps_low, ...ratios), Math.max(1 + 1.25 * DATA.run.eps_high, ...ratios)] : null;
  return element("div", {}, grid(
    scatterChart({ title: "Where SAT acted: ratio against d", wide: true, definition: "A sample of tokens of each fate. Between the lines a token keeps its outward gradient; beyond q = |g| the radius shrinks by 1 / (1 + (|g|/q)^exponent). The lines take |d| for |g|, which is exact at token granularity.", xLabel: "d = log pi - log mu (nats)", yLabel: "ratio r of the objective", xDomain: [-reach, reach], yDomain, groups, curves }),
    overTraining("q_mean"), overTraining("changed_share"), overTraining("gate_rate"), overTraining("clipped_share"), perTurn(["gate_rate", "clipped_share", "changed_share"], { title: "The trust region by turn" }), perTurn(["contraction_mean", "contraction_min"], { title: "Contraction by turn" })));
}

function metricChart(title, names, options = {}) {
  const rows = DATA.metrics.step.map((_, row) => row).filter((row) => inStep(DATA.metrics.step[row]));
  const present = names.filter((name) => DATA.metrics[name] && rows.some((row) => DATA.metrics[name][row] !== null));
  const series = present.map((name, index) => ({ name: options.label ? options.label(name) : name, color: options.sequence ? ordered(present.length > 1 ? index / (present.length - 1) : 0) : category(index), index, points: rows.map((row) => [DATA.metrics.step[row], DATA.metrics[name][row]]) }));
  return lineChart({ title, xLabel: "step", wholeX: true, series, ...options });
}

const named = (pattern) => Object.keys(DATA.metrics).filter((name) => pattern.test(name)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));

function staleness() {
  const t = DATA.lag_sums, lags = addUp(t, (row) => t.lag[row], chosen(t)), keys = [...lags.keys()].sort((a, b) => a - b);
  const line = (name, index) => ({ name: M[name].title, color: category(index), index, points: keys.map((lag) => [lag, evaluate(M[name], lags.get(lag)), `n ${lags.get(lag).tokens}`]) });
  return grid(
    lineChart({ title: "Mismatch by lag", definition: definition("log_ratio_abs_mean"), xLabel: "lag (updates between sampling and use)", yLabel: "nats", wholeX: true, series: ["log_ratio_abs_mean", "policy_lag_abs_mean", "implementation_abs_mean"].map(line).filter((one) => one.points.some((p) => p[1] !== null)) }),
    lineChart({ title: "Tokens by lag", xLabel: "lag (updates)", yLabel: "tokens", wholeX: true, series: [{ name: "tokens", quiet: true, color: category(0), points: keys.map((lag) => [lag, lags.get(lag).tokens]) }] }),
    metricChart("Lag over training", named(/^staleness\/lag/), { yLabel: "updates" }), metricChart("Queue", named(/^staleness\/(in_queue|predicted|pre_queue)/), { yLabel: "updates or groups" }), metricChart("Throughput", ["rollout/tokens_per_second", "train/tokens_per_second"], { yLabel: "tokens/s" }), metricChart("Time of a step", named(/^time\//), { yLabel: "seconds" }));
}

function rewardChart() {
  return metricChart("Mean reward over training", ["reward/mean"], { yLabel: "reward", definition: "mean outcome reward of the episodes a step trained on; episodes that failed for reasons not the model's are left out" });
}

function rewards() {
  const scores = DATA.evaluations.flatMap((one) => (one.scores || []).map((score) => ({ step: one.step, ...score })));
  const table = scores.length ? dataTable([{ title: "step", of: (s) => s.step }, { title: "kind", text: true, of: (s) => String(s.kind) }, { title: "stratum", text: true, of: (s) => String(s.stratum) }, { title: "success", unit: "share", of: (s) => (s.total ? s.successes / s.total : null) }, { title: "episodes", of: (s) => s.total }], scores) : element("p", { class: "empty" }, "No evaluation was recorded.");
  const r = DATA.reward_by_turns;
  return element("div", {}, grid(rewardChart(), metricChart("Reward by stratum", named(/^reward\/[^/]+=/), { yLabel: "reward", sequence: true, label: (name) => name.slice(7) }),
    metricChart("Gradient norm", ["train/grad_norm"], { logY: true, yLabel: "norm before clipping", definition: DATA.rules.spike, note: DATA.stability.spikes.length ? `Spikes at steps ${DATA.stability.spikes.slice(0, 30).join(", ")}.` : "No spikes." }),
    lineChart({ title: "Reward by number of turns taken", definition: "mean reward of the recorded episodes with that many assistant turns, over the whole window of the report", xLabel: "turns of the episode", yLabel: "reward", wholeX: true, series: [{ name: "reward", quiet: true, color: category(0), points: (r.num_turns || []).map((turns, row) => [turns, r.reward[row], `${r.episodes[row]} episodes`]) }], note: "Turns are chosen by the model: this is no effect of the number of turns." })),
    element("h2", {}, "Evaluations"), table, element("h2", {}, "Collapse"), element("p", {}, DATA.rules.collapse));
}

function episodesView() {
  const host = element("div");
  episodeBrowser(host, embedded(DATA.episodes), `${DATA.episodes.length} episodes are part of this page: those with the largest |d|, those SAT changed most, some of each ending and some in between. agent-sat view RUNDIR shows all.`);
  return host;
}

function about() {
  const rows = Object.entries(M);
  return element("div", {}, element("h2", {}, "Definitions"), dataTable([{ title: "measure", text: true, of: ([, m]) => m.title }, { title: "unit", text: true, of: ([, m]) => m.unit || "-" }, { title: "meaning", text: true, of: ([, m]) => m.meaning }], rows),
    element("h2", {}, "Rules"), element("p", {}, DATA.rules.collapse), element("p", {}, DATA.rules.spike), element("h2", {}, "Sessions"), textBlock(JSON.stringify(DATA.run.sessions, null, 1)), element("h2", {}, "Config"), textBlock(DATA.run.config));
}

const PAGES = { overview, mismatch, tails, "KL groups": klGroups, SAT: satView, staleness, reward: rewards, episodes: episodesView, about };

function controls() {
  const first = element("input", { type: "range", name: "from", min: 0, max: BINS.length - 1, value: state.from, "aria-label": "first step" });
  const last = element("input", { type: "range", name: "to", min: 0, max: BINS.length - 1, value: state.to, "aria-label": "last step" });
  const label = element("output");
  const say = () => { label.textContent = BINS.length ? `${BINS[state.from]} to ${state.to === BINS.length - 1 ? DATA.bin_of[DATA.bin_of.length - 1][0] : BINS[state.to + 1] - 1}` : "none"; };
  const move = () => { state.from = Math.min(+first.value, +last.value); state.to = Math.max(+first.value, +last.value); say(); draw(); };
  first.addEventListener("input", move);
  last.addEventListener("input", move);
  say();
  const boxes = element("fieldset", {}, element("legend", {}, "turns"), TURNS.map((turn) => {
    const box = element("input", { type: "checkbox", name: `turn-${turn}`, onchange: (event) => { if (event.target.checked) state.turns.add(turn); else state.turns.delete(turn); draw(); } });
    box.checked = true;
    return element("label", {}, box, String(turn) + (turn === DATA.max_turns - 1 ? "+" : ""));
  }));
  return element("div", { class: "controls" }, element("label", {}, "steps", first, last, label), boxes);
}

const body = element("div");

function draw() {
  const offset = window.scrollY;
  body.replaceChildren(PAGES[state.page]());
  window.scrollTo(0, offset);
}

const top_ = element("header", { class: "top" }, element("h1", {}, DATA.run.name), element("p", { class: "sub" }, `${DATA.run.method}, seed ${DATA.run.seed}, ${DATA.run.window}; run ${DATA.run.state}`), controls());
main.append(top_);
tabs(top_, Object.keys(PAGES), (name) => { state.page = name; draw(); });
main.append(body);
