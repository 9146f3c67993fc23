// The panel for the selected box, search, and the controls of the page.

function select(what) {
  selected = what;
  if (!what || what.value === undefined || what.pane.graph.vars[what.value].name !== life) life = null;
  panes.forEach((p) => p.mark());
  tell();
}
function follow(pane, name) {
  life = name;
  const value = pane.graph.byName.get(name);
  selected = { pane, value };
  panes.forEach((p) => { p.mark(); p.fitLife(); });
  tell();
}
function go(pane, node) {
  pane.graph.reveal(node);
  pane.draw();
  pane.center(node);
  select({ pane, node });
}

function tell() {
  const panel = $("panel");
  if (!selected) panel.replaceChildren(...overview(panes[panes.length - 1]));
  else if (selected.value !== undefined) panel.replaceChildren(...aboutValue(selected.pane, selected.value));
  else if (selected.node.group) panel.replaceChildren(...aboutGroup(selected.pane, selected.node));
  else panel.replaceChildren(...aboutOperator(selected.pane, selected.node));
  panel.scrollTop = 0;
}
const h3 = (text) => el("h3", {}, text);
const soft = (text) => el("p", { class: "soft" }, text);
const tag = (kind, text = kind) => el("span", { class: "tag", style: `background: var(--${KINDS.includes(kind) ? kind : "soft"})` }, text);
const link = (text, act) => el("a", { class: "go mono", tabindex: 0, on: { click: act, keydown: (e) => { if (e.key === "Enter") act(); } } }, text);
const opLink = (pane, k) => {
  const op = pane.graph.ops[k], made = op.out.length ? pane.graph.vars[op.out[0]].shown : "";
  return el("p", {}, link(op.type, () => go(pane, pane.graph.leaf[k])), el("span", { class: "soft mono" }, ` ${clip(made, 30)}`));
};
function opList(pane, ops, most = 12) {
  const out = ops.slice(0, most).map((k) => opLink(pane, k));
  if (ops.length > most) out.push(soft(`and ${ops.length - most} more`));
  return out;
}
function valueRow(pane, v) {
  const d = pane.graph.vars[v];
  const about = [d.type, d.placement, d.size, d.kind === "value" ? "" : d.kind].filter(Boolean).join(" · ");
  return el("div", { class: "value" }, link(d.shown, () => select({ pane, value: v })), el("div", { class: "soft mono" }, about));
}
function counts(pane, ops) {
  const by = new Map();
  for (const k of ops) {
    const op = pane.graph.ops[k], row = by.get(op.type) || { kind: op.kind, n: 0, bytes: 0, first: k };
    row.n++;
    row.bytes += op.bytes || 0;
    by.set(op.type, row);
  }
  const rows = [...by].sort((a, b) => b[1].n - a[1].n);
  return el("table", {}, ...rows.slice(0, 40).map(([type, r]) => el("tr", {}, el("td", {}, el("span", { class: "mono", style: `border-left: 3px solid var(--${KINDS.includes(r.kind) ? r.kind : "soft"}); padding-left: 5px` }, type)), el("td", { class: "n" }, r.bytes ? bytes(r.bytes) : ""), el("td", { class: "n" }, r.n))));
}

