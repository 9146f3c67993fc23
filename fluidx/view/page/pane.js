// A pane: the drawing of one program, with marks for the selected box and for the operators of a parameter.

let panes = [], partAt = 0, selected = null, life = null;

class Pane {
  constructor(view) {
    this.view = view;
    this.graphs = view.parts.map(() => null);
    this.layer = el("g");
    this.svg = el("svg", { role: "img", "aria-label": view.title }, el("defs", {}, tip("tip"), tip("overtip")), this.layer);
    this.place = { x: 0, y: 0, k: 1 };
    const heading = el("h2", {}, view.title, el("small", {}, view.note ? ` ${view.note}` : ""));
    this.root = el("section", { class: "pane" }, this.svg, heading);
    this.listen();
  }
  get graph() {
    const k = Math.min(partAt, this.graphs.length - 1);
    return (this.graphs[k] ||= new Graph(this.view.parts[k]));
  }

  listen() {
    let from = null;
    this.svg.addEventListener("wheel", (e) => {
      e.preventDefault();
      const r = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0016)), e.clientX - r.left, e.clientY - r.top);
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (e) => { from = { x: e.clientX, y: e.clientY, place: { ...this.place }, moved: false }; });
    this.svg.addEventListener("pointermove", (e) => {
      if (!from || !e.buttons) return;
      const dx = e.clientX - from.x, dy = e.clientY - from.y;
      if (!from.moved && Math.hypot(dx, dy) < 4) return;
      if (!from.moved) { from.moved = true; this.svg.setPointerCapture(e.pointerId); this.svg.classList.add("drag"); }
      this.move({ ...from.place, x: from.place.x + dx, y: from.place.y + dy });
    });
    const end = () => { this.dragged = from?.moved; from = null; this.svg.classList.remove("drag"); setTimeout(() => { this.dragged = false; }); };
    this.svg.addEventListener("pointerup", end);
    this.svg.addEventListener("pointercancel", end);
    this.svg.addEventListener("click", (e) => {
      if (this.dragged) return;
      const hit = e.target.closest(".node");
      if (!hit) return select(null);
      const node = this.graph.nodes.get(hit.dataset.id);
      if (e.target.closest(".toggle")) return this.toggle(node);
      select(node.pill ? { pane: this, value: node.data } : { pane: this, node });
    });
    this.svg.addEventListener("dblclick", (e) => {
      const hit = e.target.closest(".node");
      const node = hit && this.graph.nodes.get(hit.dataset.id);
      if (node && node.group) this.toggle(node);
    });
    this.svg.addEventListener("keydown", (e) => {
      const hit = e.target.closest(".node");
      if (!hit || (e.key !== "Enter" && e.key !== " ")) return;
      e.preventDefault();
      const node = this.graph.nodes.get(hit.dataset.id);
      if (node.group) this.toggle(node);
      else select(node.pill ? { pane: this, value: node.data } : { pane: this, node });
    });
  }
  zoom(by, x, y) {
    const k = Math.min(3, Math.max(0.05, this.place.k * by)), r = k / this.place.k;
    this.move({ k, x: x - (x - this.place.x) * r, y: y - (y - this.place.y) * r });
  }
  move(place) {
    this.place = place;
    this.moved = true; // resizing the window does not move the drawing then

    this.layer.setAttribute("transform", `translate(${place.x.toFixed(2)} ${place.y.toFixed(2)}) scale(${place.k.toFixed(4)})`);
  }
  // the scale that shows the whole drawing
  whole() {
    const { width, height } = this.svg.getBoundingClientRect(), { w, h } = this.graph.root.size;
    return Math.min(1.15, (width - 32) / w, (height - 62) / h);
  }
  // a drawing that does not fit at the smallest scale is shown from its start
  begin() {
    this.fit(READABLE);
    this.moved = false;
  }
  fit(least = 0.05) {
    const { width, height } = this.svg.getBoundingClientRect(), { w, h, middle } = this.graph.root.size;
    const k = Math.max(least, this.whole());
    const x = w * k <= width - 32 ? (width - w * k) / 2 : Math.min(16, Math.max(width / 2 - middle * k, width - 16 - w * k));
    this.move({ k, x, y: Math.max(46, (height + 30 - h * k) / 2) });
  }
  // show all boxes of a parameter
  fitLife() {
    const ops = Object.values(this.graph.lives[life] || {}).flat();
    const boxes = ops.map((k) => this.boxes.get(this.graph.shown(k))).filter(Boolean);
    if (!boxes.length) return;
    const { width, height } = this.svg.getBoundingClientRect();
    const x = Math.min(...boxes.map((b) => b.x)), y = Math.min(...boxes.map((b) => b.y));
    const w = Math.max(...boxes.map((b) => b.x + b.w)) - x, h = Math.max(...boxes.map((b) => b.y + b.h)) - y;
    const k = Math.min(1, (width - 60) / w, (height - 100) / h);
    this.move({ k, x: (width - w * k) / 2 - x * k, y: (height + 30 - h * k) / 2 - y * k });
  }
  toggle(node, open = !node.open) {
    const before = this.boxes.get(node);
    node.open = open;
    this.draw();
    const now = this.boxes.get(node);
    if (before && now) this.move({ ...this.place, x: this.place.x + (before.x - now.x) * this.place.k, y: this.place.y + (before.y - now.y) * this.place.k });
  }
  center(node) {
    const b = this.boxes.get(node), { width, height } = this.svg.getBoundingClientRect();
    if (!b) return;
    const k = Math.max(this.place.k, 0.75), tall = Math.min(b.h, height / k - 80);
    this.move({ k, x: width / 2 - (b.x + b.w / 2) * k, y: height / 2 - (b.y + tall / 2) * k });
  }

  draw() {
    const graph = this.graph;
    layout(graph, graph.root, this.below);
    this.boxes = new Map();
    this.layer.replaceChildren();
    this.drawGroup(graph.root, 0, 0, this.layer);
    this.drawTurn();
    this.mark();
  }
  drawGroup(node, x, y, into) {
    const edges = el("g"), boxes = el("g");
    for (const e of node.box.edges) {
      const path = el("path", { class: `edge${e.vars && e.vars.size > 3 ? " thick" : ""}`, d: curve(e.points.map((p) => ({ x: p.x + x, y: p.y + y }))), "marker-end": "url(#tip)" });
      if (e.vars) path.append(el("title", {}, [...e.vars].slice(0, 12).map((v) => `${this.graph.vars[v].shown} ${this.graph.vars[v].type || ""}`).join("\n") + (e.vars.size > 12 ? `\nand ${e.vars.size - 12} more` : "")));
      edges.append(path);
    }
    for (const [c, at] of node.box.children) {
      const b = { x: at.x + x, y: at.y + y, w: at.w, h: at.h };
      this.boxes.set(c, b);
      boxes.append(this.drawNode(c, b));
      if (c.group && c.open) this.drawGroup(c, b.x + (b.w - Math.max(0, contentWidth(c))) / 2, b.y + HEAD + PAD, boxes);
    }
    into.append(edges, boxes);
  }
  // backward begins where forward ends, though it reads nothing there
  drawTurn() {
    const { ops } = this.graph, first = ops.findIndex((op) => op.section === "backward");
    const last = ops.slice(0, Math.max(first, 0)).findLastIndex((op) => op.section === "forward");
    if (first < 0 || last < 0) return;
    const a = this.boxes.get(this.graph.shown(last)), b = this.boxes.get(this.graph.shown(first));
    if (a && b && a !== b) this.layer.prepend(el("path", { class: "edge turn", d: between(a, b), "marker-end": "url(#tip)" }));
  }
  drawNode(node, b) {
    const open = node.group && node.open;
    const g = el("g", { class: `node ${node.kind}${node.group ? " group" : ""}${open ? " open" : ""}${node.pill ? " pill" : ""}`, "data-id": node.id, tabindex: 0, transform: `translate(${b.x.toFixed(1)} ${b.y.toFixed(1)})`, style: `--k: var(--${colour(node)})` });
    if (node.kind === "repeat" && !open) for (const d of [8, 4]) g.append(el("rect", { class: "under", x: d, y: d, width: b.w, height: b.h, rx: 5 }));
    g.append(el("rect", { class: "frame", width: b.w, height: b.h, rx: node.pill ? 12 : 5 }));
    if (!node.pill) {
      g.append(el("path", { class: "head", d: `M0 ${HEAD} V5 Q0 0 5 0 H${b.w - 5} Q${b.w} 0 ${b.w} 5 V${lines(this.graph, node).length || open ? HEAD : HEAD - 5}${lines(this.graph, node).length || open ? "" : ` Q${b.w} ${HEAD} ${b.w - 5} ${HEAD} H5 Q0 ${HEAD} 0 ${HEAD - 5}`} Z` }));
      g.append(el("text", { class: "title", x: 9, y: 15.5 }, clip(node.title, open ? 60 : 38)));
    }
    if (node.group) {
      g.append(el("g", { class: "toggle", role: "button", "aria-label": open ? "Close" : "Open" }, el("rect", { class: "signbox", x: b.w - 23, y: 2, width: 19, height: HEAD - 4, rx: 4 }), el("text", { class: "sign", x: b.w - 13.5, y: 16 }, open ? "−" : "+")));
    }
    if (open) return g;
    lines(this.graph, node).forEach((l, k) => {
      const y = node.pill ? 4 : HEAD + 3 + k * LINE;
      if (l.param || l.moves) g.append(el("rect", { class: l.param ? "param" : "moves", x: 3, y: y + 1, width: b.w - 6, height: LINE - 1.5, rx: 3 }));
      g.append(el("text", { class: "line", x: 9, y: y + 11.5 }, l.name, l.type ? el("tspan", { dx: 6 }, l.type) : null));
    });
    return g;
  }

  // mark the selected box and the operators of a parameter
  mark() {
    this.layer.querySelectorAll(".over, .badge").forEach((n) => n.remove());
    this.layer.querySelectorAll(".sel, .lives").forEach((n) => n.classList.remove("sel", "lives"));
    this.layer.classList.toggle("life", Boolean(life));
    const graph = this.graph;
    const dom = (node) => this.layer.querySelector(`[data-id="${node.id}"]`);
    const pairs = new Map();
    const join = (a, b) => {
      const from = graph.shown(a), to = graph.shown(b);
      if (from !== to) pairs.set(`${from.id} ${to.id}`, [from, to, graph.leaf[a].section === "forward" && graph.leaf[b].section !== "forward"]);
    };
    if (life) {
      const stages = graph.lives[life] || {};
      const all = new Set(Object.values(stages).flat());
      for (const [a, b] of graph.links) if (all.has(a) && all.has(b)) join(a, b);
      const numbered = new Map();
      for (const [stage, ops] of Object.entries(stages)) {
        for (const k of ops) {
          const node = graph.shown(k);
          if (!numbered.has(node)) numbered.set(node, new Set());
          numbered.get(node).add(STAGES.indexOf(stage) + 1);
        }
      }
      for (const [node, numbers] of numbered) {
        dom(node)?.classList.add("lives");
        const b = this.boxes.get(node);
        if (b) [...numbers].sort().forEach((n, k) => this.layer.append(el("g", { class: "badge", transform: `translate(${b.x + k * 19} ${b.y})` }, el("circle", { r: 9 }), el("text", { y: 4 }, n))));
      }
    }
    const mine = selected && counterpart(selected, this);
    if (mine?.node) {
      dom(mine.node)?.classList.add("sel");
      if (mine.node.op !== undefined && !life) for (const [a, b] of graph.links) if (a === mine.node.op || b === mine.node.op) join(a, b);
    }
    if (mine?.value !== undefined && !life) {
      for (const k of [...graph.readers[mine.value], ...graph.writers[mine.value]]) dom(graph.shown(k))?.classList.add("sel");
      dom({ id: `d${mine.value}` })?.classList.add("sel");
      for (const [a, b, v] of graph.links) if (v === mine.value) join(a, b);
    }
    for (const [from, to, kept] of pairs.values()) {
      const a = this.boxes.get(from), b = this.boxes.get(to);
      if (a && b) this.layer.append(el("path", { class: `over${kept ? " kept" : ""}`, d: between(a, b), "marker-end": "url(#overtip)" }));
    }
  }
}

