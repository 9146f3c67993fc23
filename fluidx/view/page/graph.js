// The program of a pane: its operators and values, and the tree of groups with the lines between them.

const model = JSON.parse(document.getElementById("model").textContent);
const $ = (id) => document.getElementById(id);
const KINDS = ["forward", "loss", "backward", "optimize", "communication", "packing"];
const STAGES = ["value", "gradient", "communication", "update"];
const SMALL = 60, BUDGET = 40; // programs up to SMALL operators open whole; larger ones open groups up to BUDGET boxes
const READABLE = 0.75; // the smallest initial scale

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

  // a data variable is a pill at the top level
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
    // micro-batches: forward and backward alternate, and lines between them show which belong together
    this.turns = this.ops.filter((op, k) => op.section === "forward" && this.ops[k - 1]?.section === "backward").length > 0;
    for (const [a, b, v] of this.links) this.link(this.leaf[a], this.leaf[b], v);
    for (const node of this.root.children) {
      if (node.pill) for (const k of this.readers[node.data]) this.link(node, this.leaf[k], node.data);
    }
  }

  link(a, b, v) {
    // links from forward to backward exist for nearly every operator, so they are drawn for the selected operator only
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

  // the box that shows an operator: its own, or the outermost closed group
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
