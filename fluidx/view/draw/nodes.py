"""The nodes of a drawing: boxes for operators or groups of them, pills for inputs and state; and the edges between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ir.flow import reads, writes
from ...ir.operator import Operator
from ...ir.parts import coords_of, holds
from ...ir.program import Program
from ...ir.text import var_name, word
from ...ir.valuetypes import known_bytes
from ...ir.var import Var
from ..diff import communicates, show_bytes

COMM, DATA, PARAM, STATE = "communication", "data", "parameter", "state"
BOX, PILL = 38, 24  # heights
_WIDEST = 272


@dataclass(eq=False)
class DrawnNode:
    """A box of operators, or a pill for values that no operator writes."""

    title: str = ""
    sub: str = ""
    kind: str = ""
    pill: bool = False
    hint: str = ""  # tooltip
    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, None] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)
    marked: bool = False
    sync: Any = None  # one value for the boxes of a collective on all ranks
    after: Any = None  # the `sync` of the send that this recv waits for
    above: list[DrawnNode] = field(default_factory=list)  # drawn edges
    order_only: list[DrawnNode] = field(default_factory=list)  # nodes that must be higher, without a drawn edge
    layer: int = 0
    width: float = 0.0
    x: float = 0.0  # centre
    y: float = 0.0  # top

    @property
    def height(self) -> float:
        return PILL if self.pill else BOX

    def measure(self) -> None:
        self.title, self.sub = _clip(self.title, 32), _clip(self.sub, 38)
        wide = len(self.title) * (6.6 if self.pill else 8.1)
        self.width = min(_WIDEST, max(46.0, max(wide, len(self.sub) * 6.05) + 20))


def _clip(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return text[: limit // 2] + "…" + text[len(text) - (limit - limit // 2 - 1) :]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def nodes_of(program: Program, select: Callable[[Operator, int], bool], max_ops: int) -> list[DrawnNode]:
    """The boxes of a program in order, with the names that they read and write."""
    block = program.blocks[0]
    nodes: list[DrawnNode] = []
    calls: Counter = Counter()
    for k, op in enumerate(block.oplist):
        ins, outs = dict.fromkeys(reads(program, op)), dict.fromkeys(writes(program, op))
        moves = communicates(op)
        node = DrawnNode(word(op.type), "", COMM if moves else op.role.value, ops=[op], marked=select(op, k))
        node.reads, node.writes = ins, outs
        if moves:
            _synchronise(node, op, program, calls)
        node.sub = _subtitle(op, block.find, moves)
        node.hint = f"{op.type}: {', '.join(map(var_name, ins))} → {', '.join(map(var_name, outs))}"
        nodes.append(node)
    if len(nodes) > max_ops:
        nodes = list(_shortened(nodes, lambda a, b: a.kind == b.kind != COMM and a.marked == b.marked))
    if len(nodes) > max_ops:  # communication after every operator: merge boxes of any kind, in order
        per_box = -(-len(nodes) // max(1, max_ops))
        nodes = [_merged(nodes[i : i + per_box]) for i in range(0, len(nodes), per_box)]
    return nodes


def _subtitle(op: Operator, find: Callable[[str], Var | None], moves: bool) -> str:
    names = op.output_arg_names or (op.input_arg_names if moves else ())
    if not names:
        return str(op.attrs.get("group", "")) if moves else ""
    text = var_name(names[0])
    d = find(names[0])
    if moves:
        records = [r for n in names if (r := find(n)) is not None]
        text += f" +{len(names) - 1}" if len(names) > 1 else ""
        size = [show_bytes(sum(known_bytes(r.type) for r in records))] * bool(records)
        return " · ".join([text, *size, *[str(op.attrs["group"])] * ("group" in op.attrs)])
    if len(names) > 1:
        return f"{text} +{len(names) - 1}"
    return _typed(d, 38) if d is not None else text


def _typed(d: Var, room: int) -> str:
    """Name and type of a value, and its placement if it fits."""
    text = f"{var_name(d.name)} {d.type}"
    long = " ".join([text, *(f"{e.label} {e.group}".rstrip() for e in d.placement)])
    return long if len(long) <= room else text


def _synchronise(node: DrawnNode, op: Operator, program: Program, calls: Counter) -> None:
    rank, group = program.rank, str(op.attrs.get("group", ""))
    peer = op.attrs.get("peer")
    if op.type in ("send", "recv") and isinstance(peer, int):
        if rank is None:
            return
        way = (rank, peer) if op.type == "send" else (peer, rank)
        calls[op.type, way] += 1
        end = ("send", way, calls[op.type, way])
        node.sync, node.after = (end, None) if op.type == "send" else (("recv", *end[1:]), end)
        return
    members: tuple[int, ...] = ()
    if rank is not None and group in program.groups:
        members = next((s for s in program.groups[group] if rank in s), ())
    calls[op.type, group] += 1
    node.sync = (op.type, group, members, calls[op.type, group])


def _shortened(nodes: Sequence[DrawnNode], alike: Callable[[DrawnNode, DrawnNode], bool]) -> Iterator[DrawnNode]:
    run: list[DrawnNode] = []
    for n in nodes:
        if run and not alike(run[-1], n):
            yield _merged(run)
            run = []
        run.append(n)
    if run:
        yield _merged(run)


def _merged(run: Sequence[DrawnNode]) -> DrawnNode:
    """One box for several consecutive ones."""
    if len(run) == 1:
        return run[0]
    node = DrawnNode(ops=[op for n in run for op in n.ops], marked=any(n.marked for n in run))
    kinds = Counter(n.kind for n in run for _ in n.ops)
    types = Counter(op.type for op in node.ops).most_common()
    node.kind = kinds.most_common(1)[0][0]
    node.title = _count(len(node.ops), f"{node.kind} operator" if len(kinds) == 1 else "operator")
    listed = [f"{n} {word(t)}" for t, n in types]
    fits = next((k for k in range(len(listed), 1, -1) if len(", ".join(listed[:k])) <= 36), 1)
    node.sub = ", ".join(listed[:fits]) + (" …" if len(listed) > fits else "")
    node.hint = ", ".join(f"{n} {t}" for t, n in types)
    for n in run:
        node.reads.update({r: None for r in n.reads if r not in node.writes})
        node.writes.update(n.writes)
    return node


def link(nodes: list[DrawnNode], program: Program) -> list[DrawnNode]:
    """Set the edges of the nodes, and add pills for values that no operator writes. Returns all nodes in drawing order."""
    return _Linker(program).link(nodes)


class _Linker:
    """Finds the edges between the nodes of one program."""

    def __init__(self, program: Program):
        self.find = program.blocks[0].find
        self.coords = {} if program.rank is None else coords_of(program.groups, program.rank, program.turns)
        self.writer: dict[str, DrawnNode] = {}
        self.readers: dict[str, list[DrawnNode]] = {}  # since the last write
        self.opened: dict[str, DrawnNode] = {}  # nccl_init by group
        self.pills: dict[tuple[str, str], DrawnNode] = {}
        self.out: list[DrawnNode] = []

    def link(self, nodes: list[DrawnNode]) -> list[DrawnNode]:
        for node in nodes:
            for kind, names in self._read(node).items():
                for bundle in [names] if len(names) > 3 else [[n] for n in names]:
                    node.above.append(self._pill(node, kind, bundle))
            self._write(node)
            if node.kind == COMM and len(node.ops) == 1:
                self._link_to_init(node, node.ops[0])
            self.out.append(node)
        for node in self.out:
            node.measure()
        return self.out

    def _read(self, node: DrawnNode) -> dict[str, list[str]]:
        """Link a node to the writers of its operands; return the operands that no operator writes, by kind."""
        outside: dict[str, list[str]] = {}
        for n in node.reads:
            if n in self.writer:
                if self.writer[n] not in node.above:
                    node.above.append(self.writer[n])
            else:
                d = self.find(n)
                if d is not None and not holds(d.placement, self.coords):
                    continue  # the value is on another rank
                kind = STATE if d is None else DATA if d.is_data else PARAM if d.is_parameter else STATE
                outside.setdefault(kind, []).append(n)
            self.readers.setdefault(n, []).append(node)
        return outside

    def _pill(self, node: DrawnNode, kind: str, names: list[str]) -> DrawnNode:
        """The pill for some values. Each section that reads them has a pill of its own, which avoids lines across the drawing."""
        key = (node.ops[0].role.value, "\0".join(names))
        if key not in self.pills:
            known = [d for n in names if (d := self.find(n)) is not None]
            title = f"{_count(len(names), {STATE: 'value', DATA: 'input'}.get(kind, kind))}" if len(names) > 1 else ""
            if not title:
                title = _typed(known[0], 32) if known else var_name(names[0])
            elif known:
                title += f", {show_bytes(sum(known_bytes(d.type) for d in known))}"
            self.pills[key] = DrawnNode(title, "", kind, pill=True, hint=", ".join(map(var_name, names)))
            self.out.append(self.pills[key])
        return self.pills[key]

    def _write(self, node: DrawnNode) -> None:
        """A write comes after earlier reads and writes of the same name."""
        for n in node.writes:
            node.order_only += [r for r in self.readers.pop(n, ()) if r is not node]
            if n in self.writer and self.writer[n] is not node:
                node.order_only.append(self.writer[n])
            self.writer[n] = node

    def _link_to_init(self, node: DrawnNode, op: Operator) -> None:
        """A collective comes after the nccl_init of its group; the edge is drawn if it has no other."""
        group = str(op.attrs.get("group", ""))
        if op.type == "nccl_init":
            self.opened[group] = node
        elif group in self.opened:
            node.order_only.append(self.opened[group])
            if not node.above or all(a.pill for a in node.above):
                node.above.append(self.opened[group])
