// Sizes and positions of boxes: each open group is laid out by itself, then as one box of its parent.

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

// -- layout: each open group by itself, then as one box of its parent --------------------------------------------------------------------

// `below`: backward is under forward; else it is beside forward and runs upwards, so that a block and its gradient are neighbours
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
    // links into or out of a group end at its border
    if (a === "in") points.unshift({ x: points[0].x, y: points[0].y + (flip ? PAD - 2 : 2 - PAD) });
    if (b === "out") points.push({ x: points.at(-1).x, y: points.at(-1).y + (flip ? 2 - PAD : PAD - 2) });
    return { ...e, points };
  });
  const middle = (c) => at.get(c).x + sizes.get(c).w / 2;
  const lowest = members.filter((c) => !c.pill).reduce((a, b) => (at.get(b).y > at.get(a).y ? b : a), members[0]);
  return { w: width, h: height, at, edges, top: middle(members[0]), foot: middle(lowest), big: members.length > 2 };
}

// large boxes one after the other, forward first; small boxes without links to them in rows at the end
function inSequence(boxes, below) {
  const big = boxes.filter((b) => b.big), small = boxes.filter((b) => !b.big);
  const tall = Math.max(0, ...big.map((b) => b.h));
  let x = 0, y = 0, foot = null;
  for (const b of big) {
    Object.assign(b, below ? { x: foot === null ? 0 : foot - b.top, y } : { x, y: tall - b.h });
    foot = b.x + b.foot; // the next box begins below the end of this one
    x += b.w + 70;
    y += b.h + 46;
  }
  const left = Math.min(0, ...big.map((b) => b.x));
  for (const b of big) b.x -= left;
  const w = Math.max(0, ...big.map((b) => b.x + b.w)), h = big.length ? (below ? y - 46 : tall) : 0;
  const middle = big.length ? big[0].x + big[0].w / 2 : 0; // of the first box
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