function overview(pane) {
  const graph = pane.graph;
  const params = graph.vars.map((v, k) => [v, k]).filter(([v]) => v.kind === "parameter");
  const out = [el("h1", {}, graph.summary), soft(panes.length > 1 ? `${pane.view.title}; click a box to read about it` : "click a box to read about it, its + to open a group")];
  if (model.note) out.push(soft(model.note));
  out.push(h3("Operators"), counts(pane, graph.ops.map((_, k) => k)));
  if (params.length) out.push(h3(`Parameters (${params.length})`), ...params.slice(0, 60).map(([v, k]) => el("div", { class: "value" }, link(v.shown, () => follow(pane, v.name)), el("div", { class: "soft mono" }, [v.type, v.placement, v.size].filter(Boolean).join(" · ")))));
  if (params.length > 60) out.push(soft(`and ${params.length - 60} more: search for them`));
  return out;
}
function aboutGroup(pane, node) {
  const ops = pane.graph.opsOf(node);
  return [
    el("h1", {}, node.title),
    el("p", {}, tag(colour(node), node.section), plural(node.count, "operator")),
    node.alike ? soft(node.alike) : "",
    el("p", {}, el("button", { on: { click: () => pane.toggle(node) } }, node.open ? "Close the group" : "Open the group")),
    h3("Operators"), counts(pane, ops),
  ];
}
function aboutOperator(pane, node) {
  const graph = pane.graph, op = graph.ops[node.op];
  const groups = graph.path(node).slice(1, -1).map((n) => n.title);
  const out = [el("h1", {}, op.type), el("p", {}, tag(op.kind), el("span", { class: "soft" }, `operator ${node.op} of ${graph.title}`))];
  if (groups.length) out.push(soft(groups.join(" › ")));
  out.push(el("pre", { id: "text" }, op.text));
  if (op.bytes) out.push(soft(`${bytes(op.bytes)} moved`));
  if (op.in.length) out.push(h3("Reads"), ...op.in.map((v) => valueRow(pane, v)));
  if (op.out.length) out.push(h3("Writes"), ...op.out.map((v) => valueRow(pane, v)));
  if (op.site !== undefined) {
    const [file, line, where, text] = graph.sites[op.site];
    out.push(h3("Written at"), el("p", { class: "mono" }, `${file}:${line}`), soft(`in ${where}`), text ? el("pre", {}, text) : "");
  }
  if (op.body) out.push(h3("Runs"), el("pre", {}, op.body));
  return out;
}
function aboutValue(pane, v) {
  const graph = pane.graph, d = graph.vars[v];
  const out = [el("h1", { class: "mono" }, d.shown), el("p", {}, tag("", d.kind))];
  out.push(el("p", { class: "mono" }, [d.type, d.placement, d.size].filter(Boolean).join(" · ")));
  const stages = graph.lives[d.name];
  if (stages) {
    out.push(el("p", {}, el("button", { id: "life", "aria-pressed": life === d.name, on: { click: () => (life === d.name ? select({ pane, value: v }) : follow(pane, d.name)) } }, "Show its life in a step")));
    STAGES.forEach((stage, k) => {
      if (stages[stage]) out.push(el("div", { class: "stage" }, el("b", {}, `${k + 1} ${stage}`), ...opList(pane, stages[stage], 8)));
    });
  }
  if (!stages) {
    if (graph.writers[v].length) out.push(h3("Written by"), ...opList(pane, graph.writers[v]));
    if (graph.readers[v].length) out.push(h3("Read by"), ...opList(pane, graph.readers[v]));
  }
  return out;
}

// -- search ---------------------------------------------------------------------------------------------------------------------------

function find(pane, query) {
  const graph = pane.graph, q = query.trim().toLowerCase(), hits = [];
  if (!q) return hits;
  const rank = (text) => { const at = text.toLowerCase().indexOf(q); return at < 0 ? null : at === 0 ? (text.length === q.length ? 0 : 1) : 2; };
  const add = (text, about, act) => { const r = rank(text); if (r !== null) hits.push({ r, text, about, act }); };
  graph.vars.forEach((v, k) => add(v.name, v.kind, () => {
    const at = (v.kind === "parameter" ? graph.readers[k] : graph.writers[k].concat(graph.readers[k]))[0];
    if (at !== undefined) go(pane, graph.leaf[at]);
    if (v.kind === "parameter") follow(pane, v.name); else select({ pane, value: k });
  }));
  graph.ops.forEach((op, k) => add(op.type, `operator ${k}${op.out.length ? ` ${clip(graph.vars[op.out[0]].shown, 24)}` : ""}`, () => go(pane, graph.leaf[k])));
  for (const n of graph.nodes.values()) if (n.group && n !== graph.root) add(n.title, plural(n.count, "operator"), () => go(pane, n));
  return hits.sort((a, b) => a.r - b.r);
}
function search(query) {
  const list = $("found"), hits = panes.length ? find(panes[panes.length - 1], query) : [];
  list.hidden = !query.trim();
  list.replaceChildren(...hits.slice(0, 40).map((h, k) => el("li", { role: "option", "aria-selected": k === 0, on: { pointerdown: (e) => { e.preventDefault(); pick(h); } } }, h.text, el("small", {}, h.about))));
  if (!hits.length) list.append(el("li", { class: "none" }, "nothing has this name"));
  if (hits.length > 40) list.append(el("li", { class: "none" }, `and ${hits.length - 40} more`));
  return hits;
}
function pick(hit) {
  hit.act();
  $("found").hidden = true;
}

