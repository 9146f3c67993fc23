"""The operators of a program as a tree: groups by name_scope, and repeated patterns such as the blocks of a network.

The tree keeps the order of the program: the leaves below a group stand in one stretch of it. Computing operators decide where a pattern
repeats; those that communicate, and those that pack for it, go with the computing operator that they serve, so that a bucket which ends
in every third block does not hide that the blocks are alike. The backward section takes the groups of the forward section over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...ir.flow import touches
from ...ir.operator import Operator, Role
from ...ir.program import Program
from ..diff import communicates

SECTION, SCOPE, REPEAT, COPY, PART = "section", "scope", "repeat", "copy", "part"
WIDEST = 60  # children of one group; more are put into sections, or into parts of about this size
_SECTIONS = {
    Role.FORWARD: "forward", Role.LOSS: "forward", Role.BACKWARD: "backward", Role.LR_SCHED: "update", Role.OPTIMIZE: "update",
}  # fmt: skip


@dataclass(eq=False)
class OperatorGroup:
    """Some operators in a row. Children are groups, and indices of operators."""

    title: str
    kind: str
    children: list[Item] = field(default_factory=list)
    each: str = ""  # of a repeat: what one of its copies is called

    def ops(self) -> list[int]:
        """Indices of all operators below, in order."""
        return [k for c in self.children for k in (c.ops() if isinstance(c, OperatorGroup) else (c,))]


Item = OperatorGroup | int


@dataclass
class GroupTree:
    children: list[Item]
    sections: list[str]  # of each operator: forward, backward or update


def tree_of(program: Program) -> GroupTree:
    """The tree of block 0."""
    return _Grouping(program).tree()


class _Grouping:
    def __init__(self, program: Program):
        self.block = program.blocks[0]
        self.ops = self.block.oplist
        self.touched = [touches(program, op) for op in self.ops]
        self.own = [not communicates(op) and op.role in _SECTIONS for op in self.ops]
        self.kinds: dict[object, int] = {}
        self.kind_of: dict[int, int] = {}
        self.resting: set[str] = set()  # what is made of parameters and states alone, such as a gathered parameter: used far away
        self.crossing: list[tuple[int, int]] = []  # of the items that are being folded, once it was asked for
        self.beside: dict[int, list[int]] = {}  # of a computing operator: itself and those that serve it, in order

    def tree(self) -> GroupTree:
        if not any(self.own):
            return GroupTree(self._limited(self._folded(list(range(len(self.ops))))), ["forward"] * len(self.ops))
        served = self._served()
        sections = [_SECTIONS[self.ops[k].role] for k in served]
        runs: list[tuple[str, list[int]]] = []
        for k, owned in enumerate(self.own):
            if owned and runs and runs[-1][0] == sections[k]:
                runs[-1][1].append(k)
            elif owned:
                runs.append((sections[k], [k]))
        for k, home in enumerate(served):
            self.beside.setdefault(home, []).append(k)
        children: list[Item] = []
        starts: list[tuple[str, int]] = []
        forward: dict[int, list[OperatorGroup]] = {}
        for section, run in runs:
            starts.append((section, len(children)))
            if section == "backward":
                children += self._folded(self._mirrored(run, [forward.get(k, []) for k in self._sources(run)]))
                continue
            made = self._folded(self._scoped(run, 0))
            if section == "forward":
                _paths(made, [], forward)
            children += made
        if len(children) > WIDEST and len(runs) > 1:
            ends = [start for _, start in starts[1:]] + [len(children)]
            children = [OperatorGroup(s, SECTION, children[a:b]) for (s, a), b in zip(starts, ends)]
        children = _with_beside(children, self.beside)
        self.beside = {}
        return GroupTree(self._limited(self._folded(children)), sections)

    def _served(self) -> list[int]:
        """For each operator the computing one that it stands beside: the one before it where it reads what its section wrote, else the
        next."""
        nearest, homes = -1, [-1] * len(self.ops)
        following = [-1] * len(self.ops)
        for k in range(len(self.ops) - 1, -1, -1):
            nearest = k if self.own[k] else nearest
            following[k] = nearest
        writer: dict[str, int] = {}
        before, ahead = -1, False  # ahead: one since `before` serves the next, and those behind it then do, too: the order stays
        for k, (reads, writes) in enumerate(self.touched):
            if self.own[k]:
                homes[k], before, ahead = k, k, False
            else:
                makers = [homes[writer[n]] for n in reads if n in writer]
                behind = before >= 0 and any(m <= before and _same_section(self.ops[m], self.ops[before]) for m in makers)
                ahead = following[k] >= 0 and (ahead or not behind)
                homes[k] = following[k] if ahead else before
            if not self.own[k] and all(n in self.resting or self._rests(n) for n in reads):
                self.resting.update(writes)
            for n in writes:
                writer[n] = k
        return homes

    def _rests(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and d.persistable

    # -- scopes and patterns ----------------------------------------------------------------------------------------------------------

    def _scoped(self, run: list[int], depth: int) -> list[Item]:
        """Operators that one name_scope wrote, in a group."""
        out: list[Item] = []
        part: list[int] = []
        inside = None
        for k in [*run, None]:
            scope = None if k is None else self._scope(k, depth)
            if part and (k is None or scope != inside):
                out += [OperatorGroup(inside, SCOPE, self._folded(self._scoped(part, depth + 1)))] if inside else part
                part = []
            inside = scope
            if k is not None:
                part.append(k)
        return out

    def _scope(self, k: int, depth: int) -> str | None:
        site = self.ops[k].site
        scopes = site.function.split("/")[:-1] if site else []
        return scopes[depth] if depth < len(scopes) else None

    def _folded(self, items: list[Item]) -> list[Item]:
        """The items with repeated stretches put into groups, short patterns first: a stage holds a row of alike blocks.

        Cuts that few values cross come first. Inside of a block with a way around two values cross, so that it is found before the
        alike layers within it are.
        """
        kinds, self.crossing = np.array([self._kind(i) for i in items]), []
        for most in (1, 2, 4, len(self.ops)):
            changed = True
            while changed:
                changed, period = False, 1
                while 2 * period <= len(items):
                    found = self._repeats(items, kinds, period, most)
                    if found:
                        changed = True
                        items = self._replaced(items, period, found)
                        kinds, self.crossing = np.array([self._kind(i) for i in items]), []
                    period += 1
        return items

    def _repeats(self, items: list[Item], kinds: np.ndarray, period: int, most: int) -> list[tuple[int, int]]:
        """(start, copies) of the stretches in which a pattern of `period` items repeats, cut where at most so many values cross."""
        equal = np.concatenate([[0], (kinds[:-period] == kinds[period:]).astype(int), [0]])
        edges = np.flatnonzero(np.diff(equal))
        long = edges[1::2] - edges[::2] >= period
        found: list[tuple[int, int]] = []
        end = 0
        for first, last in zip(edges[::2][long].tolist(), edges[1::2][long].tolist()):
            first, last = max(first, end), last + period
            if last - first < 2 * period or not self._worth(items[first : first + period], (last - first) // period):
                continue
            crossing = self.crossing = self.crossing or self._crossing(items)
            best: tuple[tuple[int, int, int], int, int] | None = None
            for start in range(first, min(first + period, last - 2 * period + 1)):
                copies = (last - start) // period
                cuts = [crossing[start + c * period] for c in range(copies + 1)]
                cost = (-copies, sum(n for n, _ in cuts), -sum(r for _, r in cuts))
                if max(n for n, _ in cuts) > most or not self._worth(items[start : start + period], copies):
                    continue
                if best is None or cost < best[0]:
                    best = cost, start, copies
            if best is not None:
                found.append(best[1:])
                end = best[1] + best[2] * period
        return found

    def _worth(self, pattern: list[Item], copies: int) -> bool:
        if len(pattern) == 1 and isinstance(pattern[0], OperatorGroup) and pattern[0].kind == REPEAT:
            return False
        weight = sum(len(i.ops()) if isinstance(i, OperatorGroup) else 1 for i in pattern)
        return copies >= 4 or copies == 3 and weight >= 4 or weight >= 8

    def _crossing(self, items: list[Item]) -> list[tuple[int, int]]:
        """For each position between items how many values cross it, written before and read behind, and how often they are read.

        Gathered parameters do not count, as parameters do not.
        """
        first: dict[str, int] = {}
        reads: dict[str, list[int]] = {}
        for p, item in enumerate(items):
            for core in item.ops() if isinstance(item, OperatorGroup) else (item,):
                for k in self.beside.get(core, (core,)):
                    for n in self.touched[k][0]:
                        if n in first:
                            reads.setdefault(n, []).append(p)
                    for n in self.touched[k][1]:
                        if n not in self.resting:
                            first.setdefault(n, p)
        values, readers = [0] * (len(items) + 2), [0] * (len(items) + 2)
        for n, at in reads.items():
            values[first[n] + 1] += 1
            values[max(at) + 1] -= 1
            for p in at:
                readers[first[n] + 1] += 1
                readers[p + 1] -= 1
        return list(zip(np.cumsum(values).tolist(), np.cumsum(readers).tolist()))

    def _kind(self, item: Item) -> int:
        """A number that alike items share. Sizes and attributes do not count: stages differ in them."""
        if isinstance(item, int):
            if item not in self.kind_of:
                op = self.ops[item]
                key = (op.type, tuple((s, len(n)) for s, n in op.inputs.items()), tuple((s, len(n)) for s, n in op.outputs.items()))
                self.kind_of[item] = self.kinds.setdefault(key, len(self.kinds))
            return self.kind_of[item]
        inner = [self._kind(c) for c in (item.children[:1] if item.kind == REPEAT else item.children)]
        return self.kinds.setdefault((item.kind == REPEAT, *inner), len(self.kinds))

    def _replaced(self, items: list[Item], period: int, found: list[tuple[int, int]]) -> list[Item]:
        out: list[Item] = []
        at = 0
        for start, copies in found:
            out += items[at:start]
            at = start + copies * period
            out.append(self._repeat([items[start + c * period : start + (c + 1) * period] for c in range(copies)]))
        return out + items[at:]

    def _repeat(self, copies: list[list[Item]]) -> OperatorGroup:
        one = copies[0]
        if len(one) == 1 and isinstance(one[0], OperatorGroup):
            titles = [c[0].title for c in copies if isinstance(c[0], OperatorGroup)]
            each = os.path.commonprefix(titles).rstrip("0123456789_-. ") or "group"
            return OperatorGroup(f"{len(copies)} × {each}", REPEAT, [c[0] for c in copies], each)
        if len(one) == 1 and isinstance(one[0], int):
            each = self.ops[one[0]].type
            return OperatorGroup(f"{len(copies)} × {each}", REPEAT, [c[0] for c in copies], each)
        each = self._pattern_name(one)
        marks = [self._parameters_of(c) for c in copies]
        named = len(set(marks)) == len(marks) and all(marks)
        groups: list[Item] = [
            OperatorGroup(f"{each} {k}" + (f" · {marks[k - 1]}" if named else ""), COPY, list(c)) for k, c in enumerate(copies, start=1)
        ]
        return OperatorGroup(f"{len(copies)} × {each}", REPEAT, groups, each)

    def _pattern_name(self, items: list[Item]) -> str:
        if any(isinstance(i, OperatorGroup) and i.kind == REPEAT for i in items):
            return "stage"
        if all(_SECTIONS.get(self.ops[k].role, "update") == "update" for k in OperatorGroup("", "", items).ops()):
            return "updates"
        if len(items) <= 3:
            return " + ".join(i.title if isinstance(i, OperatorGroup) else self.ops[i].type for i in items)
        return "block"

    def _parameters_of(self, items: list[Item]) -> str:
        """What the names of all parameters begin with that these items read."""
        read = (n for k in OperatorGroup("", "", items).ops() for n in self.ops[k].input_arg_names)
        names = [name for n in read if (name := n.rpartition(".")[0] if n in self.resting else n) and self._trained(name)]
        return os.path.commonprefix(names).rstrip("._- ") if len(set(names)) > 1 else ""

    def _trained(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and d.is_parameter

    # -- backward ---------------------------------------------------------------------------------------------------------------------

    def _sources(self, run: list[int]) -> list[int]:
        """For each operator of a backward run the forward operator whose gradient it works on."""
        made: dict[str, int] = {}
        read: dict[str, int] = {}
        for k in range(run[-1]):
            if _SECTIONS.get(self.ops[k].role) == "forward":
                made.update(dict.fromkeys(self.touched[k][1], k))
                read.update(dict.fromkeys(self.touched[k][0], k))
        out: list[int] = []
        source: dict[str, int] = {}  # of values that this run wrote
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

    def _mirrored(self, run: list[int], paths: list[list[OperatorGroup]]) -> list[Item]:
        """A backward run in the groups of the forward operators whose gradients it works on."""
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
                out += self._mirrored(ops, rest) if key is not None and key.kind == REPEAT else ops
                continue
            del longest[key]
            inner = self._mirrored(ops, rest)
            copies = sum(isinstance(c, OperatorGroup) for c in inner)
            title = f"{copies} × {key.each}" if key.kind == REPEAT and copies else key.title
            if key.kind == REPEAT and not copies:
                out += ops
                continue
            out.append(OperatorGroup(title, key.kind, inner, key.each))
        return out

    def _limited(self, items: list[Item]) -> list[Item]:
        """No group with more children than a picture can show, but for the copies of one operator."""
        for item in items:
            if isinstance(item, OperatorGroup):
                single = item.kind == REPEAT and all(isinstance(c, int) for c in item.children)
                item.children = item.children if single else self._limited(item.children)
        if len(items) <= 2 * WIDEST:
            return items
        cost = self._crossing(items)
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
    """The value whose gradient a name is, by the rule of names; itself for others."""
    return name.partition("@GRAD")[0]


def _same_section(a: Operator, b: Operator) -> bool:
    return _SECTIONS.get(a.role) == _SECTIONS.get(b.role)


def _paths(items: Sequence[Item], above: list[OperatorGroup], found: dict[int, list[OperatorGroup]]) -> None:
    for i in items:
        if isinstance(i, OperatorGroup):
            _paths(i.children, [*above, i], found)
        else:
            found[i] = above


def _with_beside(items: list[Item], beside: dict[int, list[int]]) -> list[Item]:
    """The operators that communicate put where those stand that they serve."""
    out: list[Item] = []
    for i in items:
        if isinstance(i, OperatorGroup):
            i.children = _with_beside(i.children, beside)
            out.append(i)
        else:
            out += beside.get(i, [i])
    return out


def walk(items: Sequence[Item], visit: Callable[[OperatorGroup], None]) -> None:
    """Visit every group, those above first."""
    for i in items:
        if isinstance(i, OperatorGroup):
            visit(i)
            walk(i.children, visit)
