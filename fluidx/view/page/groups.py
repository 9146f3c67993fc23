"""The operators of a program as a tree of groups: by name_scope, and by repeated patterns such as the blocks of a network.

The tree keeps the order of the program: the leaves below a group are consecutive operators. Only computing operators decide where a
pattern repeats. An operator that communicates or packs is attached to a computing operator, so that a bucket that ends in every third
block does not hide that the blocks repeat. The backward section is grouped as the forward section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.flow import touches
from ...ir.operator import Operator
from ...ir.program import Program
from ..diff import communicates
from .operator_group import PART, REPEAT, SCOPE, SECTION, SECTIONS, Item, OperatorGroup
from .repeats import Repeats

WIDEST = 60  # the most children of a group; more are put into sections, or into parts of about this size


@dataclass
class GroupTree:
    children: list[Item]
    sections: list[str]  # for each operator: forward, backward or update


def tree_of(program: Program) -> GroupTree:
    """The tree of block 0."""
    return _Grouping(program).tree()


class _Grouping:
    """Builds the tree of one program."""

    def __init__(self, program: Program):
        self.block = program.blocks[0]
        self.ops = self.block.oplist
        self.touched = [touches(program, op) for op in self.ops]
        self.own = [not communicates(op) and op.role in SECTIONS for op in self.ops]
        self.from_state: set[str] = set()  # values computed from state alone, such as a gathered parameter; they are read far away
        self.attached: dict[int, list[int]] = {}  # by computing operator: itself and the operators attached to it, in order
        self.repeats = Repeats(self.block, self.touched, self.from_state, self.attached)

    def tree(self) -> GroupTree:
        if not any(self.own):
            return GroupTree(self._limited(self.repeats.fold(list(range(len(self.ops))))), ["forward"] * len(self.ops))
        attachments = self._attachments()
        sections = [SECTIONS[self.ops[k].role] for k in attachments]
        runs: list[tuple[str, list[int]]] = []
        for k, owned in enumerate(self.own):
            if owned and runs and runs[-1][0] == sections[k]:
                runs[-1][1].append(k)
            elif owned:
                runs.append((sections[k], [k]))
        for k, home in enumerate(attachments):
            self.attached.setdefault(home, []).append(k)
        children: list[Item] = []
        starts: list[tuple[str, int]] = []
        forward: dict[int, list[OperatorGroup]] = {}
        for section, run in runs:
            starts.append((section, len(children)))
            if section == "backward":
                children += self.repeats.fold(self._like_forward(run, [forward.get(k, []) for k in self._sources(run)]))
                continue
            made = self.repeats.fold(self._scoped(run, 0))
            if section == "forward":
                _paths(made, [], forward)
            children += made
        if len(children) > WIDEST and len(runs) > 1:
            ends = [start for _, start in starts[1:]] + [len(children)]
            children = [OperatorGroup(s, SECTION, children[a:b]) for (s, a), b in zip(starts, ends)]
        children = _with_attached(children, self.attached)
        self.attached.clear()
        return GroupTree(self._limited(self.repeats.fold(children)), sections)

    def _attachments(self) -> list[int]:
        """For each operator the computing operator that it is attached to.

        That is the one before it if the operator reads a value of the same section; else the next one.
        """
        nearest, homes = -1, [-1] * len(self.ops)
        following = [-1] * len(self.ops)
        for k in range(len(self.ops) - 1, -1, -1):
            nearest = k if self.own[k] else nearest
            following[k] = nearest
        writer: dict[str, int] = {}
        # ahead: an operator since `before` is attached to the next one; later ones then are too, which keeps the order
        before, ahead = -1, False
        for k, (reads, writes) in enumerate(self.touched):
            if self.own[k]:
                homes[k], before, ahead = k, k, False
            else:
                makers = [homes[writer[n]] for n in reads if n in writer]
                behind = before >= 0 and any(m <= before and _same_section(self.ops[m], self.ops[before]) for m in makers)
                ahead = following[k] >= 0 and (ahead or not behind)
                homes[k] = following[k] if ahead else before
            if not self.own[k] and all(n in self.from_state or self._is_state(n) for n in reads):
                self.from_state.update(writes)
            for n in writes:
                writer[n] = k
        return homes

    def _is_state(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and d.persistable

    # -- scopes and patterns ----------------------------------------------------------------------------------------------------------

    def _scoped(self, run: list[int], depth: int) -> list[Item]:
        """Put consecutive operators of one name_scope into a group."""
        out: list[Item] = []
        part: list[int] = []
        inside = None
        for k in [*run, None]:
            scope = None if k is None else self._scope(k, depth)
            if part and (k is None or scope != inside):
                out += [OperatorGroup(inside, SCOPE, self.repeats.fold(self._scoped(part, depth + 1)))] if inside else part
                part = []
            inside = scope
            if k is not None:
                part.append(k)
        return out

    def _scope(self, k: int, depth: int) -> str | None:
        site = self.ops[k].site
        scopes = site.function.split("/")[:-1] if site else []
        return scopes[depth] if depth < len(scopes) else None

    # -- backward ---------------------------------------------------------------------------------------------------------------------

    def _sources(self, run: list[int]) -> list[int]:
        """For each operator of a backward run the forward operator whose gradient it computes."""
        made: dict[str, int] = {}
        read: dict[str, int] = {}
        for k in range(run[-1]):
            if SECTIONS.get(self.ops[k].role) == "forward":
                made.update(dict.fromkeys(self.touched[k][1], k))
                read.update(dict.fromkeys(self.touched[k][0], k))
        out: list[int] = []
        source: dict[str, int] = {}  # by value that this run wrote
        last = -1
        for k in run:
            reads, writes = self.touched[k]
            copied = [made[c] for n in writes if (d := self.block.find(n)) is not None and (c := d.attrs.get("copy_of")) in made]
            grads = [base for n in reads if (base := _base(n)) != n]
            known = (
                copied
                or [made[b] for b in grads if b in made]
                or [source[n] for n in reads if n in source]
                or [made[b] for n in writes if (b := _base(n)) in made]
                or [read[b] for n in writes if (b := _base(n)) in read]
            )
            last = max(known) if known else last
            out.append(last)
            source.update(dict.fromkeys(writes, last))
        return out

    def _like_forward(self, run: list[int], paths: list[list[OperatorGroup]]) -> list[Item]:
        """Group a backward run like the forward operators whose gradients it computes."""
        parts: list[tuple[OperatorGroup | None, list[int], list[list[OperatorGroup]]]] = []
        for k, path in zip(run, paths):
            key = path[0] if path else None
            if not parts or parts[-1][0] is not key:
                parts.append((key, [], []))
            parts[-1][1].append(k)
            parts[-1][2].append(path[1:])
        longest: dict[OperatorGroup, int] = {}
        for key, ops, _ in parts:
            if key is not None:
                longest[key] = max(longest.get(key, 0), len(ops))
        out: list[Item] = []
        for key, ops, rest in parts:
            if key is None or len(ops) < 2 or longest.get(key) != len(ops):
                out += self._like_forward(ops, rest) if key is not None and key.kind == REPEAT else ops
                continue
            del longest[key]
            inner = self._like_forward(ops, rest)
            copies = sum(isinstance(c, OperatorGroup) for c in inner)
            title = f"{copies} × {key.each}" if key.kind == REPEAT and copies else key.title
            if key.kind == REPEAT and not copies:
                out += ops
                continue
            out.append(OperatorGroup(title, key.kind, inner, key.each))
        return out

    def _limited(self, items: list[Item]) -> list[Item]:
        """Split groups with more children than a picture can show, except repeats of one operator."""
        for item in items:
            if isinstance(item, OperatorGroup):
                single = item.kind == REPEAT and all(isinstance(c, int) for c in item.children)
                item.children = item.children if single else self._limited(item.children)
        if len(items) <= 2 * WIDEST:
            return items
        cost = self.repeats.crossing(items)
        out: list[Item] = []
        at = 0
        while at < len(items):
            room = range(at + WIDEST // 2, min(at + WIDEST, len(items)) + 1)
            end = len(items) if len(items) - at <= WIDEST else min(room, key=lambda p: cost[p])
            inside = OperatorGroup("", PART, items[at:end])
            ops = inside.ops()
            inside.title = f"operators {ops[0]} to {ops[-1]}"
            out.append(inside)
            at = end
        return self._limited(out)


def _base(name: str) -> str:
    """The value that a gradient belongs to, by the naming rule; other names unchanged."""
    return name.partition("@GRAD")[0]


def _same_section(a: Operator, b: Operator) -> bool:
    return SECTIONS.get(a.role) == SECTIONS.get(b.role)


def _paths(items: Sequence[Item], above: list[OperatorGroup], found: dict[int, list[OperatorGroup]]) -> None:
    for i in items:
        if isinstance(i, OperatorGroup):
            _paths(i.children, [*above, i], found)
        else:
            found[i] = above


def _with_attached(items: list[Item], attached: dict[int, list[int]]) -> list[Item]:
    """Insert the attached operators next to their computing operators."""
    out: list[Item] = []
    for i in items:
        if isinstance(i, OperatorGroup):
            i.children = _with_attached(i.children, attached)
            out.append(i)
        else:
            out += attached.get(i, [i])
    return out
