(() => {
  "use strict";
  const model = JSON.parse(document.getElementById("model").textContent);
  const $ = (id) => document.getElementById(id);
  const KINDS = ["forward", "loss", "backward", "optimize", "communication", "packing"];
  const STAGES = ["value", "gradient", "communication", "update"];
  const SMALL = 60, BUDGET = 40; // operators of a program that opens whole; boxes that groups may open to at first
  const READABLE = 0.75; // the least scale to begin with

  function el(tag, attrs = {}, ...children) {
    const svg = ["svg", "g", "rect", "text", "tspan", "path", "title", "defs", "marker", "circle"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attrs)) {
      if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
      else if (value !== undefined && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.filter((c) => c !== undefined && c !== null));
    return node;
  }
  const clip = (text, n) => (text.length <= n ? text : text.slice(0, Math.ceil(n / 2) - 1) + "…" + text.slice(text.length - Math.floor(n / 2)));
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  function bytes(n) {
    const units = ["B", "KB", "MB", "GB", "TB"];
    let u = 0;
    while (n >= 999.95 && u < 4) { n /= 1000; u++; }
    return u ? `${n.toFixed(1)} ${units[u]}` : `${n} B`;
  }

  // -- a program with its tree --------------------------------------------------------------------------------------------------------

  class Graph {
    constructor(part) {
      Object.assign(this, part);
      this.nodes = new Map();
      this.leaf = [];
      this.readers = part.vars.map(() => []);
      this.writers = part.vars.map(() => []);
      part.ops.forEach((op, k) => {
        op.in.forEach((v) => this.readers[v].push(k));
        op.out.forEach((v) => this.writers[v].push(k));
      });
      this.byName = new Map(part.vars.map((v, k) => [v.name, k]));
      this.root = this.build({ title: part.title, kind: "root", children: part.tree }, null, "g");
      this.addData();
      this.addLinks();
      this.openSmall();
    }

    build(said, parent, id) {
      if (typeof said === "number") {
        const op = this.ops[said];
        const node = { id: `o${said}`, op: said, parent, title: op.type, kind: op.kind, first: said, count: 1, section: op.section, moved: op.bytes || 0, moves: op.kind === "communication" ? 1 : 0 };
        this.nodes.set(node.id, node);
        this.leaf[said] = node;
        return node;
      }
      const node = { id, parent, title: said.title, kind: said.kind, alike: said.alike, group: true, open: said.kind === "root" };
      this.nodes.set(id, node);
      node.children = said.children.map((c, k) => this.build(c, node, `${id}.${k}`));
      node.first = Math.min(...node.children.map((c) => c.first));
      for (const key of ["count", "moved", "moves"]) node[key] = node.children.reduce((sum, c) => sum + c[key], 0);
      node.section = node.children.length ? node.children.find((c) => c.count === Math.max(...node.children.map((d) => d.count))).section : "forward";
      node.edges = new Map();
      node.enters = new Map();
      node.leaves = new Map();
      return node;
    }

    // what is fed stands at the top level as a pill
    addData() {
      this.vars.forEach((v, k) => {
        if (v.kind !== "data" || !this.readers[k].length) return;
        const section = this.ops[this.readers[k][0]].section;
        const node = { id: `d${k}`, parent: this.root, data: k, pill: true, title: v.shown, kind: "data", first: this.readers[k][0] - 0.5, count: 0, moved: 0, moves: 0, section };
        this.nodes.set(node.id, node);
        this.root.children.push(node);
      });
    }

    path(node) {
      const path = [];
      for (let n = node; n; n = n.parent) path.push(n);
      return path.reverse();
    }

    addLinks() {
      // micro-batches: forward and backward take turns, and lines between them say which belong together
      this.turns = this.ops.filter((op, k) => op.section === "forward" && this.ops[k - 1]?.section === "backward").length > 0;
      for (const [a, b, v] of this.links) this.link(this.leaf[a], this.leaf[b], v);
      for (const node of this.root.children) {
        if (node.pill) for (const k of this.readers[node.data]) this.link(node, this.leaf[k], node.data);
      }
    }

    link(a, b, v) {
      // what forward keeps for backward is drawn for the selected operator only: there is a line for nearly every operator;
      const kept = a.section === "forward" && b.section !== "forward";
      if (kept && (a.pill || !this.turns)) return;
      const pa = this.path(a), pb = this.path(b);
      let d = 0;
      while (pa[d + 1] === pb[d + 1]) d++;
      if (kept && d) return;
      const from = pa[d + 1], to = pb[d + 1], key = `${from.id} ${to.id}`;
      const edges = pa[d].edges;
      if (!edges.has(key)) edges.set(key, { from, to, vars: new Set() });
      edges.get(key).vars.add(v);
      if (kept) return;
      for (let k = d + 1; k < pa.length - 1; k++) pa[k].leaves.set(pa[k + 1].id, pa[k + 1]);
      for (let k = d + 1; k < pb.length - 1; k++) pb[k].enters.set(pb[k + 1].id, pb[k + 1]);
    }

    openSmall() {
      const groups = [...this.nodes.values()].filter((n) => n.group && n !== this.root);
      if (this.ops.length <= SMALL) {
        groups.forEach((n) => { n.open = n.children.length <= 4 || n.children.some((c) => c.group); });
        return;
      }
      let shown = this.root.children.length;
      const closed = (list) => list.flatMap((n) => (n.group ? (n.open ? closed(n.children) : [n]) : []));
      for (;;) {
        const next = closed(this.root.children)
          .filter((n) => n.kind !== "repeat" && n.kind !== "copy" && shown + n.children.length <= BUDGET)
          .sort((x, y) => x.children.length - y.children.length)[0];
        if (!next) return;
        next.open = true;
        shown += next.children.length;
      }
    }

    // the box that stands for an operator: its own, or that of the outermost closed group
    shown(k) {
      const path = this.path(this.leaf[k]);
      return path.find((n) => n.group && !n.open) || path[path.length - 1];
    }
    reveal(node) {
      for (let n = node.parent; n; n = n.parent) n.open = true;
    }
    each(node, act) {
      act(node);
      (node.children || []).forEach((c) => this.each(c, act));
    }
    opsOf(node) {
      const out = [];
      this.each(node, (n) => { if (n.op !== undefined) out.push(n.op); });
      return out;
    }
  }

  // -- boxes --------------------------------------------------------------------------------------------------------------------------

  const HEAD = 22, LINE = 15, PAD = 14;
  const ruler = document.createElement("canvas").getContext("2d");
  const TITLE = '600 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif', MONO = '10.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
  const known = new Map();
  function wideness(text, font) {
    const key = font[0] + text;
    if (!known.has(key)) {
      ruler.font = font;
      known.set(key, ruler.measureText(text).width);
    }
    return known.get(key);
  }
  function lines(graph, node) {
    if (node.lines) return node.lines;
    const out = [];
    if (node.pill) out.push({ name: clip(node.title, 22), type: graph.vars[node.data].type });
    else if (node.group) {
      const own = new Set(graph.opsOf(node).flatMap((k) => graph.ops[k].in).filter((v) => graph.vars[v].kind === "parameter"));
      out.push({ name: plural(node.count, "operator"), type: own.size ? `${plural(own.size, "parameter")}` : "" });
      if (node.moves) {
        const types = [...new Set(graph.opsOf(node).filter((k) => graph.ops[k].kind === "communication").map((k) => graph.ops[k].type))];
        const what = types.length === 1 ? `${node.moves} ${types[0]}` : plural(node.moves, "communication op");
        out.push({ name: what, type: node.moved ? bytes(node.moved) : "", moves: true });
      }
    } else {
      const op = graph.ops[node.op];
      const made = op.out.map((v) => graph.vars[v]);
      const used = op.in.map((v) => graph.vars[v]).filter((v) => v.kind === "parameter");
      if (made.length && !(used.length && used.some((p) => p.name === made[0].name))) {
        out.push({ name: clip(made[0].shown, 20) + (made.length > 1 ? ` +${made.length - 1}` : ""), type: made[0].type });
      }
      if (op.kind === "communication" && op.bytes) out.push({ name: bytes(op.bytes), type: "", moves: true });
      used.slice(0, used.length > 4 ? 3 : 4).forEach((v) => out.push({ name: clip(v.shown, 20), type: v.type, param: true }));
      if (used.length > 4) out.push({ name: `${used.length - 3} more parameters`, type: "", param: true });
    }
    return (node.lines = out);
  }
  function measure(graph, node) {
    const all = lines(graph, node);
    const wide = Math.max(0, ...all.map((l) => wideness(l.name + (l.type || ""), MONO) + (l.type ? 6 : 0)));
    const title = node.pill ? 0 : wideness(clip(node.title, 38), TITLE) + (node.group ? 24 : 0);
    return { w: Math.max(70, Math.max(wide, title) + 18), h: node.pill ? LINE + 9 : HEAD + all.length * LINE + (all.length ? 6 : 0) };
  }

  // -- layout: each open group by itself, then as one box of the group above ---------------------------------------------------------------

  // `below`: backward stands under forward; else it stands beside it and runs upwards, so that a block and its gradient are neighbours
  function layout(graph, node, below) {
    const root = node.kind === "root", sizes = new Map();
    for (const c of node.children) sizes.set(c, c.group && c.open ? layout(graph, c, below) : measure(graph, c));
    const ports = !root && node.edges.size > 0;
    const up = (members) => !below && (root ? members.every((m) => m.section !== "forward") : node.section !== "forward");
    const boxes = components(node).map((members) => arrange(graph, node, members, sizes, ports, up(members)));
    const size = root ? inSequence(boxes, below) : shelves(boxes);
    node.box = { children: new Map(), edges: [] };
    for (const box of boxes) {
      for (const [c, at] of box.at) node.box.children.set(c, { x: at.x + box.x, y: at.y + box.y, ...sizes.get(c) });
      for (const e of box.edges) node.box.edges.push({ ...e, points: e.points.map((p) => ({ x: p.x + box.x, y: p.y + box.y })) });
    }
    if (root) return (node.size = size);
    const title = wideness(clip(node.title, 60), TITLE) + 44;
    return (node.size = { w: Math.max(size.w + 2 * PAD, title), h: size.h + HEAD + 2 * PAD });
  }

  function components(node) {
    const above = new Map(node.children.map((c) => [c, c]));
    const top = (c) => { while (above.get(c) !== c) c = above.get(c); return c; };
    for (const e of node.edges.values()) above.set(top(e.from), top(e.to));
    const parts = new Map();
    for (const c of [...node.children].sort((a, b) => a.first - b.first)) {
      const t = top(c);
      if (!parts.has(t)) parts.set(t, []);
      parts.get(t).push(c);
    }
    return [...parts.values()];
  }

  function arrange(graph, node, members, sizes, ports, flip) {
    const inside = new Set(members);
    if (members.length === 1 && !ports) {
      const { w, h } = sizes.get(members[0]);
      return { w, h, at: new Map([[members[0], { x: 0, y: 0 }]]), edges: [] };
    }
    const g = new dagre.graphlib.Graph();
    g.setGraph({ rankdir: "TB", nodesep: 26, edgesep: 12, ranksep: 30, ranker: members.length > 150 ? "longest-path" : "network-simplex" });
    g.setDefaultEdgeLabel(() => ({}));
    for (const c of members) g.setNode(c.id, { width: sizes.get(c).w, height: sizes.get(c).h });
    const made = [];
    for (const e of node.edges.values()) {
      if (!inside.has(e.from)) continue;
      g.setEdge(e.from.id, e.to.id, { weight: e.from.pill ? 1 : 2 });
      made.push([e.from.id, e.to.id, e]);
    }
    for (const [name, ends] of ports ? [["in", node.enters], ["out", node.leaves]] : []) {
      const mine = [...ends.values()].filter((c) => inside.has(c));
      if (!mine.length || mine.length > 8) continue;
      g.setNode(name, { width: 4, height: 4 });
      for (const c of mine) {
        const [a, b] = name === "in" ? [name, c.id] : [c.id, name];
        g.setEdge(a, b, { weight: 1 });
        made.push([a, b, { port: true }]);
      }
    }
    dagre.layout(g);
    const { width, height } = g.graph();
    const at = new Map();
    for (const c of members) {
      const p = g.node(c.id), { w, h } = sizes.get(c);
      at.set(c, { x: p.x - w / 2, y: (flip ? height - p.y : p.y) - h / 2 });
    }
    const edges = made.map(([a, b, e]) => {
      const points = g.edge(a, b).points.map((p) => ({ x: p.x, y: flip ? height - p.y : p.y }));
      // what enters or leaves a group is drawn to its border
      if (a === "in") points.unshift({ x: points[0].x, y: points[0].y + (flip ? PAD - 2 : 2 - PAD) });
      if (b === "out") points.push({ x: points.at(-1).x, y: points.at(-1).y + (flip ? 2 - PAD : PAD - 2) });
      return { ...e, points };
    });
    const middle = (c) => at.get(c).x + sizes.get(c).w / 2;
    const lowest = members.filter((c) => !c.pill).reduce((a, b) => (at.get(b).y > at.get(a).y ? b : a), members[0]);
    return { w: width, h: height, at, edges, top: middle(members[0]), foot: middle(lowest), big: members.length > 2 };
  }

  // forward, then what comes behind it; small parts, which nothing joins to the others, in rows at the end
  function inSequence(boxes, below) {
    const big = boxes.filter((b) => b.big), small = boxes.filter((b) => !b.big);
    const tall = Math.max(0, ...big.map((b) => b.h));
    let x = 0, y = 0, foot = null;
    for (const b of big) {
      Object.assign(b, below ? { x: foot === null ? 0 : foot - b.top, y } : { x, y: tall - b.h });
      foot = b.x + b.foot; // the next one begins below the place where this one ends
      x += b.w + 70;
      y += b.h + 46;
    }
    const left = Math.min(0, ...big.map((b) => b.x));
    for (const b of big) b.x -= left;
    const w = Math.max(0, ...big.map((b) => b.x + b.w)), h = big.length ? (below ? y - 46 : tall) : 0;
    const middle = big.length ? big[0].x + big[0].w / 2 : 0; // of what is read first
    if (!small.length) return { w, h, middle };
    const rest = shelves(small, big.length ? Math.max(w, 420) : 0), top = big.length ? h + 40 : 0;
    for (const b of small) b.y += top;
    return { w: big.length ? Math.max(w, rest.w) : rest.w, h: top + rest.h, middle };
  }

  function shelves(boxes, width) {
    const gap = 20;
    const area = boxes.reduce((sum, b) => sum + (b.w + gap) * (b.h + gap), 0);
    const room = width || Math.max(...boxes.map((b) => b.w), Math.sqrt(area * 1.8));
    let x = 0, y = 0, row = 0, w = 0;
    for (const b of boxes) {
      if (x && x + b.w > room) { x = 0; y += row + gap; row = 0; }
      Object.assign(b, { x, y });
      x += b.w + gap;
      row = Math.max(row, b.h);
      w = Math.max(w, x - gap);
    }
    return { w, h: y + row };
  }

  function curve(points) {
    const p = points.map((q) => `${q.x.toFixed(1)} ${q.y.toFixed(1)}`);
    if (points.length < 3) return `M${p.join(" L")}`;
    const mid = (a, b) => `${((a.x + b.x) / 2).toFixed(1)} ${((a.y + b.y) / 2).toFixed(1)}`;
    let d = `M${p[0]}`;
    for (let k = 1; k < points.length - 2; k++) d += ` Q${p[k]} ${mid(points[k], points[k + 1])}`;
    return `${d} Q${p[points.length - 2]} ${p[points.length - 1]}`;
  }

  // -- a pane: one program, drawn ---------------------------------------------------------------------------------------------------------

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
      this.moved = true; // a window that changes its size leaves it there

      this.layer.setAttribute("transform", `translate(${place.x.toFixed(2)} ${place.y.toFixed(2)}) scale(${place.k.toFixed(4)})`);
    }
    // the scale at which the whole drawing is seen
    whole() {
      const { width, height } = this.svg.getBoundingClientRect(), { w, h } = this.graph.root.size;
      return Math.min(1.15, (width - 32) / w, (height - 62) / h);
    }
    // a drawing that is larger at the least scale is shown from where it begins
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
    // the boxes of a parameter's life, all in view
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

    // what is selected, and the life of a parameter, over the drawing
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

  // the same thing in the other pane, by its name
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

  // -- the panel ------------------------------------------------------------------------------------------------------------------------

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
})();