const contentWidth = (node) => node.size.w - 2 * PAD;
const colour = (node) => (node.pill ? "data" : node.op !== undefined ? node.kind : { forward: "forward", backward: "backward", update: "optimize" }[node.section] || "soft");
function tip(id) {
  return el("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6.5, markerHeight: 6.5, orient: "auto-start-reverse" }, el("path", { class: id, d: "M0 0.8 L8 4 L0 7.2 z" }));
}
function between(a, b) {
  const ca = { x: a.x + a.w / 2, y: a.y + a.h / 2 }, cb = { x: b.x + b.w / 2, y: b.y + b.h / 2 };
  if (a.x + a.w < b.x || b.x + b.w < a.x) {
    const right = ca.x < cb.x, x1 = right ? a.x + a.w : a.x, x2 = right ? b.x : b.x + b.w, m = (x1 + x2) / 2;
    return `M${x1} ${ca.y} C${m} ${ca.y} ${m} ${cb.y} ${x2} ${cb.y}`;
  }
  const down = ca.y < cb.y, y1 = down ? a.y + a.h : a.y, y2 = down ? b.y : b.y + b.h, m = (y1 + y2) / 2;
  return `M${ca.x} ${y1} C${ca.x} ${m} ${cb.x} ${m} ${cb.x} ${y2}`;
}

// the box of the same name in the other pane
function counterpart(what, pane) {
  if (what.pane === pane) return what;
  const here = what.pane.graph, there = pane.graph;
  if (what.value !== undefined) {
    const value = there.byName.get(here.vars[what.value].name);
    return value === undefined ? null : { pane, value };
  }
  if (what.node.op === undefined) return null;
  const op = here.ops[what.node.op];
  const names = op.out.map((v) => here.vars[v].name);
  const k = there.ops.findIndex((o) => o.type === op.type && o.out.length === names.length && o.out.every((v, n) => there.vars[v].name === names[n]));
  return k < 0 ? null : { pane, node: there.leaf[k] };
}
