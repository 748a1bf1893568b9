"use strict";
// `agent-sat view`: the episode browser over a local server, which reads from disk what is asked for.

const DATA = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");

async function ask(path, query) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}

function complain(error) {
  main.prepend(element("p", { class: "status bad" }, String(error)));
}

const server = {
  facets: DATA.facets,
  list: (query, offset) => ask("/api/list", { ...query, offset }).catch((error) => { complain(error); return { entries: [], more: false }; }),
  open: (entry) => ask("/api/episode", { step: entry.step, group: entry.group, member: entry.member }),
};

main.append(element("h1", {}, `${DATA.name}: episodes`), element("p", { class: "sub" }, `${DATA.method}, seed ${DATA.seed}; steps ${DATA.steps[0]} to ${DATA.steps[1]}`));
episodeBrowser(main, server);