// -- the page -------------------------------------------------------------------------------------------------------------------------

const every = model.views.map((v) => new Pane(v));
const before = model.views.length > 1 && !model.views[0].ranks.length ? [every[0]] : [];
const ranked = before.length ? every.slice(1) : every;
let rank = ranked[0], mode = before.length ? "beside" : "after";

function show() {
  panes = mode === "before" ? before : mode === "after" ? [rank] : [...before, rank];
  selected = life = null;
  $("panes").replaceChildren(...panes.map((p) => p.root));
  const parts = rank.view.parts;
  $("part").hidden = parts.length < 2;
  document.querySelectorAll("#shows [data-mode]").forEach((b) => b.setAttribute("aria-pressed", b.dataset.mode === mode));
  // in the flow that shows more, the same in all panes; what does not fit is read from top to bottom
  const scales = [true, false].map((below) => Math.min(...panes.map((p) => { layout(p.graph, p.graph.root, below); return p.whole(); })));
  panes.forEach((p) => {
    p.below = scales[0] >= scales[1] || scales[1] < READABLE;
    p.draw();
    p.begin();
  });
  tell();
}
function controls() {
  $("name").textContent = document.title = model.name;
  const shows = $("shows");
  if (before.length) {
    for (const [m, text] of [["before", "Before"], ["beside", "Side by side"], ["after", "After"]]) {
      shows.append(el("button", { "data-mode": m, on: { click: () => { mode = m; show(); } } }, text));
    }
  }
  if (ranked.length > 1) {
    const choose = el("select", { id: "rank", "aria-label": "Rank", on: { change: () => { rank = ranked[choose.selectedIndex]; if (mode === "before") mode = "after"; show(); } } }, ...ranked.map((p) => el("option", {}, p.view.title)));
    shows.after(choose);
  }
  rank.view.parts.forEach((p) => $("part").append(el("option", {}, p.title)));
  $("part").addEventListener("change", () => { partAt = $("part").selectedIndex; show(); });
  const all = (open) => panes.forEach((p) => {
    p.graph.each(p.graph.root, (n) => { if (n.group && n !== p.graph.root) n.open = open; });
    p.draw();
    p.fit();
  });
  $("expand").addEventListener("click", () => all(true));
  $("collapse").addEventListener("click", () => all(false));
  $("fit").addEventListener("click", () => panes.forEach((p) => p.fit()));
  const zoom = (by) => panes.forEach((p) => { const r = p.svg.getBoundingClientRect(); p.zoom(by, r.width / 2, r.height / 2); });
  $("in").addEventListener("click", () => zoom(1.25));
  $("out").addEventListener("click", () => zoom(0.8));
  const box = $("search");
  box.addEventListener("input", () => search(box.value));
  box.addEventListener("focus", () => search(box.value));
  box.addEventListener("blur", () => { $("found").hidden = true; });
  box.addEventListener("keydown", (e) => { if (e.key === "Enter") { const [hit] = search(box.value); if (hit) pick(hit); } });
  document.addEventListener("keydown", (e) => {
    if (e.target.closest("input, select")) { if (e.key === "Escape") e.target.blur(); return; }
    if (e.key === "/") { e.preventDefault(); box.focus(); }
    else if (e.key === "Escape") select(null);
    else if (e.key === "f") panes.forEach((p) => p.fit());
    else if (e.key === "+" || e.key === "=") zoom(1.25);
    else if (e.key === "-") zoom(0.8);
  });
  const legend = [...KINDS.map((k) => [k, `var(--${k})`]), ["parameter", "var(--param-back)", "var(--param-line)"], ["fed data", "var(--box)", "var(--data)"]];
  $("legend").append(...legend.map(([text, c, b]) => el("span", { style: `--c: ${c}; --b: ${b || c}` }, text)), el("i", {}, "dashed: kept by forward for backward; dotted: backward begins"));
  window.addEventListener("resize", () => panes.forEach((p) => { if (!p.moved) p.begin(); }));
}

controls();
show();
const ready = Math.round(performance.now());
document.documentElement.dataset.ready = ready;
window.fluidxPage = { ready, model, panes: () => panes, find: (q) => find(panes[panes.length - 1], q).map((h) => h.text), follow: (name) => follow(panes[panes.length - 1], name) };
