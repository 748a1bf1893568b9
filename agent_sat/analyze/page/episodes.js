"use strict";
// The episode browser. Text of models and tools only ever enters the page as text nodes.

const LONG_TEXT = 20000, MANY_TOKENS = 4000;
const HIDDEN_MARKS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// The text with control and direction marks spelled out, so that what is read is what is there.
function visible(text) {
  return text.replace(HIDDEN_MARKS, (mark) => `\u27e8U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

function textBlock(text) {
  const block = element("pre", {}, visible(text.slice(0, LONG_TEXT)));
  if (text.length <= LONG_TEXT) return block;
  const more = element("button", { type: "button", onclick: () => { block.replaceChildren(visible(text)); more.remove(); } }, `show all ${text.length} characters`);
  return element("div", {}, block, more);
}

const blend = (share, [r, g, b]) => `rgb(${[r, g, b].map((c) => Math.round(255 - (255 - c) * Math.min(Math.max(share, 0), 1))).join(",")})`;
const ORANGE = [224, 112, 16], BLUE = [70, 130, 190];

// How tokens are coloured: name -> {of: (tokens, i) => css colour, legend}
const COLOURS = {
  "|d|": { of: (t, i) => blend(Math.abs(t.logprob[i] - t.behavior_logprob[i]) / 0.5, ORANGE), missing: (t, i) => t.logprob[i] === null || t.behavior_logprob[i] === null, ramp: ["0", "0.5 nats or more"], colour: ORANGE },
  "log pi": { of: (t, i) => blend(-t.logprob[i] / 8, BLUE), missing: (t, i) => t.logprob[i] === null, ramp: ["log pi 0", "-8 or less"], colour: BLUE },
  gate: { of: (t, i) => (t.changed[i] ? "#f2b48a" : t.clipped[i] ? "#c9c9c9" : t.gate[i] ? "#fbe6a2" : "#fff"), missing: () => false, key: [["#f2b48a", "gradient taken by SAT"], ["#c9c9c9", "clipped by the base method"], ["#fbe6a2", "gated, gradient kept"], ["#fff", "untouched"]] },
  version: { of: (t, i) => blend(t.lag[i] / Math.max(1, ...t.lag), BLUE), missing: () => false, ramp: ["lag 0", "largest lag of the turn"], colour: BLUE },
};

function tokenTip(t, i) {
  const d = t.logprob[i] === null || t.behavior_logprob[i] === null ? null : t.logprob[i] - t.behavior_logprob[i];
  const q = t.q[i] === null ? "" : `\nq ${figureText(t.q[i])}  c ${figureText(t.contraction[i])}`;
  const flags = ["gate", "clipped", "changed"].filter((name) => t[name][i]).join(" ");
  return `token ${t.offset[i]}\nd ${figureText(d)}\nlog pi ${figureText(t.logprob[i])}  log mu ${figureText(t.behavior_logprob[i])}\nratio ${figureText(t.ratio[i])}  advantage ${figureText(t.advantage[i])}\nentropy ${figureText(t.entropy[i])}\nversion ${t.version[i]}  lag ${t.lag[i]}${q}${flags ? "\n" + flags : ""}${t.kept[i] ? "" : "\nmasked out"}`;
}

function tokenLine(turn, mode) {
  const tokens = turn.tokens, pieces = turn.pieces;
  if (!pieces || !tokens) return element("div", {}, textBlock(turn.text), element("p", { class: "note" }, pieces ? "not trained: no token records" : "no text of single tokens was recorded"));
  const colour = COLOURS[mode];
  const at = new Map(tokens.offset.map((offset, index) => [offset, index]));
  const line = element("div", { class: "tokens" });
  const draw = (from, to) => {
    const spans = document.createDocumentFragment();
    for (let offset = from; offset < to; offset++) {
      if (pieces[offset] === "") continue;
      const index = at.get(offset);
      const span = element("span", {}, visible(pieces[offset]));
      if (index === undefined) span.title = "no record of this token";
      else {
        span.title = tokenTip(tokens, index);
        if (colour.missing(tokens, index)) span.className = "mark";
        else span.style.background = colour.of(tokens, index);
        if (tokens.changed[index]) span.classList.add("changed");
      }
      spans.append(span);
    }
    line.append(spans);
  };
  draw(0, Math.min(pieces.length, MANY_TOKENS));
  if (pieces.length > MANY_TOKENS) {
    const more = element("button", { type: "button", onclick: () => { more.remove(); draw(MANY_TOKENS, pieces.length); } }, `show all ${pieces.length} tokens`);
    line.append(more);
  }
  return line;
}

function colourKey(mode) {
  const colour = COLOURS[mode];
  if (colour.key) return element("span", { class: "legend" }, colour.key.map(([fillColour, name]) => { const box = element("i", { class: "ramp" }); box.style.cssText = `background:${fillColour};width:16px`; return element("span", {}, box, name); }));
  const ramp = element("i", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, #fff, ${blend(1, colour.colour)})`;
  return element("span", { class: "legend" }, element("span", {}, colour.ramp[0], ramp, colour.ramp[1]));
}

function episodeView(episode, mode) {
  const options = Object.entries(episode.options).map(([name, value]) => `${name} ${value}`).join(", ");
  const box = element("article", { class: "episode" }, element("h2", {}, `Step ${episode.step}, group ${episode.group}, member ${episode.member}`),
    element("p", { class: "sub" }, visible(`task ${episode.task}${options ? ", " + options : ""} \u00b7 reward ${figureText(episode.reward)} \u00b7 ${episode.ending} \u00b7 ${episode.num_turns} turns, ${episode.num_tokens} tokens \u00b7 ${figureText(episode.seconds)} s`)));
  if (episode.failure) box.append(element("p", { class: "status bad" }, visible(episode.failure)));
  box.append(element("h3", {}, "Prompt"), textBlock(episode.prompt));
  episode.turns.forEach((turn, number) => {
    const versions = turn.version_min === turn.version_max ? turn.version_min : `${turn.version_min} to ${turn.version_max}`;
    const part = element("section", { class: "turn" }, element("h3", {}, `Turn ${number} \u00b7 advantage ${figureText(episode.advantages[number])} \u00b7 reward ${figureText(turn.reward)} \u00b7 ${turn.num_tokens} tokens, version ${versions} \u00b7 model ${figureText(turn.model_seconds)} s, environment ${figureText(turn.env_seconds)} s \u00b7 ${turn.stop_reason}`), tokenLine(turn, mode));
    if (turn.tool) {
      const tool = turn.tool;
      part.append(element("h3", {}, "Tool ", element("span", { class: "status " + (tool.status === "ok" ? "ok" : "bad") }, tool.status), ` in ${figureText(tool.seconds)} s${tool.truncated ? ", output cut" : ""}`), textBlock(tool.code));
      if (tool.stdout) part.append(element("h3", {}, "stdout"), textBlock(tool.stdout));
      if (tool.stderr) part.append(element("h3", {}, "stderr"), textBlock(tool.stderr));
    }
    if (turn.observation) part.append(element("h3", {}, "Observation"), textBlock(turn.observation));
    box.append(part);
  });
  return box;
}

// source: {facets: {endings, options, steps: [first, last]}, list(query, offset) -> {entries, more}, open(entry) -> episode}
function episodeBrowser(host, source, note) {
  const state = { mode: "|d|", episode: null, offset: 0, ticket: 0 };
  const choice = (label, name, values) => element("label", {}, label, element("select", { name, onchange: refresh }, element("option", { value: "" }, "any"), values.map((value) => element("option", { value }, visible(value)))));
  const number = (label, name) => element("label", {}, label, element("input", { type: "number", name, step: "any", onchange: refresh }));
  const form = element("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); refresh(); } },
    number("steps from", "from"), number("to", "to"), number("group", "group"), number("member", "member"), choice("ending", "ending", source.facets.endings), choice("task", "option", source.facets.options),
    number("largest |d| at least", "least"), element("label", {}, "SAT", element("select", { name: "changed", onchange: refresh }, element("option", { value: "" }, "any"), element("option", { value: "1" }, "changed a gradient"), element("option", { value: "0" }, "changed none"))));
  const list = element("div", { class: "list" }), detail = element("div", { class: "detail" }, element("p", { class: "empty" }, "Choose an episode on the left."));
  const modes = element("div", { class: "controls" });
  const drawDetail = () => {
    modes.replaceChildren(element("label", {}, "token colour", element("select", { name: "colour", onchange: (event) => { state.mode = event.target.value; drawDetail(); } }, Object.keys(COLOURS).map((name) => element("option", { value: name, selected: name === state.mode }, name)))), colourKey(state.mode), element("span", { class: "note" }, "outlined: SAT took its gradient; hover a token for its numbers"));
    if (state.episode) detail.replaceChildren(episodeView(state.episode, state.mode));
  };
  async function openEntry(entry, row) {
    for (const other of list.querySelectorAll("tr.open")) other.classList.remove("open");
    row.classList.add("open");
    state.episode = await source.open(entry);
    drawDetail();
  }
  const columns = [["step", "step"], ["group", "group"], ["member", "m"], ["reward", "reward"], ["ending", "ending"], ["num_turns", "turns"], ["max_abs", "max |d|"], ["changed", "SAT"]];
  async function refresh() {
    const ticket = ++state.ticket;
    const query = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    const body = element("tbody");
    const table = element("table", {}, element("thead", {}, element("tr", {}, columns.map(([, title]) => element("th", {}, title)))), body);
    state.offset = 0;
    const load = async () => {
      const { entries, more } = await source.list(query, state.offset);
      if (ticket !== state.ticket) return;
      state.offset += entries.length;
      for (const entry of entries) {
        const row = element("tr", { "data-key": `${entry.step}/${entry.group}/${entry.member}`, tabindex: 0, onclick: () => openEntry(entry, row), onkeydown: (event) => { if (event.key === "Enter") openEntry(entry, row); } }, columns.map(([name]) => element("td", {}, typeof entry[name] === "string" ? visible(entry[name]) : figureText(entry[name]))));
        body.append(row);
      }
      const tail = list.querySelector(".tail");
      if (tail) tail.remove();
      if (more) list.append(element("button", { class: "tail", type: "button", onclick: load }, "more"));
      else list.append(element("p", { class: "tail note" }, state.offset ? `${state.offset} episodes` : "no episode matches"));
    };
    list.replaceChildren(table);
    await load();
  }
  drawDetail();
  host.append(note ? element("p", { class: "note" }, note) : "", form, modes, element("div", { class: "browser" }, list, detail));
  refresh();
}

// A source over episodes that the page itself holds.
function embedded(episodes) {
  const options = new Set(), endings = new Set();
  for (const one of episodes) {
    endings.add(one.ending);
    for (const [name, value] of Object.entries(one.options)) options.add(`${name}=${value}`);
  }
  const takes = (one, q) => (q.from === undefined || one.step >= +q.from) && (q.to === undefined || one.step <= +q.to) && (q.group === undefined || one.group === +q.group) && (q.member === undefined || one.member === +q.member)
    && (q.ending === undefined || one.ending === q.ending) && (q.option === undefined || Object.entries(one.options).some(([name, value]) => `${name}=${value}` === q.option))
    && (q.least === undefined || (one.max_abs || 0) >= +q.least) && (q.changed === undefined || one.changed > 0 === (q.changed === "1"));
  return {
    facets: { endings: [...endings].sort(), options: [...options].sort() },
    list: async (query) => ({ entries: episodes.filter((one) => takes(one, query)), more: false }),
    open: async (entry) => entry.episode,
  };
}
